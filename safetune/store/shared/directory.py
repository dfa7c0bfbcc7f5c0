"""A shared store that is a directory: one immutable file per choice, on any file system.

    DIR/2/NAMESPACE/KEY[:2]/KERNEL.KEY.LIST.GENERATION.json

Made for NFS, Lustre and FUSE: no locks, no mmap, no rename over a valid file, and no directory is
ever removed. A file is written under another name, synced, and linked to its own, which fails where
that exists: the first wins. Where there are no hard links it is renamed if the name is free, and
the record that is read back counts. A file that is gone, stale or unreadable is a miss, as is
anything else under a record's name: a directory, a pipe, a link to itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Set
from pathlib import Path

from safetune.errors import PackError
from safetune.store.packs.packs import beginning, sync_directory
from safetune.store.records import StoredChoice
from safetune.store.shared.record import FORMAT, MAX_BYTES, Name, decoded
from safetune.store.shared.record_files import RecordFiles, name_in

logger = logging.getLogger("safetune")

#: Errors of a network file system for a file that another client has just changed or removed.
_MISSES = {errno.ENOENT, errno.ESTALE, errno.EBUSY, errno.EIO, errno.EACCES, errno.ENOTDIR}

#: Its errors where it has no hard links.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class Directory(RecordFiles):
    """The records below a directory. The first writer makes it, but not the directory above it."""

    def __init__(self, root: Path) -> None:
        self.location = self.url = f"file://{root}"
        self._root = root / str(FORMAT)

    def namespaces(self) -> list[str]:
        """Return the namespaces that have records; raises `StoreError`."""
        with self._failures("read"):
            return sorted(_namespace_entries(self._root))

    def forget(self, kernel: str) -> None:
        """Delete the records of a kernel; raises `StoreError`."""
        for namespace in self.namespaces():
            with self._failures("write to"):
                for name, path in self._listing(namespace, None).items():
                    found = self._read(path, namespace, name)
                    if found is not None and found.key.kernel_name == kernel:
                        path.unlink(missing_ok=True)

    def _path(self, namespace: str, file: str, key: str) -> Path:
        return self._root / namespace / key[:2] / file

    def _listing(self, namespace: str, keys: Set[str] | None) -> dict[Name, Path]:
        self._check_mounted()
        root = self._root / namespace
        buckets = _namespace_entries(root) if keys is None else {key[:2] for key in keys}
        paths = (root / bucket / file for bucket in buckets for file in _entries(root / bucket))
        return {name: path for path in paths if (name := name_in(path.name))}

    def _check_mounted(self) -> None:
        """Raise `OSError` where the directory is not there, and its share may not be mounted."""
        place = self._root.parent
        if not place.exists() and not os.listdir(place.parent) and not place.parent.is_mount():
            problem = f"{place.parent} is empty, as where nothing is mounted: create {place} first"
            raise FileNotFoundError(errno.ENOENT, problem)

    def _load(self, namespace: str, paths: Mapping[Name, Path]) -> list[StoredChoice]:
        read = (self._read(path, namespace, name) for name, path in paths.items())
        return [found for found in read if found]

    def _read(self, path: Path, namespace: str, name: Name) -> StoredChoice | None:
        try:
            text = beginning(path, MAX_BYTES + 1)
        except (OSError, PackError) as error:
            logger.debug("%s is not read: %s", path, error)
            return None
        return decoded(text, namespace, name)

    def _create(self, path: Path, data: bytes, is_record: Callable[[Path], object]) -> None:
        self._check_mounted()
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.parent.mkdir(exist_ok=True)
        except FileExistsError as error:
            logger.info("%s is not a directory, and is left as it is: %s", path.parent, error)
            return
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not _link(temporary, path):
                _mend(path, temporary, is_record)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        for directory in path.parents[:4]:  # each may be new
            sync_directory(directory)


def _mend(path: Path, temporary: Path, is_record: Callable[[Path], object]) -> None:
    """Put a record in place of a file that is not one, such as half of one, and of nothing else.

    The file is moved aside first and looked at there: another node may have mended it meanwhile.
    """
    try:
        beginning(path, 1)
    except (OSError, PackError) as error:
        logger.info("%s is not a record, and is left as it is: %s", path, error)
        return
    if is_record(path):
        return
    aside = temporary.with_name(f"{temporary.name}.old")
    with contextlib.suppress(FileNotFoundError):  # another node has moved it
        path.rename(aside)
        if is_record(aside):
            _link(aside, path)
        aside.unlink()
    _link(temporary, path)


def _namespace_entries(directory: Path) -> list[str]:
    """What is in the directory of a namespace; raises `OSError` where the store does not answer."""
    try:
        return os.listdir(directory)
    except OSError as error:
        if error.errno in _MISSES:
            return []
        raise


def _entries(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


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
