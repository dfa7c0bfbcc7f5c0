"""What can be wrong with a command, and the one line that says so."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest

from safetune.cli import main
from safetune.store.local.store import Store

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

KERNEL = """\
import torch, triton, triton.language as tl
from safetune import Workload, safetune

@safetune(configs=[triton.Config({"BLOCK": size}) for size in (64, 128)], key=["N"])
@triton.jit
def add_one(x, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N) + 1, mask=offsets < N)

"""

GOOD = KERNEL + (
    "@add_one.workload\ndef sizes(device, dtype):\n"
    '    yield Workload("one", (2,), (torch.zeros(64, device=device, dtype=dtype), 64))\n'
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "faults.py"


def test_the_good_one_is_fine(safetune: Any, file: Path) -> None:
    """What the tests below break."""
    file.write_text(GOOD)

    assert safetune.json("tune", file)["measured"] == 2


class TestImport:
    def test_no_such_module(self, safetune: Any) -> None:
        assert safetune.error("tune", "no_such_package.module") == (
            "Error: no_such_package.module cannot be imported: "
            "ModuleNotFoundError: No module named 'no_such_package'"
        )

    def test_no_such_file(self, safetune: Any) -> None:
        assert safetune.error("tune", "no/such/file.py:kernel") == (
            "Error: no/such/file.py is not a file"
        )

    def test_a_syntax_error(self, safetune: Any, file: Path) -> None:
        file.write_text("import torch\n\ndef broken(:\n")

        assert safetune.error("tune", file) == (
            f"Error: {file} cannot be imported: SyntaxError: invalid syntax ({file}:3)"
        )

    @pytest.mark.parametrize(
        ("line", "what"),
        [
            ("1 / 0", "ZeroDivisionError: division by zero"),
            ("import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
            ("raise ValueError('one\\ntwo')", "ValueError: one two"),
            ("sys.exit(3)", "SystemExit: 3"),
            ("import json; json.loads('')", "JSONDecodeError: Expecting value: line 1 column 1 "),
        ],
    )
    def test_an_error_in_the_file(self, safetune: Any, file: Path, line: str, what: str) -> None:
        """The line is the target's own, where the error came from a library too."""
        file.write_text(f"import sys\n\n{line}\n")

        message = safetune.error("tune", file)

        assert message.startswith(f"Error: {file} cannot be imported: {what}")
        assert message.endswith(f" ({file}:3)")

    def test_an_error_in_a_module_that_a_package_imports(
        self, safetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "broken_package"
        package.mkdir()
        (package / "__init__.py").write_text("from broken_package import inner\n")
        (package / "inner.py").write_text("\n\nraise RuntimeError('inside')\n")
        monkeypatch.chdir(tmp_path)

        assert safetune.error("tune", "broken_package") == (
            "Error: broken_package cannot be imported: RuntimeError: inside "
            f"({package / 'inner.py'}:3)"
        )

    def test_a_config_that_the_decorator_refuses(self, safetune: Any, file: Path) -> None:
        """The line is the decorator's in the file, not where safetune raised it."""
        file.write_text(GOOD.replace('{"BLOCK": size}', '{"BLOKC": size}'))

        message = safetune.error("tune", file)

        assert "configs[0] of add_one sets 'BLOKC' (did you mean 'BLOCK'?), which is" in message
        assert re.search(rf" \({re.escape(str(file))}:\d+\)$", message)


class TestTarget:
    def test_no_kernel(self, safetune: Any, file: Path) -> None:
        file.write_text(GOOD.replace("@safetune", "@triton.autotune").split("@add_one")[0])

        assert safetune.error("tune", file) == (
            f"Error: {file} has no kernel decorated with @safetune; name a module that has one, "
            "or set SAFETUNE_INSTALL=1 for those under triton.autotune"
        )

    def test_no_workload(self, safetune: Any, file: Path) -> None:
        file.write_text(KERNEL)

        assert safetune.error("tune", file) == (
            f"Error: no workload is declared for add_one in {file}: decorate a function that "
            "yields safetune.Workload(...) with @add_one.workload, "
            "or give --recorded for the calls of a program"
        )

    def test_no_workload_under_heuristics(self, safetune: Any, file: Path) -> None:
        """The tuner, which has the decorator, is inside."""
        file.write_text(KERNEL.replace("@safetune", "@triton.heuristics({})\n@safetune"))

        assert " with @add_one.fn.workload, or" in safetune.error("tune", file)

    def test_no_workload_for_the_kernel_that_is_meant(self, safetune: Any, targets: Path) -> None:
        target = targets / "add.py"

        assert safetune.error("tune", f"{target}:unused") == (
            f"Error: no workload is declared for kernel in {target}: decorate a function that "
            "yields safetune.Workload(...) with @kernel.workload, "
            "or give --recorded for the calls of a program"
        )

    def test_no_kernel_of_that_name(self, safetune: Any, targets: Path) -> None:
        target = targets / "add.py"

        assert safetune.error("tune", f"{target}:grid") == (
            f"Error: {target} has no kernel 'grid'; it has add_one, kernel, twice, unused"
        )

    @pytest.mark.parametrize("name", ["", "environment.sh"])
    def test_neither_a_python_file_nor_a_module(
        self, safetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "environment.sh").write_text("")

        assert safetune.error("tune", name) == (
            f"Error: TARGET {name!r} is not a .py file, a directory or a module; give "
            "package.module[:kernel], file.py[:kernel] or a directory"
        )

    def test_the_working_directory_is_searched_for_what_is_there_only(
        self, safetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Regression: a folder there was imported in place of the library of its name, later."""
        monkeypatch.chdir(tmp_path)
        assert "has no kernel 'other'" in safetune.error(
            "tune", "safetune.kernels.layer_norm:other"
        )
        assert str(tmp_path) not in sys.path

        (tmp_path / "mine.py").write_text(KERNEL)
        assert "no workload is declared for add_one in mine" in safetune.error("tune", "mine")

    def test_a_directory_without_a_workload(self, safetune: Any, tmp_path: Path) -> None:
        (tmp_path / "plain.py").write_text("import safetune\n")

        assert safetune.error("tune", tmp_path) == (
            f"Error: no .py file below {tmp_path} declares a workload with @kernel.workload for a "
            "kernel decorated with @safetune"
        )

    def test_links_to_nothing_and_hidden_files_are_no_part_of_a_directory(
        self, safetune: Any, file: Path
    ) -> None:
        file.write_text(GOOD)
        for name in ("gone.py", f".#{file.name}"):  # Emacs marks so what it has open
            (file.parent / name).symlink_to("nowhere")

        assert safetune.json("tune", file.parent, "--dry-run")["tunings"]

    def test_no_target(self, safetune: Any) -> None:
        result = safetune("tune")

        assert result.exit_code == 2
        assert "Missing argument 'TARGET...'" in result.stderr


class TestOptions:
    def test_shape(self, safetune: Any, targets: Path) -> None:
        target = targets / "add.py"

        assert safetune.error("tune", target, "--shape", "small", "--shape", "smal") == (
            "Error: no workload is named 'smal'; the workloads are: small, large"
        )

    @pytest.mark.parametrize("dtype", ["float17", "Tensor", "cuda"])
    def test_dtype(self, safetune: Any, targets: Path, dtype: str) -> None:
        assert safetune.error("tune", targets / "add.py", "--dtype", dtype) == (
            f"Error: dtype {dtype!r} is not a torch dtype; try float16 or bfloat16"
        )

    def test_device(self, safetune: Any, targets: Path) -> None:
        assert safetune.error("tune", targets / "add.py", "--device", "gpu") == (
            "Error: --device 'gpu' is not a torch device; try cuda, cuda:1 or cpu"
        )

    def test_isolation(self, safetune: Any, targets: Path) -> None:
        result = safetune("tune", targets / "add.py", "--isolation", "none")

        assert result.exit_code == 2
        assert "'none' is not one of 'config', 'worker'" in result.stderr

    @pytest.mark.parametrize("name", sorted(main.commands))
    def test_one_without_text_and_a_path_without_text(self, safetune: Any, name: str) -> None:
        """Of a variable that is not set: `clear --device ""` cleared the kernel on all devices, and
        `export ""` wrote into the working directory.
        """
        given = [each for each in main.commands[name].params if not getattr(each, "is_flag", False)]
        paths = [each for each in given if isinstance(each.type, click.Path)]
        options = [each for each in given if isinstance(each, click.Option)]
        for option in options:
            result = safetune(name, f"{option.opts[-1]}=")
            assert result.exit_code == 2
            assert f"Error: {option.opts[-1]} is empty." in result.stderr
        for path in {*paths}.difference(options):
            assert f"Error: The path {path.human_readable_name} is empty." in (
                safetune(name, "").stderr
            )

    @pytest.mark.parametrize(
        "words",
        [("gc", "--older-than"), ("clear", "kernel", "--older-than"), ("tune", "--top")],
        ids=" ".join,
    )
    def test_a_number_that_is_none(self, safetune: Any, words: tuple[str, ...]) -> None:
        result = safetune(*words, "nan")

        assert result.exit_code == 2
        assert "'nan' is not a number" in result.stderr

    def test_a_setting(self, safetune: Any, targets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", "fast")

        assert safetune.error("list") == (
            "Error: SAFETUNE_MODE='fast' is not known; use one of: tune, "
            "background, frozen, record, off"
        )


class TestWorkload:
    """Seen before anything is measured, so that an hour of tuning does not end in one of these."""

    @pytest.fixture
    def broken(self, file: Path) -> Any:
        def write(body: str) -> None:
            good = GOOD.replace("def sizes", "def good")
            file.write_text(f"{good}\n@add_one.workload\ndef sizes(device, dtype):\n    {body}\n")

        return write

    def test_it_raises(self, safetune: Any, file: Path, broken: Any, cache_dir: Path) -> None:
        broken("raise RuntimeError('no data here')")

        assert safetune.error("tune", file) == (
            "Error: the workload sizes of add_one raised RuntimeError: no data here "
            f"({file}:{line_of(file, 'raise')})"
        )
        assert not cache_dir.exists(), "nothing was tuned before"

    @pytest.mark.parametrize("command", ["tune", "verify"])
    def test_it_exits(self, safetune: Any, file: Path, broken: Any, command: str) -> None:
        """With 0, as scripts do where there is no GPU: nothing was tuned or verified."""
        broken("raise SystemExit(0)")

        assert safetune.error(command, file) == (
            "Error: the workload sizes of add_one raised SystemExit: 0 "
            f"({file}:{line_of(file, 'raise')})"
        )

    def test_it_yields_something_else(self, safetune: Any, file: Path, broken: Any) -> None:
        broken("yield 'a launch'")

        message = safetune.error("tune", file)

        assert message.startswith(
            "Error: the workload sizes of add_one gave 'a launch'; it must yield "
            "safetune.Workload(name, grid, args, kwargs)"
        )
        line = line_of(file, "def sizes")  # or its decorator's, one above
        assert any(f"({file}:{number})" in message for number in (line - 1, line))

    @pytest.mark.parametrize("command", ["tune", "verify"])
    def test_it_yields_two_of_one_name(
        self, safetune: Any, file: Path, broken: Any, command: str
    ) -> None:
        """The table would have both, and --shape would choose both."""
        broken("yield from [Workload('same', (1,), (torch.zeros(n), n)) for n in (8, 16)]")

        assert safetune.error(command, file).startswith(
            "Error: the workload sizes of add_one yielded two workloads named 'same'; give each a "
        )

    @pytest.mark.parametrize(
        ("fields", "mistake"),
        [
            ("5, (1,), (torch.zeros(8), 8)", "5, of which the name must be text on one line"),
            ("'a\\nb', (1,)", "of which the name must be text on one line"),
            ("'a', (1,), torch.zeros(8)", "'a', of which args must be a tuple, and not a Tensor"),
            ("'a', (1,), (), [8]", "'a', of which kwargs must be a dict, and not a list"),
        ],
    )
    def test_it_yields_one_with_a_mistake(
        self, safetune: Any, file: Path, broken: Any, fields: str, mistake: str
    ) -> None:
        broken(f"yield Workload({fields})")

        message = safetune.error("tune", file)

        assert message.startswith("Error: the workload sizes of add_one yielded the workload ")
        assert mistake in message

    @pytest.mark.parametrize(
        ("body", "given"),
        [("return None", "None"), ("yield 'a', torch.zeros(1000)", "('a', tensor([")],
    )
    def test_it_gives_something_else_which_is_cut(
        self, safetune: Any, file: Path, broken: Any, body: str, given: str
    ) -> None:
        broken(body)

        message = safetune.error("tune", file)

        assert message.startswith(f"Error: the workload sizes of add_one gave {given}")
        assert len(message) < 300, "a tensor has thousands of characters"
        assert str(file) in message

    def test_it_takes_other_arguments(self, safetune: Any, file: Path) -> None:
        """The place is the workload's, not where safetune calls it."""
        file.write_text(f"{KERNEL}@add_one.workload\ndef sizes(device):\n    yield\n")

        message = safetune.error("tune", file)

        assert message.startswith(
            "Error: the workload sizes of add_one cannot be called with a torch device and a torch "
            "dtype: too many positional arguments"
        )
        assert str(file) in message

    def test_it_yields_nothing(self, safetune: Any, file: Path) -> None:
        file.write_text(f"{KERNEL}@add_one.workload\ndef sizes(device, dtype):\n    return []\n")

        assert safetune.error("tune", file) == "Error: the workloads of add_one yield nothing"

    def test_its_call_sets_what_the_configs_set(self, safetune: Any, file: Path) -> None:
        file.write_text(GOOD.replace(", 64))", ", 64), {'BLOCK': 32})"))

        assert safetune.error("tune", file) == (
            "Error: Conflicting meta-parameters: BLOCK. The configs of add_one set them, and so "
            "does this call: leave them out of the call or of the configs."
        )

    def test_its_second_call_is_one_that_pruning_cannot_take(
        self, safetune: Any, file: Path, cache_dir: Path
    ) -> None:
        prune = (
            "{'early_config_prune': lambda configs, named, **_: configs[: 1 // (named['N'] - 9)]}"
        )
        file.write_text(
            KERNEL.replace('key=["N"]', f'key=["N"], prune_configs_by={prune}')
            + "@add_one.workload\ndef sizes(device, dtype):\n    for n in (10, 9):\n"
            '        yield Workload(f"{n}", (2,), (torch.zeros(64, device=device), n))\n'
        )

        assert safetune.error("tune", file) == (
            f"Error: ZeroDivisionError: integer division or modulo by zero "
            f"({file}:{line_of(file, 'prune_configs_by')}); --debug shows the traceback"
        )
        assert not cache_dir.exists(), "nothing was tuned before"


class TestDebug:
    @pytest.mark.parametrize(
        "words", [("--debug", "tune", "{}"), ("tune", "{}", "--debug")], ids=["before", "after"]
    )
    def test_shows_the_traceback_and_keeps_the_exit_code(
        self, safetune: Any, file: Path, words: tuple[str, ...]
    ) -> None:
        file.write_text("1 / 0\n")

        result = safetune(*(word.format(file) for word in words))

        assert result.exit_code == 2
        assert "Traceback (most recent call last):" in result.stderr
        assert "ZeroDivisionError: division by zero" in result.stderr
        assert "safetune.errors.TargetError: " in result.stderr


#: A kernel whose second workload is made when no choice can be stored any more.
FILLING = """
import os, sqlite3
import torch, triton, triton.language as tl
from safetune import Workload, safetune

@safetune(configs=[triton.Config({{"BLOCK": 64}})], key=["N"])
@triton.jit
def double(x, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N) * 2, mask=offsets < N)

@double.workload
def vectors(device, dtype):
    for count in (100, 300):
        if count == 300 and os.path.exists({database!r}):
            with sqlite3.connect({database!r}) as other:
                other.execute(
                    "CREATE TRIGGER full BEFORE INSERT ON choice "
                    "BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
                )
            other.close()
        yield Workload(str(count), (5,), (torch.zeros(count, device=device, dtype=dtype), count))
"""


class TestStore:
    """A file where the cache directory should be: root may write wherever the bits forbid it."""

    @pytest.fixture
    def blocked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        file = tmp_path / "a_file"
        file.write_text("")
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(file / "cache"))
        return file / "cache"

    def test_tune_says_so_before_it_measures_anything(
        self, safetune: Any, targets: Path, blocked: Path
    ) -> None:
        message = safetune.error("tune", f"{targets / 'add.py'}:add_one")

        assert message.startswith(f"Error: cannot open the store {blocked}")

    def test_tune_does_not_begin_while_nothing_can_be_written(
        self,
        safetune: Any,
        targets: Path,
        cache_dir: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        Store.open(cache_dir).close()
        monkeypatch.setenv("SAFETUNE_WAIT", "0")
        other = sqlite3.connect(cache_dir / "safetune.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        message = safetune.error("tune", f"{targets / 'add.py'}:add_one")

        other.close()
        assert message.startswith("Error: cannot write to the store")
        assert message.endswith("database is locked")

    def test_tune_fails_at_the_end_where_an_outcome_is_not_stored(
        self, safetune: Any, tmp_path: Path, cache_dir: Path
    ) -> None:
        """Though the disk was not full at the beginning."""
        target = tmp_path / "filling.py"
        target.write_text(FILLING.format(database=str(cache_dir / "safetune.db")))
        result = safetune("tune", target)
        assert result.exit_code == 2
        assert result.stdout.splitlines()[-1] == "2 tunings, 2 configs measured"
        assert "disk is full" in result.stderr.splitlines()[-1]

    @pytest.mark.parametrize("words", [("list",), ("show", "add_one"), ("clear", "add_one")])
    def test_the_others_say_so(self, safetune: Any, blocked: Path, words: tuple[str, ...]) -> None:
        message = safetune.error(*words)

        assert message.startswith(f"Error: cannot open the store {blocked}")
        assert message.endswith(": Not a directory")

    def test_a_file_that_is_not_a_database_is_moved_aside(
        self, safetune: Any, cache_dir: Path
    ) -> None:
        cache_dir.mkdir(parents=True)
        (cache_dir / "safetune.db").write_text("this is not a database, but long enough to be one")

        (line,) = safetune("list").stderr.splitlines()

        (aside,) = cache_dir.glob("safetune.db.corrupt-*")
        assert line.startswith("Warning: the store ")
        assert "file is not a database" in line
        assert str(aside) in line


def test_no_gpu_and_the_interpreter_forbidden(
    fresh_process: FreshProcess, file: Path, cache_dir: Path
) -> None:
    file.write_text(GOOD)
    command = f"from safetune.cli import main; main(['tune', {str(file)!r}, '--json'])"

    result = fresh_process(command, env={"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""})

    assert result.returncode == 2
    assert json.loads(result.stdout)["error"]["type"] == "NoDevice"
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: Triton finds no GPU (")
    assert "Set TRITON_INTERPRET=1 before the kernel is decorated" in line
    assert not cache_dir.exists()


def line_of(file: Path, text: str) -> int:
    (number,) = [n for n, line in enumerate(file.read_text().splitlines(), 1) if text in line]
    return number
