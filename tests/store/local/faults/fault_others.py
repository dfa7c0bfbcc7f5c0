"""What other programs do to a store that is open: delete its logs, lock it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path

import fault_system
from tally import DECLARED, Tally, call, choice, fault, filled, heard, key, run, settings, trial

from safetune.store import lookup
from safetune.store.local.db_files import DATABASE_NAME
from safetune.store.local.store import Store

_LOGS = (("-wal",), ("-shm",), ("-wal", "-shm"))


@fault(
    "log-deleted",
    "its log, or part of it, is deleted while it is open",
    "rows of the deleted log may be lost; never another choice; the run continues",
    3,
    30,
)
def log_deleted(place: Path, times: int) -> Tally:
    """In every other round another process opens it, and writes before this one looks."""
    tally = Tally()
    for number in range(times):
        directory = place / str(number)
        tally.tried += 1
        store = Store.open(directory)
        for index in range(40):
            store.put_choice(choice(index))
        for suffix in _LOGS[number % 3]:
            (directory / f"{DATABASE_NAME}{suffix}").unlink()
        if number % 2:
            done = fault_system._write(directory)
            tally.expect(not done.returncode, f"another process: {done.stderr[-200:]}")
        store.put_choice(choice(40))
        store.close()
        after = run(directory, [*range(41)])
        for index, record in after.found.items():
            tally.expect(record == choice(index), f"another choice for key {index}")
    return tally


def _writing(path: Path) -> sqlite3.Connection:
    """A program that leaves its transaction open, such as a database browser."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    return other


def _exclusive(path: Path) -> sqlite3.Connection:
    """A program that keeps even readers out."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA journal_mode=DELETE")
    other.execute("BEGIN EXCLUSIVE")
    return other


@contextlib.contextmanager
def _wait(seconds: str) -> Iterator[None]:
    os.environ["SAFETUNE_WAIT"] = seconds
    try:
        yield
    finally:
        del os.environ["SAFETUNE_WAIT"]


@fault(
    "locked",
    "another program keeps it locked",
    "one wait; one line in the log, or one warning; later rows are written once it is free",
    2,
    10,
)
def locked(place: Path, times: int) -> Tally:
    tally = Tally()
    for number in range(times):
        tally.tried += 1
        directory = place / str(number)
        lock = (_writing, _exclusive)[number % 2]
        other = lock(filled(directory))
        with _wait("0"):
            lookup._lookups.clear()
            with warnings.catch_warnings(record=True) as caught, heard() as log:
                warnings.simplefilter("always", UserWarning)
                opened = lookup.open_lookup(settings(directory))
                for index in range(100, 130):
                    opened.store.put_key(key(index))
                    opened.store.put_trial(trial(index))
                    put = opened.store.put_choice(choice(index))
                    tally.expect(
                        put == opened.find(call(index), DECLARED), "its own choice is not found"
                    )
                found = opened.find(call(1), DECLARED)
                tally.expect(lock is _exclusive or found == choice(1), "a choice is not found")
            told = [*(str(each.message) for each in caught), *log.lines]
            tally.expect(all("database is locked" in line for line in told), f"told {told}")
            tally.expect(len(told) == 1, f"told {len(told)} lines")
        other.close()
        tally.expect(
            opened.find(call(1), DECLARED) == choice(1), "a choice is not found afterwards"
        )
        opened.store.put_choice(choice(200))
        with sqlite3.connect(directory / DATABASE_NAME) as reader:
            (there,) = reader.execute("SELECT count(*) FROM choice WHERE created > 0").fetchone()
        reader.close()
        tally.lose(41 - there, lock.__name__)
        opened.store.close()
    return tally
