"""A shared store in PostgreSQL: two tables in the schema `safetune`, and leases across nodes.

A connection is open for the length of one errand, never while a node works: three hundred nodes
that start together share a hundred connections, with a few tries each.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator, Set
from typing import Any

import psycopg
from psycopg import errors, sql

from safetune.errors import StoreError
from safetune.settings import place_of
from safetune.store.records import StoredChoice
from safetune.store.shared import postgres_server as server
from safetune.store.shared import record as shared_record
from safetune.store.shared.protocol import Lease, NoLease, Unwritable
from safetune.store.shared.record import ForeignRecord, Name

_STATEMENT_TIMEOUT_MS = 5000

#: How many records are fetched together: some MB.
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
_SELECT = f"SELECT record FROM safetune.choice WHERE {_OF_NAME}"
_REPLACE = f"UPDATE safetune.choice SET record = %s WHERE {_OF_NAME} AND record = %s"
_NAMES = "SELECT key, declared, generation FROM safetune.choice WHERE namespace = %s"
_PULL = f"""
SELECT record FROM safetune.choice
JOIN unnest(%s::text[], %s::text[], %s::integer[]) AS wanted(key, declared, generation)
USING (key, declared, generation)
WHERE namespace = %s AND octet_length(record) <= {shared_record.MAX_BYTES}
"""
_GET = f"""
SELECT record FROM safetune.choice WHERE namespace = %s AND key = %s AND declared = %s
AND octet_length(record) <= {shared_record.MAX_BYTES} ORDER BY generation DESC
"""

# The clock is the server's; the token goes up with each holder, and an old one's is worth nothing.
_EXPIRY = "clock_timestamp() + make_interval(secs => %s)"
_CLAIM = f"""
INSERT INTO safetune.lease AS held (key, owner, token, expires) VALUES (%s, %s, 1, {_EXPIRY})
ON CONFLICT (key) DO UPDATE
SET owner = excluded.owner, token = held.token + 1, expires = excluded.expires
WHERE held.expires < clock_timestamp() RETURNING token
"""
_RENEW = f"""
UPDATE safetune.lease SET expires = {_EXPIRY}
WHERE key = %s AND owner = %s AND token = %s AND expires >= clock_timestamp() RETURNING token
"""
_RELEASE = f"""
UPDATE safetune.lease SET owner = %s, expires = {_EXPIRY}
WHERE key = %s AND owner = %s AND token = %s
"""
_OWNER = "SELECT owner FROM safetune.lease WHERE key = %s"

#: The owner of a lease that nobody needs: its last holder found what is not shared.
_UNSHARED = "unshared"
_UNSHARED_S = 600.0

#: A parent's connections, in a fork: to close one would end the parent's session.
_abandoned: list[psycopg.Connection[Any]] = []


class Postgres:
    """The records in a database. For one thread at a time."""

    def __init__(self, url: str, lease_s: float = 15.0) -> None:
        self.place = place_of(url)
        self.url = url
        self._lease_s = lease_s
        self._connection: psycopg.Connection[Any] | None = None
        self._pid = os.getpid()
        self._prepared = False

    def names(self, namespace: str) -> set[Name]:
        """Return the names of all records in a namespace; raises `StoreError`."""
        with self.reading() as connection:
            if connection is None:
                return set()
            return {Name(*row) for row in connection.execute(_NAMES, (namespace,))}

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[StoredChoice]:
        """Yield the records of these names; raises `StoreError`."""
        listed = sorted(names)
        for start in range(0, len(listed), _TOGETHER):
            columns = map(list, zip(*listed[start : start + _TOGETHER], strict=True))
            with self.reading() as connection:
                if connection is None:
                    return
                found = connection.execute(_PULL, (*columns, namespace)).fetchall()
            for (text,) in found:
                stored = _decoded(text)
                if stored is not None and shared_record.name_of(stored) in names:
                    yield stored

    def get(self, namespace: str, key: str, declared: str) -> StoredChoice | None:
        """Return the record of the highest generation; raises `StoreError`."""
        with self.reading() as connection:
            if connection is None:
                return None
            rows = connection.execute(_GET, (namespace, key, declared)).fetchall()
        found = (_decoded(text) for (text,) in rows)
        return next((each for each in found if each and _is_of(each, key, declared)), None)

    def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
        """Write records, none over a valid one; return what is there now.

        Raises:
            Unwritable: the role may only read, or the disk is full.
            StoreError: the server cannot be reached.
        """
        with self.writing() as connection:
            return [_publish(connection, namespace, record) for record in records]

    def lease(self, key: str) -> Lease | None:
        """Take the lease for a key; None while another node has it; raises as `publish`."""
        owner = uuid.uuid4().hex
        with self.writing() as connection:
            row = connection.execute(_CLAIM, (key, owner, self._lease_s)).fetchone()
            if row is None:
                found = connection.execute(_OWNER, (key,)).fetchone()
                return NoLease() if found and found[0] == _UNSHARED else None
        return PostgresLease(self.url, key, owner, int(row[0]), self._lease_s)

    def close(self) -> None:
        """Close the connection, until the next use."""
        self._notice_fork()
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[psycopg.Connection[Any] | None]:
        """A connection in a transaction; None where no writer has made the tables yet."""
        with self._transaction("read") as connection:
            version = None if self._prepared else server.version(connection)
            yield connection if self._prepared or version else None

    @contextlib.contextmanager
    def writing(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection in a transaction, with the tables made."""
        with self._transaction("write to") as connection:
            if not self._prepared and server.version(connection) != len(server.HISTORY):
                server.migrate(connection)
            yield connection
        self._prepared = True

    @contextlib.contextmanager
    def _transaction(self, action: str) -> Iterator[psycopg.Connection[Any]]:
        self._notice_fork()
        try:
            if self._connection is None:
                self._connection = server.connect(self.url)
            with self._connection.transaction():
                timeout = sql.Literal(_STATEMENT_TIMEOUT_MS)
                self._connection.execute(
                    sql.SQL("SET LOCAL statement_timeout = {}").format(timeout)
                )
                yield self._connection
        except BaseException as error:
            self.close()
            if not isinstance(error, (psycopg.Error, OSError)):
                raise
            kind = Unwritable if isinstance(error, _UNWRITABLE) else StoreError
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise kind(f"cannot {action} the shared store {self.place}: {lines[0]}") from error

    def _notice_fork(self) -> None:
        """Leave the parent's connection, and the lock in it that its thread may hold, alone."""
        if self._pid != os.getpid():
            if self._connection is not None:
                _abandoned.append(self._connection)
            self._connection, self._pid = None, os.getpid()


