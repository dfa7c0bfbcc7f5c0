"""A shared store behind any fsspec URL: one immutable object per choice.

    ROOT/2/NAMESPACE/KERNEL.KEY.LIST.GENERATION.json

Written with fsspec's `mode="create"`, a conditional put where the file system has one (S3's
If-None-Match; memory). Elsewhere it checks and then writes, so if two nodes write at the same
moment the later one may win; the record that is read back counts, and the next pull corrects the
other node.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from safetune.settings import display_url
from safetune.store.records import StoredChoice, precedence
from safetune.store.shared import record as shared_record
from safetune.store.shared.record import ForeignRecord, Name
from safetune.store.shared.record_files import RecordFiles, content, file_name, name_in

#: How many objects are fetched together; fsspec does that concurrently where it can.
_TOGETHER = 200


class Objects(RecordFiles):
    """The records below a path of an fsspec file system."""

    def __init__(self, url: str) -> None:
        self.location = display_url(url)
        self._url = url

    @property
    def _at(self) -> tuple[Any, str]:
        """The file system and the path of the records; may ask the network for credentials.

        fsspec caches file systems, per process.
        """
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(self._url)
        return filesystem, f"{root.rstrip('/')}/{shared_record.FORMAT}"

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
                texts = self._at[0].cat(list(paths), on_error="omit")
            if isinstance(texts, bytes):  # some file systems answer so for a list of one
                texts = dict.fromkeys(paths, texts)
            for path, text in texts.items():
                if path in paths and (stored := _decoded(text, paths[path])):
                    yield stored

    def get(self, namespace: str, key: str, declared: str) -> StoredChoice | None:
        """Return the record of the highest generation; raises `StoreError`."""
        with self._failures("read"):
            listing = self._listing(namespace)
        found = self._load(listing, [name for name in listing if name[:2] == (key, declared)])
        return min(found, key=lambda stored: precedence(stored.choice), default=None)

    def _publish(self, namespace: str, record: StoredChoice) -> StoredChoice:
        filesystem, root = self._at
        name = shared_record.name_of(record)
        path = f"{root}/{namespace}/{file_name(record)}"
        data = shared_record.encode(record).encode()
        try:
            filesystem.pipe_file(path, data, mode="create")
        except FileExistsError:
            if stored := _read(filesystem, path, name):
                return stored
            filesystem.pipe_file(path, data)  # what is there is not a record
        return _read(filesystem, path, name) or record

    def _listing(self, namespace: str) -> dict[Name, str]:
        filesystem, root = self._at
        filesystem.invalidate_cache()
        try:
            entries = filesystem.ls(f"{root}/{namespace}", detail=True)
        except FileNotFoundError:
            return {}
        small = [e["name"] for e in entries if (e.get("size") or 0) <= shared_record.MAX_BYTES]
        names = [(name_in(path.rpartition("/")[2]), path) for path in small]
        return {name: path for name, path in names if name}


def _read(filesystem: Any, path: str, name: Name) -> StoredChoice | None:
    try:
        return _decoded(filesystem.cat_file(path), name)
    except FileNotFoundError:
        return None


def _decoded(data: bytes, name: Name) -> StoredChoice | None:
    try:
        return content(data, name)
    except ForeignRecord:
        return None
