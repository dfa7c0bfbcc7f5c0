"""One SQLite connection per store and process: opening it, sharing it, surviving a fork.

The threads of a process share one connection under a lock. Every statement accesses one indexed row
and takes microseconds, and a connection per thread would stay open after its thread ended.

A connection is closed before a fork, and each side opens its own at its next use. An in-memory
database cannot be reopened: a forked child starts with an empty one. A database that was deleted or
replaced is reopened; rows that other processes cannot see are lost. An unusable file is renamed.
Every failure is a `StoreError`.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from safetune import forks
from safetune.errors import StoreError, from_signal_handler
from safetune.messages import logger
from safetune.store.local import opening
from safetune.store.local.db_files import Damaged, Identity, Locked, identity
from safetune.store.local.rows import RecordError

#: How long a use of a database waits for another process that has locked it, in seconds. Less where
#: SAFETUNE_WAIT is less, but never under the second one: a transaction of another process is short.
BUSY_TIMEOUT_S = 5.0
_LEAST_TIMEOUT_S = 1.0

#: How long a fork waits for a statement of another thread before it leaves the connection open.
_FORK_WAIT_S = 1.0

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
_forking = threading.local()

#: A parent's connections, in a child whose fork could not wait: closing one would release the
#: parent's locks or delete its log, so they are kept and never touched.
_abandoned: list[sqlite3.Connection] = []


class Connection:
    """The connection to one database file, or to an in-memory database if `path` is None.

    After a wait for a lock fails, later uses try without waiting until one can write.
    """

    def __init__(self, path: Path | None, wait_s: float = math.inf) -> None:
        """Connect at the first use.

        Args:
            wait_s: SAFETUNE_WAIT.
        """
        self.path = path
        self._wait_s = max(_LEAST_TIMEOUT_S, min(BUSY_TIMEOUT_S, wait_s))
        self._is_locked = False
        self._sqlite: sqlite3.Connection | None = None
        self._file: Identity = None
        self._prepare = opening.prepare
        self._closed = False
        self.renew()
        _connections.add(self)

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection, exclusively, for plain SELECTs; raises `StoreError`."""
        with self._alone() as connection, self._failures("read"):
            yield connection

    @contextlib.contextmanager
    def transaction(self, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Run one transaction of plain statements, committed at the end; raises `StoreError`.

        Args:
            durable: at the end, it is on disk with everything written before.
        """
        with (
            self._alone() as connection,
            self._failures("write to"),
            _synchronous(connection) if durable else contextlib.nullcontext(),
        ):
            connection.execute("BEGIN IMMEDIATE")
            if self._is_locked:
                self._is_locked = False
                connection.execute(f"PRAGMA busy_timeout={self._timeout_s * 1000:.0f}")
            with opening.ending(connection):
                yield connection

    def open(self) -> None:
        """Open the database now, not at the first use; raises `StoreError`."""
        with self.reading():
            pass

    def close(self) -> None:
        """Close permanently; a later use raises `StoreError`."""
        self._notice_fork()
        with self._lock:
            self._disconnect()
            self._closed = True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[sqlite3.Connection]:
        self._notice_fork()
        with self._lock:
            if self._closed:
                raise StoreError(f"the store {self._name} is closed")
            if self._is_lost():
                logger.warning("the store %s was deleted or replaced; opening it again", self.path)
                self._disconnect()  # SQLite leaves the files alone that took their place
            self._sqlite = self._sqlite or self._connected()
            yield self._sqlite

    def _connected(self) -> sqlite3.Connection:
        with self._failures("open"):
            if self.path is None:
                connection = opening.in_memory()
            else:
                opened = opening.connect(self.path, self._prepare, self._timeout_s)
                connection, self._file = opened
            self._prepare = opening.prepare
        return connection

    @property
    def _name(self) -> str:
        return "in memory" if self.path is None else str(self.path)

    @property
    def _timeout_s(self) -> float:
        """How long to wait now for a process that has locked the database."""
        return 0.0 if self._is_locked else self._wait_s

    def _is_lost(self) -> bool:
        """Whether an open file is no longer reachable by name, so that writes are lost."""
        if self._sqlite is None or self.path is None or self._file is None:
            return False
        try:
            return identity(self.path) != self._file
        except OSError:  # SQLite will fail as well, if it lasts
            return False

    @contextlib.contextmanager
    def _failures(self, action: str) -> Iterator[None]:
        """Turn any error of SQLite and sqlite-utils into one line that names the path."""
        try:
            yield
        except RecordError:
            raise
        except (StoreError, *opening.SQLITE_ERRORS, OSError, ImportError, OverflowError) as error:
            if from_signal_handler(error):  # while a lock was waited for
                raise
            message = f"cannot {action} the store {self._name}: {opening.reason_of(error)}"
            if opening.is_damage(error):
                self._prepare = opening.prepare_suspect
                self._disconnect()
                raise Damaged(message) from error
            is_locked = isinstance(error, Locked) or str(error) == "database is locked"
            # A new connection has a timeout of its own, and no lock that could not be released.
            renews = is_locked or action == "read" or str(error) == "locking protocol"
            if self.path is not None and renews:
                self._disconnect()
            if is_locked:
                self._is_locked = True
                raise Locked(message) from error
            raise StoreError(message) from error

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
        """Close the file and stay locked; False if another thread uses it for too long."""
        self._notice_fork()
        if not self._lock.acquire(timeout=_FORK_WAIT_S):
            return False
        if self.path is not None:
            self._disconnect()
        return True

    def resume(self) -> None:
        """Let the other threads continue."""
        self._lock.release()

    def renew(self) -> None:
        """Forget the parent's connection and its lock, which a lost thread may have held."""
        if self._sqlite is not None:
            _abandoned.append(self._sqlite)
        self._sqlite = None
        self._lock = threading.RLock()
        self._pid = os.getpid()


class ReadOnlyConnection(Connection):
    """Opens a connection for each read and closes it afterwards: nothing is shared, or lost in a
    fork.
    """

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the database for plain SELECTs; raises `StoreError`."""
        assert self.path is not None
        with self._failures("read"), contextlib.ExitStack() as opened:
            connection = opening.connect_read_only(self.path, self._timeout_s)
            opened.callback(connection.close)
            yield connection

    @contextlib.contextmanager
    def transaction(self, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Raise `StoreError`."""
        raise StoreError(f"the store {self.path} is open read-only")
        yield


@contextlib.contextmanager
def _synchronous(connection: sqlite3.Connection) -> Iterator[None]:
    """Have a commit wait for the disk; only outside of a transaction can SQLite be told so."""
    connection.execute("PRAGMA synchronous=FULL")
    try:
        yield
    finally:
        connection.execute("PRAGMA synchronous=NORMAL")


def _before_fork() -> None:
    _forking.held = [each for each in tuple(_connections) if each.pause()]


def _after_fork_in_parent() -> None:
    for each in _forking.held:
        each.resume()


def _after_fork_in_child() -> None:
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
