"""The local store: outcomes and choices in one SQLite database that processes share.

Statements are plain `sqlite3`, built once, and every write is one BEGIN IMMEDIATE transaction. What
only commands read, whole tables, is read with sqlite-utils, which a launch never imports. A corrupt
row counts as absent and is logged once. All methods raise only `StoreError` (`RecordError`
for a record that no store accepts); `lookup` shields a run from it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetune.messages import logger
from safetune.outcome import TRANSIENT, VIOLENT
from safetune.store.local import db_files, in_flight, rows
from safetune.store.local.connection import Connection, ReadOnlyConnection
from safetune.store.local.db_files import Damaged
from safetune.store.local.rows import CALL, CHOICE, KEY, OWN, TRIAL, Scalar, Table, text
from safetune.store.records import (
    PINNED_LIST,
    CallCount,
    ChoiceRecord,
    KeyRecord,
    RecordedCall,
    RelatedChoice,
    StoredChoice,
    TrialRecord,
)

if TYPE_CHECKING:
    import sqlite3

    from sqlite_utils import Database
    from typing_extensions import Self

    from safetune.store.shared.layer import SharedLayer

#: The origin of a choice that is not the record of a shared store: see `Store.origin`.
IMPORTED = "import"
AGREED = "sync()"

#: Of one config list the choice that `records.wins` prefers; of several lists, the newest first.
_BEST_FIRST = "ORDER BY choice.generation DESC, choice.created DESC"
CHOICES_OF_KEY = f"{CHOICE.select} WHERE key = ? {_BEST_FIRST}"
_OF_KERNEL = "SELECT digest FROM key WHERE kernel_name = ?"
CHOICES_OF_LIST = f"{CHOICE.select} WHERE key = ? AND declared = ? ORDER BY generation DESC"
_ORIGINS = "SELECT key, declared, generation, origin FROM choice"
_ORIGIN = f"{_ORIGINS} WHERE key = ? AND declared = ? AND generation = ?"
_TRIALS_OF_KEY = f"{TRIAL.select} WHERE key = ? ORDER BY generation, rowid"
_LATEST_TRIAL = (
    f"{TRIAL.select} WHERE key = ? AND config_digest = ? AND generation <= ? "
    "ORDER BY generation DESC LIMIT 1"
)
_DELETE_TRIAL = "DELETE FROM trial WHERE key = ? AND generation = ? AND config_digest = ?"
_VIOLENT = sorted(verdict.value for verdict in VIOLENT)
_DELETE_FAILURES = (
    f"DELETE FROM trial WHERE key = ? AND verdict IN ({', '.join('?' * len(_VIOLENT))})"
)

_RELATED = "WHERE key.kernel_digest = ? AND key.device_digest = ?"
_OF_KEYS = "JOIN key ON key.digest = {0}.key {1} {2}"
_RELATED_KEYS = f"{KEY.select} {_RELATED} ORDER BY rowid"
_RELATED_CHOICES = f"{CHOICE.select} {_OF_KEYS.format('choice', _RELATED, _BEST_FIRST)}"


class Store:
    """A database of trials and choices. Thread-safe, also after a fork."""

    #: What several nodes share, if anything.
    shared: SharedLayer | None = None

    #: More keys than a program has; this bounds the file of a program whose keys never repeat.
    most_calls = 10_000

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._reported: set[tuple[Any, ...]] = set()
        self._put_keys: dict[str, dict[str, Scalar]] = {}

    @classmethod
    def open(cls, directory: Path, wait_s: float = math.inf) -> Self:
        """Open `safetune.db` in `directory`, creating both if they are missing.

        Args:
            wait_s: SAFETUNE_WAIT.
        """
        store = cls(Connection(Path(directory) / db_files.DATABASE_NAME, wait_s))
        store.connection.open()
        return store

    @classmethod
    def open_read_only(cls, path: Path) -> Self:
        """Open a database file that is never written to."""
        store = cls(ReadOnlyConnection(path))
        store.connection.open()
        return store

    @classmethod
    def in_memory(cls) -> Self:
        """Return an empty store that lives as long as the object."""
        return cls(Connection(None))

    @property
    def path(self) -> Path | None:
        """The database file; None in memory."""
        return self.connection.path

    @property
    def outlives_machine(self) -> bool:
        """Whether the database survives a crash of the machine."""
        return self.path is not None and db_files.outlives_machine(self.path)

    def close(self) -> None:
        """Close the database; every later call raises `StoreError`."""
        if self.shared is not None:
            self.shared.close()
        self.connection.close()

    def put_key(self, record: KeyRecord) -> None:
        """Write a key, or refresh it."""
        row = self._put_keys[text(record.digest)] = KEY.seal(record)
        with self.connection.transaction() as connection:
            KEY.insert(connection, row, "REPLACE")

    def put_trial(self, *records: TrialRecord, durable: bool = False) -> None:
        """Write outcomes of configs for one key, over earlier rows of the same generation.

        A transient outcome replaces none, because it says nothing about the config. A failure of
        one call keeps the results of other calls: see `TrialRecord.after`. With `durable` they are
        on disk at the end.
        """
        sealed = [(TRIAL.seal(record), record) for record in records]
        with self.connection.transaction(durable=durable) as connection:
            for row, record in sealed:
                self._restore_key(connection, row)
                if record.outcome.verdict in TRANSIENT:
                    self._drop_in_flight(connection, row)
                    TRIAL.insert(connection, row, "IGNORE")
                    continue
                if (merged := self._merged(connection, row, record)) is not record:
                    row = TRIAL.seal(merged)
                TRIAL.insert(connection, row, "REPLACE")

    def drop_in_flight(self, record: TrialRecord) -> None:
        """Delete the row of a config that has begun to run but will have no outcome."""
        row = TRIAL.seal(record)
        with self.connection.transaction() as connection:
            self._drop_in_flight(connection, row)

    def _drop_in_flight(self, connection: sqlite3.Connection, row: dict[str, Scalar]) -> None:
        identity = [row[name] for name in TRIAL.primary_key]
        before = TRIAL.find(connection, *identity)
        if before is not None and before.flight:
            connection.execute(_DELETE_TRIAL, identity)

    def _merged(
        self, connection: sqlite3.Connection, row: dict[str, Scalar], record: TrialRecord
    ) -> TrialRecord:
        """Return the record with the failures that were seen with other calls."""
        if record.outcome.scope is None:
            return record
        wanted = row["key"], row["config_digest"], row["generation"]
        for before in self._fetch(connection, TRIAL, _LATEST_TRIAL, *wanted):
            if before.elsewhere or not (before.outcome.runs and record.outcome.runs):
                return record.after(before)
        return record

    def trials(self, key: str) -> list[TrialRecord]:
        """Return the outcomes of a key, by generation and then in writing order."""
        with self.connection.reading() as connection:
            found = self._checked(connection, TRIAL, _TRIALS_OF_KEY, text(key))
        return in_flight.landed(found) if any(trial.flight for trial in found) else found

    def choice(
        self, key: str, declared: str | None = None, among: Collection[str] | None = None
    ) -> ChoiceRecord | None:
        """Return the choice of the highest generation for this config list, or for any.

        With `among`, only configs with these digests count, and a pinned choice comes first.
        """
        lists = [declared] if declared is None or among is None else [PINNED_LIST, declared]
        with self.connection.reading() as connection:
            found = [c for each in lists for c in self._choices(connection, key, each)]
        if among is None:
            return next((choice for choice in found if choice.declared != PINNED_LIST), None)
        return next((choice for choice in found if choice.config_digest in among), None)

    def pinned(self, key: str) -> ChoiceRecord | None:
        """Return the pinned choice for a key."""
        with self.connection.reading() as connection:
            return next(iter(self._choices(connection, key, PINNED_LIST)), None)

    def _choices(
        self, connection: sqlite3.Connection, key: str, declared: str | None
    ) -> list[ChoiceRecord]:
        wanted = [text(digest) for digest in (key, declared) if digest is not None]
        statement = CHOICES_OF_KEY if declared is None else CHOICES_OF_LIST
        return self._checked(connection, CHOICE, statement, *wanted)

    def put_choice(self, record: ChoiceRecord) -> ChoiceRecord:
        """Write a choice unless its key, list and generation have one; return the stored one."""
        row = CHOICE.seal(record)
        wanted = [row[name] for name in CHOICE.primary_key]
        with self.connection.transaction() as connection:
            self._restore_key(connection, row)
            CHOICE.put_if_absent(connection, row)
            stored = self._checked(connection, CHOICE, CHOICE.select_one, *wanted)
            if not stored:
                raise Damaged("the row just written is missing")
        return stored[0]

    def generation(self, key: str) -> int:
        """Return the highest generation with a trial or choice; 0 if none."""
        found = [*self.trials(key), self.choice(key)]
        return max((record.generation for record in found if record), default=0)

    def related(self, kernel_digest: str, device_digest: str) -> list[RelatedChoice]:
        """Return the current choices of a kernel on a device, one per key and config list."""
        wanted = (text(kernel_digest), text(device_digest))
        with self.connection.reading() as connection:
            keys = _readable(self._fetch(connection, KEY, _RELATED_KEYS, *wanted))
            current = _first_of_lists(self._fetch(connection, CHOICE, _RELATED_CHOICES, *wanted))
        return [
            RelatedChoice(key.toolchain, key.call, choice)
            for key in keys
            for choice in current.get(key.digest, {}).values()
        ]

    def choices(self, kernel_name: str | None = None) -> list[StoredChoice]:
        """Return the current choice of each key, or of one kernel's keys, by kernel name."""
        current: dict[str, StoredChoice] = {}
        for stored in self.choices_of_lists(kernel_name):
            if stored.choice.pinned or stored.key.digest not in current:
                current[stored.key.digest] = stored
        return list(current.values())

    def choices_of_lists(self, kernel_name: str | None = None) -> list[StoredChoice]:
        """Return the current choice of each key and list, a key's newest list first."""
        found = self._all(CHOICE, kernel_name, "generation DESC, created DESC")
        current = _first_of_lists(found)
        return [
            StoredChoice(key, choice)
            for key in self.keys(kernel_name)
            for choice in current.get(key.digest, {}).values()
        ]

    def origin(self, choice: ChoiceRecord) -> str:
        """Return a choice's origin: its shared store, `IMPORTED` or `AGREED`; empty otherwise."""
        wanted = (choice.key, choice.declared, choice.generation)
        with self.connection.reading() as connection:
            found = connection.execute(_ORIGIN, wanted).fetchall()
        return _origins(found).get(wanted, "")

    def origins(self) -> dict[tuple[str, str, int], str]:
        """Return `origin` of all choices, by key, list and generation."""
        with self.connection.reading() as connection:
            return _origins(connection.execute(_ORIGINS).fetchall())

    def trials_of(
        self, kernel_name: str | None = None
    ) -> list[tuple[KeyRecord, list[TrialRecord]]]:
        """Return all keys, or one kernel's, with their trials of all generations."""
        of_key: dict[str, list[TrialRecord]] = {}
        for trial in self._all(TRIAL, kernel_name, "generation, rowid"):
            of_key.setdefault(trial.key, []).append(trial)
        keys = self.keys(kernel_name)
        return [(key, in_flight.landed(of_key.get(key.digest, ()))) for key in keys]

    def keys(self, kernel_name: str | None = None) -> list[KeyRecord]:
        """Return all keys, or one kernel's, by kernel name, with the last known file of each."""
        return _with_known_files(_readable(self._all(KEY, kernel_name, "kernel_name, rowid")))

    def corrupt_rows(self) -> int:
        """Read everything; return how many rows were ignored as corrupt."""
        self.keys(), self.trials_of(), self.choices_of_lists(), self.calls()
        return len(self._reported)

    def kernels(self) -> list[str]:
        """Return the names of all kernels with a key, sorted."""
        with self.tables() as database:
            name = "kernel_name"
            names = database["key"].rows_where(select=f"DISTINCT {name}", order_by=name)
            return [str(row[name]) for row in names]

    def clear(self, kernel_name: str, digests: Collection[str] | None = None) -> int:
        """Delete a kernel's keys, or those with some digests, with their trials and choices.

        Return how many keys were deleted. Deleting all keys also deletes all recorded calls.
        """
        name = (text(kernel_name),)
        with self.connection.transaction() as connection:
            keys = connection.execute(_OF_KERNEL, name).fetchall()
            if digests is None:
                connection.execute("DELETE FROM call WHERE name = ?", name)
            else:
                keys = [(digest,) for (digest,) in keys if digest in digests]
            rows.delete_keys(connection, keys)
        return len(keys)

    def clear_failures(self, digests: Collection[str]) -> int:
        """Delete the outcomes of crashed or hung configs for some keys; return how many."""
        with self.connection.transaction() as connection:
            return sum(
                connection.execute(_DELETE_FAILURES, (digest, *_VIOLENT)).rowcount
                for digest in digests
            )

    def put_call(self, call: RecordedCall) -> bool:
        """Write a recorded call; return whether it is new and was kept.

        Keeps one call per key: the first of the most completely described ones.
        """
        with self.connection.transaction() as connection:
            known = CALL.find(connection, text(call.key))
            if known is None:
                (found,) = connection.execute("SELECT count(*) FROM call").fetchone()
                if found >= self.most_calls:
                    return False
            elif known.completeness >= call.completeness:
                return False
            else:
                call = call.counted(known.count)
            return CALL.insert(connection, CALL.seal(call), "REPLACE")

    def count_calls(self, *counts: CallCount) -> None:
        """Add to the counts of recorded calls; counts of other keys are dropped."""
        with self.connection.transaction() as connection:
            for count in counts:
                if (known := CALL.find(connection, text(count.key))) is not None:
                    counted = known.counted(known.count.plus(count))
                    CALL.insert(connection, CALL.seal(counted), "REPLACE")

    def calls(self) -> list[RecordedCall]:
        """Return the recorded calls in order."""
        return self._all(CALL)

    @contextlib.contextmanager
    def tables(self) -> Iterator[Database]:
        """Yield the database as sqlite-utils opens it, for commands; raises `StoreError`."""
        from sqlite_utils import Database

        with self.connection.reading() as sqlite:
            yield Database(sqlite, recursive_triggers=False, execute_plugins=False)

    def _all(self, table: Table, kernel: str | None = None, order_by: str = "rowid") -> list[Any]:
        """All sound records of a table, or those of one kernel's keys."""
        of_kernel = "kernel_name = ?" if table is KEY else f"key IN ({_OF_KERNEL})"
        where, given = (None, []) if kernel is None else (of_kernel, [text(kernel)])
        columns = ", ".join(["record", *table.primary_key])
        with self.tables() as database:
            found = database[table.name].rows_where(where, given, order_by, columns)
            return list(table.sound([(*row.values(),) for row in found], self._report_corrupt))

    def _restore_key(self, connection: sqlite3.Connection, row: dict[str, Scalar]) -> None:
        """Write a key again that `safetune clear` deleted while this process was tuning it."""
        if known := self._put_keys.get(str(row["key"])):
            KEY.insert(connection, known, "IGNORE")

    def _fetch(
        self, connection: sqlite3.Connection, table: Table, statement: str, *parameters: Scalar
    ) -> list[Any]:
        """The records of the sound rows; a corrupt one is absent, and reported once.

        All rows at once: a half-read SELECT would pin an old snapshot and block a COMMIT.
        """
        found = connection.execute(statement, parameters).fetchall()
        return list(table.sound(found, self._report_corrupt))

    def _checked(
        self, connection: sqlite3.Connection, table: Table, statement: str, *wanted: Scalar
    ) -> list[Any]:
        """Return what `_fetch` returns; raises `Damaged` if an index points to the wrong rows."""
        found = self._fetch(connection, table, statement, *wanted)
        for record in found:
            other = table is CHOICE and len(wanted) > 1 and record.declared != wanted[1]
            if other or record.key != wanted[0]:
                raise Damaged("an index points to the wrong rows")
        return found

    def _report_corrupt(
        self, table: Table, row: Sequence[Any], error: rows.CorruptRowError
    ) -> None:
        """Log a corrupt row, once."""
        _, *identity = row
        if (table.name, *identity) not in self._reported:
            self._reported.add((table.name, *identity))
            logger.warning(
                "ignoring a corrupt row of %s: %s %s: %s",
                self.path,
                table.name,
                tuple(identity),
                error,
            )


