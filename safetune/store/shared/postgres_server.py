"""Connections to a PostgreSQL server, and the tables there.

TLS and every other option of a connection is libpq's: in the URL, in PG* variables, in ~/.pgpass.
The tables are made by the first writer, under an advisory lock; a reader never makes any.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import psycopg

from safetune.errors import StoreError

#: "safetune" in the numbers that advisory locks have.
_MIGRATION_LOCK = 0x7361666574756E65

#: Unless the URL says otherwise: a server that is gone is noticed within seconds.
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
_MAX_CONNECT_PAUSE_S = 0.3

# Plain reads: `to_regclass` may remember what was not there before this session got the lock.
_HAS_SCHEMA = "SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = 'safetune'"
_HAS_TABLES = """
SELECT 1 FROM pg_catalog.pg_class AS relation
JOIN pg_catalog.pg_namespace AS namespace ON namespace.oid = relation.relnamespace
WHERE namespace.nspname = 'safetune' AND relation.relname = 'version'
"""

#: One entry is one step; a database is at the version that counts them.
HISTORY = (
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


def connect(url: str, clock: Callable[[], float] = time.monotonic) -> psycopg.Connection[Any]:
    """Connect, with a few tries: a server may have no connection to give just now."""
    given = psycopg.conninfo.conninfo_to_dict(url)
    options: dict[str, Any] = {n: v for n, v in _DEFAULTS.items() if n not in given}
    end, pause_s = clock() + _CONNECT_FOR_S, _CONNECT_PAUSE_S
    while True:
        try:
            # No prepared statements: a pooler may give each transaction another server process.
            return psycopg.connect(url, autocommit=True, prepare_threshold=None, **options)
        except psycopg.OperationalError:
            pause_s = min(2 * pause_s, _MAX_CONNECT_PAUSE_S)
            delay_s = random.uniform(pause_s / 2, pause_s)
            if clock() + delay_s > end:
                raise
            time.sleep(delay_s)


def version(connection: psycopg.Connection[Any]) -> int:
    """The version of the tables, 0 if there are none; raises `StoreError` on a newer one."""
    if connection.execute(_HAS_TABLES).fetchone() is None:
        return 0
    found = connection.execute("SELECT found.version FROM safetune.version AS found").fetchone()
    number = int(found[0]) if found else 0
    if number > len(HISTORY):
        raise StoreError(
            f"the shared store was written by a newer safetune (schema {number}, this one knows "
            f"{len(HISTORY)}); it is left untouched"
        )
    return number


def migrate(connection: psycopg.Connection[Any]) -> None:
    """Make or bring up to date the tables, in the transaction that is open."""
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK,))
    found = version(connection)
    if connection.execute(_HAS_SCHEMA).fetchone() is None:
        connection.execute("CREATE SCHEMA safetune")
    for step in HISTORY[found:]:
        connection.execute(step)
