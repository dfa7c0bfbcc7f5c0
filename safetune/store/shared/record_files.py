"""The common part of shared stores that keep one file, or one object, per record.

They have no lock that can be trusted, so they have no leases: the first record that is published
wins.
"""

from __future__ import annotations

import contextlib
import errno
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

from safetune.errors import StoreError
from safetune.settings import without_password
from safetune.store.records import StoredChoice
from safetune.store.shared import record as shared_record
from safetune.store.shared.protocol import Lease, NoLease, Unwritable
from safetune.store.shared.record import Name

#: How many files are read together.
_TOGETHER = 200

#: Errors of a file system that cannot be written to.
_UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_FILE = re.compile(
    r"[\w-]{0,64}\.([0-9a-f]{32})\.([0-9a-f]{32})\.([1-9][0-9]{0,9})\.json", re.ASCII
)


class RecordFiles(ABC):
    """Records as files. A subclass decides where they are, and how one is read and written."""

    location: str
    url: str

    @property
    def identity(self) -> str:
        """Return the location: no parameter or variable changes which store it is."""
        return self.location

    def names(self, namespace: str) -> set[Name]:
        """Return the names of all records in a namespace; raises `StoreError`."""
        with self._failures("read"):
            return set(self._listing(namespace, None))

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[StoredChoice]:
        """Yield the records of these names; raises `StoreError`."""
        with self._failures("read"):
            listing = self._listing(namespace, {name.key for name in names})
        wanted = sorted(names & listing.keys())
        for start in range(0, len(wanted), _TOGETHER):
            with self._failures("read"):
                found = self._load(
                    namespace, {n: listing[n] for n in wanted[start : start + _TOGETHER]}
                )
            yield from found

    def get(self, namespace: str, key: str, declared: str) -> StoredChoice | None:
        """Return the record of the highest generation; raises `StoreError`."""
        with self._failures("read"):
            listing = self._listing(namespace, {key})
            for name in sorted((n for n in listing if n[:2] == (key, declared)), reverse=True):
                if found := self._load(namespace, {name: listing[name]}):
                    return found[0]
        return None

    def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
        """Write records, none over a valid one; return what is there now; raises `StoreError`."""
        with self._failures("write to"):
            return [self._publish(namespace, record) for record in records]

    def lease(self, key: str, node: str) -> Lease:
        """Return a lease that excludes no other node."""
        return NoLease()

    def close(self) -> None:  # noqa: B027 - a subclass need not override it
        """Do nothing: nothing stays open between calls."""

    @abstractmethod
    def _listing(self, namespace: str, keys: Set[str] | None) -> dict[Name, Any]:
        """The path of each record, of these keys at least."""

    @abstractmethod
    def _load(self, namespace: str, paths: Mapping[Name, Any]) -> list[StoredChoice]:
        """The valid records in these files."""

    @abstractmethod
    def _read(self, path: Any, namespace: str, name: Name) -> StoredChoice | None:
        """The valid record in one file, None without one."""

    @abstractmethod
    def _path(self, namespace: str, file: str, key: str) -> Any:
        """The path of a record's file."""

    @abstractmethod
    def _create(self, path: Any, data: bytes, is_record: Callable[[Any], object]) -> None:
        """Write a file, in place of one that is not a record, and of no other."""

    def _publish(self, namespace: str, record: StoredChoice) -> StoredChoice:
        name = shared_record.name_of(record)
        path = self._path(namespace, file_name(record), name.key)
        if stored := self._read(path, namespace, name):
            return stored
        data = shared_record.encode(record).encode()
        self._create(path, data, lambda path: self._read(path, namespace, name))
        return self._read(path, namespace, name) or record

    @contextlib.contextmanager
    def _failures(self, action: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # fsspec's back ends raise what their libraries raise
            refused = isinstance(error, PermissionError)
            refused = refused or getattr(error, "errno", None) in _UNWRITABLE
            kind = Unwritable if refused and action != "read" else StoreError
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            reason = without_password(reason, self.url)
            raise kind(f"cannot {action} the shared store {self.location}: {reason}") from error


def file_name(record: StoredChoice) -> str:
    """Return the name of a record's file."""
    kernel = re.sub(r"[^\w-]", "_", record.key.kernel_name, flags=re.ASCII)[:64]
    return ".".join([kernel, *map(str, shared_record.name_of(record)), "json"])


def name_in(file: str) -> Name | None:
    """Return the name of the record in a file of this name; None if it is not a record's file."""
    match = _FILE.fullmatch(file)
    return Name(match[1], match[2], int(match[3])) if match else None
