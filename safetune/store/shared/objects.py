"""A shared store behind any fsspec URL: one immutable object per choice.

    ROOT/2/NAMESPACE/KERNEL.KEY.LIST.GENERATION.json

Written with fsspec's `mode="create"`, a conditional put where the file system has one (S3's
If-None-Match; memory). Elsewhere, and where `mode` has no effect, it looks and then writes, so if
two nodes write at the same moment the later one may win; the record that is read back counts, and
the next pull corrects the other node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from safetune.settings import display_url
from safetune.store.records import StoredChoice
from safetune.store.shared.record import FORMAT, MAX_BYTES, Name, decoded
from safetune.store.shared.record_files import RecordFiles, name_in


class Objects(RecordFiles):
    """The records below a path of an fsspec file system."""

    def __init__(self, url: str) -> None:
        self.location, self.url = display_url(url), url

    @property
    def _files(self) -> Any:
        """The file system, without what it remembers; may ask the network for credentials."""
        filesystem, _ = self._at
        filesystem.invalidate_cache()
        return filesystem

    @property
    def _at(self) -> tuple[Any, str]:
        import fsspec

        return fsspec.core.url_to_fs(self.url)  # type: ignore[no-any-return]

    def _path(self, namespace: str, file: str, key: str) -> str:
        return f"{self._at[1].rstrip('/')}/{FORMAT}/{namespace}/{file}"

    def _listing(self, namespace: str, keys: Set[str] | None) -> dict[Name, str]:
        try:
            entries = self._files.ls(self._path(namespace, "", "").rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        small = [each["name"] for each in entries if _is_small(each)]
        return {name: path for path in small if (name := name_in(path.rpartition("/")[2]))}

    def _load(self, namespace: str, paths: Mapping[Name, str]) -> list[StoredChoice]:
        listed = list(paths.values())
        texts = self._files.cat(listed, on_error="omit")
        if isinstance(texts, bytes):  # some file systems answer so for a list of one
            texts = dict.fromkeys(listed, texts)
        present = ((name, texts[path]) for name, path in paths.items() if path in texts)
        return [found for name, text in present if (found := decoded(text, namespace, name))]

    def _read(self, path: str, namespace: str, name: Name) -> StoredChoice | None:
        files = self._files
        try:
            if not _is_small(files.info(path)):
                return None
            return decoded(files.cat_file(path), namespace, name)
        except (FileNotFoundError, IsADirectoryError):
            return None

    def _create(self, path: str, data: bytes, is_record: Callable[[str], object]) -> None:
        try:
            self._files.pipe_file(path, data, mode="create")
        except FileExistsError:
            if not is_record(path):
                self._files.pipe_file(path, data)


def _is_small(facts: Mapping[str, Any]) -> bool:
    return (facts.get("size") or 0) <= MAX_BYTES
