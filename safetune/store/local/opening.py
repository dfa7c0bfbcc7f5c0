"""Opens a database: creates a new one, sets an unusable one aside, or only reads.

`SCHEMA` creates all tables of a new file inside one BEGIN IMMEDIATE, so that only one of many
simultaneous openers does. A cache may lose: a database in an earlier format, or one that `PRAGMA
integrity_check` finds damaged, is renamed, and an empty one replaces it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from safetune.errors import StoreError
from safetune.store.local import db_files
from safetune.store.local.db_files import Damaged, Identity, identity
from safetune.store.local.rows import TABLES, Table

#: Makes a connection that was just opened usable, or raises what is wrong.
Prepare = Callable[[sqlite3.Connection], None]

#: "SFTU" in the file's header: it is a database of safetune.
APPLICATION_ID = 0x53465455

#: `PRAGMA user_version`: the format of the tables and of their rows.
VERSION = 8

_TYPES = {"generation": "INTEGER", "created": "REAL"}

_STRANGERS = (
    "SELECT 1 FROM sqlite_master WHERE type NOT IN ('table', 'index') "
    "OR sql LIKE 'CREATE VIRTUAL%' "
    "UNION ALL SELECT 1 FROM sqlite_master AS made, pragma_table_xinfo(made.name) AS has "
    "WHERE made.type = 'table' AND has.hidden LIMIT 1"
)


def _table(table: Table) -> str:
    typed = [f"{name} {_TYPES.get(name, 'TEXT')}" for name in table.columns]
    typed = [f"{each} NOT NULL DEFAULT ''" if each[:-5] in table.own else each for each in typed]
    key = ", ".join(table.primary_key)
    return f"CREATE TABLE {table.name} ({', '.join(typed)}, PRIMARY KEY ({key}))"


SCHEMA = (
    *map(_table, TABLES),
    "CREATE INDEX idx_key_kernel_name ON key (kernel_name)",
    "CREATE INDEX idx_key_kernel_digest_device_digest ON key (kernel_digest, device_digest)",
    "CREATE INDEX idx_key_space ON key (space)",
)

#: What SQLite raises. Python cannot make a message that quotes damaged text: it is not UTF-8.
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)


def in_memory() -> sqlite3.Connection:
    """Return an empty in-memory database."""
    return _opened(":memory:", prepare)


def connect(path: Path, prepare: Prepare, wait_s: float) -> tuple[sqlite3.Connection, Identity]:
    """Open a database file and return its identity; an unusable file is set aside first.

    A single failed disk read looks like damage, so `integrity_check` checks again. The identity is
    None if the file cannot be replaced. Raises the errors of `prepare`.
    """
    if path.exists() and not os.access(path.parent, os.W_OK):  # where SQLite must write
        db_files.check(path)
        return connect_read_only(path, wait_s), None
    db_files.make_directory(path)
    for last in (False, False, True):
        try:
            with db_files.unmoved(path, wait_s):
                db_files.make(path)
                opened_file = identity(path)
                connection = _opened(path, prepare, wait_s)
        except (*SQLITE_ERRORS, Damaged) as error:
            # An error of a file that was replaced says nothing about the new one.
            replaced = identity(path) != opened_file
            if last or not (replaced or is_damage(error)):
                raise
            if not replaced and (prepare is prepare_suspect or isinstance(error, Damaged)):
                db_files.set_aside(path, opened_file, reason_of(error), wait_s)
            prepare = prepare_suspect
            continue
        if opened_file == identity(path):
            return connection, opened_file
        connection.close()  # it was replaced meanwhile
    raise StoreError("other processes keep replacing it")


def is_damage(error: BaseException) -> bool:
    """Whether an error means that the file itself is bad, and not the disk, a lock or a program.

    SQLite's "malformed" and "not a database" have the base class; all others have a subclass.
    """
    quotes_damage = isinstance(error, (Damaged, UnicodeDecodeError))
    return quotes_damage or type(error) is sqlite3.DatabaseError


def reason_of(error: BaseException) -> str:
    """Return an error's message; if Python could not decode it, the readable part."""
    if isinstance(error, UnicodeDecodeError):
        return error.object.decode("utf-8", "replace")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def connect_read_only(path: Path, wait_s: float) -> sqlite3.Connection:
    """Open a database file that is never written to; creates no lock file and no log.

    SQLite writes files beside a database in WAL mode, even to read it, so it is opened as
    immutable. If a writer has a log open, the files that a reader needs exist; if they cannot be
    used, rows only in the log are not seen.
    """
    path = path.absolute()
    path.stat()  # SQLite's own message does not say that the file is missing
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and log.stat().st_size:
        with contextlib.suppress(sqlite3.OperationalError):
            return _opened(f"{path.as_uri()}?mode=ro&readonly_shm=1", check_readable, wait_s)
    return _opened(f"{path.as_uri()}?mode=ro&immutable=1", check_readable, wait_s)


