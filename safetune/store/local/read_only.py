"""A database that is only read: no lock file, no log, no migration.

SQLite writes files beside a database in WAL mode, even to read it. If there is no log, the file is
opened as immutable: no file is made beside it. If there is a log, a writer has made the files that
a reader needs; if those are gone, a private copy is read.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from safetune.store.local import migrations


def connect(path: Path) -> sqlite3.Connection:
    """Open a database for reading; raises `StoreError` and `OSError`."""
    path = path.absolute()
    path.stat()  # SQLite's own message does not say that the file is missing
    log = path.with_name(f"{path.name}-wal")
    if not (log.exists() and log.stat().st_size):
        return _opened(f"{path.as_uri()}?immutable=1")
    try:
        return _opened(f"{path.as_uri()}?mode=ro")
    except sqlite3.OperationalError:
        return _copied(path, log)


def _opened(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, 30.0, uri=True, isolation_level=None, check_same_thread=False)
    return migrations.prepared(connection, migrations.check_readable)


def _copied(path: Path, log: Path) -> sqlite3.Connection:
    """A copy in memory of the database with its log."""
    import shutil
    import tempfile

    memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    with tempfile.TemporaryDirectory(prefix="safetune-") as folder:
        for file in (path, log):
            shutil.copyfile(file, Path(folder) / file.name)
        with contextlib.closing(_opened((Path(folder) / path.name).as_uri())) as copied:
            memory.text_factory = copied.text_factory
            copied.backup(memory)
    return memory
