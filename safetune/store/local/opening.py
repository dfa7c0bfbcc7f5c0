"""Opening a database: brought up to date and checked to be written to, or only read.

The `m...` functions are the schema history, which `HISTORY` lists and sqlite-utils keeps. Only an
older database needs `sqlite_utils`, which takes 0.2 s to import: a plain `PRAGMA user_version`
tells that a database is up to date, and a new one is made by the same steps. They run inside one
BEGIN IMMEDIATE, so that of many processes that open a new file at once, one migrates it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from safetune.errors import StoreError
from safetune.store.local import db_files
from safetune.store.local.db_files import Damaged, Identity, identity
from safetune.store.local.rows import TABLES

if TYPE_CHECKING:
    from sqlite_utils import Database

    Executes: TypeAlias = Database | sqlite3.Connection

#: Brings a connection that was just opened up to date, or checks it: raises what is wrong.
Prepare = Callable[[sqlite3.Connection], None]

_TYPES = {int: "INTEGER", float: "REAL"}

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


def m001_create_tables(database: Executes) -> None:
    """The tables and columns of 0.1.0, which made them in three steps, without its leases."""
    for table in TABLES:
        columns = [
            f'"{name}" {_TYPES.get(kind, "TEXT")}'
            for name, kind in {**table.columns, "checksum": str}.items()
            if name not in table.added
        ]
        key = ", ".join(table.primary_key)
        database.execute(f"CREATE TABLE {table.name} ({', '.join(columns)}, PRIMARY KEY ({key}))")
    database.execute('CREATE INDEX "idx_key_name"\n    ON "key" ("name")')
    database.execute('CREATE INDEX "idx_key_kernel_device"\n    ON "key" ("kernel", "device")')


def m004_drop_lease(database: Executes) -> None:
    """The process that tunes a key holds a lock of the operating system, not a row."""
    database.execute("DROP TABLE IF EXISTS lease")


def m005_add_origin_of_choice(database: Executes) -> None:
    """The shared store that a choice is the record of; empty for this node's own and for imports.

    It is not part of the choice, and its checksum leaves it out.
    """
    database.execute("ALTER TABLE choice ADD COLUMN origin TEXT NOT NULL DEFAULT ''")


def m006_add_judgement(database: Executes) -> None:
    """How many configs agreed with a trial's result; what users must know of a choice."""
    database.execute("ALTER TABLE trial ADD COLUMN judged INTEGER DEFAULT 0")
    database.execute("ALTER TABLE choice ADD COLUMN marks TEXT DEFAULT '[]'")


HISTORY = (
    m001_create_tables,
    m004_drop_lease,
    m005_add_origin_of_choice,
    m006_add_judgement,
)

#: `PRAGMA user_version` of 0.1.0, and of a database that has every step.
OLDEST, VERSION = 3, 6

#: Where sqlite-utils keeps which steps have run, as it makes it.
_APPLIED = (
    'CREATE TABLE "_sqlite_migrations" ("id" INTEGER PRIMARY KEY, "migration_set" TEXT, '
    '"name" TEXT, "applied_at" TEXT)',
    'CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"\n'
    '    ON "_sqlite_migrations" ("migration_set", "name")',
)
_APPLY = (
    "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) "
    "VALUES ('safetune', ?, strftime('%Y-%m-%d %H:%M:%f+00:00', 'now'))"
)

#: What SQLite raises. Python cannot make a message that quotes damaged text: it is not UTF-8.
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)

#: What stands for the tables of a database that is only read and lacks their newest columns.
_WITH_NEWER_COLUMNS = [
    f"CREATE TEMP VIEW {table.name} AS SELECT *, {value!r} AS {name} FROM main.{table.name}"
    for table in TABLES
    for name, value in table.added.items()
]


def in_memory() -> sqlite3.Connection:
    """Return an empty database."""
    return _opened(":memory:", prepare)


def connect(path: Path, prepare: Prepare, wait_s: float) -> tuple[sqlite3.Connection, Identity]:
    """Open a database file, and return its identity; a damaged one is moved aside first.

    Damage must be found twice: SQLite reports the same for a disk that fails to read once. The
    identity is None where the file cannot be replaced. Raises what `prepare` raises.
    """
    looked = False
    for last in (False, False, False, True):
        if path.exists() and not os.access(path.parent, os.W_OK):  # where SQLite must write
            db_files.check(path)
            return connect_read_only(path, wait_s), None
        db_files.make_directory(path)
        try:
            with db_files.unmoved(path, wait_s):
                db_files.make(path)
                found = identity(path)
                connection = _opened(path, prepare, wait_s)
        except (*SQLITE_ERRORS, Damaged) as error:
            # An error of a file that was replaced says nothing about the new one.
            replaced = identity(path) != found
            if last or not (replaced or is_damage(error)):
                raise
            if looked and not replaced:
                db_files.move_aside(path, found, reason_of(error), wait_s)
            looked = not replaced
            continue
        if found == identity(path):
            return connection, found
        connection.close()  # it was replaced meanwhile
    raise StoreError("other processes replace it again and again")


