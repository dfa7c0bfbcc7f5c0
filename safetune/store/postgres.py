"""A shared store in PostgreSQL: two tables in the schema `safetune`, and leases across nodes.

A connection is open for the length of one errand, never while a node works: three hundred nodes
that start together share a hundred connections, with a few tries each. The tables are made by the
first writer, under an advisory lock; a reader never makes any. TLS and every other option of a
connection is libpq's: in the URL, in PG* variables, in ~/.pgpass.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import psycopg
from psycopg import errors, sql

from safetune.errors import StoreError
from safetune.store import shared_record
from safetune.store.records import StoredChoice
from safetune.store.shared import Lease, Unwritable, place_of
from safetune.store.shared_record import ForeignRecord, Name

#: "safetune" in the numbers that advisory locks have.
_MIGRATION_LOCK = 0x7361666574756E65

#: What a connection gets unless the URL says otherwise: a server that is gone is noticed in seconds.
_DEFAULTS = {
    "connect_timeout": "2",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "2",
    "tcp_user_timeout": "5000",
    "application_name": "safetune",
}

#: A server has no connection left for as long as others need theirs: some ten milliseconds each.
_CONNECT_FOR_S = 1.6
_CONNECT_PAUSE_S = 0.05

_STATEMENT_TIMEOUT_MS = 5000

_UNWRITABLE = (
    errors.InsufficientPrivilege,
    errors.ReadOnlySqlTransaction,
    errors.DiskFull,
    errors.OutOfMemory,
)

#: One entry is one step; a database is at the version that counts them.
HISTORY = (
    """
    CREATE TABLE safetune.version (version integer NOT NULL);
    CREATE TABLE safetune.choice (
        namespace text NOT NULL,
        key text NOT NULL,
        generation integer NOT NULL,
        kernel text NOT NULL,
        record text NOT NULL,
        stored timestamptz NOT NULL DEFAULT clock_timestamp(),
        PRIMARY KEY (namespace, key, generation)
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

_INSERT = """
INSERT INTO safetune.choice (namespace, key, generation, kernel, record)
VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING
"""
_OF_NAME = "namespace = %s AND key = %s AND generation = %s"
_SELECT = f"SELECT record FROM safetune.choice WHERE {_OF_NAME}"
_REPLACE = f"UPDATE safetune.choice SET record = %s WHERE {_OF_NAME} AND record = %s"
_NAMES = "SELECT key, generation FROM safetune.choice WHERE namespace = %s"
_PULL = """
SELECT record FROM safetune.choice JOIN unnest(%s::text[], %s::integer[]) AS wanted(key, generation)
USING (key, generation) WHERE namespace = %s
"""
_GET = """
SELECT record FROM safetune.choice WHERE namespace = %s AND key = %s ORDER BY generation DESC
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
_RELEASE = """
UPDATE safetune.lease SET expires = '-infinity' WHERE key = %s AND owner = %s AND token = %s
"""


class Postgres:
    """The records in a database. For one thread at a time."""

    has_leases = True

    def __init__(self, url: str, lease_s: float = 15.0) -> None:
        self.place = place_of(url)
        self.url = url
        self._lease_s = lease_s
        self._connection: psycopg.Connection[Any] | None = None
        self._prepared = False

    def names(self, namespace: str) -> set[Name]:
        """Return the names of all records in a namespace; raises `StoreError`."""
        with self.reading() as connection:
            if connection is None:
                return set()
            return {Name(*row) for row in connection.execute(_NAMES, (namespace,))}

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[StoredChoice]:
        """Yield the records of these names; raises `StoreError`."""
        columns = [name.key for name in names], [name.generation for name in names]
        with self.reading() as connection:
            if connection is None:
                return
            for (text,) in connection.execute(_PULL, (*columns, namespace)).fetchall():
                stored = _decoded(text)
                if stored is not None and shared_record.name_of(stored) in names:
                    yield stored

    def get(self, namespace: str, key: str) -> StoredChoice | None:
        """Return the record of a key's highest generation; raises `StoreError`."""
        with self.reading() as connection:
            if connection is None:
                return None
            rows = connection.execute(_GET, (namespace, key)).fetchall()
        found = (_decoded(text) for (text,) in rows)
        return next((stored for stored in found if stored and stored.choice.key == key), None)

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
            return None
        return PostgresLease(self.url, key, owner, int(row[0]), self._lease_s)

    def close(self) -> None:
        """Close the connection, until the next use."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[psycopg.Connection[Any] | None]:
        """A connection in a transaction; None where no writer has made the tables yet."""
        with self._transaction("read") as connection:
            version = None if self._prepared else _version(connection)
            yield connection if self._prepared or version else None

    @contextlib.contextmanager
    def writing(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection in a transaction, with the tables made."""
        with self._transaction("write to") as connection:
            if not self._prepared and _version(connection) != len(HISTORY):
                _migrate(connection)
            yield connection
        self._prepared = True

    @contextlib.contextmanager
    def _transaction(self, action: str) -> Iterator[psycopg.Connection[Any]]:
        try:
            if self._connection is None:
                self._connection = _connect(self.url)
            with self._connection.transaction():
                timeout = sql.Literal(_STATEMENT_TIMEOUT_MS)
                self._connection.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(timeout))
                yield self._connection
        except BaseException as error:
            self.close()
            if not isinstance(error, (psycopg.Error, OSError)):
                raise
            kind = Unwritable if isinstance(error, _UNWRITABLE) else StoreError
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise kind(f"cannot {action} the shared store {self.place}: {lines[0]}") from error


