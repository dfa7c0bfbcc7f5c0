"""The local store: outcomes and choices in one SQLite database that processes share.

Reads are plain `sqlite3` with statements built once; `sqlite_utils` is imported at the first write.
Every write is one BEGIN IMMEDIATE transaction. A row whose checksum does not match is absent, and
logged once. Every method raises `StoreError` and nothing else; `lookup` is what keeps that out of a
run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetune.errors import StoreError
from safetune.outcome import TRANSIENT
from safetune.store.local import queries, rows
from safetune.store.local.connection import Connection
from safetune.store.local.lease import Contender, Lease, check
from safetune.store.local.queries import fetch
from safetune.store.local.recovery import Damaged
from safetune.store.local.rows import CHOICE, DEVICE, KERNEL, KEY, TRIAL
from safetune.store.local.table import CorruptRowError, Scalar, Table, text
from safetune.store.records import (
    ChoiceRecord,
    KeyRecord,
    KinChoice,
    StoredChoice,
    TrialRecord,
)

if TYPE_CHECKING:
    import sqlite3

    from sqlite_utils import Database
    from typing_extensions import Self

    from safetune.store.shared.layer import SharedLayer

DATABASE_NAME = "safetune.db"

logger = logging.getLogger("safetune")

Record = TypeVar("Record")


class Store:
    """A database of trials and choices. Safe from several threads and after a fork."""

    #: What several nodes share, if anything.
    shared: SharedLayer | None = None

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reported: set[tuple[Any, ...]] = set()

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open `safetune.db` in `directory`, creating both if they are missing.

        Raises:
            StoreError: it cannot be created, read or brought up to date; names path and reason.
        """
        store = cls(Connection(Path(directory) / DATABASE_NAME))
        store._connection.open()
        return store

    @classmethod
    def in_memory(cls) -> Self:
        """Return an empty store that lives as long as the object."""
        return cls(Connection(None))

    @property
    def path(self) -> Path | None:
        """The database file; None in memory."""
        return self._connection.path

    @property
    def connection(self) -> Connection:
        """What it reads and writes through."""
        return self._connection

    def close(self) -> None:
        """Close the database; every later call raises `StoreError`."""
        self._connection.close()

    def contender(self, name: str) -> Contender:
        """Return what asks for the lease of this name, as often as it is asked to."""
        return Contender(self._connection, name)

    def put_key(self, record: KeyRecord) -> None:
        """Write a key with its kernel and device, or refresh them; raises `StoreError`."""
        prepared = rows.key_rows(record)
        with self._connection.writing() as database:
            for table, row in prepared:
                _upsert(database, table, row)

    def put_trial(self, record: TrialRecord, lease: Lease | None = None) -> None:
        """Write what became of one config, over an earlier row of the same generation.

        A transient outcome never replaces a row: it says nothing of the config.

        Args:
            lease: what the writer must still hold when this is written.

        Raises:
            StoreError: it cannot be written; `RecordError` if the record itself is refused,
                `LeaseLost` if another process has the lease now.
        """
        row = rows.trial_row(record)
        with self._connection.writing() as database:
            check(lease, database.conn)
            if record.outcome.verdict in TRANSIENT:
                _table(database, TRIAL).insert(row, pk=TRIAL.primary_key, ignore=True)
            else:
                _upsert(database, TRIAL, row)

    def trials(self, key: str, generation: int | None = None) -> list[TrialRecord]:
        """Return the outcomes of a key, or of one generation of it; raises `StoreError`.

        In the order of generations, and within one in that of writing.
        """
        wanted: list[Scalar] = [text(key)]
        if generation is not None:
            wanted.append(generation)
        statement = queries.TRIALS_OF_KEY if generation is None else queries.TRIALS_OF_GENERATION
        with self._connection.reading() as connection:
            found = fetch(connection, statement, *wanted)
            trials = list(self._valid(TRIAL, found, rows.trial_record))
            _check_found(trials, *wanted)
        return trials

    def choice(self, key: str, declared: str | None = None) -> ChoiceRecord | None:
        """Return the choice of the highest generation; raises `StoreError`.

        Args:
            declared: the config list that it is chosen from; of any list if None.
        """
        wanted = [text(name) for name in (key, declared) if name is not None]
        statement = queries.CHOICES_OF_KEY if declared is None else queries.CHOICES_OF_LIST
        with self._connection.reading() as connection:
            found = fetch(connection, statement, *wanted)
            choices = list(self._valid(CHOICE, found, rows.choice_record))
            _check_found(choices, *wanted)
        return choices[0] if choices else None

    def put_choice(self, record: ChoiceRecord, lease: Lease | None = None) -> ChoiceRecord:
        """Write a choice unless its generation has one; return the one that is stored now.

        One for each key, config list and generation. `lease` and what is raised: see `put_trial`.
        """
        row = rows.choice_row(record)
        with self._connection.writing() as database:
            check(lease, database.conn)
            wanted = [row[name] for name in CHOICE.primary_key]
            find = functools.partial(fetch, database.conn, queries.CHOICE_OF_GENERATION, *wanted)
            stored = list(self._valid(CHOICE, find(), rows.choice_record))
            if not stored:
                # Replaces a row that is there but corrupt.
                _upsert(database, CHOICE, row)
                stored = list(self._valid(CHOICE, find(), rows.choice_record))
                if not stored:
                    raise Damaged("what was just written is not found")
            _check_found(stored, *wanted)
        return stored[0]

    def generation(self, key: str) -> int:
        """Return the highest generation with a trial or choice, 0 if none; raises `StoreError`."""
        with self._connection.reading() as connection:
            choices = fetch(connection, queries.CHOICES_OF_KEY, text(key))
            trials = fetch(connection, queries.TRIALS_OF_KEY, text(key))
        choice = next(self._valid(CHOICE, choices, rows.choice_record), None)
        trial = next(self._valid(TRIAL, reversed(trials), rows.trial_record), None)
        return max(choice.generation if choice else 0, trial.generation if trial else 0)

    def kin(self, kernel_digest: str, device_digest: str) -> list[KinChoice]:
        """Return the current choices of a kernel's keys on a device; raises `StoreError`.

        One for each key and list of configs.
        """
        wanted = (text(kernel_digest), text(device_digest))
        with self._connection.reading() as connection:
            found_keys = fetch(connection, queries.KIN_KEYS, *wanted)
            found = fetch(connection, queries.KIN_CHOICES, *wanted)
        keys = {key["digest"]: key for key in self._valid(KEY, found_keys, KEY.unseal)}
        current: dict[str, dict[str, ChoiceRecord]] = {digest: {} for digest in keys}
        for choice in self._valid(CHOICE, found, rows.choice_record):
            current.get(choice.key, {}).setdefault(choice.declared, choice)
        return [
            KinChoice(keys[digest]["toolchain"], keys[digest]["call"], choice)
            for digest, choices in current.items()
            for choice in choices.values()
        ]

    def choices(self, kernel_name: str | None = None) -> list[StoredChoice]:
        """Return the current choice of every key, or of one kernel's keys, by kernel name.

        Raises:
            StoreError: the database cannot be read.
        """
        with self._connection.reading() as connection:
            keys = self._keys(connection, kernel_name)
            found = fetch(connection, queries.CHOICES, *queries.name_twice(kernel_name))
        current: dict[str, ChoiceRecord] = {}
        for choice in self._valid(CHOICE, found, rows.choice_record):
            current.setdefault(choice.key, choice)
        return [StoredChoice(key, current[key.digest]) for key in keys if key.digest in current]

    def trials_of(self, kernel_name: str) -> list[tuple[KeyRecord, list[TrialRecord]]]:
        """Return each key of a kernel with its trials of all generations; raises `StoreError`."""
        with self._connection.reading() as connection:
            keys = self._keys(connection, kernel_name)
            found = fetch(connection, queries.TRIALS, *queries.name_twice(kernel_name))
        trials: dict[str, list[TrialRecord]] = {}
        for trial in self._valid(TRIAL, found, rows.trial_record):
            trials.setdefault(trial.key, []).append(trial)
        return [(key, trials.get(key.digest, [])) for key in keys]

    def kernels(self) -> list[str]:
        """Return the names of all kernels with a key, sorted; raises `StoreError`."""
        with self._connection.reading() as connection:
            return [str(name) for (name,) in fetch(connection, queries.KERNEL_NAMES)]

    def clear(self, kernel_name: str) -> int:
        """Delete a kernel's keys, trials and choices; return how many keys it had.

        Raises:
            StoreError: the database cannot be written.
        """
        name = (text(kernel_name),)
        with self._connection.writing() as database:
            for statement in queries.CLEAR:
                database.conn.execute(statement, name)
            deleted = database.conn.execute(queries.CLEAR_KEYS, name).rowcount
            for statement in queries.CLEAR_UNUSED:
                database.conn.execute(statement)
        return deleted

    def _keys(self, connection: sqlite3.Connection, kernel_name: str | None) -> list[KeyRecord]:
        kernels = self._by_digest(connection, KERNEL)
        devices = self._by_digest(connection, DEVICE)
        found = fetch(connection, queries.KEYS, *queries.name_twice(kernel_name))
        return [
            rows.key_record(key, kernels[key["kernel"]], devices[key["device"]])
            for key in self._valid(KEY, found, KEY.unseal)
            if key["kernel"] in kernels and key["device"] in devices
        ]

    def _by_digest(self, connection: sqlite3.Connection, table: Table) -> dict[str, Any]:
        found = fetch(connection, table.select)
        return {values["digest"]: values for values in self._valid(table, found, table.unseal)}

    def _valid(
        self,
        table: Table,
        found: Iterable[Sequence[Any]],
        build: Callable[[Sequence[Any]], Record],
    ) -> Iterator[Record]:
        """What the sound rows hold; the others are reported once and are absent."""
        for row in found:
            try:
                yield build(row)
            except CorruptRowError as error:
                self._report(table, row, error)

    def _report(self, table: Table, row: Sequence[Any], error: CorruptRowError) -> None:
        columns = [name for name, _ in table.columns]
        identity = tuple(row[columns.index(name)] for name in table.primary_key)
        if (table.name, *identity) not in self._reported:
            self._reported.add((table.name, *identity))
            logger.warning(
                "ignoring a corrupt row of %s: %s %s: %s", self.path, table.name, identity, error
            )


def _check_found(found: Sequence[ChoiceRecord | TrialRecord], *wanted: Scalar) -> None:
    """Raise `Damaged` where an index leads to other rows than those wanted, however sound.

    `wanted` is a key, and for choices the config list, too, unless any will do.
    """
    for record in found:
        declared = getattr(record, "declared", None)
        if record.key != wanted[0] or (declared and declared != (*wanted, declared)[1]):
            raise Damaged("an index leads to the wrong rows")


def _upsert(database: Database, table: Table, row: dict[str, Scalar]) -> None:
    _table(database, table).upsert(row, pk=table.primary_key)


def _table(database: Database, table: Table) -> Any:
    """The table to write to; sqlite-utils would make up a missing one from the row."""
    found = database.table(table.name)
    missing = {name for name, _ in table.columns} - set(found.columns_dict)
    if missing:
        raise StoreError(f"table {table.name} has no {', '.join(sorted(missing))}")
    return found
