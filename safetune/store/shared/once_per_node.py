"""Once per node: of the processes that share a cache directory, one asks the shared store.

The others wait for it, and read what it wrote to the local database. The time of a file beside the
database says when that was last done, and the file is locked meanwhile. Where there are no locks
(on some network file systems, or without a directory) every process asks for itself.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Iterator
from pathlib import Path

from safetune import forks
from safetune.store.local import db_files
from safetune.store.waiting import flock

#: The lock files that this process has open. A forked child inherits flock's locks, and must close
#: the files, or the lock would outlive the parent.
_descriptors: set[int] = set()


class Turn(enum.Enum):
    """Who asks: this process, none because one has asked lately, or another one right now."""

    MINE = enum.auto()
    DONE = enum.auto()
    BUSY = enum.auto()


@contextlib.contextmanager
def turn(database: Path | None, name: str, since: float, wait_s: float) -> Iterator[Turn]:
    """Yield whether this process is to ask the shared store.

    Args:
        name: of the shared store and the namespace.
        since: in seconds since the epoch: an answer that came later still counts.
        wait_s: how long to wait for another process that is asking, before it is `BUSY`.
    """
    descriptor = None
    with contextlib.suppress(OSError):
        if database is not None:
            path = database.with_name(f"{database.stem}-shared-{name}.lock")
            descriptor = db_files.open_lock(path)
    if descriptor is None or database is None:
        yield Turn.MINE
        return
    owner = os.getpid()
    _descriptors.add(descriptor)
    try:
        found = _turn(descriptor, database, since, wait_s)
        yield found
        if found is Turn.MINE:
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, _mark(database), 0)
                os.utime(descriptor)
    finally:
        if os.getpid() == owner:
            _descriptors.discard(descriptor)
            os.close(descriptor)


def _turn(descriptor: int, database: Path, since: float, wait_s: float) -> Turn:
    try:
        if not flock(descriptor, exclusive=True, wait_s=wait_s):
            return Turn.BUSY
        if os.pread(descriptor, 64, 0) != _mark(database):
            return Turn.MINE
        answered = since <= os.fstat(descriptor).st_mtime <= time.time() + 1
    except (OSError, ImportError):
        return Turn.MINE
    return Turn.DONE if answered else Turn.MINE


def _mark(database: Path) -> bytes:
    return b"%020d\n" % os.stat(database).st_ino


def _after_fork_in_child() -> None:
    while _descriptors:
        with contextlib.suppress(OSError):
            os.close(_descriptors.pop())


forks.register("shared store", after_in_child=_after_fork_in_child)
