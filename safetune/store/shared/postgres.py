"""A shared store in PostgreSQL: two tables in the schema `safetune`, and leases between nodes.

A connection is open for one task only, some milliseconds, and never while a node tunes. A server
with no free connection is asked again for a few seconds. TLS and all other connection options are
libpq's: in the URL, in PG* variables, in ~/.pgpass. The first writer creates the tables, under an
advisory lock; a reader never does.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Set
from typing import Any

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo

from safetune.errors import SafetuneError, StoreError
from safetune.keys import encoding
from safetune.settings import display_url, driver_error
from safetune.store.local.db_files import tries
from safetune.store.records import StoredChoice
from safetune.store.shared.protocol import (
    MAX_BYTES,
    Lease,
    Name,
    Unwritable,
    decoded,
    encode,
    name_of,
)

#: For what neither the URL nor a PG* variable sets: notice within seconds that a server is gone.
_DEFAULTS = {"connect_timeout": "4", "fallback_application_name": "safetune"}
_DEFAULTS |= {"keepalives_idle": "5", "keepalives_interval": "2", "keepalives_count": "2"}
_DEFAULTS |= {"tcp_user_timeout": "5000"}

#: What a server says that has no free connection or is starting, and what PgBouncer and other
#: poolers say then. psycopg does not pass on the code of an error that ends the connecting.
_FULL = re.compile(
    "too many|remaining connection slots|no more connections|connections exceeded|max clients|"
    "query_wait_timeout|starting up|not yet accepting",
    re.IGNORECASE,
)

#: How long a full server is asked for a connection.
FULL_FOR_S = 4.0
_PAUSES_S = (0.1, 0.5)

_TIMEOUT = "SET LOCAL statement_timeout = 5000"  # milliseconds

#: Records are fetched, and written in one transaction, in groups of this many.
_TOGETHER = 200

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
_SELECT = f"SELECT left(record, {MAX_BYTES + 1}) FROM safetune.choice WHERE {_OF_NAME}"
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
_NAMESPACES = "SELECT DISTINCT namespace FROM safetune.choice ORDER BY 1"
_FORGET = f"DELETE FROM safetune.choice WHERE {_OF_NAME}"

# The clock is the server's. A node that has the lease gets it again: its process that had it has
# ended.
_EXPIRY = "clock_timestamp() + make_interval(secs => %s)"
_CLAIM = f"""
INSERT INTO safetune.lease AS held (key, owner, expires) VALUES (%s, %s, {_EXPIRY})
ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, expires = excluded.expires
WHERE held.expires < clock_timestamp() OR held.owner = excluded.owner RETURNING key
"""
_RENEW = f"""
UPDATE safetune.lease SET expires = {_EXPIRY}
WHERE key = %s AND owner = %s AND expires >= clock_timestamp()
"""
_RELEASE = "UPDATE safetune.lease SET expires = '-infinity' WHERE key = %s AND owner = %s"

#: The number of the advisory lock of who makes the tables: "safetune" in ASCII.
_MAKING = 0x7361666574756E65

# Plain reads: `to_regclass` may answer from before this session got the lock.
_HAS_SCHEMA = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = 'safetune'"
_FIND_TABLES = """
SELECT 1 FROM pg_catalog.pg_class AS relation
JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = relation.relnamespace
WHERE namespace.nspname = 'safetune' AND relation.relname = 'version'
"""

#: The version of the tables; of another one neither a row is read nor one written.
_VERSION = 2
_TABLES = f"""
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
    expires timestamptz NOT NULL
);
INSERT INTO safetune.version VALUES ({_VERSION});
"""


class Postgres:
    """The records in a database, see `protocol.SharedStore`. For one thread at a time."""

    def __init__(self, url: str, lease_s: float = 15.0) -> None:
        """Read and write at a URL.

        Args:
            lease_s: how long a lease lasts that is not renewed.
        """
        self.location = display_url(url)
        self._url = url
        self._lease_s = lease_s
        self._connection: psycopg.Connection[Any] | None = None

    @property
    def identity(self) -> str:
        """Return the server and the database, even if a parameter or a variable names them."""
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

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[list[StoredChoice]]:
        listed = sorted(names)
        for start in range(0, len(listed), _TOGETHER):
            columns = map(list, zip(*listed[start : start + _TOGETHER], strict=True))
            found = (decoded(text, namespace) for (text,) in self._rows(_PULL, *columns, namespace))
            yield [stored for stored in found if stored and name_of(stored) in names]

    def get(self, namespace: str, key: str, declared: str) -> StoredChoice | None:
        for text, generation in self._rows(_GET, namespace, key, declared):
            if stored := decoded(text, namespace, Name(key, declared, generation)):
                return stored
        return None

    def namespaces(self) -> list[str]:
        return [namespace for (namespace,) in self._rows(_NAMESPACES)]

    def forget(self, namespace: str, names: Set[Name]) -> None:
        with self.writing() as connection:
            for name in sorted(names):
                connection.execute(_FORGET, (namespace, *name))

    def _rows(self, statement: str, *parameters: Any) -> list[Any]:
        """What a statement finds: nothing where no writer has made the tables yet."""
        with self._transaction("read") as connection:
            has_tables = _has_tables(connection)
            return connection.execute(statement, parameters).fetchall() if has_tables else []

    def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
        records = list(records)
        wanted = {name_of(record): record for record in records}
        listed, found = sorted(wanted), {}  # in one order on all nodes, as each row is locked
        for start in range(0, len(listed), _TOGETHER):
            with self.writing() as connection:
                for name in listed[start : start + _TOGETHER]:
                    found[name] = _publish(connection, namespace, wanted[name])
        return [found[name_of(record)] for record in records]

    def lease(self, key: str, node: str) -> Lease | None:
        with self.writing() as connection:
            if not connection.execute(_CLAIM, (key, node, self._lease_s)).fetchone():
                return None
        return PostgresLease(self, key, node, self._lease_s)

    def again(self) -> Postgres:
        return Postgres(self._url, self._lease_s)

    def close(self) -> None:
        """Close the connection until the next use."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[psycopg.Connection[Any]]:
        """Yield a connection in a transaction, with the tables created."""
        with self._transaction("write to") as connection:
            if not _has_tables(connection):
                _make_tables(connection)
            yield connection

    @contextlib.contextmanager
    def _transaction(self, action: str) -> Iterator[psycopg.Connection[Any]]:
        try:
            if self._connection is None:
                self._connection = connect(self._url)
            with self._connection.transaction():
                self._connection.execute(_TIMEOUT)
                yield self._connection
        except BaseException as error:
            self.close()
            if isinstance(error, SafetuneError) or not isinstance(error, Exception):
                raise
            refused = action != "read" and isinstance(error, _UNWRITABLE)
            kind = Unwritable if refused else StoreError
            reason = driver_error(error)
            raise kind(f"cannot {action} the shared store {self.location}: {reason}") from error


