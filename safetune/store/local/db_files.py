"""The files of the database: made for their owner alone, refused where others may write, and
moved aside when they are damaged.

SQLite follows a symbolic link and writes to its target, and gives its log files the permissions of
the database, so both are checked before SQLite opens anything.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sqlite3
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from safetune import forks
from safetune.errors import StoreError
from safetune.store.local.locks import Identity, identity, open_lock, tries

#: Beside `safetune.db`: the files that belong to it while it is open, and the lock for moving it.
LOGS = ("-wal", "-shm", "-journal")
LOCK = ".lock"

#: The newest moved databases are kept, this many.
_KEPT = 3

#: Held while a database file is made: closing an existing one would drop every lock that this
#: process holds on it (POSIX), so no other thread may connect in between.
creating = forks.lock()


def make_directory(path: Path) -> None:
    """Make the directory of a database, which only its owner can read.

    Raises `StoreError` if it is a symbolic link or another user's, or there is no home; `OSError`.
    """
    if path.parts[0].startswith("~"):
        raise StoreError(
            "there is no home directory; set SAFETUNE_CACHE_DIR to a directory to write to"
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(path.parent, stat.S_ISDIR, "directory")


def make(path: Path) -> None:
    """Make an empty database that only its owner can read, unless there is one; raises likewise."""
    with creating:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        check(path)


def logs(path: Path) -> tuple[Identity, ...]:
    """Return which files are the logs of a database now."""
    return tuple(identity(path.with_name(path.name + suffix)) for suffix in LOGS[:2])


def check(path: Path) -> None:
    """Check that the directory and the files of a database are this user's, and not links."""
    _check(path.parent, stat.S_ISDIR, "directory")
    for suffix in ("", *LOGS):
        with contextlib.suppress(FileNotFoundError):
            _check(path.with_name(path.name + suffix), stat.S_ISREG, "regular file")


def _check(path: Path, is_kind: Callable[[int], bool], kind: str) -> None:
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise StoreError(f"{path} is a symbolic link; set SAFETUNE_CACHE_DIR to where it leads")
    if not is_kind(found.st_mode):
        raise StoreError(f"{path} is not a {kind}")
    # What root has put there, e.g. in an image, is trusted unless others may change it.
    trusted = found.st_uid == 0 and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid() and not trusted:
        raise StoreError(
            f"{path} belongs to another user (uid {found.st_uid}); set SAFETUNE_CACHE_DIR to a "
            "directory of your own"
        )


class Locked(StoreError):
    """Another process keeps the database locked."""


class Damaged(StoreError):
    """A database of safetune that cannot be used."""


def is_damage(error: BaseException) -> bool:
    """Whether an error says that the file itself is bad, and not the disk, a lock or a program.

    SQLite's "malformed" and "not a database" have the plain class; every other one a subclass.
    """
    return isinstance(error, Damaged) or type(error) is sqlite3.DatabaseError


def move_aside(path: Path, found: Identity, reason: BaseException, wait_s: float) -> None:
    """Rename a damaged database and its logs, with one warning that names the new file.

    Of many processes that see the damage one moves; `found` is the file that was seen.
    """
    with _locked(path, exclusive=True, wait_s=wait_s):
        if found is None or identity(path) != found:
            return
        last = max(map(_stamp, moved(path)), default=0)  # the clock may have been set back since
        stamp = max(time.time_ns(), last + 1)
        aside = path.with_name(f"{path.name}.corrupt-{stamp}-{os.getpid()}")
        for log in (*LOGS, ""):  # the database last: until then all of it can be done again
            with contextlib.suppress(FileNotFoundError):
                os.rename(path.with_name(path.name + log), aside.with_name(aside.name + log))
        for old in moved(path)[:-_KEPT]:
            remove(old)
    warnings.warn(
        f"safetune: the store {path} is damaged ({reason}); it is renamed to {aside}, and "
        "an empty database replaces it",
        stacklevel=2,
    )


@contextlib.contextmanager
def unmoved(path: Path, wait_s: float) -> Iterator[None]:
    """Keep other processes from moving a database aside while it is opened; raises `StoreError`.

    SQLite finds the logs by their names: a process that opens the file that is moved, and finds
    beside it the logs of the one that took its place, rolls those back or deletes them. Where no
    lock is to be had, such as on a full disk, it is opened all the same.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, ImportError):
            held.enter_context(_locked(path, exclusive=False, wait_s=wait_s))
        yield


def answer(path: Path, name: str) -> Path:
    """Return the file whose time says when a shared store was last asked for all that it has."""
    return path.with_name(f"{path.stem}-shared-{name}")


def forget_answers(path: Path) -> None:
    """Delete these files, after choices were deleted or imported."""
    for file in path.parent.glob(answer(path, "*").name):
        with contextlib.suppress(OSError):
            file.unlink()


def remove(aside: Path) -> None:
    """Delete a database that was moved aside, with its logs."""
    for log in (*LOGS, ""):
        aside.with_name(aside.name + log).unlink(missing_ok=True)


def moved(path: Path, before: float = math.inf) -> list[Path]:
    """Return the databases that were moved aside from here, the oldest first.

    Only those from before a time, in seconds since the epoch.
    """
    found = path.parent.glob(f"{path.name}.corrupt-*-*")
    return sorted((file for file in found if 0 < _stamp(file) < before * 1e9), key=_stamp)


def _stamp(aside: Path) -> int:
    """Return the time in a name, in nanoseconds; 0 for a log and for any other file."""
    named = re.search(r"\.corrupt-([0-9]+)-[0-9]+$", aside.name)
    return int(named[1]) if named else 0


@contextlib.contextmanager
def _locked(path: Path, exclusive: bool, wait_s: float) -> Iterator[None]:
    """The lock for moving a database. Its file stays: deleting a lock file breaks the lock."""
    import fcntl

    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    descriptor = open_lock(path.with_name(path.name + LOCK))
    try:
        for _ in tries(wait_s, 0.001, 0.1):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                break
        else:
            busy = "opening" if exclusive else "moving"
            raise Locked(f"other processes have been {busy} it for {wait_s:.0f} s")
        yield
    finally:
        os.close(descriptor)
