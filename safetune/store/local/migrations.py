"""The schema history of the store: each `m...` function is one step, and `HISTORY` lists them.

Only a migration imports `sqlite_utils`: a plain `PRAGMA user_version` tells that a database is up
to date. The steps run inside one BEGIN IMMEDIATE, so that of many processes that open a new file at
once, one migrates and the others find it done.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from safetune.errors import StoreError
from safetune.store.local.db_files import Damaged
from safetune.store.local.rows import TABLES

if TYPE_CHECKING:
    from sqlite_utils import Database

#: "SFTU" in the file's header: it is a database of safetune.
APPLICATION_ID = 0x53465455

#: The switch to WAL does not honour the busy timeout: tried this often, then left to the next open.
_WAL_ATTEMPTS = 5
_WAL_PAUSE_S = 0.01

_STRANGERS = (
    "SELECT 1 FROM sqlite_master WHERE type NOT IN ('table', 'index') "
    "OR sql LIKE 'CREATE VIRTUAL%' "
    "UNION ALL SELECT 1 FROM sqlite_master AS made, pragma_table_xinfo(made.name) AS has "
    "WHERE made.type = 'table' AND has.hidden LIMIT 1"
)


def m001_create_tables(database: Database) -> None:
    """Kernels, devices, keys, one row per trial and one per choice."""
    text, integer, real = str, int, float
    kernel = {"digest": text, "name": text, "source": text, "file": text, "line": integer}
    device = {"digest": text, "record": text}
    key = {"digest": text, "name": text, "kernel": text, "device": text}
    key |= {"toolchain": text, "call": text}
    trial = {"key": text, "generation": integer, "config_digest": text, "config": text}
    trial |= {"verdict": text, "detail": text, "message": text, "stderr": text}
    trial |= {"median_ms": real, "p20_ms": real, "p80_ms": real, "count": integer, "stage": text}
    trial |= {"gpu_uuid": text, "marks": text, "created": real}
    choice = {"key": text, "generation": integer, "config_digest": text, "config": text}
    choice |= {"declared": text, "median_ms": real, "measured": integer, "created": real}
    for name, columns, primary_key in (
        ("kernel", kernel, "digest"),
        ("device", device, "digest"),
        ("key", key, "digest"),
        ("trial", trial, ("key", "generation", "config_digest")),
        ("choice", choice, ("key", "generation")),
    ):
        database.table(name).create({**columns, "checksum": text}, pk=primary_key)
    database.table("key").create_index(["name"])


def m002_lease_and_choice_per_list(database: Database) -> None:
    """One choice for each config list of a key; leases; an index for keys related to a key.

    A token is never used twice, not even after its row is gone: AUTOINCREMENT.
    """
    database.table("choice").transform(pk=("key", "declared", "generation"))
    database.execute(
        "CREATE TABLE lease (token INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, "
        "owner TEXT NOT NULL, beats INTEGER NOT NULL)"
    )
    database.table("key").create_index(["kernel", "device"])


def m003_create_call(database: Database) -> None:
    """Calls that were recorded to be tuned offline."""
    columns = {"key": str, "name": str, "place": str, "arguments": str, "created": float}
    database.table("call").create({**columns, "checksum": str}, pk="key")


def m004_drop_lease(database: Database) -> None:
    """The process that tunes a key holds a lock of the operating system, not a row."""
    database.table("lease").drop()


def m005_add_origin_of_choice(database: Database) -> None:
    """The shared store that a choice is the record of; empty for this node's own and for imports.

    It is not part of the choice, and its checksum leaves it out.
    """
    database.execute("ALTER TABLE choice ADD COLUMN origin TEXT NOT NULL DEFAULT ''")


def m006_add_judgement(database: Database) -> None:
    """How many configs agreed with a trial's result; what users must know of a choice."""
    database.execute("ALTER TABLE trial ADD COLUMN judged INTEGER DEFAULT 0")
    database.execute("ALTER TABLE choice ADD COLUMN marks TEXT DEFAULT '[]'")


HISTORY = (
    m001_create_tables,
    m002_lease_and_choice_per_list,
    m003_create_call,
    m004_drop_lease,
    m005_add_origin_of_choice,
    m006_add_judgement,
)

#: `PRAGMA user_version` of a database that has every step.
VERSION = len(HISTORY)

#: From this version on, a database has every table that is read.
READABLE = 3