class PostgresLease:
    """A row that says which node tunes a key."""

    def __init__(self, store: Postgres, key: str, owner: str, expires_after_s: float) -> None:
        self.expires_after_s = expires_after_s
        self._store, self._name = store, (key, owner)

    def renew(self) -> bool:
        return self._execute(_RENEW, self.expires_after_s, *self._name) > 0

    def release(self) -> None:
        self._execute(_RELEASE, *self._name)

    def _execute(self, statement: str, *parameters: Any) -> int:
        """Return how many rows the statement has changed."""
        with contextlib.closing(self._store.again()) as store, store.writing() as connection:
            return connection.execute(statement, parameters).rowcount


def connect(url: str) -> psycopg.Connection[Any]:
    """Connect; if the server is full, retry for some seconds.

    Any other refusal is final: another wrong password may lock the account.
    """
    given = {*conninfo_to_dict(url)}
    # What a PG* variable or a service file sets.
    given |= {o.keyword.decode() for o in Conninfo.get_defaults() if o.val != o.compiled}
    options: dict[str, Any] = {n: v for n, v in _DEFAULTS.items() if n not in given}
    options["client_encoding"] = "UTF8"  # also if the database has none, as under LANG=C
    for last in tries(FULL_FOR_S, *_PAUSES_S):
        try:
            # No prepared statements: a pooler may give each transaction another server process.
            return psycopg.connect(url, autocommit=True, prepare_threshold=None, **options)
        except psycopg.OperationalError as error:
            if last or not _FULL.search(str(error)):
                raise
    raise AssertionError("the last try returns or raises")


def _publish(
    connection: psycopg.Connection[Any], namespace: str, record: StoredChoice
) -> StoredChoice:
    name, text = name_of(record), encode(record)
    key = (namespace, *name)
    kernel = record.key.kernel_name.encode("ascii", "backslashreplace").decode()
    connection.execute(_INSERT, (*key, kernel, text))  # ASCII, which a database of any encoding has
    row = connection.execute(_SELECT, key).fetchone()
    return (row and decoded(row[0], namespace, name)) or record


def _has_tables(connection: psycopg.Connection[Any]) -> bool:
    """Whether the tables exist; raises `StoreError` if they are of another version."""
    if connection.execute(_FIND_TABLES).fetchone() is None:
        return False
    found = connection.execute("SELECT found.version FROM safetune.version AS found").fetchone()
    if found != (_VERSION,):
        raise StoreError(
            f"its tables are version {found and found[0]}, but this safetune reads version "
            f"{_VERSION}; they are left untouched: use another database, or drop the schema "
            "safetune"
        )
    return True


def _make_tables(connection: psycopg.Connection[Any]) -> None:
    """Make the tables, in the open transaction, unless another writer has."""
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (_MAKING,))
    if _has_tables(connection):
        return
    if connection.execute(_HAS_SCHEMA).fetchone() is None:
        connection.execute("CREATE SCHEMA safetune")
    connection.execute(_TABLES)
