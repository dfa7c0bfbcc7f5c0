"""One SQLite connection per store and process: opening it, sharing it, surviving a fork.

The threads of a process share one connection under a lock. Every statement is one indexed row and
takes microseconds, and a connection per thread would be left open for each thread that ended. A
thread that waits for another process to write does not hold that lock: the others go on reading.

A connection is closed before a fork, and each side opens its own at its next use. A database in
memory cannot be opened again: a forked child starts with an empty one. A database that was deleted
or replaced is opened again, and a damaged file is renamed. Every failure is a `StoreError`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetune import forks
from safetune.errors import StoreError
from safetune.store.local import db_files, migrations
from safetune.store.local.db_files import Damaged
from safetune.store.local.rows import RecordError
from safetune.store.waiting import tries

if TYPE_CHECKING:
    from sqlite_utils import Database

logger = logging.getLogger("safetune")

#: Device and inode; None where the file cannot be replaced.
Identity = tuple[int, int] | None

#: How long a writer waits for others, in seconds.
BUSY_TIMEOUT_S = 30.0

#: The first and the longest pause of a writer between two tries, as SQLite's own while it waits.
_PAUSES_S = (0.001, 0.1)

#: How long a fork waits for a statement of another thread before it leaves the connection open.
_FORK_WAIT_S = 1.0

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_forking = threading.local()

#: A parent's connections, in a child whose fork could not wait: closing one would release the
#: parent's locks or delete its log, so they are kept and never touched.
_abandoned: list[sqlite3.Connection] = []


class Connection:
    """The connection to one database file, or to one in memory when `path` is None."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._name = "in memory" if path is None else str(path)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._sqlite: sqlite3.Connection | None = None
        self._file: Identity = None
        self._suspect = False
        self._closed = False
        _connections.add(self)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, alone, for plain SELECTs; raises `StoreError`."""
        with self._alone() as connection, self._failures("read"):
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[Database]:
        """One transaction on the connection, committed at the end; raises `StoreError`."""
        with self._failures("write to"):
            from sqlite_utils import Database

        with self.transaction() as connection:
            yield Database(connection, execute_plugins=False, recursive_triggers=False)

    @contextlib.contextmanager
    def transaction(self, wait_s: float = BUSY_TIMEOUT_S) -> Iterator[sqlite3.Connection]:
        """One transaction for plain statements, committed at the end; raises `StoreError`.

        Other processes that write are waited for, `wait_s` seconds at most.
        """
        for last in tries(wait_s, *_PAUSES_S):
            with self._alone() as connection, self._failures("write to"):
                if _begin(connection, must=last):
                    with migrations.ending(connection):
                        yield connection
                    return

    def open(self) -> None:
        """Open the database now instead of at the first use; raises `StoreError`."""
        with self.reading():
            pass

    def close(self) -> None:
        """Close for good; a later use raises `StoreError`."""
        self._notice_fork()
        with self._lock:
            self._closed = True
            self._disconnect()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[sqlite3.Connection]:
        self._notice_fork()
        with self._lock:
            if self._closed:
                raise StoreError(f"the store {self._name} is closed")
            if self._sqlite is not None and self._is_replaced():
                logger.warning("the store %s was deleted or replaced; opening it again", self.path)
                self._disconnect()
            if self._sqlite is None:
                with self._failures("open"):
                    self._sqlite, self._file = self._connect()
                self._suspect = False
            yield self._sqlite

    def _connect(self) -> tuple[sqlite3.Connection, Identity]:
        if self.path is None:
            return migrations.prepared(_plain(":memory:"), migrations.prepare), None
        return _connect(self.path, self._suspect)

    def _is_replaced(self) -> bool:
        """Whether the path leads to another file now, so that what is written would be lost."""
        if self.path is None or self._file is None:
            return False
        try:
            return db_files.identity(self.path) != self._file
        except OSError:  # SQLite will fail as well, if it lasts
            return False

    @contextlib.contextmanager
    def _failures(self, action: str) -> Iterator[None]:
        """Turn any error of SQLite and sqlite-utils into one line that names the path."""
        try:
            yield
        except RecordError:
            raise
        except (StoreError, sqlite3.Error, OSError, ImportError, OverflowError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            message = f"cannot {action} the store {self._name}: {reason}"
            if not db_files.is_damage(error):
                # Such as a lock that could not be released: only a new connection clears that.
                if action == "read" and self.path is not None:
                    self._disconnect()
                raise StoreError(message) from error
            self._suspect = True
            self._disconnect()
            raise Damaged(message) from error

    def _disconnect(self) -> None:
        connection, self._sqlite = self._sqlite, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _notice_fork(self) -> None:
        """Catch the forks that run none of Python's hooks."""
        if self._pid != os.getpid():
            self.renew()

    def pause(self) -> bool:
        """Close the file, and stay locked; False if another thread is in it for too long."""
        self._notice_fork()
        if not self._lock.acquire(timeout=_FORK_WAIT_S):
            return False
        if self.path is not None:
            self._disconnect()
        return True

    def resume(self) -> None:
        """Let the other threads go on."""
        self._lock.release()

    def renew(self) -> None:
        """Forget the parent's connection, and its lock, which a lost thread may have held."""
        if self._sqlite is not None:
            _abandoned.append(self._sqlite)
        self._sqlite = None
        self._lock = threading.RLock()
        self._pid = os.getpid()


