"""Shared stores with one immutable file, or one object, per choice.

    ROOT/2/NAMESPACE/KEY[:2]/KERNEL.KEY.LIST.GENERATION.json    a directory
    ROOT/2/NAMESPACE/KERNEL.KEY.LIST.GENERATION.json            any other URL, through fsspec

They have no reliable lock, so they have no leases: the first published record wins, and the record
that is read back counts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from safetune.errors import PackError, StoreError
from safetune.messages import logger
from safetune.settings import display_url, driver_error
from safetune.store.packs.packs import beginning, written_beside
from safetune.store.records import StoredChoice
from safetune.store.shared.protocol import (
    FORMAT,
    MAX_BYTES,
    Lease,
    Name,
    NoLease,
    Unwritable,
    decoded,
    encode,
    name_of,
)

#: How many files are read together.
_TOGETHER = 200

#: Errors of a file system that cannot be written to.
_UNWRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_FILE = re.compile(
    r"[\w-]{0,64}\.([0-9a-f]{32})\.([0-9a-f]{32})\.([1-9][0-9]{0,9})\.json", re.ASCII
)

#: Errors of a network file system for a file that another client has just changed or removed.
_MISSES = {errno.ENOENT, errno.ESTALE, errno.EBUSY, errno.EIO, errno.EACCES, errno.ENOTDIR}
_MISSES |= {errno.ELOOP}

#: Its errors where it has no hard links.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class RecordFiles(ABC):
    """Records as files, see `protocol.SharedStore`.

    A subclass decides where they are, and how to read and write one.
    """

    location: str
    url: str

    @property
    def identity(self) -> str:
        """Return the location; no parameter or variable changes which store it is."""
        return self.location

    def names(self, namespace: str) -> set[Name]:
        with self._failures("read"):
            return set(self._listing(namespace, None))

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[list[StoredChoice]]:
        with self._failures("read"):
            listing = self._listing(namespace, {name.key for name in names})
            wanted = sorted(names & listing.keys())
            for start in range(0, len(wanted), _TOGETHER):
                together = wanted[start : start + _TOGETHER]
                yield self._load(namespace, {name: listing[name] for name in together})

    def get(self, namespace: str, key: str, declared: str) -> StoredChoice | None:
        with self._failures("read"):
            listing = self._listing(namespace, {key})
            for name in sorted((n for n in listing if n[:2] == (key, declared)), reverse=True):
                if found := self._load(namespace, {name: listing[name]}):
                    return found[0]
        return None

    def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
        with self._failures("write to"):
            return [self._publish(namespace, record) for record in records]

    def namespaces(self) -> list[str]:
        with self._failures("read"):
            return sorted(self._namespaces())

    def forget(self, namespace: str, names: Set[Name]) -> None:
        with self._failures("write to"):
            for name, path in self._listing(namespace, {name.key for name in names}).items():
                if name in names:
                    self._remove(path)

    def lease(self, key: str, node: str) -> Lease | None:
        """Return a lease that excludes no other node."""
        return NoLease()

    def again(self) -> RecordFiles:
        """Return this object, which keeps nothing between calls."""
        return self

    def close(self) -> None:  # noqa: B027 - a subclass need not override it
        """Do nothing: nothing stays open between calls."""

    @abstractmethod
    def _namespaces(self) -> list[str]:
        """The namespaces that have files."""

    @abstractmethod
    def _remove(self, path: Any) -> None:
        """Delete a file, if it is there."""

    @abstractmethod
    def _listing(self, namespace: str, keys: Set[str] | None) -> dict[Name, Any]:
        """The path of each record, of these keys at least."""

    def _load(self, namespace: str, paths: Mapping[Name, Any]) -> list[StoredChoice]:
        """The valid records in these files."""
        read = (self._read(path, namespace, name) for name, path in paths.items())
        return [found for found in read if found]

    @abstractmethod
    def _read(self, path: Any, namespace: str, name: Name) -> StoredChoice | None:
        """The valid record in one file, None without one."""

    @abstractmethod
    def _path(self, namespace: str, file: str, key: str) -> Any:
        """The path of a record's file."""

    @abstractmethod
    def _create(self, path: Any, data: bytes) -> None:
        """Write a file unless there is one."""

    def _publish(self, namespace: str, record: StoredChoice) -> StoredChoice:
        name = name_of(record)
        path = self._path(namespace, file_name(record), name.key)
        if stored := self._read(path, namespace, name):
            return stored
        self._create(path, encode(record).encode())
        return self._read(path, namespace, name) or record

    @contextlib.contextmanager
    def _failures(self, action: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # fsspec's back ends raise errors of their libraries
            refused = isinstance(error, PermissionError)
            refused = refused or getattr(error, "errno", None) in _UNWRITABLE
            kind = Unwritable if refused and action != "read" else StoreError
            reason = driver_error(error)
            raise kind(f"cannot {action} the shared store {self.location}: {reason}") from error


class Directory(RecordFiles):
    """The records below a directory. The first writer creates it, but not its parent.

    Made for NFS, Lustre and FUSE: no locks, no mmap, no rename over a valid file, and no directory
    is ever removed. A file is written under another name, synced, and linked to its own, which
    fails if that exists. Without hard links, it is renamed if the name is free. A missing, stale or
    unreadable file is a miss, as is anything else with a record's name: a directory, a pipe, a link
    to itself.
    """

    def __init__(self, root: Path) -> None:
        self.location = self.url = f"file://{root}"
        self._root = root / str(FORMAT)

    def _namespaces(self) -> list[str]:
        return _entries(self._root)

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def _path(self, namespace: str, file: str, key: str) -> Path:
        return self._root / namespace / key[:2] / file

    def _listing(self, namespace: str, keys: Set[str] | None) -> dict[Name, Path]:
        self._check_mounted()
        root = self._root / namespace
        buckets = _entries(root) if keys is None else {key[:2] for key in keys}
        paths = (root / bucket / file for bucket in buckets for file in _entries(root / bucket))
        return {name: path for path in paths if (name := name_in(path.name))}

    def _check_mounted(self) -> None:
        """Raise where the directory is not there, and its share may not be mounted."""
        place = self._root.parent
        if not place.exists() and not os.listdir(place.parent) and not place.parent.is_mount():
            problem = f"{place.parent} is empty, perhaps not mounted: create {place} first"
            missing = StoreError(f"cannot use the shared store {self.location}: {problem}")
            raise missing.with_fix(f"mkdir -p {place}, unless a share belongs there")

    def _read(self, path: Path, namespace: str, name: Name) -> StoredChoice | None:
        try:
            text = beginning(path, MAX_BYTES + 1)
        except (OSError, PackError) as error:
            logger.debug("could not read %s: %s", path, error)
            return None
        return decoded(text, namespace, name)

    def _create(self, path: Path, data: bytes) -> None:
        self._check_mounted()
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.parent.mkdir(exist_ok=True)
        except FileExistsError as error:
            logger.info("%s is not a directory; leaving it unchanged: %s", path.parent, error)
            return
        with written_beside(path, data) as new:
            give_name(new, path)


class Objects(RecordFiles):
    """The records below a path of an fsspec file system.

    Written with `mode="create"`, a conditional put on file systems that have one (S3's
    If-None-Match; memory). On others, and if `mode` has no effect, it checks and then writes: if
    two nodes write at the same moment, the later one may win, and the next pull corrects the other.
    """

    def __init__(self, url: str) -> None:
        self.location, self.url = display_url(url), url

    @property
    def _files(self) -> Any:
        """The file system, without its cache; may ask the network for credentials."""
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
        small = [each["name"] for each in self._entries(namespace) if _is_small(each)]
        return {name: path for path in small if (name := name_in(path.rpartition("/")[2]))}

    def _namespaces(self) -> list[str]:
        return [each["name"].rstrip("/").rpartition("/")[2] for each in self._entries("")]

    def _entries(self, namespace: str) -> list[dict[str, Any]]:
        try:
            return self._files.ls(self._path(namespace, "", "").rstrip("/"), detail=True)  # type: ignore[no-any-return]
        except FileNotFoundError:
            return []

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(path)

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

    def _create(self, path: str, data: bytes) -> None:
        with contextlib.suppress(FileExistsError):
            self._files.pipe_file(path, data, mode="create")


def _is_small(facts: Mapping[str, Any]) -> bool:
    return (facts.get("size") or 0) <= MAX_BYTES


def _entries(directory: Path) -> list[str]:
    """What is in a directory; raises `OSError` where the store does not answer."""
    try:
        return os.listdir(directory)
    except OSError as error:
        if error.errno in _MISSES:
            return []
        raise


def give_name(temporary: Path, path: Path, link: Callable[[Path, Path], None] = os.link) -> None:
    """Give a finished file its name, unless another file has it."""
    try:
        link(temporary, path)
    except OSError as error:
        if os.path.lexists(path):  # also if the reply was lost: NFS sends the request again
            return
        if error.errno not in _NO_LINKS:
            raise
        os.rename(temporary, path)


def file_name(record: StoredChoice) -> str:
    """Return the name of a record's file."""
    kernel = re.sub(r"[^\w-]", "_", record.key.kernel_name, flags=re.ASCII)[:64]
    return ".".join([kernel, *map(str, name_of(record)), "json"])


def name_in(file: str) -> Name | None:
    """Return the record name in a file name; None if it is not a record's file."""
    match = _FILE.fullmatch(file)
    return Name(match[1], match[2], int(match[3])) if match else None