def _origins(rows: Iterable[tuple[str, str, int, Any]]) -> dict[tuple[str, str, int], str]:
    """The origins by what identifies a choice; empty of one that was made here."""
    return {
        (key, declared, generation): "" if str(origin).startswith(OWN) else str(origin)
        for key, declared, generation, origin in rows
    }


def _first_of_lists(choices: Iterable[ChoiceRecord]) -> dict[str, dict[str, ChoiceRecord]]:
    """The first choice of each config list, by list, by key."""
    first: dict[str, dict[str, ChoiceRecord]] = {}
    for choice in choices:
        first.setdefault(choice.key, {}).setdefault(choice.declared, choice)
    return first


def _readable(keys: Iterable[KeyRecord]) -> list[KeyRecord]:
    """The keys that a reader can use."""
    from safetune.store import schema  # not needed to launch a stored choice

    return list(filter(schema.is_readable, keys))


def _with_known_files(keys: Sequence[KeyRecord]) -> list[KeyRecord]:
    """The keys with the last known file of their kernels: an imported one has none."""
    last = {(key.kernel_name, key.kernel_digest): key for key in keys if key.kernel_file}
    known = [last.get((key.kernel_name, key.kernel_digest), key) for key in keys]
    return [
        replace(key, kernel_file=other.kernel_file, kernel_line=other.kernel_line)
        for key, other in zip(keys, known, strict=True)
    ]
