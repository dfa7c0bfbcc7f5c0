"""What can be wrong with a command, and the one line that says so."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
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


def workload(body: str, kernel: str = KERNEL) -> str:
    """A kernel with a second workload, which has a mistake."""
    good = GOOD.replace(KERNEL, kernel).replace("def sizes", "def good")
    return f"{good}\n@add_one.workload\ndef sizes(device, dtype):\n    {body}\n"


def pruned(condition: str) -> str:
    prune = f"{{'early_config_prune': lambda configs, named, **_: configs[: {condition}]}}"
    return KERNEL.replace('key=["N"]', f'key=["N"], prune_configs_by={prune}')


IMPORT = "Error: {file} cannot be imported: "
YIELDED = "Error: the workload sizes of add_one yielded "
GAVE = "Error: the workload sizes of add_one gave "

#: By a name: the file, and the message. `{line TEXT}` is the number of the line with the text.
MISTAKES = {
    "syntax": (
        "import torch\n\ndef broken(:\n",
        f"{IMPORT}SyntaxError: invalid syntax ({{file}}:3)",
    ),
    "raises": ("\n1 / 0", f"{IMPORT}ZeroDivisionError: division by zero ({{file}}:2)"),
    "imports": (
        "import no_such_thing",
        f"{IMPORT}ModuleNotFoundError: No module named 'no_such_thing' ({{file}}:1)",
    ),
    "two lines": ("raise ValueError('one\\ntwo')", f"{IMPORT}ValueError: one two ({{file}}:1)"),
    "exits": ("import sys; sys.exit(3)", f"{IMPORT}SystemExit: 3 ({{file}}:1)"),
    "in a library": (
        "import json; json.loads('')",
        f"{IMPORT}JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({{file}}:1)",
    ),
    "a config that the decorator refuses": (
        GOOD.replace('{"BLOCK": size}', '{"BLOKC": size}'),
        r"re:configs\[0\] of add_one sets 'BLOKC' \(did you mean 'BLOCK'\?\), .* \(\S+\.py:\d+\)$",
    ),
    "no kernel": (
        GOOD.replace("@safetune", "@triton.autotune").split("@add_one")[0],
        "Error: {file} has no kernel decorated with @safetune; name a module that has one. For "
        "kernels under triton.autotune, use `safetune run`, then `safetune tune --recorded`",
    ),
    "no workload": (
        KERNEL,
        "Error: no workload is declared for add_one in {file}: decorate a function that yields "
        "safetune.Workload(...) with @add_one.workload, or give `safetune tune` or `warm` "
        "--recorded for the calls of a program",
    ),
    "no workload under heuristics": (
        KERNEL.replace("@safetune", "@triton.heuristics({})\n@safetune"),
        "re: with @add_one.fn.workload, or",
    ),
    "a workload raises": (
        workload("raise RuntimeError('no data here')"),
        "Error: the workload sizes of add_one raised RuntimeError: no data here "
        "({file}:{line raise})",
    ),
    "a workload exits": (  # with 0, as scripts do where there is no GPU: nothing was tuned
        workload("raise SystemExit(0)"),
        "Error: the workload sizes of add_one raised SystemExit: 0 ({file}:{line raise})",
    ),
    "a workload yields something else": (
        workload("yield 'a launch'"),
        rf"re:{GAVE}'a launch'; it must yield safetune.Workload\(name, grid, args, kw.*\.py:\d",
    ),
    "a workload yields a tensor, which is cut": (
        workload("yield 'a', torch.zeros(1000)"),
        rf"re:{GAVE}\('a', tensor\(\[.{{,200}}$",
    ),
    "a workload returns nothing": (workload("return None"), f"re:{GAVE}None"),
    "two workloads of one name": (  # the table would have both, and --shape would choose both
        workload("yield from [Workload('same', (1,), (torch.zeros(n), n)) for n in (8, 16)]"),
        f"re:{YIELDED}two workloads named 'same'; give each a ",
    ),
    "a name that is no text": (
        workload("yield Workload(5, (1,), (torch.zeros(8), 8))"),
        f"re:{YIELDED}the workload 5, of which the name must be text on one line",
    ),
    "a name of two lines": (
        workload("yield Workload('a\\nb', (1,))"),
        f"re:{YIELDED}the workload .*, of which the name must be text on one line",
    ),
    "args that are no tuple": (
        workload("yield Workload('a', (1,), torch.zeros(8))"),
        f"re:{YIELDED}the workload 'a', of which args must be a tuple, and not a Tensor",
    ),
    "kwargs that are no dict": (
        workload("yield Workload('a', (1,), (), [8])"),
        f"re:{YIELDED}the workload 'a', of which kwargs must be a dict, and not a list",
    ),
    "a workload takes other arguments": (
        f"{KERNEL}@add_one.workload\ndef sizes(device):\n    yield\n",
        "re:the workload sizes of add_one cannot be called with a torch device and a torch dtype: "
        r"too many positional arguments.*\.py:\d",
    ),
    "workloads yield nothing": (
        f"{KERNEL}@add_one.workload\ndef sizes(device, dtype):\n    return []\n",
        "Error: the workload functions of add_one yield nothing",
    ),
    "a call sets what the configs set": (
        GOOD.replace(", 64))", ", 64), {'BLOCK': 32})"),
        "Error: Conflicting meta-parameters: BLOCK. The configs of add_one set them, and so does "
        "this call: leave them out of the call or of the configs.",
    ),
    "pruning cannot take the second call": (
        pruned("1 // (named['N'] - 9)")
        + "@add_one.workload\ndef sizes(device, dtype):\n    for n in (10, 9):\n"
        '        yield Workload(f"{n}", (2,), (torch.zeros(64, device=device), n))\n',
        "Error: ZeroDivisionError: integer division or modulo by zero "
        "({file}:{line prune_configs_by}); --debug shows the traceback",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_file_is_one_line_before_anything_is_tuned(
    safetune: Any, file: Path, cache_dir: Path, name: str
) -> None:
    """The line is the target's own, where the error came from a library or from safetune too."""
    source, message = MISTAKES[name]
    file.write_text(source)

    said = safetune.error("tune", file)

    if message.startswith("re:"):
        assert re.search(message.removeprefix("re:"), said), said
    else:
        lines = [n for n, text in enumerate(source.splitlines(), 1)]
        numbers = {
            text: next(n for n in lines if text in source.splitlines()[n - 1])
            for text in re.findall(r"\{line (.*?)\}", message)
        }
        for text, number in numbers.items():
            message = message.replace(f"{{line {text}}}", str(number))
        assert said == message.replace("{file}", str(file))
    assert not cache_dir.exists()


