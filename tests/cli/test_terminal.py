"""`safetune tune` on a terminal: the live line, and Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from safetune.outcome import duration
from tests.cli.conftest import DEADLINE_S, Start, Terminal


@pytest.fixture
def env(fifo: Any) -> dict[str, str]:
    """The environment of someone at a terminal with colours."""
    return {**fifo.env, "TERM": "xterm-256color", "COLUMNS": "200"}


def test_the_live_line(
    safetune: Any,
    start: Start,
    terminal: Terminal,
    fifo: Any,
    env: dict[str, str],
    targets: Path,
) -> None:
    """While the last of five configs runs: one has failed, and the best of three times is shown."""
    target = targets / "sweep.py"
    outputs = {"stdout": terminal.theirs, "stderr": terminal.theirs}
    process = start("tune", target, "--shape", "second", env=env, **outputs)
    fifo.pids()

    line = terminal.wait_for("measures BLOCK=256 ")

    assert line.startswith("1/1 add_one ━")
    assert " 4/5 1 failed best " in line
    stored = [trial["timing"] for trial in safetune.json("show", "add_one")]
    medians = [timing["median_ms"] for timing in stored if timing is not None]
    assert len(medians) == 3
    assert f" best {duration(min(medians))} (" in line
    fifo.let_go()
    assert process.wait(DEADLINE_S) == 0
    terminal.read_to_the_end()
    shown = terminal.lines
    assert [each.split()[0] for each in shown if "over median" in each] == ["shape"]
    assert shown[-2:] == ["1 tuning, 5 configs measured", ""]
