"""A database that cannot be used as it is: moved aside, or opened to be read only."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from safetune.errors import StoreError
from safetune.store.local import db_files
from safetune.store.waiting import flock

#: The newest moved databases are kept, this many.
_KEPT = 3

#: How long to wait for the lock, in seconds.
_WAIT_S = 30.0


class Damaged(StoreError):
    """A database of safetune that cannot be used."""


def is_damage(error: BaseException) -> bool:
    """Whether an error says that the file itself is bad, and not the disk, a lock or a program.

    SQLite's "malformed" and "not a database" have the plain class; every other one a subclass.
    """
    return isinstance(error, Damaged) or type(error) is sqlite3.DatabaseError


def move_aside(path: Path, found: tuple[int, int] | None, reason: BaseException) -> None:
    """Rename a damaged database and its logs, with one warning that names the new file.

    Of many processes that see the damage one moves; `found` is the file that was seen.

    Raises:
        StoreError: other processes have been opening it for too long.
        OSError: it cannot be renamed.
    """
    with _locked(path, exclusive=True):
        if found is None or db_files.identity(path) != found:
            return
        aside = path.with_name(f"{path.name}.corrupt-{time.time_ns()}-{os.getpid()}")
        for log in (
            *db_files.LOGS,
            "",
        ):  # the database last: until then all of it can be done again
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
def unmoved(path: Path) -> Iterator[None]:
    """Keep other processes from moving a database aside while it is opened.

    SQLite finds the logs by their names: a process that has just opened the file that is moved, and
    finds beside it the logs of the one that took its place, rolls those back or deletes them.
    Where no lock is to be had, such as on a full disk, it is opened all the same.

    Raises:
        StoreError: another process has been moving it for too long.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, ImportError):
            held.enter_context(_locked(path, exclusive=False))
        yield


def remove(aside: Path) -> None:
    """Delete a database that was moved aside, with its logs."""
    for log in (*db_files.LOGS, ""):
        aside.with_name(aside.name + log).unlink(missing_ok=True)


def moved(path: Path) -> list[Path]:
    """Return the databases that were moved aside from here, the oldest first."""
    found = path.parent.glob(f"{path.name}.corrupt-*")
    return sorted(each for each in found if not each.name.endswith(db_files.LOGS))


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open a database that cannot be written to, such as one in an image.

    Raises:
        StoreError: part of it is in a log, which cannot be folded in.
    """
    log = path.with_name(path.name + "-wal")
    if log.exists() and log.stat().st_size:
        raise StoreError("it cannot be written to, and part of it is in its log")
    return sqlite3.connect(
        f"file:{quote(str(path))}?mode=ro&immutable=1",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )


@contextlib.contextmanager
def _locked(path: Path, exclusive: bool) -> Iterator[None]:
    """The lock for moving a database. Its file stays: deleting a lock file breaks the lock."""
    import fcntl

    descriptor = db_files.open_lock(path.with_name(path.name + db_files.LOCK))
    try:
        if not flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, _WAIT_S):
            busy = "opening" if exclusive else "moving"
            raise StoreError(f"other processes have been {busy} it for {_WAIT_S:.0f} s")
        yield
    finally:
        os.close(descriptor)
