"""The local store: outcomes and choices in one SQLite database that processes share.

Statements are plain `sqlite3`, built once, and every write is one BEGIN IMMEDIATE transaction. A
corrupt row is absent, and logged once. Every method raises `StoreError` and nothing else
(`RecordError` for a record that no store keeps); `lookup` keeps that out of a run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetune.errors import StoreError
from safetune.messages import logger
from safetune.outcome import TRANSIENT, Outcome
from safetune.store.local import db_files, rows
from safetune.store.local.connection import Connection, ReadOnlyConnection
from safetune.store.local.db_files import Damaged
from safetune.store.local.rows import CALL, CHOICE, DEVICE, KERNEL, KEY, TRIAL, Scalar, Table, text
from safetune.store.records import (
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

    from typing_extensions import Self

    from safetune.store.shared.layer import SharedLayer

#: The origin of a choice that is not the record of a shared store: see `Store.origin`.
IMPORTED = "import"
AGREED = "sync()"

#: Of one config list the choice that `records.wins` prefers; of several lists, the newest first.
_BEST_FIRST = "ORDER BY choice.generation DESC, choice.created DESC"
CHOICES_OF_KEY = f"{CHOICE.select} WHERE key = ? {_BEST_FIRST}"
CHOICES_OF_LIST = f"{CHOICE.select} WHERE key = ? AND declared = ? ORDER BY generation DESC"
_CHOSEN = "SELECT key, declared FROM choice WHERE created > ?"
_ORIGIN = "SELECT origin FROM choice WHERE key = ? AND declared = ? AND generation = ?"
_TRIALS_OF_KEY = f"{TRIAL.select} WHERE key = ? ORDER BY generation, rowid"

_OF_NAME = "WHERE key.name = ifnull(?, key.name)"
_RELATED = "WHERE key.kernel = ? AND key.device = ?"
_OF_KEYS = "JOIN key ON key.digest = {0}.key {1} {2}"
_KEYS = f"{KEY.select} {_OF_NAME} ORDER BY name, rowid"
_CHOICES = f"{CHOICE.select} {_OF_KEYS.format('choice', _OF_NAME, _BEST_FIRST)}"
_TRIALS = f"{TRIAL.select} {_OF_KEYS.format('trial', _OF_NAME, 'ORDER BY generation, trial.rowid')}"
_RELATED_KEYS = f"{KEY.select} {_RELATED} ORDER BY rowid"
_RELATED_CHOICES = f"{CHOICE.select} {_OF_KEYS.format('choice', _RELATED, _BEST_FIRST)}"

_HAS_KEY = (
    "SELECT 1 FROM key JOIN kernel ON kernel.digest = key.kernel "
    "JOIN device ON device.digest = key.device WHERE key.digest = ?"
)

_PASSING = ", ".join(f"'{verdict.value}'" for verdict in TRANSIENT)
_TRIED = (
    f"SELECT config_digest FROM trial WHERE key = ? AND created > ? AND verdict NOT IN ({_PASSING})"
)
_FORGET = "DELETE FROM trial WHERE key = ? AND config_digest = ?"


class Store:
    """A database of trials and choices. Safe from several threads and after a fork."""

    #: What several nodes share, if anything.
    shared: SharedLayer | None = None

    #: More keys than a program has; this bounds the file of a program whose keys never repeat.
    most_calls = 10_000

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._reported: set[tuple[Any, ...]] = set()
        self._put_keys: dict[str, tuple[tuple[Table, dict[str, Scalar]], ...]] = {}

    @classmethod
    def open(cls, directory: Path, wait_s: float = math.inf) -> Self:
        """Open `safetune.db` in `directory`, creating both if they are missing.

        Args:
            wait_s: for all waits of this process together.
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

    def close(self) -> None:
        """Close the database; every later call raises `StoreError`."""
        self.connection.close()

    def put_key(self, record: KeyRecord) -> None:
        """Write a key with its kernel and device, or refresh them."""
        prepared = self._put_keys[text(record.digest)] = rows.key_rows(record)
        with self.connection.transaction() as connection:
            for table, row in prepared:
                table.upsert(connection, row)

    def put_trial(self, *records: TrialRecord) -> None:
        """Write outcomes of configs of one key, over earlier rows of the same generation.

        A transient outcome never replaces a row: it says nothing about the config.
        """
        sealed = [(rows.trial_row(record), record.outcome.verdict) for record in records]
        with self.connection.transaction() as connection:
            for row, verdict in sealed:
                self._restore_key(connection, row)
                if verdict in TRANSIENT:
                    TRIAL.insert(connection, row, "IGNORE")
                else:
                    TRIAL.upsert(connection, row)

    def trials(self, key: str, generation: int | None = None) -> list[TrialRecord]:
        """Return the outcomes of a key, or of one generation, in the order of their writing."""
        with self.connection.reading() as connection:
            found = self._checked(connection, TRIAL, _TRIALS_OF_KEY, text(key))
        return [trial for trial in found if generation in (None, trial.generation)]

    def outcomes(self, key: str) -> dict[str, Outcome]:
        """Return the latest outcome of each config of a key that is not transient, by digest."""
        return {
            trial.config_digest: trial.outcome
            for trial in self.trials(key)
            if trial.outcome.verdict not in TRANSIENT
        }

    def tried(self, key: str, since: float) -> set[str]:
        """Return the configs of a key with an outcome since a time that is not transient."""
        with self.connection.reading() as connection:
            return {digest for (digest,) in connection.execute(_TRIED, (text(key), since))}

    def forget(self, key: str, configs: Iterable[str]) -> None:
        """Delete the outcomes of configs of a key, which are then tried again."""
        with self.connection.transaction() as connection:
            connection.executemany(_FORGET, [(text(key), config) for config in configs])

    def choice(
        self, key: str, declared: str | None = None, among: Collection[str] | None = None
    ) -> ChoiceRecord | None:
        """Return the choice of the highest generation of this config list, or of any.

        With `among`, only configs of these digests count.
        """
        wanted = [text(digest) for digest in (key, declared) if digest is not None]
        statement = CHOICES_OF_KEY if declared is None else CHOICES_OF_LIST
        with self.connection.reading() as connection:
            found = self._checked(connection, CHOICE, statement, *wanted)
        return next((c for c in found if among is None or c.config_digest in among), None)

    def put_choice(self, record: ChoiceRecord) -> ChoiceRecord:
        """Write a choice unless its key, list and generation have one; return what is there now."""
        row = rows.choice_row(record)
        wanted = [row[name] for name in CHOICE.primary_key]
        with self.connection.transaction() as connection:
            self._restore_key(connection, row)
            stored = self._checked(connection, CHOICE, CHOICE.select_one, *wanted)
            if not stored:
                CHOICE.insert(connection, row, "REPLACE")  # also over a row that is corrupt
                stored = self._checked(connection, CHOICE, CHOICE.select_one, *wanted)
            if not stored:
                raise Damaged("the row that was just written is not found")
        return stored[0]

    def generation(self, key: str) -> int:
        """Return the highest generation with a trial or choice, 0 if none."""
        found = [*self.trials(key), self.choice(key)]
        return max((record.generation for record in found if record), default=0)

    def related(self, kernel_digest: str, device_digest: str) -> list[RelatedChoice]:
        """Return the current choice of each key and config list of a kernel on a device."""
        wanted = (text(kernel_digest), text(device_digest))
        with self.connection.reading() as connection:
            keys = self._fetch_keys(connection, _RELATED_KEYS, *wanted)
            current = _first_of_lists(self._fetch(connection, CHOICE, _RELATED_CHOICES, *wanted))
        return [
            RelatedChoice(key["toolchain"], key["call"], choice)
            for key in keys
            for choice in current.get(key["digest"], {}).values()
        ]

    def choices(self, kernel_name: str | None = None) -> list[StoredChoice]:
        """Return the current choice of every key, or of one kernel's keys, by kernel name."""
        current: dict[str, StoredChoice] = {}
        for stored in self.choices_of_lists(kernel_name):
            current.setdefault(stored.key.digest, stored)
        return list(current.values())

    def chosen(self, since: float) -> set[tuple[str, str]]:
        """Return the key and the list of each choice made after a time; raises `StoreError`."""
        with self.connection.reading() as connection:
            return {(key, declared) for key, declared in connection.execute(_CHOSEN, (since,))}

    def choices_of_lists(self, kernel_name: str | None = None) -> list[StoredChoice]:
        """Return the current choice of every key and list, the newest list of a key first."""
        with self.connection.reading() as connection:
            keys = self._keys(connection, kernel_name)
            choices = self._fetch(connection, CHOICE, _CHOICES, _name(kernel_name))
        current = _first_of_lists(choices)
        return [
            StoredChoice(key, choice)
            for key in keys
            for choice in current.get(key.digest, {}).values()
        ]

    def origin(self, choice: ChoiceRecord) -> str:
        """Return which shared store a choice is from, `IMPORTED` or `AGREED`; else an empty one."""
        wanted = (choice.key, choice.declared, choice.generation)
        try:
            with self.connection.reading() as connection:
                found = connection.execute(_ORIGIN, wanted).fetchone()
        except StoreError:  # it is only read, and older than the column
            return ""
        return str(found[0]) if found else ""

    def trials_of(
        self, kernel_name: str | None = None
    ) -> list[tuple[KeyRecord, list[TrialRecord]]]:
        """Return every key, or those of one kernel, with its trials of all generations."""
        with self.connection.reading() as connection:
            keys = self._keys(connection, kernel_name)
            found = self._fetch(connection, TRIAL, _TRIALS, _name(kernel_name))
        trials: dict[str, list[TrialRecord]] = {key.digest: [] for key in keys}
        for trial in found:
            trials.setdefault(trial.key, []).append(trial)
        return [(key, trials[key.digest]) for key in keys]

    def keys(self) -> list[KeyRecord]:
        """Return every key, by kernel name."""
        with self.connection.reading() as connection:
            return self._keys(connection, None)

    def kernels(self) -> list[str]:
        """Return the names of all kernels with a key, sorted."""
        with self.connection.reading() as connection:
            found = connection.execute("SELECT DISTINCT name FROM key ORDER BY name").fetchall()
        return [str(name) for (name,) in found]

    def clear(self, kernel_name: str, digests: Collection[str] | None = None) -> int:
        """Delete a kernel's keys, or those of some digests, with their trials and choices.

        Return how many keys were deleted. With all keys go all recorded calls.
        """
        name = (text(kernel_name),)
        with self.connection.transaction() as connection:
            keys = connection.execute("SELECT digest FROM key WHERE name = ?", name).fetchall()
            if digests is None:
                connection.execute("DELETE FROM call WHERE name = ?", name)
            else:
                keys = [(digest,) for (digest,) in keys if digest in digests]
            rows.delete_keys(connection, keys)
        self.ask_again()
        return len(keys)

    def ask_again(self) -> None:
        """Have the next process ask the shared store for all that is missing here now."""
        if self.path is not None:
            db_files.forget_answers(self.path)

    def put_call(self, call: RecordedCall) -> bool:
        """Write a recorded call; return whether it is new and was kept.

        One for each key: the first of those that have the most to make the call again from.
        """
        with self.connection.transaction() as connection:
            known = self._call(connection, call.key)
            if known is None:
                (found,) = connection.execute("SELECT count(*) FROM call").fetchone()
                if found >= self.most_calls:
                    return False
            elif known.completeness >= call.completeness:
                return False
            else:
                call = call.counted(known.count)
            return CALL.insert(connection, CALL.seal(vars(call)), "REPLACE")

    def count_calls(self, *counts: CallCount) -> None:
        """Add to the counts of recorded calls; those of other keys are dropped."""
        with self.connection.transaction() as connection:
            for count in counts:
                if (known := self._call(connection, count.key)) is not None:
                    counted = known.counted(known.count.plus(count))
                    CALL.upsert(connection, CALL.seal(vars(counted)))

    def _call(self, connection: sqlite3.Connection, key: str) -> RecordedCall | None:
        found = self._fetch(connection, CALL, CALL.select_one, text(key))
        return found[0] if found else None

    def calls(self) -> list[RecordedCall]:
        """Return the recorded calls in their order."""
        with self.connection.reading() as connection:
            return self._fetch(connection, CALL, f"{CALL.select} ORDER BY rowid")

    def _restore_key(self, connection: sqlite3.Connection, row: dict[str, Scalar]) -> None:
        """Write a key again that `safetune clear` deleted while this process was tuning it."""
        if connection.execute(_HAS_KEY, (row["key"],)).fetchone():
            return
        for table, of_key in self._put_keys.get(str(row["key"]), ()):
            table.put_if_absent(connection, of_key)

    def _keys(self, connection: sqlite3.Connection, kernel_name: str | None) -> list[KeyRecord]:
        kernels, devices = (
            {values["digest"]: values for values in self._fetch(connection, table, table.select)}
            for table in (KERNEL, DEVICE)
        )
        return [
            rows.key_record(key, kernels[key["kernel"]], devices[key["device"]])
            for key in self._fetch_keys(connection, _KEYS, _name(kernel_name))
            if key["kernel"] in kernels and key["device"] in devices
            if type(devices[key["device"]]["record"].get("name")) is str
        ]

    def _fetch_keys(
        self, connection: sqlite3.Connection, statement: str, *parameters: Scalar
    ) -> list[Any]:
        """The keys that a reader can use. A checksum does not guard against another program."""
        from safetune.store import schema  # msgspec is not needed to launch a stored choice

        found = self._fetch(connection, KEY, statement, *parameters)
        return [key for key in found if schema.is_call(key["call"])]

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
        """What `_fetch` returns; raises `Damaged` where an index leads to the wrong rows."""
        found = self._fetch(connection, table, statement, *wanted)
        for record in found:
            other = table is CHOICE and len(wanted) > 1 and record.declared != wanted[1]
            if other or record.key != wanted[0]:
                raise Damaged("an index leads to the wrong rows")
        return found

    def _report_corrupt(
        self, table: Table, row: Sequence[Any], error: rows.CorruptRowError
    ) -> None:
        """Log a corrupt row, once."""
        columns = list(table.columns)
        identity = tuple(row[columns.index(name)] for name in table.primary_key)
        if (table.name, *identity) not in self._reported:
            self._reported.add((table.name, *identity))
            logger.warning(
                "ignoring a corrupt row of %s: %s %s: %s", self.path, table.name, identity, error
            )


def _first_of_lists(choices: Iterable[ChoiceRecord]) -> dict[str, dict[str, ChoiceRecord]]:
    """The first choice of each config list, by list, by key."""
    first: dict[str, dict[str, ChoiceRecord]] = {}
    for choice in choices:
        first.setdefault(choice.key, {}).setdefault(choice.declared, choice)
    return first


def _name(kernel_name: str | None) -> str | None:
    return None if kernel_name is None else text(kernel_name)
