"""The common part of shared stores that keep one file, or one object, per record.

They have no lock that can be trusted, so they have no leases: the first record that is published
wins.
"""

from __future__ import annotations

import contextlib
import errno
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from safetune.errors import StoreError
from safetune.store.records import StoredChoice
from safetune.store.shared import record as shared_record
from safetune.store.shared.protocol import Lease, NoLease, Unwritable
from safetune.store.shared.record import ForeignRecord, Name

#: Errors of a file system that cannot be written to.
_UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_FILE = re.compile(
    r"[\w-]{0,64}\.([0-9a-f]{32})\.([0-9a-f]{32})\.([1-9][0-9]{0,6})\.json", re.ASCII
)


class RecordFiles(ABC):
    """Publishes records as files. A subclass decides where, and how one is written."""

    location: str

    def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
        """Write records, none over a valid one; return what is there now.

        Raises:
            Unwritable: it is read-only or full.
            StoreError: it cannot be reached.
        """
        with self._failures("write to"):
            return [self._publish(namespace, record) for record in records]

    def lease(self, key: str, node: str) -> Lease:
        """Return a lease that excludes no other node."""
        return NoLease()

    def close(self) -> None:  # noqa: B027 - a subclass need not override it
        """Do nothing: nothing stays open between calls."""

    @abstractmethod
    def _publish(self, namespace: str, record: StoredChoice) -> StoredChoice:
        """Write a record, not over a valid one; return what is there now."""

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
            raise kind(f"cannot {action} the shared store {self.location}: {reason}") from error


def file_name(record: StoredChoice) -> str:
    """Return the name of a record's file."""
    name = shared_record.name_of(record)
    kernel = re.sub(r"[^\w-]", "_", record.key.kernel_name, flags=re.ASCII)[:64]
    return f"{kernel}.{name.key}.{name.declared}.{name.generation}.json"


def name_in(file: str) -> Name | None:
    """Return the name of the record in a file of this name; None if it is not a record's file."""
    match = _FILE.fullmatch(file)
    return Name(match[1], match[2], int(match[3])) if match else None


def content(data: bytes, name: Name) -> StoredChoice:
    """Return the record in a file's bytes; raises `ForeignRecord`, also if it has another name."""
    stored = shared_record.decode(data)
    if shared_record.name_of(stored) != name:
        raise ForeignRecord("its name is that of another record")
    return stored
