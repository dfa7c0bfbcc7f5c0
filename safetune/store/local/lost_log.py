"""The log of an open database that was deleted, as a cleaner of /tmp does file by file.

SQLite goes on with the deleted files, and other processes make new ones: what is written to the old
log reaches no other process, and closing the connection would delete the new log with their rows.
So all rows that the connection sees are read, it is closed without touching a file, and the next
one writes the rows that the database lacks.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetune.store.local import opening
from safetune.store.local.rows import TABLES, TRIAL

#: The rows of each table that could be read.
Rows = dict[str, list[tuple[Any, ...]]]

#: The bytes of a database file that every reader locks, and that SQLite locks alone to write the
#: log back and delete it: https://www.sqlite.org/src/file/src/os.h (SHARED_FIRST, SHARED_SIZE).
_SHARED = (0x40000002, 510)


def rows(connection: sqlite3.Connection, earlier: Rows) -> Rows:
    """Return the rows that a connection sees in tables that can be read, after `earlier` ones."""
    found = {table.name: list(earlier.get(table.name, ())) for table in TABLES}
    for name, of_table in found.items():
        with contextlib.suppress(*opening.SQLITE_ERRORS):
            of_table += connection.execute(f"SELECT * FROM {name}").fetchall()
    return found


def write(connection: sqlite3.Connection, saved: Rows) -> None:
    """Write the rows that a database lacks; a later outcome of a config replaces an earlier one."""
    connection.execute("BEGIN IMMEDIATE")
    with opening.ending(connection):
        for name, found in saved.items():
            otherwise = "REPLACE" if name == TRIAL.name else "IGNORE"
            for row in found:
                marks = ", ".join("?" * len(row))
                connection.execute(f"INSERT OR {otherwise} INTO {name} VALUES ({marks})", row)


@contextlib.contextmanager
def files_kept(path: Path) -> Iterator[None]:
    """Keep SQLite from writing to or deleting any file of a database while this process closes it.

    A lock of an open file description stands against the POSIX locks of the same process. Where the
    system has none, the log of another process may be deleted.
    """
    import fcntl

    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, AttributeError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, descriptor)
            lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, *_SHARED, 0)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
        yield
