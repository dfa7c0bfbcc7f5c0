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

import pytest

from safetune.store.local.store import Store
from tests.cli.conftest import DEADLINE_S

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


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    "two workloads of one name": (  # the table would have both, and --shape would choose both
        workload("yield from [Workload('same', (1,), (torch.zeros(n), n)) for n in (8, 16)]"),
        f"re:{YIELDED}two workloads named 'same'; give each a ",
    ),
    "a name of two lines": (
        workload("yield Workload('a\\nb', (1,))"),
        f"re:{YIELDED}the workload .*, but its name must be text on one line",
    ),
    "args that are no tuple": (
        workload("yield Workload('a', (1,), torch.zeros(8))"),
        f"re:{YIELDED}the workload 'a', but its args must be a tuple, not a Tensor",
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
        lines = source.splitlines()
        for text in re.findall(r"\{line (.*?)\}", message):
            number = next(n for n, line in enumerate(lines, 1) if text in line)
            message = message.replace(f"{{line {text}}}", str(number))
        assert said == message.replace("{file}", str(file))
    assert not cache_dir.exists()


def test_verify_names_a_mistake_in_a_workload_too(safetune: Any, file: Path) -> None:
    file.write_text(workload("raise SystemExit(0)"))

    result = safetune("verify", file)

    assert result.exit_code == 1
    assert "\n    the workload sizes of add_one " in result.stdout


def test_an_error_in_a_module_that_a_package_imports(safetune: Any, empty: Path) -> None:
    package = empty / "broken_package"
    package.mkdir()
    (package / "__init__.py").write_text("from broken_package import inner\n")
    (package / "inner.py").write_text("\n\nraise RuntimeError('inside')\n")

    assert safetune.error("tune", "broken_package") == (
        f"Error: broken_package cannot be imported: RuntimeError: inside ({package / 'inner.py'}:3)"
    )


def command_errors() -> dict[str, str]:
    """The command lines in `errors.txt`, and the errors below them; `{add}` is a file."""
    blocks = Path(__file__).with_name("errors.txt").read_text(encoding="utf-8").split("$ safetune ")
    return {words: error.strip() for words, _, error in (b.partition("\n") for b in blocks[1:])}


@pytest.mark.parametrize(("words", "error"), command_errors().items())
def test_a_mistake_in_the_command_is_one_line_and_changes_nothing(
    safetune: Any, targets: Path, cache_dir: Path, empty: Path, words: str, error: str
) -> None:
    (empty / "environment.sh").touch()
    add = str(targets / "add.py")

    assert safetune.error(*words.replace("{add}", add).split()).replace(add, "{add}") == error

    assert not cache_dir.exists()
    assert os.listdir() == ["environment.sh"]


def test_the_working_directory_is_searched_for_what_is_there_only(
    safetune: Any, empty: Path
) -> None:
    """Regression: a folder there was imported in place of the library of its name, later."""
    assert "has no kernel 'other'" in safetune.error("tune", "safetune.kernels.layer_norm:other")
    assert str(empty) not in sys.path

    Path("mine.py").write_text(KERNEL)
    assert "no workload is declared for add_one in mine" in safetune.error("tune", "mine")
    assert "Error: TARGET '' is not a .py file, a directory or" in safetune.error("tune", "")


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


def test_a_setting(safetune: Any) -> None:
    safetune.set(SAFETUNE_MODE="fast")

    assert safetune.error("list") == (
        "Error: SAFETUNE_MODE='fast' is not valid; use one of: tune, "
        "background, frozen, record, off"
    )


def test_debug_shows_the_traceback_and_keeps_the_exit_code(safetune: Any, file: Path) -> None:
    file.write_text("1 / 0\n")

    for words in (("--debug", "tune", file), ("tune", file, "--debug")):
        result = safetune(*words)
        assert result.exit_code == 2
        assert "Traceback (most recent call last):" in result.stderr
        assert "ZeroDivisionError: division by zero" in result.stderr
        assert "safetune.errors.TargetError: " in result.stderr


#: When the second workload is made, no choice can be stored any more.
FILL = """
        if count == 300 and os.path.exists({database!r}):
            import sqlite3
            with sqlite3.connect({database!r}) as other:
                other.execute(
                    "CREATE TRIGGER full BEFORE INSERT ON choice "
                    "BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
                )
            other.close()
        yield Workload("""


class TestStore:
    """A file where the cache directory should be: root may write wherever the bits forbid it."""

    @pytest.mark.parametrize("words", ["tune {add}", "list", "show add_one", "clear add_one"])
    def test_every_command_says_that_it_cannot_be_opened(
        self, safetune: Any, targets: Path, tmp_path: Path, words: str
    ) -> None:
        """`tune`, before it measures anything."""
        (tmp_path / "a_file").touch()
        safetune.use_store("a_file/cache")

        message = safetune.error(*words.format(add=targets / "add.py").split())

        assert message.startswith(f"Error: cannot open the store {tmp_path}/a_file/cache")
        assert message.endswith(": Not a directory")

    def test_tune_does_not_begin_while_nothing_can_be_written(
        self, safetune: Any, targets: Path, cache_dir: Path
    ) -> None:
        Store.open(cache_dir).close()
        safetune.set(SAFETUNE_WAIT="0")
        other = sqlite3.connect(cache_dir / "safetune.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        message = safetune.error("tune", f"{targets / 'add.py'}:add_one")

        other.close()
        assert message.startswith("Error: cannot write to the store")
        assert message.endswith("database is locked")

    def test_tune_fails_at_the_end_where_an_outcome_is_not_stored(
        self, safetune: Any, targets: Path, tmp_path: Path, cache_dir: Path
    ) -> None:
        """Though the disk was not full at the beginning."""
        fill = FILL.format(database=str(cache_dir / "safetune.db"))
        text = (targets / "add.py").read_text()
        assert "        yield Workload(name" in text
        (tmp_path / "filling.py").write_text(text.replace("        yield Workload(", fill, 1))

        result = safetune("tune", f"{tmp_path / 'filling.py'}:add_one")

        assert result.exit_code == 2
        assert result.stdout.splitlines()[-1] == "2 tunings, 4 configs measured"
        assert "disk is full" in result.stderr.splitlines()[-1]

    def test_a_file_that_is_not_a_database_is_moved_aside(
        self, safetune: Any, cache_dir: Path
    ) -> None:
        cache_dir.mkdir(parents=True)
        (cache_dir / "safetune.db").write_text("this is not a database, but long enough to be one")

        (line,) = safetune("list").stderr.splitlines()

        assert line.startswith("Warning: cannot use the store ")
        assert "file is not a database" in line
        assert str(cache_dir / "safetune.db.aside") in line


def test_no_gpu_and_the_interpreter_forbidden(
    run: FreshProcess, file: Path, cache_dir: Path
) -> None:
    file.write_text(GOOD)

    env = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    result = run("tune", file, "--json", env=env, ends=2)

    assert json.loads(result.stdout)["error"]["type"] == "NoDevice"
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: Triton finds no GPU (")
    assert "Set TRITON_INTERPRET=1 before the kernel is decorated" in line
    assert not cache_dir.exists()


@pytest.mark.parametrize("words", [("list",), ("list", "--json")], ids=" ".join)
def test_a_reader_that_is_gone(tuned: None, start: Any, words: tuple[str, ...]) -> None:
    """As `safetune list | head -1` under pipefail: exit code 1 means that the answer is no."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        process = start(*words, env={}, stdout=output, stderr=subprocess.PIPE)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (141, b"")
