"""A shared store in PostgreSQL: two tables in the schema `safetune`, and leases between nodes.

A connection is open for one task only, never while a node tunes, and the processes of a node take
turns to have one: a server needs one for each node, however many ranks a node has. One that has
none left, or that drops one, is to be asked again (`protocol.TryLater`). TLS and every other option
of a connection is libpq's: in the URL, in PG* variables, in ~/.pgpass. The first writer makes the
tables, under an advisory lock; a reader never makes any.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Set
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from safetune.errors import SafetuneError, StoreError
from safetune.keys import encoding
from safetune.settings import display_url, without_password
from safetune.store.records import StoredChoice
from safetune.store.shared import once_per_node
from safetune.store.shared.postgres_connect import CONNECT_FOR_S, connect, is_for_now
from safetune.store.shared.protocol import (
    MAX_BYTES,
    UNSHARED,
    UNSHARED_S,
    Lease,
    Name,
    NoLease,
    TryLater,
    Unwritable,
    decoded,
    encode,
    name_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from safetune.store.local.locks import KeyLock

#: How long to wait for another process of the node to close its connection, before this one opens
#: a second one: the other may have been stopped.
TURN_S = 0.5

_TIMEOUT = "SET LOCAL statement_timeout = 5000"  # milliseconds

#: Records are fetched in groups of this many: some MB.
_TOGETHER = 2000

_UNWRITABLE = (
    errors.InsufficientPrivilege,
    errors.ReadOnlySqlTransaction,
    errors.DiskFull,
    errors.OutOfMemory,
)

_INSERT = """
INSERT INTO safetune.choice (namespace, key, declared, generation, kernel, record)
VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING
"""
_OF_NAME = "namespace = %s AND key = %s AND declared = %s AND generation = %s"
_BEGINNING = f"left(record, {MAX_BYTES + 1})"
_SELECT = f"SELECT {_BEGINNING} FROM safetune.choice WHERE {_OF_NAME}"
_REPLACE = f"UPDATE safetune.choice SET record = %s WHERE {_OF_NAME} AND {_BEGINNING} = %s"
_NAMES = "SELECT key, declared, generation FROM safetune.choice WHERE namespace = %s"
_PULL = f"""
SELECT record FROM safetune.choice
JOIN unnest(%s::text[], %s::text[], %s::integer[]) AS wanted(key, declared, generation)
USING (key, declared, generation)
WHERE namespace = %s AND octet_length(record) <= {MAX_BYTES}
"""
_GET = f"""
SELECT record, generation FROM safetune.choice WHERE namespace = %s AND key = %s AND declared = %s
AND octet_length(record) <= {MAX_BYTES} ORDER BY generation DESC
"""

# The clock is the server's. The token goes up with each holder, and an earlier one has no effect. A
# node that has the lease gets it again: its process that had it has ended.
_EXPIRY = "clock_timestamp() + make_interval(secs => %s)"
_CLAIM = f"""
INSERT INTO safetune.lease AS held (key, owner, token, expires) VALUES (%s, %s, 1, {_EXPIRY})
ON CONFLICT (key) DO UPDATE
SET owner = excluded.owner, token = held.token + 1, expires = excluded.expires
WHERE held.expires < clock_timestamp() OR held.owner = excluded.owner RETURNING token
"""
_RENEW = f"""
UPDATE safetune.lease SET expires = {_EXPIRY}
WHERE key = %s AND owner = %s AND token = %s AND expires >= clock_timestamp()
"""
_RELEASE = f"""
UPDATE safetune.lease SET owner = %s, expires = {_EXPIRY}
WHERE key = %s AND owner = %s AND token = %s
"""
#: Rows of keys that no node tunes any more; not one that another node is deleting now.
_PRUNE = """
DELETE FROM safetune.lease WHERE key IN (SELECT key FROM safetune.lease
WHERE expires < clock_timestamp() - interval '1 day' FOR UPDATE SKIP LOCKED)
"""
_OWNER = "SELECT owner FROM safetune.lease WHERE key = %s"

#: A parent's connections, in a forked child: to close one would end the parent's session.
_abandoned: list[psycopg.Connection[Any]] = []

#: The number of the advisory lock for migrations: "safetune" in ASCII.
_MIGRATION_LOCK = 0x7361666574756E65

# Plain reads: `to_regclass` may answer from before this session got the lock.
_HAS_SCHEMA = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = 'safetune'"
_HAS_TABLES = """
SELECT 1 FROM pg_catalog.pg_class AS relation
JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = relation.relnamespace
WHERE namespace.nspname = 'safetune' AND relation.relname = 'version'
"""

#: The schema's history: a database that has the first N steps is at version N.
_HISTORY = (
    """
    CREATE TABLE safetune.version (version integer NOT NULL);
    CREATE TABLE safetune.choice (
        namespace text NOT NULL,
        key text NOT NULL,
        declared text NOT NULL,
        generation integer NOT NULL,
        kernel text NOT NULL,
        record text NOT NULL,
        stored timestamptz NOT NULL DEFAULT clock_timestamp(),
        PRIMARY KEY (namespace, key, declared, generation)
    );
    CREATE TABLE safetune.lease (
        key text PRIMARY KEY,
        owner text NOT NULL,
        token bigint NOT NULL,
        expires timestamptz NOT NULL
    );
    INSERT INTO safetune.version VALUES (1);
    """,
)


class Postgres:
    """The records in a database, see `protocol.SharedStore`. For one thread at a time."""

    def __init__(
        self,
        url: str,
        lease_s: float = 15.0,
        connect_for_s: float = CONNECT_FOR_S,
        node: Path | None = None,
        turn_s: float = TURN_S,
    ) -> None:
        """Read and write at a URL.

        Args:
            lease_s: how long a lease lasts that is not renewed.
            connect_for_s: how long to try to connect where nothing answers.
            node: the database of a node whose processes take turns to connect.
            turn_s: how long to wait for that turn, before this connects without one.
        """
        self.location = display_url(url)
        self._url = url
        self._lease_s = lease_s
        self._connect_for_s = connect_for_s
        self._node = node
        self._turn_s = turn_s
        self._connection: psycopg.Connection[Any] | None = None
        self._turn: KeyLock | None = None
        self._dropped = False
        self._pid = os.getpid()

    @property
    def identity(self) -> str:
        """Return the server and the database, also where a parameter or a variable names them."""
        found: dict[str, Any] = {
            option.keyword.decode(): option.val and option.val.decode()
            for option in Conninfo.get_defaults()
        }
        with contextlib.suppress(psycopg.Error):  # connecting will report it
            found |= conninfo_to_dict(self._url)
        named = [found.get(name) for name in ("service", "host", "hostaddr", "port", "dbname")]
        return f"{self.location} {encoding.digest(named)}"

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def names(self, namespace: str) -> set[Name]:
        return {Name(*row) for row in self._rows(_NAMES, namespace)}

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[StoredChoice]:
        listed = sorted(names)
        for start in range(0, len(listed), _TOGETHER):
            columns = map(list, zip(*listed[start : start + _TOGETHER], strict=True))
            for (text,) in self._rows(_PULL, *columns, namespace):
                stored = decoded(text, namespace)
                if stored is not None and name_of(stored) in names:
                    yield stored

    def get(self, namespace: str, key: str, declared: str) -> StoredChoice | None:
        for text, generation in self._rows(_GET, namespace, key, declared):
            if stored := decoded(text, namespace, Name(key, declared, generation)):
                return stored
        return None

    def _rows(self, statement: str, *parameters: Any) -> list[Any]:
        """What a statement finds: nothing where no writer has made the tables yet."""
        with self._transaction("read") as connection:
            has_tables = _version(connection) > 0
            return connection.execute(statement, parameters).fetchall() if has_tables else []

    def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
        records = list(records)
        wanted = {name_of(record): record for record in records}
        with self.writing() as connection:  # in one order on all nodes, as each row is locked
            found = {n: _publish(connection, namespace, wanted[n]) for n in sorted(wanted)}
        return [found[name_of(record)] for record in records]

    def lease(self, key: str, node: str) -> Lease | None:
        with self.writing() as connection:
            row = connection.execute(_CLAIM, (key, node, self._lease_s)).fetchone()
            if row is None:
                found = connection.execute(_OWNER, (key,)).fetchone()
                return NoLease() if found and found[0] == UNSHARED else None
            with contextlib.suppress(errors.InsufficientPrivilege), connection.transaction():
                connection.execute(_PRUNE)
        return PostgresLease(self._again, key, node, int(row[0]), self._lease_s)

    def _again(self) -> Postgres:
        """The same store for another thread."""
        return Postgres(self._url, self._lease_s, self._connect_for_s, self._node, self._turn_s)

    def close(self) -> None:
        """Close the connection, until the next use."""
        self._notice_fork()
        connection, self._connection = self._connection, None
        turn, self._turn = self._turn, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()
        if turn is not None:
            turn.release()

    @contextlib.contextmanager
    def writing(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection in a transaction, with the tables made."""
        with self._transaction("write to") as connection:
            if _version(connection) != len(_HISTORY):
                _migrate(connection)
            yield connection

    @contextlib.contextmanager
    def _transaction(self, action: str) -> Iterator[psycopg.Connection[Any]]:
        self._notice_fork()
        try:
            if self._connection is None:
                self._turn = once_per_node.to_connect(self._node, self.location, self._turn_s)
                self._connection = connect(self._url, self._connect_for_s)
            with self._connection.transaction():
                self._connection.execute(_TIMEOUT)
                yield self._connection
            self._dropped = False
        except BaseException as error:
            first = not self._dropped
            self._dropped = self._connection is not None and self._connection.broken
            self.close()
            if isinstance(error, SafetuneError) or not isinstance(error, Exception):
                raise
            kind = StoreError
            if is_for_now(error) or (self._dropped and first):  # to connect again says what it is
                kind = TryLater
            elif action != "read" and isinstance(error, _UNWRITABLE):
                kind = Unwritable
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = without_password(lines[0], self._url)
            raise kind(f"cannot {action} the shared store {self.location}: {reason}") from error

    def _notice_fork(self) -> None:
        """Do not touch the parent's connection, whose lock a thread may hold."""
        if self._pid != os.getpid():
            if self._connection is not None:
                _abandoned.append(self._connection)
            self._connection, self._turn, self._pid = None, None, os.getpid()


