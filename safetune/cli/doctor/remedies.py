"""Remedies for faults of a store, by their cause."""

from __future__ import annotations

import errno
from pathlib import Path

_FULL = "free some space in {where}"
_NOT_ALLOWED = "let this user write there: chown or chmod u+rwx {where}"
_READ_ONLY = "remount {where} writable, or set another directory"

_OF_ERRNO = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: "free some of your quota in {where}",
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _NOT_ALLOWED,
    errno.EPERM: _NOT_ALLOWED,
    errno.ENOENT: "mkdir -p {where}",
    errno.ENOTDIR: "set another directory: {where} is a file, or lies below one",
}

#: What SQLite says, which has no number of its own for it.
_OF_SQLITE = {
    "database or disk is full": _FULL,
    "disk I/O error": f"{_FULL}; if there is enough, look for disk errors in dmesg",
    "attempt to write a readonly database": f"{_READ_ONLY}; or let this user write there",
    "unable to open database file": _NOT_ALLOWED,
    "database is locked": "end the process that holds the lock, or wait for it",
}


def remedy(error: BaseException, where: Path | str, otherwise: str) -> str:
    """Return the remedy for the first known cause of an error.

    Args:
        where: the directory with the fault.
        otherwise: the remedy if no cause is known.
    """
    cause: BaseException | None = error
    while cause is not None:
        if fix := getattr(cause, "fix", ""):
            return str(fix)
        known = _OF_ERRNO.get(getattr(cause, "errno", None) or 0) or _OF_SQLITE.get(str(cause))
        if known is not None:
            return known.format(where=where)
        cause = cause.__cause__
    return otherwise
