"""A shared store that is a directory: one immutable file per choice, on any file system.

    DIR/2/NAMESPACE/KEY[:2]/KERNEL.KEY.LIST.GENERATION.json

Made for NFS, Lustre and FUSE: no locks, no mmap, no rename over a valid file, and no directory is
ever removed. A file is written under another name, synced, and linked to its own, which fails where
that exists: the first wins. Where there are no hard links it is renamed if the name is free, and
the record that is read back counts. A file that is gone, stale or unreadable is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterator, Set
from pathlib import Path

from safetune.store.records import StoredChoice
from safetune.store.shared import record as shared_record
from safetune.store.shared.record import ForeignRecord, Name
from safetune.store.shared.record_files import RecordFiles, content, file_name, name_in

#: Errors of a network file system for a file that another client has just changed or removed.
_MISSES = {errno.ENOENT, errno.ESTALE, errno.EBUSY, errno.EIO, errno.EACCES, errno.EISDIR}

#: Its errors where it has no hard links.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class Directory(RecordFiles):
    """The records below a directory, which is made at the first write."""

    def __init__(self, root: Path) -> None:
        self.location = f"file://{root}"
        self._root = root / str(shared_record.FORMAT)

    def names(self, namespace: str) -> set[Name]:
        """Return the names of all records in a namespace; raises `StoreError`."""
        with self._failures("read"):
            self._reachable()
            return {
                name
                for bucket in _entries(self._root / namespace)
                for name in self._bucket(self._root / namespace / bucket)
            }

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[StoredChoice]:
        """Yield the records of these names; raises `StoreError`."""
        by_bucket: dict[str, set[Name]] = {}
        for name in sorted(names):
            by_bucket.setdefault(name.key[:2], set()).add(name)
        for bucket, wanted in by_bucket.items():
            with self._failures("read"):
                directory = self._root / namespace / bucket
                files = self._bucket(directory)
                found = [self._read(directory / files[n], n) for n in wanted if n in files]
            yield from filter(None, found)

    def get(self, namespace: str, key: str, declared: str) -> StoredChoice | None:
        """Return the record of the highest generation; raises `StoreError`."""
        with self._failures("read"):
            directory = self._root / namespace / key[:2]
            files = self._bucket(directory)
            for name in sorted((n for n in files if n[:2] == (key, declared)), reverse=True):
                if stored := self._read(directory / files[name], name):
                    return stored
        return None

    def _publish(self, namespace: str, record: StoredChoice) -> StoredChoice:
        name = shared_record.name_of(record)
        directory = self._root / namespace / name.key[:2]
        path = directory / file_name(record)
        if stored := self._read(path, name):
            return stored
        data = shared_record.encode(record).encode()
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".{path.name}.{uuid.uuid4().hex}"
        try:
            _write(temporary, data)
            if not _link(temporary, path):
                try:
                    return self._load(path, name)
                except ForeignRecord:  # such as half of one
                    os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return self._read(path, name) or record

    def _bucket(self, directory: Path) -> dict[Name, str]:
        found = {}
        for entry in _entries(directory):
            if name := name_in(entry):
                found[name] = entry
        return found

    def _read(self, path: Path, name: Name) -> StoredChoice | None:
        try:
            return self._load(path, name)
        except ForeignRecord:
            return None
        except OSError as error:
            if error.errno in _MISSES:
                return None
            raise

    def _load(self, path: Path, name: Name) -> StoredChoice:
        with path.open("rb") as file:
            return content(file.read(shared_record.MAX_BYTES + 1), name)

    def _reachable(self) -> None:
        """Raise where even the directory above is missing: the share is not mounted."""
        if not self._root.parent.exists():
            os.stat(self._root.parent.parent)


def _entries(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError as error:
        if error.errno in _MISSES | {errno.ENOTDIR}:
            return []
        raise


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _link(temporary: Path, path: Path, link: Callable[[Path, Path], None] = os.link) -> bool:
    """Give a finished file its name; False where another file has it."""
    try:
        link(temporary, path)
    except OSError as error:
        # The reply was lost: NFS sends the request again, and finds the name taken.
        if temporary.stat().st_nlink == 2:
            return True
        if error.errno in _NO_LINKS and not path.exists():
            os.rename(temporary, path)
            return True
        if error.errno != errno.EEXIST and not path.exists():
            raise
        return False
    return True
