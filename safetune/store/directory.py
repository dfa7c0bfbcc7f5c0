"""A shared store that is a directory: one immutable file per choice, on any file system.

    DIR/1/NAMESPACE/KEY[:2]/KERNEL.KEY.LIST.GENERATION.json

Made for NFS, Lustre and FUSE: no locks, no mmap, no rename over a valid file, no directory that is
ever removed. A file is written under another name, synced, and linked to its own, which fails where
there is one: the first wins. Where there are no hard links it is renamed after a look, and what is
read back counts. What is gone, stale or unreadable is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path

from safetune.errors import StoreError
from safetune.store import shared_record
from safetune.store.records import StoredChoice
from safetune.store.shared import Lease, NoLease, Unwritable
from safetune.store.shared_record import ForeignRecord, Name

#: What a network file system says of a file that another client has just changed or removed.
_MISSES = {errno.ENOENT, errno.ESTALE, errno.EBUSY, errno.EIO, errno.EACCES, errno.EISDIR}

#: What it says when nothing can be written, now or ever.
_UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

#: What it says where it has no hard links.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

_FILE = re.compile(
    r"[\w-]{0,64}\.([0-9a-f]{32})\.([0-9a-f]{32})\.([1-9][0-9]{0,6})\.json", re.ASCII
)


class Directory:
    """The records below a directory, which is made at the first write."""

    def __init__(self, root: Path) -> None:
        self.place = f"file://{root}"
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
        for name in names:
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

    def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
        """Write records, none over a valid one; return what is there now.

        Raises:
            Unwritable: the directory is read-only or full.
            StoreError: it cannot be reached.
        """
        with self._failures("write to"):
            return [self._publish(namespace, record) for record in records]

    def lease(self, key: str) -> Lease:
        """Return a lease that keeps nobody away: a directory has no lock that can be trusted."""
        return NoLease()

    def close(self) -> None:
        """Do nothing: no file stays open."""

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
                except ForeignRecord:  # such as half of one: nobody's choice
                    os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return self._read(path, name) or record

    def _bucket(self, directory: Path) -> dict[Name, str]:
        found = {}
        for entry in _entries(directory):
            if match := _FILE.fullmatch(entry):
                found[Name(match[1], match[2], int(match[3]))] = entry
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
            stored = shared_record.decode(file.read(shared_record.MAX_BYTES + 1))
        if shared_record.name_of(stored) != name:
            raise ForeignRecord("it is another one than its name says")
        return stored

    def _reachable(self) -> None:
        """Raise where not even the directory above is there: a share that is not mounted."""
        if not self._root.parent.exists():
            os.stat(self._root.parent.parent)

    @contextlib.contextmanager
    def _failures(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kind = Unwritable if error.errno in _UNWRITABLE and action != "read" else StoreError
            reason = error.strerror or str(error)
            raise kind(f"cannot {action} the shared store {self.place}: {reason}") from error


def file_name(record: StoredChoice) -> str:
    """Return the name of a record's file."""
    name = shared_record.name_of(record)
    kernel = re.sub(r"[^\w-]", "_", record.key.kernel_name, flags=re.ASCII)[:64]
    return f"{kernel}.{name.key}.{name.declared}.{name.generation}.json"


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
    """Give a finished file its name; False where somebody else's has it."""
    try:
        link(temporary, path)
    except OSError as error:
        # A reply that was lost on the way: NFS sends the request again, and finds the name taken.
        if temporary.stat().st_nlink == 2:
            return True
        if error.errno in _NO_LINKS and not path.exists():
            os.rename(temporary, path)
            return True
        if error.errno != errno.EEXIST and not path.exists():
            raise
        return False
    return True
