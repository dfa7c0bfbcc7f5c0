"""Records to store, and real processes that start at the same moment."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord
from tests.store.children import Children

ROOT = Path(__file__).parents[3]

#: What every child script starts with. The directory of the store is its first argument.
PREAMBLE = """
import json, os, sys
from pathlib import Path
from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.records import ChoiceRecord, TrialRecord
from safetune.store.local.store import Store
directory = Path(sys.argv[1])

def trial(config, message=""):
    outcome = Outcome(Verdict.OK, Timing(1.0, 0.9, 1.1, 10, "final"), message=message)
    return TrialRecord("key", str(config), {"BLOCK": str(config)}, 1, outcome, 1.0)

def choice(config, generation=1):
    return ChoiceRecord("key", generation, config, {"BLOCK": config}, "declared", 1.0, 8, 1.0)

def at_the_same_time():
    print("ready", flush=True)
    assert sys.stdin.readline() == "go\\n"
"""

#: Locks the names that it is given, says so, and holds them until it reads a line.
HOLD = """
from safetune.store.local.locks import try_lock
held = [try_lock(directory / "safetune.db", name) for name in sys.argv[2:]]
print(all(held), flush=True)
sys.stdin.readline()
for lock in filter(None, held):
    lock.release()
"""


@dataclass
class Records:
    """Records that differ only in what a test asks for."""

    outcome: Outcome = field(
        default_factory=lambda: Outcome(
            Verdict.OK,
            Timing(1.5, 1.4, 1.75, 100, "final"),
            message="two\nlines",
            stderr="warning: spilled",
            gpu_uuid="GPU-1",
        )
    )

    def key(self, digest: str = "key", **changes: Any) -> KeyRecord:
        record = KeyRecord(
            digest=digest,
            kernel_name="add",
            kernel_digest="kernel",
            kernel_file="/src/add.py",
            kernel_line=12,
            device_digest="device",
            device={"name": "H100", "sm_count": 132},
            toolchain={"triton": "3.9.0", "environment": {}},
            call={"values": [["N", 1024]], "dtypes": [], "options": []},
        )
        return replace(record, **changes)

    def trial(self, name: str = "c1", key: str = "key", **changes: Any) -> TrialRecord:
        record = TrialRecord(key, name, {"BLOCK": 64}, 1, self.outcome, 1700000000.25)
        return replace(record, **changes)

    def choice(self, name: str = "c1", key: str = "key", **changes: Any) -> ChoiceRecord:
        record = ChoiceRecord(key, 1, name, {"BLOCK": 64}, "declared", 1.5, 8, 1700000000.5)
        return replace(record, **changes)


@pytest.fixture
def children() -> Iterator[Children]:
    started = Children(PREAMBLE)
    yield started
    started.stop()


@pytest.fixture
def holding(children: Children) -> Callable[..., subprocess.Popen[str]]:
    """A function that starts a process which holds the locks of some names."""

    def start(directory: Path, *names: str) -> subprocess.Popen[str]:
        child = children.start(HOLD, directory, *names)
        assert child.stdout.readline() == "True\n", child.communicate()[1]
        return child

    return start


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "cache")
    yield opened
    opened.close()
