"""A shared store in PostgreSQL: two tables in the schema `safetune`, and leases between nodes.

A connection is open for one task only, never while a node tunes: three hundred nodes that start
together share a hundred connections, with a few tries each. TLS and every other option of a
connection is libpq's: in the URL, in PG* variables, in ~/.pgpass. The first writer makes the
tables, under an advisory lock; a reader never makes any.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import psycopg
from psycopg import errors
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from safetune.errors import SafetuneError, StoreError
from safetune.keys import encoding
from safetune.settings import display_url, without_password
from safetune.store.local.db_files import tries
from safetune.store.records import StoredChoice
from safetune.store.shared.protocol import (
    MAX_BYTES,
    UNSHARED,
    UNSHARED_S,
    Lease,
    Name,
    NoLease,
    Unwritable,
    decoded,
    encode,
    name_of,
)

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

#: For what neither the URL nor a PG* variable sets: notice within seconds that a server is gone.
_DEFAULTS = {"connect_timeout": "2", "fallback_application_name": "safetune"}
_DEFAULTS |= {"keepalives_idle": "5", "keepalives_interval": "2", "keepalives_count": "2"}
_DEFAULTS |= {"tcp_user_timeout": "5000"}

#: What a server says that has no free connection (53300), or that does not accept any yet (57P03).
#: psycopg does not pass on the code of an error that ends the connecting.
_PASSES = re.compile(
    "too many|remaining connection slots|no more connections|starting up|shutting down|"
    "in recovery mode|not yet accepting"
)

#: How long to try to connect: others use a connection for some ten milliseconds each.
CONNECT_FOR_S = 1.6
_CONNECT_PAUSES_S = (0.1, 0.3)

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
        self, url: str, lease_s: float = 15.0, connect_for_s: float = CONNECT_FOR_S
    ) -> None:
        self.location = display_url(url)
        self._url = url
        self._lease_s = lease_s
        self._connect_for_s = connect_for_s
        self._connection: psycopg.Connection[Any] | None = None
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
        with self.writing() as connection:
            return [_publish(connection, namespace, record) for record in records]

    def lease(self, key: str, node: str) -> Lease | None:
        with self.writing() as connection:
            row = connection.execute(_CLAIM, (key, node, self._lease_s)).fetchone()
            with contextlib.suppress(errors.InsufficientPrivilege), connection.transaction():
                connection.execute(_PRUNE)
            if row is None:
                found = connection.execute(_OWNER, (key,)).fetchone()
                return NoLease() if found and found[0] == UNSHARED else None
        return PostgresLease(self._url, key, node, int(row[0]), self._lease_s)

    def close(self) -> None:
        """Close the connection, until the next use."""
        self._notice_fork()
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()

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
                self._connection = connect(self._url, self._connect_for_s)
            with self._connection.transaction():
                self._connection.execute(_TIMEOUT)
                yield self._connection
        except BaseException as error:
            self.close()
            if isinstance(error, SafetuneError) or not isinstance(error, Exception):
                raise
            unwritable = action != "read" and isinstance(error, _UNWRITABLE)
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = without_password(lines[0], self._url)
            problem = f"cannot {action} the shared store {self.location}: {reason}"
            raise (Unwritable if unwritable else StoreError)(problem) from error

    def _notice_fork(self) -> None:
        """Do not touch the parent's connection, whose lock a thread may hold."""
        if self._pid != os.getpid():
            if self._connection is not None:
                _abandoned.append(self._connection)
            self._connection, self._pid = None, os.getpid()


class PostgresLease:
    """A row that says which node tunes a key. For one thread at a time, whichever it is."""

    def __init__(self, url: str, key: str, owner: str, token: int, expires_after_s: float) -> None:
        self.expires_after_s = expires_after_s
        self.token = token
        self._url = url
        self._name = (key, owner, token)

    def renew(self) -> bool:
        return self._execute(_RENEW, self.expires_after_s, *self._name) > 0

    def release(self, published: bool = True) -> None:
        owner, seconds = (self._name[1], 0.0) if published else (UNSHARED, UNSHARED_S)
        self._execute(_RELEASE, owner, seconds, *self._name)

    def _execute(self, statement: str, *parameters: Any) -> int:
        """Return how many rows the statement has changed."""
        with contextlib.closing(Postgres(self._url)) as store, store.writing() as connection:
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


class _Text(Loader):
    """Text of a database of any encoding, in which anything may have been written."""

    def load(self, data: Any) -> str:
        return bytes(data).decode("utf-8", "replace")


def connect(
    url: str, for_s: float = CONNECT_FOR_S, clock: Callable[[], float] = time.monotonic
) -> psycopg.Connection[Any]:
    """Connect, and try again for `for_s` seconds: a server may have no connection left just now."""
    given = {*psycopg.conninfo.conninfo_to_dict(url)}
    # What a PG* variable or a service file sets.
    given |= {o.keyword.decode() for o in Conninfo.get_defaults() if o.val != o.compiled}
    options: dict[str, Any] = {n: v for n, v in _DEFAULTS.items() if n not in given}
    options["client_encoding"] = "SQL_ASCII"  # not converted, which may fail: we write ASCII
    for last in tries(for_s, *_CONNECT_PAUSES_S, clock):
        try:
            # No prepared statements: a pooler may give each transaction another server process.
            connection = psycopg.connect(url, autocommit=True, prepare_threshold=None, **options)
        except psycopg.OperationalError as error:
            if last or not _may_pass(error):
                raise
        else:
            connection.adapters.register_loader("text", _Text)
            return connection
    raise AssertionError("the last try returns or raises")


def _may_pass(error: psycopg.OperationalError) -> bool:
    """Whether to connect again: not after a refusal, as each wrong password may lock an account."""
    asked = error.pgconn is not None and (error.pgconn.used_password or error.pgconn.needs_password)
    refused = asked or "FATAL" in str(error)
    return not refused or _PASSES.search(str(error)) is not None


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
