"""Once per node: of the processes that share a cache directory, one asks the shared store.

The others wait for it, and read what it wrote to the local database. The time of a file beside the
database says when that was last done, and meanwhile the process holds a lock. Another lock is the
turn to have a connection. Where there are no locks (on some network file systems, or without a
directory) every process asks for itself.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator
from pathlib import Path

from safetune.store.local import db_files, locks
from safetune.store.local.db_files import tries
from safetune.store.local.locks import KeyLock


class Turn(enum.Enum):
    """Who asks: this process, none because one has asked lately, or another one right now."""

    MINE = enum.auto()
    DONE = enum.auto()
    BUSY = enum.auto()


@contextlib.contextmanager
def turn(
    database: Path | None, name: str, origin: str, since: float, wait_s: float
) -> Iterator[Turn]:
    """Yield whether this process is to ask the shared store.

    Args:
        name: of the namespace.
        origin: the shared store. An answer of another one does not count: it may have replaced
            what this one had said.
        since: in seconds since the epoch: an answer that came later still counts.
        wait_s: how long to wait for another process that is asking, before it is `BUSY`.
    """
    if database is None:
        yield Turn.MINE
        return
    answered = db_files.answer(database, name)
    _, inode = db_files.identity(database) or (0, 0)
    mark = f"{inode:020} {origin}\n".encode()
    with contextlib.ExitStack() as held:
        found = Turn.MINE
        with contextlib.suppress(OSError):
            if not _locked(database, name, wait_s, held):
                found = Turn.BUSY
            # Not with a time in the future, after the clock was set back.
            elif since <= answered.stat().st_mtime <= time.time() + 1:
                found = Turn.DONE if answered.read_bytes() == mark else Turn.MINE
        yield found
        if found is Turn.MINE:
            with contextlib.suppress(OSError), open(db_files.open_lock(answered), "wb") as file:
                file.write(mark)
                file.truncate()


def to_connect(database: Path | None, store: str, wait_s: float) -> KeyLock | None:
    """Return this process's turn to have a connection to a shared store.

    None where there are no locks, and where another process has not let go for `wait_s`: it may be
    stopped, or its server dead, and this one then connects beside it.
    """
    if database is not None:
        with contextlib.suppress(OSError):
            for _ in tries(wait_s, 0.001, 0.05):
                if lock := locks.try_lock(database, f"connection {store}"):
                    return lock
    return None


def _locked(database: Path, name: str, wait_s: float, held: contextlib.ExitStack) -> bool:
    for _ in tries(wait_s, 0.001, 0.1):
        if lock := locks.try_lock(database, f"shared {name}"):
            held.callback(lock.release)
            return True
    return False
