"""The database's files: their location and owner, their locks, and renaming damaged ones.

`tries` waits for a process that holds a lock.

SQLite's log is shared memory, which two machines cannot share, and its locks are the file system's
(https://www.sqlite.org/wal.html, https://www.sqlite.org/lockingv3.html). So if the cache directory
is on a network file system, the database goes to the user's own folder below the temporary
directory, and the cache directory becomes the shared store of all nodes.

SQLite follows a symbolic link and writes to its target, and gives its log files the permissions of
the database, so both are checked before SQLite opens anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from safetune import forks
from safetune.errors import StoreError, StoreWarning
from safetune.frozen import dataclass
from safetune.keys import encoding
from safetune.messages import warn
from safetune.settings import Settings

#: Device and inode of a file.
Identity = tuple[int, int] | None

DATABASE_NAME = "safetune.db"

#: Beside `safetune.db`: the files that belong to it while it is open, and the lock for moving it.
LOGS = ("-wal", "-shm", "-journal")
LOCK = ".lock"

#: Held while a database file is made: closing an existing one would drop every lock that this
#: process holds on it (POSIX), so no other thread may connect in between.
creating = forks.lock()

#: `f_type` of statfs(2). From linux/magic.h, but for those of Lustre, GPFS, BeeGFS, PanFS and SNFS,
#: which are in GNU coreutils (src/stat.c, those that it calls remote).
_NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x20030528: "OrangeFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0xAAD7AAEA: "PanFS",
    0xBEEFDEAD: "SNFS",
    0x65735546: "FUSE",  # of a network (sshfs, JuiceFS, s3fs, ...) or not: the number is the same
}

#: The same of those in memory: tmpfs and ramfs.
_IN_MEMORY = (0x01021994, 0x858458F6)

#: The program's own random numbers stay as they are: ranks that wait would differ in them after.
_random = random.SystemRandom()


def network_of(path: Path, type_of: Callable[[Path], int | None] | None = None) -> str:
    """Return the name of the network file system that a path is, or will be, on; empty if none.

    Args:
        type_of: returns the file system number of a path, None if the path does not exist.
    """
    if sys.platform != "linux":
        return ""
    return _NETWORK.get(_file_system(path, type_of or _type_of), "")


@functools.cache
def outlives_machine(path: Path) -> bool:
    """Whether a file survives a crash of the machine: it is on a local disk and not below the
    temporary directory.
    """
    import tempfile

    temporary = Path(tempfile.gettempdir()).resolve()
    if path.resolve().is_relative_to(temporary) or network_of(path):
        return False
    return sys.platform == "linux" and _file_system(path, _type_of) not in _IN_MEMORY


def _file_system(path: Path, type_of: Callable[[Path], int | None]) -> int:
    """Return the number of the file system that a path is, or will be, on; 0 if not known."""
    numbers = map(type_of, (path, *path.parents))
    return next((number for number in numbers if number is not None), 0)


def _type_of(path: Path) -> int | None:
    """Return `f_type` of statfs(2), which `os.statvfs` leaves out; None if there is no file."""
    result = (ctypes.c_ulong * 64)()  # the structure has 15 words at most, this one first
    failed = ctypes.CDLL(None).statfs(os.fsencode(path), ctypes.byref(result))
    return None if failed else int(result[0]) & 0xFFFFFFFF


@dataclass(frozen=True)
class Location:
    """The location of the choices."""

    directory: Path  # of the database
    network: str = ""  # the file system of the cache directory, if it is a network's
    choices: Path | None = None  # the cache directory, where it is the shared store by default

    @property
    def database(self) -> Path:
        """The path of the database."""
        return self.directory / DATABASE_NAME

    def shared(self, settings: Settings) -> str:
        """Return the URL of the shared store; empty for none."""
        by_default = f"file://{quote(os.fsencode(self.choices))}" if self.choices else ""
        return settings.shared or by_default

    def warning(self, settings: Settings) -> str:
        """Return the message about a cache directory on a network file system; empty otherwise."""
        if not self.network:
            return ""
        shared = f", and all nodes share choices in {settings.cache_dir}" if self.choices else ""
        return (
            f"{settings.cache_dir} is on a network file system ({self.network}), where SQLite is "
            f"not safe: safetune keeps its database in {self.directory} on this node{shared}. To "
            "choose other directories, set SAFETUNE_CACHE_DIR to one on a local disk, and "
            "SAFETUNE_SHARED"
        )


def locate(
    settings: Settings, is_on: Callable[[Path], str] | None = None, *, writes: bool = True
) -> Location:
    """Return the location of the choices; creates the cache directory if it is the shared store.

    Args:
        is_on: returns the network file system of a path; by default `network_of`.
        writes: False to create nothing.
    """
    cache, is_on = settings.cache_dir, is_on or network_of
    if cache.parts[0].startswith("~") or not (network := is_on(cache)):
        return Location(cache)
    import tempfile

    name = f"safetune-{os.getuid()}-{encoding.digest(str(cache))[:16]}"
    directory = Path(tempfile.gettempdir()) / name
    if settings.shared:
        return Location(directory, network)
    with contextlib.suppress(OSError, StoreError):  # the shared store says what is wrong
        if writes:
            make_directory(cache / DATABASE_NAME)
        elif not cache.exists():
            return Location(directory, network)
    return Location(directory, network, choices=cache)


def make_directory(path: Path) -> None:
    """Create the directory of a database, readable only by its owner.

    Raises `StoreError` if it is a symbolic link or another user's, or if there is no home;
    `OSError`.
    """
    if path.parts[0].startswith("~"):
        raise StoreError(
            "there is no home directory; set SAFETUNE_CACHE_DIR to a directory to write to"
        )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(path.parent, stat.S_ISDIR, "directory")


def make(path: Path) -> None:
    """Create an empty database, readable only by its owner, unless there is one; raises like
    `make_directory`.
    """
    with creating:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        check(path)


def identity(path: Path | int) -> Identity:
    """Return the device and inode of a file or descriptor; None if the file does not exist."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def check(path: Path) -> None:
    """Check that the directory and the files of a database belong to this user and are not
    links.
    """
    _check(path.parent, stat.S_ISDIR, "directory")
    for suffix in ("", *LOGS):
        with contextlib.suppress(FileNotFoundError):
            _check(path.with_name(path.name + suffix), stat.S_ISREG, "regular file")


