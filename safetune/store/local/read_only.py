"""A database that is only read: no lock file, no log, no migration.

SQLite writes files beside a database in WAL mode, even to read it. If there is no log, each read
opens the file as immutable: no file is made beside it, and the connection is closed before another
process's writes could matter. If there is a log, a writer has made the files that a reader needs;
if those are gone, a private copy is read.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from safetune.errors import StoreError
from safetune.store.local import migrations
from safetune.store.local.connection import BUSY_TIMEOUT_S, Connection, prepared
from safetune.store.local.store import Store

AnyStore = TypeVar("AnyStore", bound=Store)


def open_read_only(path: Path, kind: type[AnyStore]) -> AnyStore:
    """Return a store of this kind over a database file that is never written to.

    Raises:
        StoreError: it is missing, not a database of safetune, or has a schema that cannot be read.
    """
    store = kind(ReadOnlyConnection(path.absolute()))
    store.connection.open()
    return store


class ReadOnlyConnection(Connection):
    """A connection for each read, closed after it: nothing is shared, or lost in a fork."""

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The database, for plain SELECTs; raises `StoreError`."""
        assert self.path is not None
        with self._failures("read"), contextlib.closing(_connect(self.path)) as connection:
            yield connection

    @contextlib.contextmanager
    def transaction(self, wait_s: float = 0.0) -> Iterator[sqlite3.Connection]:
        """Raise `StoreError`."""
        raise StoreError(f"the store {self.path} is only read here")
        yield

    def open(self) -> None:
        """Check that it can be read; raises `StoreError`."""
        with self.reading():
            pass


def _connect(path: Path) -> sqlite3.Connection:
    path.stat()  # SQLite's own message does not say that the file is missing
    log = path.with_name(f"{path.name}-wal")
    if not (log.exists() and log.stat().st_size):
        return _opened(f"{path.as_uri()}?immutable=1")
    try:
        return _opened(f"{path.as_uri()}?mode=ro")
    except sqlite3.OperationalError:
        return _copied(path, log)


def _opened(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    return prepared(connection, migrations.check_readable)


def _copied(path: Path, log: Path) -> sqlite3.Connection:
    """A copy in memory of the database with its log."""
    memory = sqlite3.connect(":memory:", isolation_level=None)
    with tempfile.TemporaryDirectory(prefix="safetune-") as folder:
        for file in (path, log):
            shutil.copyfile(file, Path(folder) / file.name)
        with contextlib.closing(_opened((Path(folder) / path.name).as_uri())) as copied:
            memory.text_factory = copied.text_factory
            copied.backup(memory)
    return memory