class ReadOnlyConnection(Connection):
    """A connection for each read, closed after it: nothing is shared, or lost in a fork."""

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The database, for plain SELECTs; raises `StoreError`."""
        assert self.path is not None
        with (
            self._failures("read"),
            contextlib.closing(_connect_read_only(self.path)) as connection,
        ):
            yield connection

    @contextlib.contextmanager
    def transaction(self, wait_s: float = 0.0) -> Iterator[sqlite3.Connection]:
        """Raise `StoreError`."""
        raise StoreError(f"the store {self.path} is only read here")
        yield


def _connect(path: Path, suspect: bool) -> tuple[sqlite3.Connection, Identity]:
    """Open a database file, and return its identity; a damaged one is moved aside first.

    Damage must be found twice: SQLite reports the same for a disk that fails to read once.
    """
    looked = False
    for last in (False, False, False, True):
        if path.exists() and not os.access(path.parent, os.W_OK):  # where SQLite must write
            db_files.check(path)
            return _connect_read_only(path), None
        db_files.make_directory(path)
        try:
            with db_files.unmoved(path):
                db_files.make(path)
                found = db_files.identity(path)
                prepare = migrations.prepare_suspect if suspect else migrations.prepare
                connection = migrations.prepared(_plain(path), prepare)
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


def _connect_read_only(path: Path) -> sqlite3.Connection:
    """Open a database file that is never written to: no lock file, no log, no migration.

    SQLite writes files beside a database in WAL mode, even to read it. If there is no log, the file
    is opened as immutable: no file is made beside it. If there is a log, a writer has made the
    files that a reader needs; if those are gone, a private copy is read.
    """
    path = path.absolute()
    path.stat()  # SQLite's own message does not say that the file is missing
    log = path.with_name(f"{path.name}-wal")
    if not (log.exists() and log.stat().st_size):
        return _readable(f"{path.as_uri()}?mode=ro&immutable=1")
    try:
        return _readable(f"{path.as_uri()}?mode=ro")
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
        with contextlib.closing(_readable((Path(folder) / path.name).as_uri())) as copied:
            memory.text_factory = copied.text_factory
            copied.backup(memory)
    return memory


def _readable(uri: str) -> sqlite3.Connection:
    return migrations.prepared(_plain(uri, is_uri=True), migrations.check_readable)


def _plain(path: Path | str, is_uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(
        path, BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=is_uri
    )


def _begin(connection: sqlite3.Connection, must: bool) -> bool:
    """Take the write lock, without waiting; False (or an error) while another process has it."""
    connection.execute("PRAGMA busy_timeout=0")
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if must or str(error) != "database is locked":
            raise
        return False
    finally:
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_S * 1000:.0f}")
    return True


def _before_fork() -> None:
    _forking.held = [each for each in tuple(_connections) if each.pause()]


def _after_fork_in_parent() -> None:
    for each in _forking.held:
        each.resume()


def _after_fork_in_child() -> None:
    db_files.creating = threading.Lock()
    for each in tuple(_connections):
        each.renew()


def _close_all() -> None:
    """Leave no log files behind at exit; a thread that still writes keeps its connection."""
    for each in tuple(_connections):
        if each.pause():
            each.resume()


forks.register(
    "database",
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
    at_exit=_close_all,
)
