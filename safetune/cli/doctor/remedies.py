"""Remedies for faults of a store, by their cause."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetune.settings import SharedKind, display_url, shared_kind

_FULL = "free some space in {where}"
_NOT_ALLOWED = "let this user write there: chown or chmod u+rwx {where}"
_READ_ONLY = "make the database writable for this user: {where}"
_BROKEN = "look for disk errors in dmesg"

_NO_SPACE = 1 << 20

_OF_ERRNO = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: "free some of your quota in {where}",
    errno.EROFS: "remount {where} writable, or set another directory",
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.ENOENT: "mkdir -p {where}",
    errno.ENOTDIR: "set another directory: {where} is a file, or lies below one",
    errno.EIO: _BROKEN,
}

#: What SQLite says, which has no number of its own for it.
_OF_SQLITE = {
    "database or disk is full": _FULL,
    "attempt to write a readonly database": _READ_ONLY,
    "unable to open database file": _NOT_ALLOWED,
    "disk I/O error": _BROKEN,
    "database is locked": "end the process that holds the lock, or wait for it",
}


def remedy(error: BaseException, where: Path | str, otherwise: str) -> str:
    """Return the remedy for the first known cause of an error.

    Args:
        where: the directory with the fault.
        otherwise: the remedy if no cause is known.
    """
    for cause in _causes(error):
        if fix := getattr(cause, "fix", ""):
            return str(fix)
        number = cause.errno if isinstance(cause, OSError) else None
        known = _OF_ERRNO.get(number or 0) or _OF_SQLITE.get(str(cause))
        if number == errno.ENOENT and os.path.exists(where):
            return otherwise  # as below /proc
        if known == _READ_ONLY and os.statvfs(where).f_flag & os.ST_RDONLY:
            known = _OF_ERRNO[errno.EROFS]
        if known == _BROKEN and shutil.disk_usage(where).free < _NO_SPACE:
            known = _FULL  # of the files beside a database, SQLite says no more
        if known is not None:
            return known.format(where=where)
    return otherwise


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def shared_path(url: str) -> str:
    """Return the directory that a shared store lies in, or its URL."""
    return url.partition("://")[2] if shared_kind(url) is SharedKind.DIRECTORY else display_url(url)
