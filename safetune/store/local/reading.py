"""Whole tables of a store, for the commands that read it: with sqlite-utils, not at a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from sqlite_utils import Database

from safetune.store import schema
from safetune.store.local.connection import Connection
from safetune.store.local.in_flight import landed
from safetune.store.local.rows import CALL, CHOICE, KEY, TRIAL, Table, text
from safetune.store.records import KeyRecord, RecordedCall, StoredChoice, TrialRecord

_OF_KERNEL = "key IN (SELECT digest FROM key WHERE kernel_name = ?)"


@contextlib.contextmanager
def tables(connection: Connection) -> Iterator[Database]:
    """Yield the tables of a database; raises `StoreError`."""
    with connection.reading() as sqlite:
        yield Database(sqlite, recursive_triggers=False, execute_plugins=False)


class Reader:
    """Reads all valid rows; reports corrupt ones and treats them as absent."""

    def __init__(self, connection: Connection, report: Callable[..., None]) -> None:
        self._connection, self._report = connection, report

    def kernels(self) -> list[str]:
        """Return the names of all kernels with a key, sorted."""
        with tables(self._connection) as database:
            name = "kernel_name"
            names = database["key"].rows_where(select=f"DISTINCT {name}", order_by=name)
            return [str(row[name]) for row in names]

    def keys(self, kernel: str | None) -> list[KeyRecord]:
        """Return all keys, or one kernel's, by kernel name, with the last known file of each."""
        with tables(self._connection) as database:
            found = self._records(database, KEY, "kernel_name, rowid", kernel)
        return _with_known_files([key for key in found if schema.is_readable(key)])

    def choices(self, kernel: str | None) -> list[StoredChoice]:
        """Return the current choice of each key and config list, a key's newest first."""
        with tables(self._connection) as database:
            best_first = "generation DESC, created DESC"
            found = self._records(database, CHOICE, best_first, kernel)
        current: dict[str, dict[str, Any]] = {}
        for choice in found:
            current.setdefault(choice.key, {}).setdefault(choice.declared, choice)
        return [
            StoredChoice(key, choice)
            for key in self.keys(kernel)
            for choice in current.get(key.digest, {}).values()
        ]

    def trials(self, kernel: str | None) -> list[tuple[KeyRecord, list[TrialRecord]]]:
        """Return all keys, or one kernel's, with their trials of all generations."""
        with tables(self._connection) as database:
            by_generation = "generation, rowid"
            found = self._records(database, TRIAL, by_generation, kernel)
        of_key: dict[str, list[TrialRecord]] = {}
        for trial in found:
            of_key.setdefault(trial.key, []).append(trial)
        return [(key, landed(of_key.get(key.digest, ()))) for key in self.keys(kernel)]

    def calls(self) -> list[RecordedCall]:
        """Return the recorded calls in order."""
        with tables(self._connection) as database:
            return self._records(database, CALL)

    def _records(
        self, database: Database, table: Table, order_by: str = "rowid", kernel: str | None = None
    ) -> list[Any]:
        columns = ", ".join(["record", *table.primary_key])
        where = None if kernel is None else "kernel_name = ?" if table is KEY else _OF_KERNEL
        given = [] if kernel is None else [text(kernel)]
        found = database[table.name].rows_where(where, given, order_by, columns)
        return list(table.sound([tuple(row.values()) for row in found], self._report))


def _with_known_files(keys: list[KeyRecord]) -> list[KeyRecord]:
    """Return keys with the last known file of their kernels: an imported one has none."""
    last = {(key.kernel_name, key.kernel_digest): key for key in keys if key.kernel_file}
    known = [last.get((key.kernel_name, key.kernel_digest), key) for key in keys]
    return [
        replace(key, kernel_file=other.kernel_file, kernel_line=other.kernel_line)
        for key, other in zip(keys, known, strict=True)
    ]
