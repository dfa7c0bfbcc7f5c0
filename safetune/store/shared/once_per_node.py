"""Once per node: of the processes that share a cache directory, one asks the shared store.

The others wait for it, and read what it wrote into the local database. A file beside the database
says when that was last done, and is locked meanwhile. Where no lock is to be had (a cache directory
on a network file system, or none at all) every process asks for itself.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Iterator
from pathlib import Path

from safetune import forks

try:
    import fcntl
except ImportError:  # no POSIX: every process asks for itself
    fcntl = None  # type: ignore[assignment]

_POLL_S = 0.01
_MAX_POLL_S = 0.1

#: What this process has open. A fork gets it, too, and would keep the lock for its parent's node.
_descriptors: set[int] = set()


class Turn(enum.Enum):
    """Whose turn it is: this process's, nobody's as it was asked lately, or that of another one."""

    MINE = enum.auto()
    DONE = enum.auto()
    BUSY = enum.auto()


@contextlib.contextmanager
def turn(database: Path | None, name: str, since: float, wait_s: float) -> Iterator[Turn]:
    """Yield whose turn it is to ask.

    Args:
        name: what is asked for.
        since: seconds since the epoch; after it is lately.
        wait_s: how long to wait for one that is asking. After that it is `BUSY`.
    """
    descriptor = _open(database, name)
    if descriptor is None or database is None:
        yield Turn.MINE
        return
    owner = os.getpid()
    _descriptors.add(descriptor)
    try:
        state = _locked(descriptor, wait_s)
        if state is False:
            yield Turn.BUSY
            return
        if state and _asked_since(descriptor, database, since):
            yield Turn.DONE
            return
        yield Turn.MINE
        with contextlib.suppress(OSError):
            os.pwrite(descriptor, _mark(database), 0)
            os.utime(descriptor)
    finally:
        if os.getpid() == owner:
            _descriptors.discard(descriptor)
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _open(database: Path | None, name: str) -> int | None:
    if database is None or fcntl is None:
        return None
    path = database.with_name(f"{database.stem}-shared-{name}.lock")
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None


def _locked(descriptor: int, wait_s: float) -> bool | None:
    """True: this process has the lock; False: it has waited in vain; None: there are no locks."""
    end, pause_s = time.monotonic() + wait_s, _POLL_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() + pause_s > end:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_POLL_S)
        except OSError:
            return None
        else:
            return True


def _asked_since(descriptor: int, database: Path, since: float) -> bool:
    """Whether the file says so, of this very database, and not from the future."""
    try:
        marked = os.pread(descriptor, 64, 0) == _mark(database)
        return marked and since <= os.fstat(descriptor).st_mtime <= time.time() + 1
    except OSError:
        return False


def _mark(database: Path) -> bytes:
    return b"%020d\n" % os.stat(database).st_ino


def _after_fork_in_child() -> None:
    while _descriptors:
        with contextlib.suppress(OSError):
            os.close(_descriptors.pop())


forks.register("shared store", after_in_child=_after_fork_in_child)
