"""A database that is read where nothing may be written: no lock file, no log, no migration.

SQLite itself writes beside a database in WAL mode, even to read it. Where no log is there, the file
is opened as one that does not change, for the moment of each read: nothing is made beside it, and
nothing that another process writes meanwhile is mixed up for long. Where a log is there, somebody
is writing and has made the files that a reader needs; failing that, a private copy is read.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetune.errors import StoreError
from safetune.store.local import migrations
from safetune.store.local.connection import BUSY_TIMEOUT_S, Connection, prepared
from safetune.store.local.store import Store

if TYPE_CHECKING:
    from sqlite_utils import Database

AnyStore = TypeVar("AnyStore", bound=Store)


def open_read_only(path: Path, kind: type[AnyStore]) -> AnyStore:
    """Return a store of this kind over a database file that is never written to.

    Raises:
        StoreError: it is missing, no database of safetune, or of another schema than this one's.
    """
    store = kind(ReadOnlyConnection(path.absolute()))
    store.connection.open()
    return store


class ReadOnlyConnection(Connection):
    """A connection for each read, gone after it: nothing to share, or to lose in a fork."""

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The database, for plain SELECTs; raises `StoreError`."""
        assert self.path is not None
        with self._failures("read"):
            connection = _connect(self.path)
            try:
                yield connection
            finally:
                connection.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[Database]:
        """Raises `StoreError`."""
        raise StoreError(f"the store {self.path} is only read here")
        yield

    @contextlib.contextmanager
    def transaction(self, wait_s: float = 0.0) -> Iterator[sqlite3.Connection]:
        """Raises `StoreError`."""
        raise StoreError(f"the store {self.path} is only read here")
        yield

    def open(self) -> None:
        """See whether it can be read; raises `StoreError`."""
        with self.reading():
            pass


def _connect(path: Path) -> sqlite3.Connection:
    path.stat()  # SQLite's own message does not say that there is none
    log = path.with_name(f"{path.name}-wal")
    if not (log.exists() and log.stat().st_size):
        return _opened(f"{path.as_uri()}?immutable=1")
    try:
        return _opened(f"{path.as_uri()}?mode=ro")
    except sqlite3.OperationalError:
        return _copied(path, log)


def _opened(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    return prepared(connection, _check)


def _check(connection: sqlite3.Connection) -> None:
    if not migrations.is_current(connection):
        raise StoreError(
            "an older safetune wrote it; run `safetune list` once where it can be written"
        )
    migrations.check_schema(connection)


def _copied(path: Path, log: Path) -> sqlite3.Connection:
    """What the database and its log hold, in memory."""
    memory = sqlite3.connect(":memory:", isolation_level=None)
    with tempfile.TemporaryDirectory(prefix="safetune-") as folder:
        for file in (path, log):
            shutil.copyfile(file, Path(folder) / file.name)
        with contextlib.closing(_opened((Path(folder) / path.name).as_uri())) as copied:
            memory.text_factory = copied.text_factory
            copied.backup(memory)
    return memory
