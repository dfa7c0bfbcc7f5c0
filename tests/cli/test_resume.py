"""A sweep that is killed, and the same command again: what was measured is not measured again."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.store.local.store import Store

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

DEADLINE_S = 90.0

#: In the order in which `targets/sweep.py` declares them.
BLOCKS = (64, 48, 4, 128, 256)


def trials(safetune: Any) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the stored trials by size and block."""
    found = safetune.json("show", "add_one")
    return {(trial["call"]["values"]["N"], trial["config"]["BLOCK"]): trial for trial in found}


@pytest.mark.parametrize(
    "killed_at",
    [pytest.param(64, marks=pytest.mark.full), 128, pytest.param(256, marks=pytest.mark.full)],
)
def test_after_a_kill_it_goes_on_where_it_was(
    safetune: Any,
    start: Callable[..., subprocess.Popen[bytes]],
    still_running: Callable[[list[int]], list[int]],
    fifo: Any,
    targets: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: int,
) -> None:
    target = targets / "sweep.py"
    process = start("tune", target, env={**fifo.env, "TEST_WAIT_AT": str(killed_at)})
    children = fifo.pids()
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert still_running(children) == []
    fifo.remove()
    for name, value in fifo.env.items():
        monkeypatch.setenv(name, value)
    before, done = trials(safetune), BLOCKS[: BLOCKS.index(killed_at)]
    assert set(before) == {(100, block) for block in BLOCKS} | {(300, block) for block in done}

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


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that other users may enter, unlike those above `tmp_path`."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_database_that_can_only_be_read_is_found_before_anything_is_measured(
    open_folder: Path, fresh_process: FreshProcess
) -> None:
    """Regression: a sweep measured all its configs, and could not store them then."""
    folder = open_folder / "store"
    Store.open(folder).close()
    program = """
import os
from safetune.cli import stored
from safetune.errors import StoreError
from safetune.store.local import store
if os.getuid() == 0:
    os.setuid(65534)
try:
    stored.check_writable()
except StoreError as error:
    print(error)
"""
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    done = fresh_process(program, env={"SAFETUNE_CACHE_DIR": str(folder)})
    folder.chmod(0o755)
    assert done.stdout.startswith(f"cannot write to the store {folder}/safetune.db: ")
