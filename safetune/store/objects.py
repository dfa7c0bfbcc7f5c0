"""A shared store behind any fsspec URL: one immutable object per choice.

    ROOT/1/NAMESPACE/KERNEL.KEY.LIST.GENERATION.json

Written with fsspec's `mode="create"`, which is a conditional put where the back end has one (S3's
If-None-Match; memory). Elsewhere it is a look and then a write, so of two nodes that write at the
same moment the later one may win; what is read back counts, and the next pull puts the other right.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from safetune.store import shared_record
from safetune.store.record_files import RecordFiles, content, file_name, name_in
from safetune.store.records import StoredChoice
from safetune.store.shared_record import ForeignRecord, Name

#: How many objects are fetched together; fsspec does that concurrently where it can.
_TOGETHER = 200


class Objects(RecordFiles):
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
        yield from self._load(listing, sorted(name for name in names if name in listing))

    def _load(self, listing: dict[Name, str], wanted: list[Name]) -> Iterator[StoredChoice]:
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
        with self._failures("read"):
            listing = self._listing(namespace)
        found = self._load(listing, [name for name in listing if name[:2] == (key, declared)])
        return max(found, key=lambda stored: stored.choice.generation, default=None)

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
        names = [(name_in(path.rpartition("/")[2]), path) for path in paths]
        return {name: path for name, path in names if name}


def _decoded(data: bytes, name: Name) -> StoredChoice | None:
    try:
        return content(data, name)
    except ForeignRecord:
        return None
