"""A sweep that is killed, and the same command again: what was measured is not measured again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import DEADLINE_S, Fifo, Start
from tests.conftest import ended

#: In the order in which `targets/sweep.py` declares them.
BLOCKS = (64, 48, 4, 128, 256)


def trials(safetune: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the stored trials by size and block."""
    found = safetune.json("show", "add_one")
    return {(trial["call"]["values"]["N"], trial["config"]["BLOCK"]): trial for trial in found}


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_what_is_measured_is_kept_and_no_process_is_left(
    safetune: Any, start: Start, fifo: Fifo, targets: Path, sent: signal.Signals
) -> None:
    """While a config of the second key hangs."""
    target, hangs_at = targets / "sweep.py", 128
    process = start(
        *("tune", target, "--json"),
        env={**fifo.env, "TEST_WAIT_AT": str(hangs_at)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    children = fifo.pids()
    assert len(children) == 2, "the child and the fork server"
    (os.killpg if sent == signal.SIGINT else os.kill)(process.pid, sent)
    output, errors = process.communicate(timeout=DEADLINE_S)
    assert output == b""
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert re.fullmatch(
            r"safetune: interrupted; \d of 5 configs of add_one for .* are stored, and the next "
            r"tuning continues from there\nInterrupted.\n",
            errors.decode(),
        )
    assert ended(*children, within_s=DEADLINE_S)
    fifo.remove()
    safetune.set(**fifo.env)
    before, done = trials(safetune), BLOCKS[: BLOCKS.index(hangs_at)]
    assert set(before) == {(100, block) for block in BLOCKS} | {(300, block) for block in done}
    assert [before[300, block]["timing"] is not None for block in done] == [True, False, True]

    plan = safetune.json("tune", target, "--dry-run")

    assert [each["to_measure"] for each in plan["tunings"]] == [0, len(BLOCKS) - len(done)]

    first, second = safetune.json("tune", target)["tunings"]

    after = trials(safetune)
    assert first["measured"] == 0
    assert {key: after[key] for key in after if key[0] == 100} == {
        key: before[key] for key in before if key[0] == 100
    }
    again = [block for block in done if after[300, block]["timing"] != before[300, block]["timing"]]
    assert second["measured"] == len(BLOCKS) - len(done) + len(again)
    stages = {after[300, block]["timing"]["stage"] for block in again}
    assert stages <= {"final"}, "the fastest are timed in turns with the new ones, and no other"
    assert 4 not in again
    assert 48 not in again
    assert first["choice"]
    assert second["choice"]