def _check(path: Path, is_kind: Callable[[int], bool], kind: str) -> None:
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise StoreError(f"{path} is a symbolic link; set SAFETUNE_CACHE_DIR to its target")
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
    """A safetune database that cannot be used."""


def set_aside(path: Path, seen: Identity, reason: str, wait_s: float) -> None:
    """Rename an unusable database and its logs, with one warning that names the new file.

    If many processes find it unusable, one renames it; `seen` is the file that was examined. It
    replaces an earlier renamed database.
    """
    with _locked(path, exclusive=True, wait_s=wait_s):
        if seen is None or identity(path) != seen:
            return
        for log in (*LOGS, ""):  # the database last: until then all of it can be done again
            aside(path, log).unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.rename(path.with_name(path.name + log), aside(path, log))
    warn(
        f"cannot use the store {path} ({reason}); renamed it to {aside(path)} and created an empty "
        "one",
        StoreWarning,
    )


@contextlib.contextmanager
def unmoved(path: Path, wait_s: float) -> Iterator[None]:
    """Prevent other processes from renaming a database while it is opened; raises `StoreError`.

    SQLite finds the logs by name. A process that opens a renamed file, and finds the logs of its
    successor beside it, rolls those back or deletes them. If no lock is available, such as on a
    full disk, the database is opened anyway.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, ImportError):
            held.enter_context(_locked(path, exclusive=False, wait_s=wait_s))
        yield


def aside(path: Path, log: str = "") -> Path:
    """Return the path of the database that was renamed, or of one of its logs."""
    return path.with_name(f"{path.name}.aside{log}")


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


def open_lock(path: Path) -> int:
    """Open a lock file for writing, creating it if missing; return its descriptor."""
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def pauses(first_s: float, most_s: float) -> Iterator[float]:
    """Yield the sleep before each retry, without end.

    It doubles each time, with random jitter, so that processes that start together spread out.
    """
    pause_s = first_s
    while True:
        yield _random.uniform(pause_s / 2, pause_s)
        pause_s = min(2 * pause_s, most_s)


def tries(wait_s: float, first_s: float, most_s: float) -> Iterator[bool]:
    """Yield, for each try, whether it is the last; sleep between tries, for `wait_s` in total."""
    end = time.monotonic() + wait_s
    for pause_s in pauses(first_s, most_s):
        left_s = end - time.monotonic()
        yield left_s <= 0
        if left_s <= 0:
            return
        time.sleep(max(0.0, min(pause_s, end - time.monotonic())))
