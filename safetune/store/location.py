"""Where choices are kept: in the cache directory, or where SQLite is not safe there, elsewhere.

On a network file system the database goes to a disk of this node, and the cache directory becomes
the shared store of all nodes, whose files need neither locks nor shared memory. So choices outlive
the job, and reach the other nodes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from safetune.errors import StoreError
from safetune.keys import encoding
from safetune.settings import Settings
from safetune.store.local import db_files
from safetune.store.local.file_systems import network_of
from safetune.store.local.store import DATABASE_NAME

#: Where a node's own disk may be, in this order, before /tmp.
_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")


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


def locate(settings: Settings, *, writes: bool = True) -> Location:
    """Return where choices are kept; makes the cache directory if it is the shared store.

    Args:
        writes: False to make nothing.
    """
    cache = settings.cache_dir
    if cache.parts[0].startswith("~") or not (network := network_of(cache)):
        return Location(cache)
    name = f"safetune-{os.getuid()}-{encoding.digest(str(cache))[:16]}"
    directory = next((disk / name for disk in _local_disks()), None)
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


def _local_disks() -> Iterator[Path]:
    """Yield the directories for temporary files that this user can write to and only this node."""
    named = [os.environ[name] for name in _VARIABLES if os.environ.get(name)]
    for disk in map(Path, [*named, "/tmp"]):
        if disk.is_absolute() and os.access(disk, os.W_OK | os.X_OK) and not network_of(disk):
            yield disk