class PostgresLease:
    """A row that says who tunes a key. Its methods may be called from any one thread."""

    def __init__(self, url: str, key: str, owner: str, token: int, expires_after_s: float) -> None:
        self.expires_after_s = expires_after_s
        self.token = token
        self._url = url
        self._name = (key, owner, token)

    def renew(self) -> bool:
        """Say that the holder lives; False if it was too late. Raises `StoreError`."""
        store = Postgres(self._url)
        with contextlib.closing(store), store.writing() as connection:
            row = connection.execute(_RENEW, (self.expires_after_s, *self._name)).fetchone()
        return row is not None

    def release(self, published: bool = True) -> None:
        """Let the next one have it, or all of them; raises `StoreError`."""
        owner, seconds = (self._name[1], 0.0) if published else (_UNSHARED, _UNSHARED_S)
        store = Postgres(self._url)
        with contextlib.closing(store), store.writing() as connection:
            connection.execute(_RELEASE, (owner, seconds, *self._name))


def _publish(
    connection: psycopg.Connection[Any], namespace: str, record: StoredChoice
) -> StoredChoice:
    name, text = shared_record.name_of(record), shared_record.encode(record)
    place = (namespace, *name)
    connection.execute(_INSERT, (*place, record.key.kernel_name, text))
    for _ in range(2):
        row = connection.execute(_SELECT, place).fetchone()
        stored = _decoded(row[0]) if row else None
        if stored is not None and shared_record.name_of(stored) == name:
            return stored
        if row:  # what is there is no record; whoever replaces it first, wins
            connection.execute(_REPLACE, (text, *place, row[0]))
    return record


def _is_of(stored: StoredChoice, key: str, declared: str) -> bool:
    return (stored.choice.key, stored.choice.declared) == (key, declared)


def _decoded(text: str) -> StoredChoice | None:
    try:
        return shared_record.decode(text)
    except ForeignRecord:
        return None
