"""Where choices are kept: in the cache directory, or where SQLite is not safe there, elsewhere.

SQLite's log is memory that processes share, which two machines cannot, and its locks are those of
the file system (https://www.sqlite.org/wal.html, https://www.sqlite.org/lockingv3.html). So on a
network file system the database goes to a disk of this node, and the cache directory becomes the
shared store of all nodes, whose files need neither: choices outlive the job and reach other nodes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from safetune.errors import StoreError
from safetune.frozen import dataclass
from safetune.keys import encoding
from safetune.settings import Settings
from safetune.store.local import db_files
from safetune.store.local.store import DATABASE_NAME

#: Where a node's own disk may be, in this order, before /tmp.
_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")

#: `f_type` of statfs(2). From linux/magic.h, but for those of Lustre, GPFS, BeeGFS, PanFS and SNFS,
#: which are in GNU coreutils (src/stat.c, those that it calls remote).
_NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x20030528: "OrangeFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0xAAD7AAEA: "PanFS",
    0xBEEFDEAD: "SNFS",
}

FUSE = 0x65735546

#: FUSE also serves disks, images and overlays of this machine; of any other kind it may be a
#: network's (sshfs, GlusterFS, JuiceFS, s3fs, gcsfuse, ...).
_LOCAL_FUSE = re.compile(
    r"fuseblk|virtiofs|fuse\.(bindfs|cryfs|encfs|exfat|fuse-overlayfs|fuse2fs|gocryptfs|lxcfs|"
    r"mergerfs|ntfs-3g|securefs|squashfuse|squashfuse_ll|unionfs|unionfs-fuse|zfs-fuse)"
)

_MOUNTS = Path("/proc/self/mountinfo")


def network_of(
    path: Path, type_of: Callable[[Path], int | None] | None = None, mounts: Path = _MOUNTS
) -> str:
    """Return the name of the network file system that a path is, or will be, on; empty if none.

    Args:
        type_of: the number of the file system of a path, None where there is no such path.
        mounts: the table of what is mounted.
    """
    if sys.platform != "linux":
        return ""
    for existing in (path, *path.parents):
        found = (type_of or _type_of)(existing)
        if found == FUSE:
            kind = _mounted(existing, mounts)
            return "" if _LOCAL_FUSE.fullmatch(kind) else kind or "FUSE"
        if found is not None:
            return _NETWORK.get(found, "")
    return ""


def _type_of(path: Path) -> int | None:
    """Return `f_type` of statfs(2), which `os.statvfs` leaves out; None if there is no file."""
    result = (ctypes.c_ulong * 64)()  # the structure has 15 words at most, this one first
    failed = ctypes.CDLL(None).statfs(os.fsencode(path), ctypes.byref(result))
    return None if failed else int(result[0]) & 0xFFFFFFFF


def _mounted(path: Path, mounts: Path) -> str:
    """Return the type of the file system that is mounted there, such as `fuse.sshfs`."""
    try:
        device = path.stat().st_dev
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    found = ""
    for line in lines:  # https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
        mount, _, source = line.partition(" - ")
        if mount.split()[2:3] == [number]:
            found = source.split()[0]
    return found


@dataclass(frozen=True)
class Location:
    """Where choices are kept.

    Attributes:
        directory: of the database; None for memory.
        network: the file system of the cache directory, if it is a network's.
        choices: the cache directory, where it is the shared store by default.
        problem: why it is not, though it is on a network.
    """

    directory: Path | None
    network: str = ""
    choices: Path | None = None
    problem: str = ""

    @property
    def database(self) -> Path | None:
        """The path of the database."""
        return self.directory and self.directory / DATABASE_NAME

    def shared(self, settings: Settings) -> str:
        """Return the URL of the shared store; empty for none."""
        by_default = f"file://{quote(os.fsencode(self.choices))}" if self.choices else ""
        return settings.shared or by_default

    def warning(self, settings: Settings) -> str:
        """Return what to tell of a cache directory on a network; empty if it is not."""
        if not self.network:
            return ""
        where = f"the database is in {self.directory}, on this node"
        if self.directory is None:
            where = f"no other directory is on a local disk (${', $'.join(_VARIABLES)}, /tmp), and "
            where += "choices are kept in memory"
        shared = f"; {settings.cache_dir} is the shared store of all nodes" if self.choices else ""
        return (
            f"{settings.cache_dir} is on a network file system ({self.network}), where SQLite is "
            f"not safe: {where}{shared}{self.problem}. To choose other directories, set "
            "SAFETUNE_CACHE_DIR to one on a local disk, and SAFETUNE_SHARED"
        )


def locate(
    settings: Settings, is_on: Callable[[Path], str] | None = None, *, writes: bool = True
) -> Location:
    """Return where choices are kept; makes the cache directory if it is the shared store.

    Args:
        is_on: returns the network file system of a path: `network_of` if None.
        writes: False to make nothing.
    """
    cache, is_on = settings.cache_dir, is_on or network_of
    if cache.parts[0].startswith("~") or not (network := is_on(cache)):
        return Location(cache)
    name = f"safetune-{os.getuid()}-{encoding.digest(str(cache))[:16]}"
    named = [os.environ[variable] for variable in _VARIABLES if os.environ.get(variable)]
    directory = None
    for disk in map(Path, ["/tmp", *reversed(named)]):
        if disk.is_absolute() and os.access(disk, os.W_OK | os.X_OK) and not is_on(disk):
            directory = disk / name
    if settings.shared:
        return Location(directory, network)
    try:
        with contextlib.suppress(OSError):  # the shared store says that it cannot be written
            if writes:
                db_files.make_directory(cache / DATABASE_NAME)
            elif cache.exists():
                db_files.check(cache / DATABASE_NAME)
            else:
                return Location(directory, network)
    except StoreError as error:
        return Location(directory, network, problem=f"; choices are not shared: {error}")
    return Location(directory, network, choices=cache)
