"""What safetune says: its warnings at the user's line, its log, and how both are switched off."""

from __future__ import annotations

import ast
import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import safetune
from safetune import messages
from safetune.errors import SafetuneWarning
from safetune.settings import Settings

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

#: argv: what the filters do with every warning, and a BLOCK that may be listed twice.
SCRIPT = """
import sys, warnings
import torch, triton, triton.language as tl
import safetune

warnings.simplefilter(sys.argv[1])

@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

configs = [triton.Config({"BLOCK": block}) for block in (16, 32, *map(int, sys.argv[2:]))]
kernel = safetune.autotune(configs=configs, key=["n"])(copy_kernel)
dst, src = torch.zeros(100), torch.ones(100)
def launch():
    kernel[(7,)](dst, src, 100)  # here
launch()
assert torch.equal(dst, src)
print("done")
"""


@pytest.fixture
def program(tmp_path: Path, fresh_process: FreshProcess, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the script, whose store cannot be opened."""
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "file"))

    def run(*words: str, **env: str) -> Any:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return fresh_process(script, *words, warm=True, ends=None)

    return run


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(SCRIPT.splitlines(), 1) if text in line)


def test_warnings_name_the_users_line_their_class_and_the_rank(program: Any) -> None:
    done = program("default", "32", RANK="3", LOCAL_RANK="1", WORLD_SIZE="4", LOCAL_WORLD_SIZE="4")
    assert done.stdout == "done\n"
    lines = [line.partition("program.py:")[2] for line in done.stderr.splitlines()[::2]]
    twice, store = lines
    assert twice.startswith(
        f"{line_of('safetune.autotune')}: SettingWarning: safetune [rank 3]: configs[2] of copy_"
    )
    assert store.startswith(f"{line_of('# here')}: StoreWarning: safetune [rank 3]: cannot open ")


@pytest.mark.parametrize(("block", "raised"), [("32", "SettingWarning"), ("", "StoreWarning")])
def test_a_filter_for_every_warning_raises_it(program: Any, block: str, raised: str) -> None:
    done = program("error", *filter(None, [block]))
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"safetune.errors.{raised}: safetune: ")


def test_nothing_is_raised_where_no_code_of_the_program_runs(fresh_process: FreshProcess) -> None:
    """Such as in a thread of safetune, or at exit."""
    script = """
import functools, threading, warnings
from safetune import errors, forks, messages
warnings.simplefilter("error")
say = functools.partial(messages.warn, "text", errors.TuningWarning)
thread = threading.Thread(target=say, name="safetune-background")
thread.start()
thread.join()
forks.register("report", at_exit=say)
"""
    done = fresh_process(script)
    assert done.stderr.splitlines() == [
        "<safetune-background>:0: TuningWarning: safetune: text",
        "<MainThread>:0: TuningWarning: safetune: text",
    ]


@pytest.mark.parametrize("name", sorted(n for n in safetune.__all__ if n.endswith("Warning")))
def test_one_filter_is_for_all_of_them(name: str) -> None:
    kind = getattr(safetune, name)
    assert issubclass(kind, SafetuneWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", safetune.SafetuneWarning)
        messages.warn("text", kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "safetune")
        messages.warn("text", kind)


def test_only_messages_warns_and_has_the_logger() -> None:
    """Another place would have no prefix, or a line of safetune's own."""
    product = Path(messages.__file__).parent
    found = [
        f"{path}:{node.lineno}"
        for path in product.rglob("*.py")
        if path.name != "messages.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("warnings.warn", "warnings.warn_explicit")
        )
        or (isinstance(node, ast.Attribute) and ast.unparse(node) == "logging.getLogger")
    ]
    assert not found, found


LOGGING = """
import logging, sys
from safetune.messages import logger, tell
from safetune.settings import Settings
if "configured" in sys.argv:
    logging.basicConfig(format="program: %(name)s: %(message)s")
if "silenced" in sys.argv:
    logger.addHandler(logging.NullHandler())
Settings.current()
logger.warning("warning")
logger.info("info")
logger.debug("debug")
tell("progress")
"""


@pytest.mark.parametrize(
    ("log", "program", "lines"),
    [
        ("", "", ["safetune: warning", "safetune: progress"]),
        ("quiet", "", []),
        ("info", "", ["safetune: warning", "safetune: info", "safetune: progress"]),
        ("debug", "", [f"safetune: {text}" for text in ["warning", "info", "debug", "progress"]]),
        ("", "configured", ["program: safetune: warning", "safetune: progress"]),
        (
            "info",
            "configured",
            [f"program: safetune: {t}" for t in ("warning", "info", "progress")],
        ),
        ("", "silenced", ["safetune: progress"]),
        ("info", "silenced", []),
    ],
)
def test_each_line_is_written_once_and_never_by_loggings_last_resort(
    fresh_process: FreshProcess,
    monkeypatch: pytest.MonkeyPatch,
    log: str,
    program: str,
    lines: list[str],
) -> None:
    monkeypatch.setenv("SAFETUNE_LOG", log)
    assert fresh_process(LOGGING, program).stderr.splitlines() == lines


def test_a_level_that_the_program_sets_later_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("safetune")
    monkeypatch.setenv("SAFETUNE_LOG", "info")
    Settings.current()
    assert logger.level == logging.INFO
    logger.setLevel(logging.ERROR)
    Settings.current()
    assert logger.level == logging.ERROR
    monkeypatch.delenv("SAFETUNE_LOG")
    Settings.current()
    assert logger.level == logging.NOTSET


@pytest.mark.parametrize(
    ("env", "text", "first"),
    [
        ({}, "safetune: ", True),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "safetune: ", True),
        ({"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16"}, "safetune [rank 8]: ", True),
        ({"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16"}, "safetune [rank 9]: ", False),
        (
            {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8"},
            "safetune [rank 5]: ",
            False,
        ),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, "safetune: ", True),
    ],
)
def test_the_prefix_has_the_rank_and_the_first_of_a_node_speaks(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], text: str, first: bool
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert (messages.prefix(), messages.is_first_of_node()) == (text, first)
