"""Opening a database file, to write to it or only to read it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from safetune.errors import StoreError
from safetune.store.local import db_files, migrations
from safetune.store.local.db_files import Damaged

#: Device and inode; None where the file cannot be replaced.
Identity = tuple[int, int] | None


def in_memory() -> sqlite3.Connection:
    """Return an empty database."""
    return migrations.prepared(_plain(":memory:"), migrations.prepare)


def connect(path: Path, suspect: bool, wait_s: float) -> tuple[sqlite3.Connection, Identity]:
    """Open a database file, and return its identity; a damaged one is moved aside first.

    Damage must be found twice: SQLite reports the same for a disk that fails to read once.
    """
    looked = False
    for last in (False, False, False, True):
        if path.exists() and not os.access(path.parent, os.W_OK):  # where SQLite must write
            db_files.check(path)
            return connect_read_only(path, wait_s), None
        db_files.make_directory(path)
        try:
            with db_files.unmoved(path, wait_s):
                db_files.make(path)
                found = db_files.identity(path)
                prepare = migrations.prepare_suspect if suspect else migrations.prepare
                connection = migrations.prepared(_plain(path, wait_s), prepare)
        except (sqlite3.Error, Damaged) as error:
            # An error of a file that was replaced says nothing about the new one.
            replaced = db_files.identity(path) != found
            if last or not (replaced or db_files.is_damage(error)):
                raise
            if looked and not replaced:
                db_files.move_aside(path, found, error)
            looked = not replaced
            continue
        if found == db_files.identity(path):
            return connection, found
        connection.close()  # it was replaced meanwhile
    raise StoreError("other processes replace it again and again")


def connect_read_only(path: Path, wait_s: float) -> sqlite3.Connection:
    """Open a database file that is never written to: no lock file, no log, no migration.

    SQLite writes files beside a database in WAL mode, even to read it. If there is no log, the file
    is opened as immutable: no file is made beside it. If there is a log, a writer has made the
    files that a reader needs; if those are gone, a private copy is read.
    """
    path = path.absolute()
    path.stat()  # SQLite's own message does not say that the file is missing
    log = path.with_name(f"{path.name}-wal")
    if not (log.exists() and log.stat().st_size):
        return _readable(f"{path.as_uri()}?mode=ro&immutable=1", wait_s)
    try:
        return _readable(f"{path.as_uri()}?mode=ro&readonly_shm=1", wait_s)
    except sqlite3.OperationalError:
        return _copied(path, log)


def _copied(path: Path, log: Path) -> sqlite3.Connection:
    """A copy in memory of a database with its log."""
    import shutil
    import tempfile

    memory = _plain(":memory:")
    with tempfile.TemporaryDirectory(prefix="safetune-") as folder:
        for file in (path, log):
            shutil.copyfile(file, Path(folder) / file.name)
        with contextlib.closing(_readable((Path(folder) / path.name).as_uri(), 0.0)) as copied:
            memory.text_factory = copied.text_factory
            copied.backup(memory)
    return memory


def _readable(uri: str, wait_s: float) -> sqlite3.Connection:
    return migrations.prepared(_plain(uri, wait_s, is_uri=True), migrations.check_readable)


def _plain(path: Path | str, wait_s: float = 0.0, is_uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(path, wait_s, isolation_level=None, check_same_thread=False, uri=is_uri)
