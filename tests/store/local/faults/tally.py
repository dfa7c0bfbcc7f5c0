"""What a fault of the store is, what is counted, and what holds after each of them."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from safetune.keys.tuning_key import Device, KernelIdentity, Toolchain, TuningKey
from safetune.outcome import Outcome, Timing, Verdict
from safetune.settings import Settings
from safetune.store import lookup
from safetune.store.local import db_files
from safetune.store.local.db_files import DATABASE_NAME
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord

ROOT = Path(__file__).resolve().parents[4]
DECLARED = "declared"


class NotHere(Exception):
    """This machine cannot make the fault; the reason is the message."""


@dataclass
class Tally:
    """What was tried, and what came of it.

    Attributes:
        lost: rows that a writer was told are stored, and that are neither found again nor kept
            aside under a name that was told.
        wrong: everything else that should not be: another value, an exception, a run that stops.
        where: when rows were lost, for `lose`.
    """

    tried: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    where: list[str] = field(default_factory=list)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    def lose(self, count: int, what: str) -> None:
        self.lost += count
        if count:
            self.where.append(f"{what}: {count} lost")

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        run: makes the fault about this many times below a directory.
        quick, full: how often in the tests, and in `make store-faults`.
    """

    name: str
    what: str
    expected: str
    quick: int
    full: int
    run: Callable[[Path, int], Tally]


FAULTS: list[Fault] = []
Maker = Callable[[Path, int], Tally]


def fault(name: str, what: str, expected: str, quick: int, full: int) -> Callable[[Maker], Maker]:
    """Enter a function in the table."""

    def enter(run: Maker) -> Maker:
        FAULTS.append(Fault(name, what, expected, quick, full, run))
        return run

    return enter


def choice(number: int = 0, **changes: object) -> ChoiceRecord:
    record = ChoiceRecord(
        f"key-{number}", 1, f"c{number}", {"BLOCK": 16 + number}, DECLARED, 1.5, 8, 1.7e9
    )
    return dataclasses.replace(record, **changes)


def trial(number: int = 0, message: str = "") -> TrialRecord:
    outcome = Outcome(Verdict.OK, Timing(1.5, 1.4, 1.75, 9, "final"), message=message)
    return TrialRecord(f"key-{number}", f"c{number}", {"BLOCK": 16 + number}, 1, outcome, 1.7e9)


def key(number: int = 0) -> KeyRecord:
    device = {"name": "H100", "capability": "90", "sm_count": 132, "shared_memory_bytes": 232448}
    chain = {"triton": "3.9.0", "backend": "ptxas", "target": "cuda:90:32", "environment": {}}
    called: dict[str, list[object]] = {"values": [], "dtypes": [], "options": []}
    of_kernel = (f"key-{number}", "add", "kernel", "", 1)
    return KeyRecord(*of_kernel, "device", device, chain, called)


def call(number: int = 0) -> TuningKey:
    """What a launch looks for; its digest is the name that the rows have here."""
    kernel, device = KernelIdentity("add", "kernel"), Device("H100", "90", 132, 232448)
    wanted = TuningKey(kernel, (), (), (), device, Toolchain("3.9.0", "ptxas", "cuda:90:32"))
    vars(wanted)["digest"] = f"key-{number}"
    return wanted


def filled(directory: Path, count: int = 40) -> Path:
    """A closed database with this number of choices, and its path."""
    store = Store.open(directory)
    for number in range(count):
        store.put_choice(choice(number))
    store.close()
    return directory / DATABASE_NAME


def settings(directory: Path) -> Settings:
    os.environ["SAFETUNE_CACHE_DIR"] = str(directory)
    return Settings.current()


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def heard() -> Iterator[Log]:
    """What is logged as a warning or worse."""
    log, logger = Log(), logging.getLogger("safetune")
    logger.addHandler(log)
    try:
        yield log
    finally:
        logger.removeHandler(log)


@dataclass
class Run:
    """A program that used a store: what it found, and what it was told."""

    found: dict[int, ChoiceRecord]
    warnings: list[str]
    log: list[str]
    goes_on: bool
    in_memory: bool


def run(directory: Path, numbers: Iterable[int]) -> Run:
    """Look choices up and store one, as a program does; raises what would reach its caller."""
    with warnings.catch_warnings(record=True) as caught, heard() as log:
        warnings.simplefilter("always", UserWarning)
        lookup._lookups.clear()
        opened = lookup.open_lookup(settings(directory))
        found = {n: opened.find(call(n), DECLARED) for n in numbers}
        opened.store.put_key(key(999))
        opened.store.put_trial(trial(999))
        stored = opened.store.put_choice(choice(999))
        goes_on = stored == choice(999) == opened.find(call(999), DECLARED)
        in_memory = opened.store.path is None
        opened.store.close()
    lookup._lookups.clear()
    texts = [str(each.message) for each in caught]
    present = {number: record for number, record in found.items() if record is not None}
    return Run(present, texts, log.lines, goes_on, in_memory)


def judge(tally: Tally, what: str, directory: Path, count: int = 40, told: bool = True) -> Run:
    """Run on a damaged store: rows are as they were, or kept aside, or reported.

    Args:
        told: a row that is missing must have been reported.
    """
    tally.tried += 1
    done = run(directory, range(count))
    for number, record in done.found.items():
        tally.expect(record == choice(number), f"{what}: another choice for key {number}")
    tally.expect(done.goes_on, f"{what}: the run does not go on")
    aside = db_files.aside(directory / DATABASE_NAME)
    named = aside.exists() and any(str(aside) in text for text in done.warnings)
    tally.expect(len(done.warnings) <= 1, f"{what}: {len(done.warnings)} warnings: {done.warnings}")
    if told and not named and not done.log and not done.in_memory:
        tally.lost += count - len(done.found)
    return done
