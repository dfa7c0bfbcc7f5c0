"""The network file system that a directory is on, if any: SQLite is not safe there.

Its log is memory that processes share, which two machines cannot, and its locks are those of the
file system. https://www.sqlite.org/wal.html and https://www.sqlite.org/lockingv3.html
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

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
_LOCAL_FUSE = {
    "fuseblk",
    "virtiofs",
    *(
        f"fuse.{name}"
        for name in (
            *("bindfs", "cryfs", "encfs", "exfat", "fuse-overlayfs", "fuse2fs", "gocryptfs"),
            *("lxcfs", "mergerfs", "ntfs-3g", "securefs", "squashfuse", "squashfuse_ll"),
            *("unionfs", "unionfs-fuse", "zfs-fuse"),
        )
    ),
}

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
            return "" if kind in _LOCAL_FUSE else kind or "FUSE"
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
