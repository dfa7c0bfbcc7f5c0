"""A shared store behind any fsspec URL: one immutable object per choice.

    ROOT/1/NAMESPACE/KERNEL.KEY.LIST.GENERATION.json

Written with fsspec's `mode="create"`, which is a conditional put where the back end has one (S3's
If-None-Match; memory). Elsewhere it is a look and then a write, so of two nodes that write at the
same moment the later one may win; what is read back counts, and the next pull puts the other right.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Set
from typing import Any

from safetune.errors import StoreError
from safetune.store import shared_record
from safetune.store.directory import file_name
from safetune.store.records import StoredChoice
from safetune.store.shared import Lease, NoLease, Unwritable
from safetune.store.shared_record import ForeignRecord, Name

_FILE = re.compile(r".*\.([0-9a-f]{32})\.([0-9a-f]{32})\.([1-9][0-9]{0,6})\.json", re.ASCII)

#: How many objects are fetched together; fsspec does that concurrently where it can.
_TOGETHER = 200


class Objects:
    """The records below a path of an fsspec file system."""

    def __init__(self, filesystem: Any, root: str, place: str) -> None:
        self.place = place
        self._filesystem = filesystem
        self._root = f"{root.rstrip('/')}/{shared_record.FORMAT}"

    def names(self, namespace: str) -> set[Name]:
        """Return the names of all records in a namespace; raises `StoreError`."""
        with self._failures("read"):
            return set(self._listing(namespace))

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[StoredChoice]:
        """Yield the records of these names; raises `StoreError`."""
        with self._failures("read"):
            listing = self._listing(namespace)
        wanted = sorted(name for name in names if name in listing)
        for start in range(0, len(wanted), _TOGETHER):
            paths = {listing[name]: name for name in wanted[start : start + _TOGETHER]}
            with self._failures("read"):
                texts = self._filesystem.cat(list(paths), on_error="omit")
            if isinstance(texts, bytes):  # fsspec's answer for a list of one, in some back ends
                texts = dict.fromkeys(paths, texts)
            for path, text in texts.items():
                if path in paths and (stored := _decoded(text, paths[path])):
                    yield stored

    def get(self, namespace: str, key: str, declared: str) -> StoredChoice | None:
        """Return the record of the highest generation; raises `StoreError`."""
        names = {name for name in self.names(namespace) if name[:2] == (key, declared)}
        found = self.pull(namespace, names)
        return max(found, key=lambda stored: stored.choice.generation, default=None)

    def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
        """Write records, none over a valid one; return what is there now.

        Raises:
            Unwritable: the back end says that it may not be written.
            StoreError: it cannot be reached.
        """
        with self._failures("write to"):
            return [self._publish(namespace, record) for record in records]

    def lease(self, key: str) -> Lease:
        """Return a lease that keeps nobody away."""
        return NoLease()

    def close(self) -> None:
        """Do nothing: connections are fsspec's own."""

    def _publish(self, namespace: str, record: StoredChoice) -> StoredChoice:
        name = shared_record.name_of(record)
        path = f"{self._root}/{namespace}/{file_name(record)}"
        data = shared_record.encode(record).encode()
        try:
            self._filesystem.pipe_file(path, data, mode="create")
        except FileExistsError:
            if stored := self._read(path, name):
                return stored
            self._filesystem.pipe_file(path, data)  # what is there is no record
        return self._read(path, name) or record

    def _read(self, path: str, name: Name) -> StoredChoice | None:
        try:
            return _decoded(self._filesystem.cat_file(path), name)
        except FileNotFoundError:
            return None

    def _listing(self, namespace: str) -> dict[Name, str]:
        self._filesystem.invalidate_cache()
        try:
            paths = self._filesystem.ls(f"{self._root}/{namespace}", detail=False)
        except FileNotFoundError:
            return {}
        matches = [(path, _FILE.fullmatch(path)) for path in paths]
        return {Name(m[1], m[2], int(m[3])): path for path, m in matches if m}

    @contextlib.contextmanager
    def _failures(self, action: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # fsspec's back ends raise what their libraries raise
            kind = Unwritable if isinstance(error, PermissionError) else StoreError
            raise kind(f"cannot {action} the shared store {self.place}: {error}") from error


def _decoded(text: bytes, name: Name) -> StoredChoice | None:
    try:
        stored = shared_record.decode(text)
    except ForeignRecord:
        return None
    return stored if shared_record.name_of(stored) == name else None
