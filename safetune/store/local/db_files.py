"""The files of the database: made for their owner alone, and refused where others may write.

SQLite follows a symbolic link and writes to its target, and gives its log files the
permissions of the database, so both are looked at before it opens anything.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path

from safetune.errors import StoreError

#: Beside `safetune.db`: the files that belong to it while it is open, the lock for moving it, and
#: the file whose bytes are the locks of keys.
LOGS = ("-wal", "-shm", "-journal")
LOCK = ".lock"
KEY_LOCKS = ".keys.lock"

#: Held while a database file is made: closing an existing one would drop every lock that this
#: process holds on it (POSIX), so no other thread may connect in between.
creating = threading.Lock()


def make_directory(path: Path) -> None:
    """Make the directory of a database, which only its owner can read.

    Raises:
        StoreError: it is a symbolic link or another user's, or there is no home.
        OSError: it cannot be made.
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


def check(path: Path) -> None:
    """Check that the directory and the files of a database are this user's, and not links.

    Raises:
        StoreError: one is another user's, or a link.
        OSError: that cannot be found out.
    """
    _check(path.parent, stat.S_ISDIR, "directory")
    for name in (path, *(path.with_name(path.name + log) for log in LOGS)):
        with contextlib.suppress(FileNotFoundError):
            _check(name, stat.S_ISREG, "regular file")


def open_lock(path: Path) -> int:
    """Open a lock file for writing, making it if it is missing; return its descriptor.

    Raises:
        OSError: it cannot be opened, or is a symbolic link.
    """
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file; None if there is none.

    Raises:
        OSError: they cannot be found out.
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def is_read_only(path: Path) -> bool:
    """Whether a database is there and nothing can be written beside it, as SQLite must."""
    return path.exists() and not os.access(path.parent, os.W_OK)


def _check(path: Path, is_kind: object, kind: str) -> None:
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise StoreError(f"{path} is a symbolic link; set SAFETUNE_CACHE_DIR to where it leads")
    if not is_kind(found.st_mode):  # type: ignore[operator]
        raise StoreError(f"{path} is not a {kind}")
    if not hasattr(os, "geteuid") or found.st_uid == os.geteuid():
        return
    # What root has put there, e.g. in an image, is trusted unless others may change it.
    if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreError(
            f"{path} belongs to another user (uid {found.st_uid}); set SAFETUNE_CACHE_DIR to a "
            "directory of your own"
        )