@pytest.mark.parametrize(
    "body", ["raise SystemExit(0)", "yield from [Workload('same', (1,), (torch.zeros(8), 8))] * 2"]
)
def test_verify_names_a_mistake_in_a_workload_too(safetune: Any, file: Path, body: str) -> None:
    file.write_text(workload(body))

    result = safetune("verify", file)

    assert result.exit_code == 1
    assert "\n    the workload sizes of add_one " in result.stdout


def test_an_error_in_a_module_that_a_package_imports(
    safetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "broken_package"
    package.mkdir()
    (package / "__init__.py").write_text("from broken_package import inner\n")
    (package / "inner.py").write_text("\n\nraise RuntimeError('inside')\n")
    monkeypatch.chdir(tmp_path)

    assert safetune.error("tune", "broken_package") == (
        f"Error: broken_package cannot be imported: RuntimeError: inside ({package / 'inner.py'}:3)"
    )


#: Words after `safetune tune`, of which `{add}` is a file, and the message.
WORDS = {
    ("no_such_package.module",): "no_such_package.module cannot be imported: ModuleNotFoundError: "
    "No module named 'no_such_package'",
    ("no/such/file.py:kernel",): "no/such/file.py is not a file",
    ("",): "TARGET '' is not a .py file, a directory or a module; give package.module[:kernel], "
    "file.py[:kernel] or a directory",
    ("{add}:unused",): "no workload is declared for kernel in {add}: decorate a function that "
    "yields safetune.Workload(...) with @kernel.workload, or give `safetune tune` or `warm` "
    "--recorded for the calls of a program",
    ("{add}:grid",): "{add} has no kernel 'grid'; it has add_one, kernel, twice, unused",
    ("{add}", "--shape", "small", "--shape", "smal"): "no workload is named 'smal'; the workloads "
    "are: small, large",
    **{
        ("{add}", "--dtype", dtype): f"dtype {dtype!r} is not a torch dtype; try float16 or "
        "bfloat16"
        for dtype in ("float17", "Tensor", "cuda")
    },
    ("{add}", "--device", "gpu"): "--device 'gpu' is not a torch device; try cuda, cuda:1 or cpu",
}


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_mistake_in_the_command_is_one_line(
    safetune: Any, targets: Path, words: tuple[str, ...]
) -> None:
    add = str(targets / "add.py")
    message = safetune.error("tune", *(word.format(add=add) for word in words))
    assert message == f"Error: {WORDS[words].format(add=add)}"


def test_a_file_that_is_not_python(safetune: Any, file: Path) -> None:
    script = file.with_name("environment.sh")
    script.write_text("")
    assert "is not a .py file, a directory or a module" in safetune.error("tune", script)


def test_the_working_directory_is_searched_for_what_is_there_only(
    safetune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a folder there was imported in place of the library of its name, later."""
    monkeypatch.chdir(tmp_path)
    assert "has no kernel 'other'" in safetune.error("tune", "safetune.kernels.layer_norm:other")
    assert str(tmp_path) not in sys.path

    (tmp_path / "mine.py").write_text(KERNEL)
    assert "no workload is declared for add_one in mine" in safetune.error("tune", "mine")


def test_a_directory(safetune: Any, file: Path) -> None:
    """Links to nothing and hidden files are no part of it."""
    file.with_name("plain.py").write_text("import safetune\n")
    assert safetune.error("tune", file.parent) == (
        f"Error: no .py file below {file.parent} declares a workload with @kernel.workload for a "
        "kernel decorated with @safetune"
    )
    file.write_text(GOOD)
    for name in ("gone.py", f".#{file.name}"):  # Emacs marks so what it has open
        (file.parent / name).symlink_to("nowhere")
    assert safetune.json("tune", file.parent, "--dry-run")["tunings"]


@pytest.mark.parametrize("name", sorted(main.commands))
def test_an_option_without_text_and_a_path_without_text(safetune: Any, name: str) -> None:
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
    ("words", "message"),
    [
        (("tune",), "Missing argument 'TARGET...'"),
        (("clear", "kernel", "--unused-for", "nan"), "'nan' is not a time"),
        (("clear",), "Give a KERNEL, or --unused-for TIME"),
        (("tune", "--top", "nan"), "'nan' is not a number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage(safetune: Any, words: tuple[str, ...], message: str) -> None:
    result = safetune(*words)

    assert result.exit_code == 2
    assert message in result.stderr


def test_a_setting(safetune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETUNE_MODE", "fast")

    assert safetune.error("list") == (
        "Error: SAFETUNE_MODE='fast' is not known; use one of: tune, "
        "background, frozen, record, off"
    )


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

        aside = cache_dir / "safetune.db.aside"
        assert line.startswith("Warning: cannot use the store ")
        assert "file is not a database" in line
        assert str(aside) in line


def test_no_gpu_and_the_interpreter_forbidden(
    fresh_process: FreshProcess, file: Path, cache_dir: Path
) -> None:
    file.write_text(GOOD)
    command = f"from safetune.cli import main; main(['tune', {str(file)!r}, '--json'])"

    env = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    result = fresh_process(command, env=env, ends=2)

    assert json.loads(result.stdout)["error"]["type"] == "NoDevice"
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: Triton finds no GPU (")
    assert "Set TRITON_INTERPRET=1 before the kernel is decorated" in line
    assert not cache_dir.exists()


@pytest.mark.parametrize("words", [("list",), ("list", "--json")], ids=" ".join)
def test_a_reader_that_is_gone(tuned: None, words: tuple[str, ...]) -> None:
    """As `safetune list | head -1` under pipefail: exit code 1 means that the answer is no."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "safetune", *words],
            stdout=output,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, b"")
