"""What a store holds in numbers, and deleting keys that are not needed any more."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from safetune.errors import StoreError
from safetune.frozen import dataclass
from safetune.store.local import db_files, locks
from safetune.store.local.rows import OF_KEY, delete_keys

if TYPE_CHECKING:
    from safetune.store.local.connection import Connection
    from safetune.store.local.store import Store


#: Each key that anything is stored of: digest, newest row, number of rows, toolchain.
_AGES = (
    "SELECT known.digest, max(created), count(created), key.toolchain FROM ("
    "SELECT digest, NULL AS created FROM key UNION ALL SELECT key, created FROM trial "
    "UNION ALL SELECT key, created FROM choice UNION ALL SELECT key, created FROM call) AS known "
    "LEFT JOIN key ON key.digest = known.digest GROUP BY known.digest ORDER BY 2, 1"
)

_COUNT = "SELECT count(*) FROM {} WHERE key = ?"
_VERDICTS = "SELECT verdict FROM trial"
_DEVICES = "SELECT device.record FROM key JOIN device ON device.digest = key.device"


@dataclass(frozen=True)
class Rule:
    """The keys to delete. A field that is None deletes none."""

    #: Seconds since the epoch: keys without a newer row, and databases that were moved aside
    #: before.
    before: float | None = None
    triton: str | None = None  # keys of every other version of Triton
    #: The oldest keys, until the file, without its free pages, has about this size.
    most_bytes: int | None = None


@dataclass(frozen=True)
class Swept:
    """How much was deleted, or would have been: `files` are databases that had been moved aside.

    `empty` of the keys had no trial, choice or recorded call: nothing came of their tuning.
    """

    keys: int
    empty: int
    trials: int
    choices: int
    calls: int
    files: int
    bytes_before: int
    bytes_after: int


class _Key(NamedTuple):
    digest: str
    newest: float
    rows: int
    triton: str


def sweep(store: Store, rule: Rule, dry_run: bool) -> Swept:
    """Delete the keys of a rule and shrink the file; keys that are being tuned now stay."""
    connection, path = store.connection, store.path
    before = _size(connection)
    with connection.transaction() as database:
        keys = _keys(database)
        locked = locks.locked(path, [key.digest for key in keys])
        idle = [key for key in keys if key.digest not in locked]
        size = _size(connection, "- freelist_count")
        matching = list(_matching(idle, rule, size))
        gone = [(key.digest,) for key in matching]
        trials, choices, calls = (
            sum(database.execute(_COUNT.format(table), key).fetchone()[0] for key in gone)
            for table in OF_KEY
        )
        if not dry_run:
            delete_keys(database, gone)
    files = [] if path is None or rule.before is None else db_files.moved(path, rule.before)
    if not dry_run:
        for file in files:
            db_files.remove(file)
        if gone or (rule.most_bytes is not None and before > rule.most_bytes):
            _shrink(connection)
        if gone:
            store.ask_again()
    empty = sum(not key.rows for key in matching)
    return Swept(len(gone), empty, trials, choices, calls, len(files), before, _size(connection))


def stats(store: Store) -> dict[str, Any]:
    """Return the contents of a store in numbers, as plain JSON data; raises `StoreError`."""
    with store.connection.reading() as database:
        keys = _keys(database)
        trials = Counter(str(verdict) for (verdict,) in database.execute(_VERDICTS))
        devices = Counter(_field(record, "name") for (record,) in database.execute(_DEVICES))
        choices, calls = (
            database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("choice", "call")
        )
        kernels = database.execute("SELECT count(DISTINCT name) FROM key").fetchone()[0]
    path = store.path
    dates = [key.newest for key in keys if key.newest]
    return {
        "path": None if path is None else str(path),
        "bytes": _size(store.connection),
        "kernels": kernels,
        "keys": len(keys),
        "choices": choices,
        "trials": sum(trials.values()),
        "recorded": calls,
        "verdicts": dict(sorted(trials.items())),
        "devices": dict(sorted(devices.items())),
        "tritons": dict(sorted(Counter(key.triton for key in keys).items())),
        "oldest": min(dates, default=None),
        "newest": max(dates, default=None),
        "tuning_now": len(locks.locked(path, [key.digest for key in keys])),
        "moved_aside": [str(each) for each in db_files.moved(path)] if path else [],
    }


def _keys(database: sqlite3.Connection) -> list[_Key]:
    """Every key that has a row in any table, the oldest first."""
    found = database.execute(_AGES).fetchall()
    return [
        _Key(digest, newest if type(newest) in (int, float) else 0, count, _field(chain, "triton"))
        for digest, newest, count, chain in found
    ]


def _matching(keys: list[_Key], rule: Rule, size: int) -> Iterator[_Key]:
    total = sum(key.rows for key in keys) or 1
    for key in keys:
        old = rule.before is not None and key.newest < rule.before
        other = rule.triton is not None and key.triton != rule.triton
        if old or other or (rule.most_bytes is not None and size > rule.most_bytes):
            size -= -(-size * key.rows // total)
            total -= min(key.rows, total - 1)
            yield key


def _field(text: Any, name: str) -> str:
    """One value in JSON that may be anything."""
    with contextlib.suppress(TypeError, ValueError, RecursionError, AttributeError):
        return str(json.loads(text).get(name, ""))
    return ""


def _shrink(connection: Connection) -> None:
    """Shrink the file; if other processes use it, the free pages stay in it for later rows."""
    for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
        with contextlib.suppress(StoreError), connection.reading() as database:
            database.execute(statement).fetchall()


def _size(connection: Connection, less: str = "") -> int:
    pragmas = "pragma_page_count, pragma_freelist_count, pragma_page_size"
    with connection.reading() as database:
        found = database.execute(f"SELECT (page_count {less}) * page_size FROM {pragmas}")
        return int(found.fetchone()[0])