class PostgresLease:
    """A row that says who tunes a key. Its methods may be called from any one thread."""

    def __init__(
        self, url: str, key: str, owner: str, token: int, expires_after_s: float
    ) -> None:
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

    def release(self) -> None:
        """Let the next one have it; raises `StoreError`."""
        store = Postgres(self._url)
        with contextlib.closing(store), store.writing() as connection:
            connection.execute(_RELEASE, self._name)


def _connect(url: str, clock: Callable[[], float] = time.monotonic) -> psycopg.Connection[Any]:
    """Connect, with a few tries: a server may have no connection to give just now."""
    given = psycopg.conninfo.conninfo_to_dict(url)
    options: dict[str, Any] = {n: v for n, v in _DEFAULTS.items() if n not in given}
    end, pause_s = clock() + _CONNECT_FOR_S, _CONNECT_PAUSE_S
    while True:
        try:
            # No prepared statements: a pooler may give each transaction another server process.
            return psycopg.connect(url, autocommit=True, prepare_threshold=None, **options)
        except psycopg.OperationalError:
            pause_s *= 2
            delay_s = random.uniform(pause_s / 2, pause_s)
            if clock() + delay_s > end:
                raise
            time.sleep(delay_s)


def _version(connection: psycopg.Connection[Any]) -> int:
    """The version of the tables, 0 if there are none; raises `StoreError` on a newer one."""
    row = connection.execute("SELECT to_regclass('safetune.version')").fetchone()
    if row is None or row[0] is None:
        return 0
    found = connection.execute("SELECT version FROM safetune.version").fetchone()
    version = int(found[0]) if found else 0
    if version > len(HISTORY):
        raise StoreError(
            f"the shared store was written by a newer safetune (schema {version}, this one knows "
            f"{len(HISTORY)}); it is left untouched"
        )
    return version


def _migrate(connection: psycopg.Connection[Any]) -> None:
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK,))
    version = _version(connection)
    schema = connection.execute("SELECT to_regnamespace('safetune')").fetchone()
    if schema is None or schema[0] is None:
        connection.execute("CREATE SCHEMA safetune")
    for step in HISTORY[version:]:
        connection.execute(step)


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


def _decoded(text: str) -> StoredChoice | None:
    try:
        return shared_record.decode(text)
    except ForeignRecord:
        return None
