"""Leases as files, for the shards of one sweep that share a directory.

    ROOT/leases/KEY[:2]/KEY    one line: the node that tunes the key, and a number of its own

A launch does not take one: a directory may be a copy, or on a file system on which a file is seen
late, and the first published choice counts in any case. Shards that take a key each have hours to
lose. A lease is a file that is linked to its name, which one client can do. Its holder touches it,
and one that was not touched for a minute is free. All times are those of the file server.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from safetune.store.packs.packs import written_beside
from safetune.store.shared.files import MISSES, Directory, give_name, take_away
from safetune.store.shared.protocol import UNSHARED, UNSHARED_S, Lease, NoLease

#: A client of NFS may see the time of a file 30 s late, or 60 s where its mount says so.
EXPIRES_AFTER_S = 60.0


class LeasedDirectory(Directory):
    """A directory of records whose keys can be leased."""

    def __init__(self, root: Path, expires_after_s: float = EXPIRES_AFTER_S) -> None:
        super().__init__(root)
        self._leases = root / "leases"
        self._expires_after_s = expires_after_s

    def lease(self, key: str, node: str) -> Lease | None:
        path = self._leases / key[:2] / key
        text = f"{node} {uuid.uuid4().hex}\n"
        mine = FileLease(path, text, self._expires_after_s)
        with self._failures("write to"), contextlib.ExitStack() as written:
            self._check_mounted()
            path.parent.mkdir(parents=True, exist_ok=True)
            new = written.enter_context(written_beside(path, text.encode()))
            for _ in range(2):
                if give_name(new, path):
                    return mine
                found, touched = _read(path)
                age_s = new.stat().st_mtime - touched
                owner = (found.split() or [""])[0]
                if owner == UNSHARED and age_s < UNSHARED_S:
                    return NoLease()
                if owner == node:  # its process that had it has ended
                    os.replace(new, path)
                    return mine
                if owner and age_s < self._expires_after_s:
                    return None
                _remove(path, found)
        return None


class FileLease:
    """A file that says which node tunes a key."""

    def __init__(self, path: Path, text: str, expires_after_s: float) -> None:
        self.expires_after_s = expires_after_s
        self._path = path
        self._text = text

    def renew(self) -> bool:
        try:
            if _read(self._path)[0] != self._text:
                return False
            os.utime(self._path)
        except OSError:
            return False
        return True

    def release(self, published: bool = True) -> None:
        with contextlib.suppress(OSError):
            if published:
                _remove(self._path, self._text)
            elif _read(self._path)[0] == self._text:
                with written_beside(self._path, f"{UNSHARED}\n".encode()) as new:
                    os.replace(new, self._path)


def _read(path: Path) -> tuple[str, float]:
    """The text of a lease and when it was touched; an empty text without one."""
    try:
        with path.open(errors="replace") as file:  # to open it is to ask the server
            return file.read(200), os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno in MISSES:
            return "", 0.0
        raise


def _remove(path: Path, text: str) -> None:
    """Remove a lease of this text. Another node may have put its own there since it was read."""
    take_away(path, lambda aside: _read(aside)[0] != text)