def _opened(path: Path | str, prepare: Prepare, wait_s: float = 0.0) -> sqlite3.Connection:
    """Return a connection once `prepare` is done with it; else it is closed."""
    connection = sqlite3.connect(
        path,
        timeout=wait_s,
        isolation_level=None,
        check_same_thread=False,
        uri=str(path).startswith("file:"),
    )
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
    """Create the tables of a new database, or check existing ones, while others may do the same.

    Raises:
        StoreError: it was written by a newer safetune, or by something else; it is left unchanged.
            `Damaged` if it has another format, or if tables or columns are missing.
        sqlite3.Error: the file is not a database, or cannot be read or written.
    """
    connection.execute("BEGIN")  # one snapshot: another process may make the tables right now
    with ending(connection):
        is_new = _version(connection) == 0
        if not is_new:
            _check_schema(connection)
    connection.execute("PRAGMA synchronous=NORMAL")
    with contextlib.suppress(sqlite3.OperationalError):  # until the next open it is only slower
        connection.execute("PRAGMA journal_mode=wal").fetchone()
    if is_new:
        _make_tables(connection)


def prepare_suspect(connection: sqlite3.Connection) -> None:
    """Check a database with signs of damage, then do the same as `prepare`.

    Raises `Damaged`.
    """
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise Damaged(str(verdict))
    prepare(connection)


def check_readable(connection: sqlite3.Connection) -> None:
    """Raise `StoreError` unless a database can be read unchanged."""
    if not _version(connection):
        raise StoreError(
            "it is empty. If you copied it from a running process, use `safetune export` instead"
        )
    _check_schema(connection)


def _version(connection: sqlite3.Connection) -> int:
    """Return the format of a database, 0 for an empty file; raises like `prepare`."""
    version, application, tables = connection.execute(
        "SELECT user_version, application_id, EXISTS (SELECT 1 FROM sqlite_master) "
        "FROM pragma_user_version, pragma_application_id"
    ).fetchone()
    if application != APPLICATION_ID and (application or version or tables):
        other = StoreError("it is not a safetune database; it is left unchanged")
        raise other.with_fix("move the file away, or set SAFETUNE_CACHE_DIR to another directory")
    if version > VERSION:
        newer = StoreError(
            f"it was written by a newer safetune (format {version}, "
            f"this one reads {VERSION}); it is left unchanged"
        )
        raise newer.with_fix("upgrade safetune, or set SAFETUNE_CACHE_DIR to another directory")
    if application and version != VERSION:
        raise Damaged(f"an earlier safetune wrote it: format {version}, now {VERSION}")
    return int(version)


def _check_schema(connection: sqlite3.Connection) -> None:
    """Check that every table has its columns, and that no code in the file runs with them.

    Raises:
        Damaged: a table or column is missing.
        StoreError: it has triggers, views, virtual tables or generated columns.
    """
    if connection.execute(_STRANGERS).fetchone() is not None:
        strange = StoreError(
            "it has triggers or views, which safetune never creates; it is left unchanged"
        )
        raise strange.with_fix("move the file away, and do not trust where it came from")
    try:
        for table in TABLES:
            connection.execute(f"SELECT {', '.join(table.columns)} FROM {table.name} LIMIT 0")
    except sqlite3.OperationalError as error:
        if str(error).startswith("no such"):
            raise Damaged(str(error)) from error
        raise


def _make_tables(connection: sqlite3.Connection) -> None:
    """Make all tables, unless another process has made them by now."""
    connection.execute("BEGIN IMMEDIATE")
    with ending(connection):
        if _version(connection) == 0:
            for statement in SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={VERSION}")


@contextlib.contextmanager
def ending(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit the open transaction, or roll it back if an exception is raised."""
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(*SQLITE_ERRORS):
            connection.execute("ROLLBACK")
        raise