#: What stands for the tables of a database that is only read and lacks their newest columns.
_WITH_NEWER_COLUMNS = (
    "CREATE TEMP VIEW trial AS SELECT *, 0 AS judged FROM main.trial",
    "CREATE TEMP VIEW choice AS SELECT *, '[]' AS marks FROM main.choice",
)


def prepared(
    connection: sqlite3.Connection, prepare: Callable[[sqlite3.Connection], None]
) -> sqlite3.Connection:
    """Return a connection that was just opened once `prepare` is done with it; else close it."""
    try:
        # A flipped byte may make text that is not UTF-8: the checksum finds it, it is not an error.
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        connection.execute("PRAGMA trusted_schema=OFF")
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(connection: sqlite3.Connection) -> None:
    """Bring a just opened database to `VERSION`, whatever other processes do to it meanwhile.

    Raises:
        StoreError: it was written by a newer safetune, or by something else; it is left as it is.
            `Damaged` where tables or columns are missing.
        sqlite3.Error: the file is not a database, or cannot be read or written.
    """
    connection.execute("BEGIN")  # one snapshot: another process may be migrating right now
    with ending(connection):
        current = is_current(connection)
        if current:
            check_schema(connection)
    connection.execute("PRAGMA synchronous=NORMAL")
    _switch_to_wal(connection, attempts=1 if current else _WAL_ATTEMPTS)
    if not current:
        _migrate(connection)


def prepare_suspect(connection: sqlite3.Connection) -> None:
    """Do what `prepare` does with a database in which damage was seen, if it can be repaired.

    Only indexes can: they are made again from the rows. Raises `Damaged`.
    """
    check = "PRAGMA integrity_check(1)"
    if connection.execute(check).fetchone() != ("ok",):
        connection.execute("REINDEX")
        (found,) = connection.execute(check).fetchone()
        if found != "ok":
            raise Damaged(str(found))
    prepare(connection)


def check_readable(connection: sqlite3.Connection) -> None:
    """Raise `StoreError` unless a database can be read without bringing it up to date."""
    if not is_current(connection):
        if _pragma(connection, "user_version") < READABLE:
            raise StoreError(
                "an older safetune wrote it; run `safetune list` once where it can be written"
            )
        for statement in _WITH_NEWER_COLUMNS:
            connection.execute(statement)
    check_schema(connection)


def is_current(connection: sqlite3.Connection) -> bool:
    """Whether every step has run, by plain reads inside a transaction; raises like `prepare`."""
    version = _pragma(connection, "user_version")
    application = _pragma(connection, "application_id")
    if application == APPLICATION_ID:
        if version > VERSION:
            raise StoreError(
                f"it was written by a newer safetune (schema {version}, "
                f"this one knows {VERSION}); it is left unchanged"
            )
        return version == VERSION
    if application or version or connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise StoreError("it is a database, but not one of safetune; it is left unchanged")
    return False


def check_schema(connection: sqlite3.Connection) -> None:
    """Check that every table has its columns, and that no code in the file runs with them.

    Raises:
        Damaged: a table or column is missing.
        StoreError: it has triggers, views, virtual tables or generated columns.
    """
    if connection.execute(_STRANGERS).fetchone() is not None:
        raise StoreError(
            "it has triggers or views, which safetune never makes; it is left unchanged"
        )
    try:
        for table in TABLES:
            connection.execute(f"{table.select} LIMIT 0")
    except sqlite3.OperationalError as error:
        if str(error).startswith("no such"):
            raise Damaged(str(error)) from error
        raise


def _migrate(connection: sqlite3.Connection) -> None:
    # Imported before the lock is taken: the import takes 0.2 s, the migration 2 ms. A deferred
    # transaction, which sqlite-utils begins, fails at once where another process has written since
    # its first read; measured: 912 of 1,280 writes lost.
    from sqlite_utils import Database
    from sqlite_utils.migrations import Migrations

    migrations = Migrations("safetune")
    for step in HISTORY:
        migrations()(step)
    connection.execute("BEGIN IMMEDIATE")
    with ending(connection):
        if is_current(connection):
            return
        migrations.apply(Database(connection, execute_plugins=False))
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={VERSION}")


@contextlib.contextmanager
def ending(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit the open transaction, or roll it back if an exception is raised."""
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _switch_to_wal(connection: sqlite3.Connection, attempts: int) -> None:
    """Ask for write-ahead logging; a database without it works, too, only slower."""
    for attempt in range(attempts):
        if attempt:
            time.sleep(_WAL_PAUSE_S)
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode=wal").fetchone()
            return


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])
