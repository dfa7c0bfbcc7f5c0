"""The remedy for a fault of a store: by its cause, or by what its directory shows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_NO_SPACE = 1 << 20


def remedy(error: BaseException, directory: Path | None, otherwise: str) -> str:
    """Return the remedy of the error or of its causes, else that for a directory, if it has one.

    Args:
        otherwise: the remedy if the directory shows no fault.
    """
    fixes = (getattr(cause, "fix", "") for cause in _causes(error))
    of_directory = _fault_of(directory) if directory is not None else ""
    return next(filter(None, fixes), of_directory or otherwise)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _fault_of(directory: Path) -> str:
    if not directory.exists():
        return f"mkdir -p {directory}"
    if not directory.is_dir():
        return f"name a directory: {directory} is, or lies below, a file"
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return f"mount it writable, or name another directory: {directory}"
    if shutil.disk_usage(directory).free < _NO_SPACE:
        return f"free some space there: {directory}"
    for path in (directory, *directory.glob("*.db*")):
        if not os.access(path, os.W_OK):
            return f"give this user the right to write there: chown or chmod u+w {path}"
    return ""
