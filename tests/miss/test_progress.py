"""What a tuning in a program tells: a line on a terminal, the log, and Triton's print knob."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import safetune
from tests.cli.test_terminal import Terminal

SOON_S = 60.0

SCRIPT = """
import os, sys
import torch, triton, triton.language as tl
from safetune import safetune

@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

gate, at_once = sys.argv[1:]
if at_once == "True":
    from safetune.miss import progress
    progress.DELAY_S = 0.0
caller = os.getpid()

def fail(arguments):
    if os.getpid() != caller:
        raise ValueError("on purpose")

def wait(arguments):
    if os.getpid() != caller and gate != "none":
        with open(gate) as file:
            file.read()

hooks = [None, fail, wait]
configs = [triton.Config({"BLOCK": 16 << i}, pre_hook=hook) for i, hook in enumerate(hooks)]
src, dst = torch.randn(100), torch.zeros(100)
tuner = safetune(configs=configs, key=["n"], run_timeout_s=1000.0)(copy_kernel)
tuner[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](dst, src, 100)
sys.stderr.write("the program goes on\\n")
"""


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def run(tmp_path: Path, terminal: Terminal) -> Callable[..., Any]:
    """Start the script with its standard error on the terminal."""
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)

    def start(
        env: dict[str, str], gate: object = "none", at_once: bool = False, **changes: Any
    ) -> Any:
        root = str(Path(safetune.__file__).parents[1])
        outputs = {"stdout": subprocess.PIPE, "stderr": terminal.theirs, **changes}
        return subprocess.Popen(
            [sys.executable, str(script), str(gate), str(at_once)],
            env={**os.environ, "PYTHONPATH": root, "TERM": "xterm-256color", **env},
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **outputs,
        )

    return start


def test_a_line_on_a_terminal_that_goes_again(run: Any, terminal: Terminal, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    process = run({}, gate)

    line = terminal.wait_for("safetune copy_kernel", "screen: BLOCK=64 ")

    assert " 2/3 " in line
    assert " 1 failed " in line
    assert " best " in line
    writer = os.open(gate, os.O_WRONLY)
    gate.unlink()
    gate.touch()
    os.close(writer)
    stdout, _ = process.communicate(timeout=SOON_S)
    assert process.returncode == 0
    assert stdout == ""
    terminal.read_to_the_end()
    assert terminal.lines[-2:] == ["the program goes on", ""]
    assert b"\x1b[2K" in terminal._shown, "the line is removed"


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ({"FORCE_COLOR": "1"}, {"stderr": subprocess.PIPE}),
        ({"TERM": "dumb"}, {}),
        ({"SAFETUNE_MODE": "background"}, {}),
    ],
    ids=["a pipe", "a dumb terminal", "in the background"],
)
def test_no_line(env: dict[str, str], changes: Any, run: Any, terminal: Terminal) -> None:
    process = run(env, at_once=True, **changes)
    _, stderr = process.communicate(timeout=SOON_S)
    assert process.returncode == 0
    terminal.read_to_the_end()
    assert (stderr or terminal._shown.decode()).splitlines() == ["the program goes on"]


def test_no_line_for_a_short_tuning(
    run: Any, terminal: Terminal, copies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, whose server runs already: a tuning takes a fraction of the delay."""
    from safetune.miss import progress

    stderr = os.fdopen(os.dup(terminal.theirs), "w")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", stderr)
    made = copies(None, None)
    made(100)
    made(101)
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    shown = terminal.lines
    made(102)
    stderr.close()
    terminal.read_to_the_end()
    assert shown == [""]
    assert "safetune copy_kernel" in terminal._shown.decode(), "the observer observes"


def test_the_print_knob_has_the_terminal_to_itself(
    run: Any, terminal: Terminal, tmp_path: Path
) -> None:
    process = run({"TRITON_PRINT_AUTOTUNING": "1"}, at_once=True)
    stdout, _ = process.communicate(timeout=SOON_S)
    assert stdout.count("Autotuning kernel copy_kernel with config BLOCK") == 3
    assert "best config selected: BLOCK: " in stdout
    terminal.read_to_the_end()
    assert terminal.lines == ["the program goes on", ""]


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "replaced"])
def test_a_standard_error_that_only_writes(
    copies: Any, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """As where a program sends its output to a logger, or has become a daemon."""
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else SimpleNamespace(write=len))
    assert copies(None, None)() in (16, 32)


def test_the_log(copies: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fails(arguments: dict[str, Any]) -> None:
        if os.getpid() != caller:
            raise ValueError("on purpose")

    caller = os.getpid()
    caplog.set_level(logging.DEBUG, logger="safetune")
    made = copies(fails, None, fails)
    made()

    infos = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    (text,) = infos
    assert text.startswith("copy_kernel tuned for n=100 (float32) in ")
    assert " s: BLOCK=32 num_warps=4 num_stages=3; 3 of 3 configs measured" in text
    assert text.endswith("failed: 2 launch_error")
    debugs = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert len(debugs) == 3
    assert debugs[0].startswith("copy_kernel: screen: BLOCK=16 num_warps=4 num_stages=3 launch_err")
    assert debugs[0].endswith(": on purpose")
    assert debugs[1].endswith(" ms")

    caplog.clear()
    caplog.set_level(logging.INFO, logger="safetune")
    made(101)
    assert {r.levelno for r in caplog.records} == {logging.INFO}
