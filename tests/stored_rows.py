"""A store as tests query it with SQL: the fields of each document as columns.

The tables of the same name are below `main`: a test that writes names that, as in `main.trial`.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

_FIELDS = {
    "key": {name: name for name in ("toolchain", "call")},
    "trial": {
        "config": "config",
        **{name: f"outcome.{name}" for name in ("detail", "message", "stderr", "gpu_uuid")},
        **{name: f"outcome.{name}" for name in ("marks", "judged", "tunings")},
        **{name: f"outcome.timing.{name}" for name in ("median_ms", "count", "stage")},
    },
    "choice": {name: name for name in ("config", "median_ms", "measured", "marks")},
    "call": {"place": "place", "arguments": "arguments"},
}


def connected(database: Path | str) -> sqlite3.Connection:
    """Return a connection to a database that is there."""
    connection = sqlite3.connect(f"file:{database}?mode=rw", uri=True)
    for table, fields in _FIELDS.items():
        more = [f"json_extract(record, '$.{path}') AS {name}" for name, path in fields.items()]
        columns = ", ".join(["rowid AS rowid", "*", *more])
        connection.execute(f"CREATE TEMP VIEW {table} AS SELECT {columns} FROM main.{table}")
    return connection
