"""What the isolation tests share: what the store says, and which processes there are."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import stored_rows
from tests.conftest import ended

#: For anything that should happen at once; far more than it takes on a loaded machine.
SOON_S = 20.0


@dataclass(frozen=True)
class Trial:
    """One row of the trial table."""

    key: str
    config: str
    verdict: str
    detail: str
    message: str
    stderr: str
    median_ms: float | None

    @property
    def label(self) -> str:
        return f"{self.verdict}({self.detail})" if self.verdict == "died" else self.verdict


class Records:
    """The rows of the test's store, read without safetune."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "safetune.db"

    def trials(self) -> list[Trial]:
        columns = "key, config, verdict, detail, message, stderr, median_ms"
        return [Trial(*row) for row in self._query(f"SELECT {columns} FROM trial ORDER BY rowid")]

    def labels(self, name: str = "BLOCK") -> dict[int, str]:
        """Return the verdicts by the configs' value of `name`."""
        import json

        return {json.loads(trial.config)[name]: trial.label for trial in self.trials()}

    def choices(self) -> list[tuple[Any, ...]]:
        return self._query("SELECT key, config, measured FROM choice ORDER BY rowid")

    def _query(self, statement: str) -> list[tuple[Any, ...]]:
        connection = stored_rows.connected(self._path)
        with contextlib.closing(connection):
            return connection.execute(statement).fetchall()


@pytest.fixture
def records(cache_dir: Path) -> Records:
    return Records(cache_dir)


class Log:
    """A file to which hooks append lines, whatever process they run in."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def writer(self) -> Callable[[object], None]:
        """Return a function that appends `pid text` in one write; it travels by value."""
        path = str(self.path)

        def write(text: object) -> None:
            with open(path, "a") as file:
                file.write(f"{os.getpid()} {text}\n")

        return write

    def lines(self) -> list[tuple[int, str]]:
        """Return (pid, text) of every line so far."""
        if not self.path.exists():
            return []
        split = (line.partition(" ") for line in self.path.read_text().splitlines())
        return [(int(pid), text) for pid, _, text in split]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log")


class Processes:
    """The fork server below a process, its children, and waiting for the end of either."""

    def servers(self, parent: int | None = None) -> list[int]:
        """Return the fork servers of this process, or of another."""
        parent = os.getpid() if parent is None else parent
        return [
            pid for pid in self.children(parent) if b"safetune.child.server_main" in _command(pid)
        ]

    def children(self, parent: int) -> list[int]:
        """Return the children of a process, zombies included."""
        return sorted(pid for pid, (_, ppid) in _processes().items() if ppid == parent)

    def zombies(self, parent: int) -> list[int]:
        return [
            pid for pid, (state, ppid) in _processes().items() if ppid == parent and state == "Z"
        ]

    def exists(self, pid: int) -> bool:
        return pid in _processes()

    def gone(self, *pids: int, within_s: float = SOON_S) -> bool:
        """Wait until all of these have ended; False when one has not in that time."""
        return ended(*pids, within_s=within_s)


@pytest.fixture
def processes() -> Processes:
    return Processes()


def _processes() -> dict[int, tuple[str, int]]:
    """Return each process's state and parent."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            found[int(folder.name)] = (state, int(parent))
    return found


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class Fifo:
    """A named pipe in which processes announce themselves, a line each."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._fd = os.open(path, os.O_RDWR)  # a writer of our own, so that no end is ever read
        self._rest = b""

    def line(self, within_s: float = 60.0) -> str:
        """Return the next line; fails when none comes in time."""
        deadline = time.monotonic() + within_s
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while b"\n" not in self._rest:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                pytest.fail(f"nothing was written to {self.path} within {within_s:g} s")
            self._rest += os.read(self._fd, 65536)
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    made = Fifo(tmp_path / "fifo")
    yield made
    made.close()


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a script in a fresh interpreter and returns at once.

    It leads its own process group; what is left of that is killed after the test.
    """
    started = []

    def run(
        script: Path, *args: object, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        import safetune

        root = str(Path(safetune.__file__).parents[1])
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, args)],
            env={**os.environ, "PYTHONPATH": root, **(env or {})},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
