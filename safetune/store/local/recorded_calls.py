"""Recorded calls: launches without a choice, as they were, to be tuned offline.

One row for each key: the first that can be rebuilt, else the first. What is in it is checked where
it is used.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from safetune.store.local.rows import CALL
from safetune.store.local.store import Store
from safetune.store.local.table import CorruptRowError

logger = logging.getLogger("safetune")

#: More keys than any program has; it bounds the file of one that makes up keys without end.
MOST = 10_000

_PUT = (
    f"INSERT OR IGNORE INTO call ({', '.join(name for name, _ in CALL.columns)}, checksum) "
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
        name: the kernel's.
        place: `module:qualname` of the kernel's function.
        arguments: what `record` makes of the call, as plain JSON data.
        created: seconds since the epoch.
    """

    key: str
    name: str
    place: str
    arguments: dict[str, Any]
    created: float


def put_call(store: Store, call: RecordedCall) -> bool:
    """Write a call; return whether it is new, and there was room.

    Raises:
        StoreError: the database cannot be written; `RecordError` if the record is refused.
    """
    row = CALL.seal(vars(call))
    with store.connection.writing() as database:
        if "problem" not in call.arguments:
            database.conn.execute(_FORGET_PROBLEM, (call.key,))
        return bool(database.conn.execute(_PUT, list(row.values())).rowcount > 0)


def calls(store: Store) -> list[RecordedCall]:
    """Return the recorded calls in their order; raises `StoreError`.

    Corrupt rows are left out, with a line in the log.
    """
    with store.connection.reading() as connection:
        found = connection.execute(f"{CALL.select} ORDER BY rowid").fetchall()
    sound = []
    for row in found:
        try:
            sound.append(RecordedCall(**CALL.unseal(row)))
        except CorruptRowError as error:
            logger.warning("ignoring a corrupt row of %s: call %s: %s", store.path, row[0], error)
    return sound
