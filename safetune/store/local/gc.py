"""What a store holds in numbers, and deleting keys that are not needed any more."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetune.errors import StoreError
from safetune.store.local import key_locks, recovery
from safetune.store.local.store import CLEAR_UNUSED

if TYPE_CHECKING:
    from safetune.store.local.connection import Connection
    from safetune.store.local.store import Store


#: The tables with a row for each of many things of one key.
_OF_KEY = ("trial", "choice", "call")

#: Each key that anything is stored of: digest, newest row, number of rows, toolchain.
_AGES = (
    "SELECT known.digest, max(created), count(created), key.toolchain FROM ("
    "SELECT digest, NULL AS created FROM key UNION ALL SELECT key, created FROM trial "
    "UNION ALL SELECT key, created FROM choice UNION ALL SELECT key, created FROM call) AS known "
    "LEFT JOIN key ON key.digest = known.digest GROUP BY known.digest ORDER BY 2, 1"
)

_VERDICTS = "SELECT verdict FROM trial"
_DEVICES = "SELECT device.record FROM key JOIN device ON device.digest = key.device"


@dataclass(frozen=True)
class Rule:
    """What may go.

    Attributes:
        before: seconds since the epoch; keys with nothing newer go, and databases moved aside
            before. None: whatever their age, they stay.
        triton: keys of any other version go; None: of none.
        most_bytes: the oldest keys go until the file is about that small; None: any size will do.
    """

    before: float | None = None
    triton: str | None = None
    most_bytes: int | None = None


@dataclass(frozen=True)
class Swept:
    """What went, or would have gone.

    Attributes:
        keys: how many, with all their trials, choices and recorded calls.
        bytes_before, bytes_after: of the database; the same where nothing went.
        files: databases that had been moved aside.
    """

    keys: int
    trials: int
    choices: int
    calls: int
    files: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class _Key:
    digest: str
    newest: float
    rows: int
    triton: str


def sweep(store: Store, rule: Rule, dry_run: bool) -> Swept:
    """Delete what the rule lets go, and give the space back; keys being tuned now stay.

    Raises:
        StoreError: the database cannot be read or written.
    """
    connection = store.connection
    before = _size(connection)
    with connection.transaction() as database:
        gone = [key.digest for key in _doomed(_idle(database, store.path), rule, before)]
        trials, choices, calls = (_count(database, table, gone) for table in _OF_KEY)
        if not dry_run:
            _delete(database, gone)
    files = _moved_before(connection.path, rule.before)
    if not dry_run:
        for path in files:
            recovery.remove(path)
        if gone:
            _shrink(connection)
    return Swept(len(gone), trials, choices, calls, len(files), before, _size(connection))


def stats(store: Store) -> dict[str, Any]:
    """Return what is in a store, in numbers, as plain JSON data; raises `StoreError`."""
    with store.connection.reading() as database:
        keys = list(_keys(database))
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
        "tuning_now": len(key_locks.locked(path, [key.digest for key in keys])),
        "moved_aside": [str(each) for each in recovery.moved(path)] if path else [],
    }


def _keys(database: sqlite3.Connection) -> Iterator[_Key]:
    """Every key that anything is stored of, the oldest first."""
    for digest, newest, count, toolchain in database.execute(_AGES).fetchall():
        yield _Key(digest, _number(newest), count, _field(toolchain, "triton"))


def _idle(database: sqlite3.Connection, path: Path | None) -> list[_Key]:
    """The keys that no process is tuning now."""
    keys = list(_keys(database))
    locked = key_locks.locked(path, [key.digest for key in keys])
    return [key for key in keys if key.digest not in locked]


def _doomed(keys: list[_Key], rule: Rule, size: int) -> Iterator[_Key]:
    total = sum(key.rows for key in keys) or 1
    for key in keys:
        old = rule.before is not None and key.newest < rule.before
        dead = rule.triton is not None and key.triton != rule.triton
        if old or dead or (rule.most_bytes is not None and size > rule.most_bytes):
            size -= -(-size * key.rows // total)
            total -= min(key.rows, total - 1)
            yield key


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _field(text: Any, name: str) -> str:
    """One value in JSON that may be anything."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        record = json.loads(text)
        if isinstance(record, Mapping):
            return str(record.get(name, ""))
    return ""


def _count(database: sqlite3.Connection, table: str, gone: list[str]) -> int:
    count = f"SELECT count(*) FROM {table} WHERE key = ?"
    return sum(database.execute(count, (digest,)).fetchone()[0] for digest in gone)


def _delete(database: sqlite3.Connection, gone: list[str]) -> None:
    for table, column in (*((table, "key") for table in _OF_KEY), ("key", "digest")):
        rows = [(digest,) for digest in gone]
        database.executemany(f"DELETE FROM {table} WHERE {column} = ?", rows)
    for statement in CLEAR_UNUSED:
        database.execute(statement)


def _shrink(connection: Connection) -> None:
    """Give the space back; where others are at work it stays for what comes next."""
    for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
        with contextlib.suppress(StoreError), connection.reading() as database:
            database.execute(statement).fetchall()


def _moved_before(path: Path | None, before: float | None) -> list[Path]:
    if path is None or before is None:
        return []
    return [each for each in recovery.moved(path) if each.lstat().st_mtime < before]


def _size(connection: Connection) -> int:
    with connection.reading() as database:
        pages, page = (
            database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")
        )
    return int(pages) * int(page)
