"""A shared store behind any fsspec URL: one immutable object per choice.

    ROOT/2/NAMESPACE/KERNEL.KEY.LIST.GENERATION.json

Written with fsspec's `mode="create"`, a conditional put where the file system has one (S3's
If-None-Match; memory). Elsewhere, and where `mode` has no effect, it looks and then writes, so if
two nodes write at the same moment the later one may win; the record that is read back counts, and
the next pull corrects the other node.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from safetune.settings import display_url
from safetune.store.records import StoredChoice
from safetune.store.shared import record as shared_record
from safetune.store.shared.record import Name
from safetune.store.shared.record_files import RecordFiles, file_name, name_in


class Objects(RecordFiles):
    """The records below a path of an fsspec file system."""

    def __init__(self, url: str) -> None:
        self.location = display_url(url)
        self.url = url

    @property
    def _at(self) -> tuple[Any, str]:
        """The file system and the path of the records; may ask the network for credentials.

        fsspec caches file systems, per process.
        """
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(self.url)
        return filesystem, f"{root.rstrip('/')}/{shared_record.FORMAT}"

    def _listing(self, namespace: str, keys: Set[str] | None) -> dict[Name, str]:
        filesystem, root = self._at
        filesystem.invalidate_cache()
        try:
            entries = filesystem.ls(f"{root}/{namespace}", detail=True)
        except FileNotFoundError:
            return {}
        small = [each["name"] for each in entries if _is_small(each)]
        return {name: path for path in small if (name := name_in(path.rpartition("/")[2]))}

    def _load(self, namespace: str, paths: Mapping[Name, str]) -> list[StoredChoice]:
        listed = list(paths.values())
        texts = self._at[0].cat(listed, on_error="omit")
        if isinstance(texts, bytes):  # some file systems answer so for a list of one
            texts = dict.fromkeys(listed, texts)
        loaded = [
            shared_record.decoded(texts[path], namespace, name)
            for name, path in paths.items()
            if path in texts
        ]
        return [stored for stored in loaded if stored]

    def _publish(self, namespace: str, record: StoredChoice) -> StoredChoice:
        filesystem, root = self._at
        name = shared_record.name_of(record)
        path = f"{root}/{namespace}/{file_name(record)}"
        if stored := _read(filesystem, path, namespace, name):
            return stored
        data = shared_record.encode(record).encode()
        try:
            filesystem.pipe_file(path, data, mode="create")
        except FileExistsError:
            if stored := _read(filesystem, path, namespace, name):
                return stored
            filesystem.pipe_file(path, data)  # what is there is not a record
        return _read(filesystem, path, namespace, name) or record


def _read(filesystem: Any, path: str, namespace: str, name: Name) -> StoredChoice | None:
    filesystem.invalidate_cache()
    try:
        if not _is_small(filesystem.info(path)):
            return None
        return shared_record.decoded(filesystem.cat_file(path), namespace, name)
    except (FileNotFoundError, IsADirectoryError):
        return None


def _is_small(facts: Mapping[str, Any]) -> bool:
    return (facts.get("size") or 0) <= shared_record.MAX_BYTES
