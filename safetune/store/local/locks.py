"""The locks of keys between the processes of this machine, and this process's waiting time.

The lock of a key says which process tunes it. It is one byte of a file beside the database, locked
by `fcntl.lockf` (a POSIX record lock). The kernel frees it whenever the process ends, and unlike a
lock of `flock`, a forked child does not inherit it. A process that closes any descriptor of a file
loses all its record locks on that file. So a process opens each lock file once, and never closes or
reopens it.

The kernel distinguishes processes, not threads; an in-memory table has the locks of this process.
Two names may share one of the 2**62 bytes; then they merely wait for each other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import struct
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path

from safetune import forks
from safetune.keys import encoding
from safetune.store.local import in_flight
from safetune.store.local.db_files import identity, open_lock

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None  # type: ignore[assignment]

#: Beside `safetune.db`: the file whose bytes are the locks of keys.
KEY_LOCKS = ".keys.lock"

#: `struct flock` of Linux: the kind of lock, the origin of the start, start, length, process.
_FLOCK = "hhqqi"

#: What `lockf` says of a byte that another process has locked.
_LOCKED = (errno.EAGAIN, errno.EACCES)

_mutex = forks.lock()

#: The descriptor of each lock file, by device and inode. A fork keeps them: they hold no locks.
_descriptors: dict[tuple[int, int], int] = {}

#: What this process holds, by lock file (device and inode) and byte.
_held: dict[tuple[tuple[int, int], int], KeyLock] = {}


class KeyLock:
    """A lock that this process holds until `release`, or until the process ends."""

    def __init__(self, file: tuple[int, int], byte: int) -> None:
        self._at = (file, byte)

    def release(self) -> None:
        """Free the lock. Does nothing in a process forked since it was taken."""
        with _mutex:
            if _held.get(self._at) is self:
                del _held[self._at]
                file, byte = self._at
                with contextlib.suppress(OSError):
                    fcntl.lockf(_descriptors[file], fcntl.LOCK_UN, 1, byte)


def try_lock(database: Path, name: str) -> KeyLock | None:
    """Lock a name, or return None if another process or thread holds it; raises `OSError`."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this platform has no record locks")
    with _mutex:
        file = _opened(_path(database))
        byte = _byte(name)
        if (file, byte) in _held:
            return None
        try:
            fcntl.lockf(_descriptors[file], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in _LOCKED:
                return None
            raise
        lock = _held[file, byte] = KeyLock(file, byte)
        return lock


def holder(database: Path, name: str) -> int:
    """Return the pid of the process that has locked a name; 0 if unknown."""
    if fcntl is None or sys.platform != "linux":
        return 0
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _byte(name), 1, 0)
    with contextlib.suppress(OSError), _mutex:
        file = _opened(_path(database))
        if (file, _byte(name)) in _held:
            return os.getpid()
        answer = struct.unpack(_FLOCK, fcntl.fcntl(_descriptors[file], fcntl.F_GETLK, asked))
        return 0 if answer[0] == fcntl.F_UNLCK else max(0, answer[-1])
    return 0


def _byte(name: str) -> int:
    return int(encoding.digest(name)[:16], 16) >> 2


def locked(database: Path | None, names: Iterable[str]) -> set[str]:
    """Return the names locked by any process now; empty if that cannot be determined."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        if database is not None and _path(database).exists():
            for name in names:
                if lock := try_lock(database, name):
                    lock.release()
                else:
                    found.add(name)
    return found


def node_id(database: Path | None) -> str:
    """Return a name common to all processes that exclude each other by these locks.

    Without locks, each call returns a new one.
    """
    with contextlib.suppress(OSError):
        if database is not None:
            with _mutex:
                found = os.fstat(_descriptors[_opened(_path(database))])
            # The start of the machine's kernel, too, as an image may have been copied to several
            # machines with its lock file; containers of one machine have names of their own.
            machine = in_flight.boot_id() or platform.node()
            return encoding.digest([machine, found.st_dev, found.st_ino, found.st_mtime_ns])
    return uuid.uuid4().hex


def _path(database: Path) -> Path:
    return database.with_name(database.name + KEY_LOCKS)


def _opened(path: Path) -> tuple[int, int]:
    """Return which file is there now, with its descriptor in the table."""
    there = None if path.is_symlink() else identity(path)
    if there is not None and there in _descriptors:
        with contextlib.suppress(OSError):  # a daemon closes all descriptors when it starts
            if identity(_descriptors[there]) == there:
                return there
    descriptor = open_lock(path)
    opened = os.fstat(descriptor)
    _descriptors[opened.st_dev, opened.st_ino] = descriptor
    return opened.st_dev, opened.st_ino


class Waited:
    """The seconds that a process has waited for others; zero in a new forked child."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self.start_over()
        forks.register("tuning", after_in_child=self.start_over)

    def start_over(self) -> None:
        """Restart from zero."""
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Add a thread's wait."""
        with self._lock:
            self.seconds += seconds


#: The waits of this process for tunings: SAFETUNE_WAIT bounds them.
waited = Waited()

forks.register("tuning", after_in_child=_held.clear)  # the locks are the parent's alone
