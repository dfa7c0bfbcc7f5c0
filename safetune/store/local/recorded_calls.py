"""Recorded calls: launches without a choice, described so that they can be tuned offline.

One row for each key: the first call that can be rebuilt, else the first. Its content is checked
where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safetune.store.local.rows import CALL
from safetune.store.local.store import Store

#: More keys than a program has; this bounds the file of a program whose keys never repeat.
MOST = 10_000

_PUT = (
    f"INSERT OR IGNORE INTO call ({', '.join(CALL.columns)}, checksum) "
    f"SELECT {', '.join('?' * (len(CALL.columns) + 1))} "
    f"WHERE (SELECT count(*) FROM call) < {MOST}"
)

#: Canonical JSON has no space there.
_FORGET_PROBLEM = """DELETE FROM call WHERE key = ? AND arguments LIKE '%"problem":%'"""


@dataclass(frozen=True)
class RecordedCall:
    """A launch that was not tuned.

    Attributes:
        key: `TuningKey.digest`.
        name: the kernel's name.
        place: `module:qualname` of the kernel's function.
        arguments: the description of the call that `miss.record` makes, as plain JSON data.
        created: seconds since the epoch.
    """

    key: str
    name: str
    place: str
    arguments: dict[str, Any]
    created: float


def put_call(store: Store, call: RecordedCall) -> bool:
    """Write a call; return whether it is new and was kept; raises `StoreError`."""
    row = CALL.seal(vars(call))
    with store.connection.writing() as database:
        if "problem" not in call.arguments:
            database.conn.execute(_FORGET_PROBLEM, (call.key,))
        return bool(database.conn.execute(_PUT, list(row.values())).rowcount > 0)


def calls(store: Store) -> list[RecordedCall]:
    """Return the recorded calls in their order; raises `StoreError`.

    Corrupt rows are left out, with one line in the log for each.
    """
    with store.connection.reading() as connection:
        found = connection.execute(f"{CALL.select} ORDER BY rowid").fetchall()
    return [RecordedCall(**values) for values in CALL.sound(found, store.report_corrupt)]
