"""`safetune tune` on a terminal: the live line, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.outcome import duration

if TYPE_CHECKING:
    from tests.cli.conftest import Terminal

DEADLINE_S = 90.0


@pytest.fixture
def env(fifo: Any) -> dict[str, str]:
    """The environment of someone at a terminal with colours."""
    return {**fifo.env, "TERM": "xterm-256color", "COLUMNS": "200"}


def test_the_live_line(
    safetune: Any,
    start: Callable[..., subprocess.Popen[bytes]],
    terminal: Terminal,
    fifo: Any,
    env: dict[str, str],
    targets: Path,
) -> None:
    """While the last of four configs runs: one has failed, and the best of two times is shown."""
    target = targets / "waiting.py"
    outputs = {"stdout": terminal.theirs, "stderr": terminal.theirs}
    process = start("tune", target, env=env, **outputs)
    fifo.pids()

    line = terminal.wait_for("measures BLOCK=64 ")

    assert line.startswith("1/1 slow_to_end ━")
    assert " 3/4 1 failed best " in line
    stored = [trial["timing"] for trial in safetune.json("show", "slow_to_end")]
    medians = [timing["median_ms"] for timing in stored if timing is not None]
    assert len(medians) == 2
    assert f" best {duration(min(medians))} (" in line
    fifo.let_go()
    assert process.wait(DEADLINE_S) == 0
    terminal.read_to_the_end()
    shown = terminal.lines
    assert [each.split()[0] for each in shown if "over median" in each] == ["shape"]
    assert shown[-2:] == ["1 tuning, 4 configs measured", ""]


@pytest.mark.full
def test_with_json_there_is_no_live_line(
    start: Callable[..., subprocess.Popen[bytes]], terminal: Terminal, targets: Path
) -> None:
    outputs = {"stdout": subprocess.PIPE, "stderr": terminal.theirs}
    env = {"TERM": "xterm-256color"}

    process = start("tune", f"{targets / 'add.py'}:add_one", "--json", env=env, **outputs)

    stdout, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert json.loads(stdout)["measured"] == 4
    terminal.read_to_the_end()
    assert terminal.lines == [""]


def test_ctrl_c(
    safetune: Any,
    start: Callable[..., subprocess.Popen[bytes]],
    still_running: Callable[[list[int]], list[int]],
    fifo: Any,
    targets: Path,
) -> None:
    """While a config hangs: a line on what is kept, exit code 130, nothing left running, no trial
    lost.
    """
    target = targets / "waiting.py"
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start("tune", target, "--json", env=fifo.env, **outputs)
    children = fifo.pids()
    assert len(children) == 2, "the child and the fork server"

    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 130
    assert stdout == b""
    kept_line, last = stderr.decode().splitlines()
    assert re.fullmatch(
        r"safetune: interrupted; \d of 4 configs of slow_to_end for .* are stored, and the next "
        "tuning continues from there",
        kept_line,
    )
    assert last == "Interrupted."
    assert still_running(children) == []
    kept = safetune.json("show", "slow_to_end")
    assert [(trial["config"]["BLOCK"], trial["verdict"] == "not_judged") for trial in kept] == [
        (32, True),
        (48, False),
        (128, True),
    ]
    assert [trial["timing"] is not None for trial in kept] == [True, False, True]