class PostgresLease:
    """A row that says which node tunes a key. For one thread at a time, whichever it is."""

    def __init__(
        self,
        opened: Callable[[], Postgres],
        key: str,
        owner: str,
        token: int,
        expires_after_s: float,
    ) -> None:
        self.expires_after_s = expires_after_s
        self.token = token
        self._opened = opened
        self._name = (key, owner, token)

    def renew(self) -> bool:
        return self._execute(_RENEW, self.expires_after_s, *self._name) > 0

    def release(self, published: bool = True) -> None:
        owner, seconds = (self._name[1], 0.0) if published else (UNSHARED, UNSHARED_S)
        self._execute(_RELEASE, owner, seconds, *self._name)

    def _execute(self, statement: str, *parameters: Any) -> int:
        """Return how many rows the statement has changed."""
        with contextlib.closing(self._opened()) as store, store.writing() as connection:
            return connection.execute(statement, parameters).rowcount


def _publish(
    connection: psycopg.Connection[Any], namespace: str, record: StoredChoice
) -> StoredChoice:
    name, text = name_of(record), encode(record)
    key = (namespace, *name)
    kernel = record.key.kernel_name.encode("ascii", "backslashreplace").decode()
    connection.execute(_INSERT, (*key, kernel, text))  # ASCII, which a database of any encoding has
    for _ in range(2):
        row = connection.execute(_SELECT, key).fetchone()
        if row and (stored := decoded(row[0], namespace, name)):
            return stored
        if row:  # what is there is not a record; the first to replace it wins
            connection.execute(_REPLACE, (text, *key, row[0]))
    return record


def _version(connection: psycopg.Connection[Any]) -> int:
    """Return the version of the tables, 0 without tables; raises `StoreError` on a newer one."""
    if connection.execute(_HAS_TABLES).fetchone() is None:
        return 0
    found = connection.execute("SELECT found.version FROM safetune.version AS found").fetchone()
    number = int(found[0]) if found else 0
    if number > len(_HISTORY):
        raise StoreError(
            f"the shared store was written by a newer safetune (schema {number}, this one knows "
            f"{len(_HISTORY)}); it is left untouched"
        )
    return number


def _migrate(connection: psycopg.Connection[Any]) -> None:
    """Make the tables or bring them up to date, in the open transaction."""
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK,))
    found = _version(connection)
    if connection.execute(_HAS_SCHEMA).fetchone() is None:
        connection.execute("CREATE SCHEMA safetune")
    for step in _HISTORY[found:]:
        connection.execute(step)