def is_damage(error: BaseException) -> bool:
    """Whether an error says that the file itself is bad, and not the disk, a lock or a program.

    SQLite's "malformed" and "not a database" have the plain class; every other one a subclass.
    """
    quotes_damage = isinstance(error, (Damaged, UnicodeDecodeError))
    return quotes_damage or type(error) is sqlite3.DatabaseError


def reason_of(error: BaseException) -> str:
    """Return an error's message; of one that Python could not make, what can be read."""
    if isinstance(error, UnicodeDecodeError):
        return error.object.decode("utf-8", "replace")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def connect_read_only(path: Path, wait_s: float) -> sqlite3.Connection:
    """Open a database file that is never written to: no lock file, no log, no migration.

    SQLite writes files beside a database in WAL mode, even to read it. If there is no log, the file
    is opened as immutable: no file is made beside it. If there is a log, a writer has made the
    files that a reader needs; if those are gone, a private copy is read.
    """
    path = path.absolute()
    path.stat()  # SQLite's own message does not say that the file is missing
    log = path.with_name(f"{path.name}-wal")
    if not (log.exists() and log.stat().st_size):
        return _opened(f"{path.as_uri()}?mode=ro&immutable=1", check_readable, wait_s)
    try:
        return _opened(f"{path.as_uri()}?mode=ro&readonly_shm=1", check_readable, wait_s)
    except sqlite3.OperationalError:
        return _copied(path, log)


def _copied(path: Path, log: Path) -> sqlite3.Connection:
    """A copy in memory of a database with its log."""
    import shutil
    import tempfile

    def copy(memory: sqlite3.Connection) -> None:
        for file in (path, log):
            shutil.copyfile(file, Path(folder) / file.name)
        with contextlib.closing(sqlite3.connect(Path(folder) / path.name)) as copied:
            copied.backup(memory)
        check_readable(memory)

    with tempfile.TemporaryDirectory(prefix="safetune-") as folder:
        return _opened(":memory:", copy)


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
    """Bring a just opened database to `VERSION`, whatever other processes do to it meanwhile.

    Raises:
        StoreError: it was written by a newer safetune, or by something else; it is left as it is.
            `Damaged` where tables or columns are missing.
        sqlite3.Error: the file is not a database, or cannot be read or written.
    """
    connection.execute("BEGIN")  # one snapshot: another process may be migrating right now
    with ending(connection):
        version = _version(connection)
        if version == VERSION:
            _check_schema(connection)
    connection.execute("PRAGMA synchronous=NORMAL")
    _switch_to_wal(connection, attempts=1 if version == VERSION else _WAL_ATTEMPTS)
    if version != VERSION:
        _migrate(connection, _missing_steps if version else _all_steps)


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
    version = _version(connection)
    if not version:
        raise StoreError(
            "it is empty; of a database that a process has open, copy the file that ends in -wal "
            "too, or use `safetune export` there"
        )
    if version < OLDEST:
        raise StoreError(
            "an older safetune wrote it; run `safetune list` once where it can be written"
        )
    if version < VERSION:
        for statement in _WITH_NEWER_COLUMNS:
            connection.execute(statement)
    _check_schema(connection)


def _version(connection: sqlite3.Connection) -> int:
    """Return the version of a database, 0 for an empty file; raises like `prepare`."""
    version, application, tables = connection.execute(
        "SELECT user_version, application_id, EXISTS (SELECT 1 FROM sqlite_master) "
        "FROM pragma_user_version, pragma_application_id"
    ).fetchone()
    if application != APPLICATION_ID and (application or version or tables):
        raise StoreError("it is a database, but not one of safetune; it is left unchanged")
    if version > VERSION:
        raise StoreError(
            f"it was written by a newer safetune (schema {version}, "
            f"this one knows {VERSION}); it is left unchanged"
        )
    return int(version)


def _check_schema(connection: sqlite3.Connection) -> None:
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


def _migrate(connection: sqlite3.Connection, run: Prepare) -> None:
    """Run the steps that a database lacks, unless another process has done it by now."""
    connection.execute("BEGIN IMMEDIATE")  # sqlite-utils begins a deferred transaction, which
    with ending(connection):  # fails where another process writes: 912 of 1,280 writes were lost
        if _version(connection) != VERSION:
            run(connection)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={VERSION}")


def _all_steps(connection: sqlite3.Connection) -> None:
    """Make the tables of an empty file, without the import of sqlite-utils."""
    for statement in _APPLIED:
        connection.execute(statement)
    for step in HISTORY:
        step(connection)
        connection.execute(_APPLY, (step.__name__,))


def _missing_steps(connection: sqlite3.Connection) -> None:
    from sqlite_utils import Database
    from sqlite_utils.migrations import Migrations

    migrations = Migrations("safetune")
    for step in HISTORY:
        migrations()(step)
    migrations.apply(Database(connection, execute_plugins=False))


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


def _switch_to_wal(connection: sqlite3.Connection, attempts: int) -> None:
    """Ask for write-ahead logging; a database without it works, too, only slower."""
    for attempt in range(attempts):
        if attempt:
            time.sleep(_WAL_PAUSE_S)
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode=wal").fetchone()
            return
