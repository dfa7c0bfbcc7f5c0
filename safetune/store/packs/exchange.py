"""Moves choices from databases to packs and back, and merges them.

If two choices have the same key and config list, `records.wins` says which is used.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from pathlib import Path

from safetune.errors import PackError
from safetune.frozen import dataclass
from safetune.outcome import Mark
from safetune.store.local.db_files import DATABASE_NAME
from safetune.store.local.rows import CHOICE, KEY
from safetune.store.local.store import CHOICES_OF_LIST, IMPORTED, Store
from safetune.store.packs.packs import (
    beginning,
    checked,
    name_of,
    read_pack,
    written_beside,
)
from safetune.store.records import StoredChoice, TrialRecord, wins

_SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True)
class Collected:
    """The choices that can be written to a pack, and a line with the reason for each that
    cannot.
    """

    entries: list[StoredChoice] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Imported:
    """The numbers of choices imported and not imported.

    Attributes:
        new: the database had none of that generation or a later one.
        known, kept: it has the same one, or another of that generation, which stays.
        older: it has one of a later generation, which stays.
        unknown: they have fields from a newer version.
    """

    new: int = 0
    known: int = 0
    kept: int = 0
    older: int = 0
    unknown: int = 0


def collect(path: Path) -> Collected:
    """Return the choices in a pack, in a directory of packs, or in a database or its directory.

    Raises:
        PackError: `path` is something else, or a pack is broken; names the file and the reason.
        StoreError: the database cannot be read.
    """
    database = path / DATABASE_NAME if path.is_dir() else path
    if path.is_dir() and not database.exists():
        packs = sorted(path.glob("*.json"))
        if not packs:
            raise PackError(f"{path} contains no packs (*.json) and no {DATABASE_NAME}")
        return Collected([entry for pack in packs for entry in read_pack(pack)])
    is_database = path.is_dir()
    with contextlib.suppress(OSError, PackError):  # reading it as a pack raises the right error
        is_database = is_database or beginning(path, len(_SQLITE)) == _SQLITE
    if not is_database:
        return Collected(read_pack(path))
    with contextlib.closing(Store.open_read_only(database)) as store:
        return of_store(store)


def of_store(store: Store) -> Collected:
    """Return the choices of a store in the form of packs; raises `StoreError`.

    Excludes choices timed while the program used the device, because their times say little. A
    choice timed on random inputs keeps that mark.
    """
    trials: dict[tuple[str, str], list[TrialRecord]] = {}
    for _, of_key in store.trials_of():
        for trial in of_key:
            trials.setdefault((trial.key, trial.config_digest), []).append(trial)
    found = Collected()
    for entry in store.choices_of_lists():
        choice, what = entry.choice, f"{entry.key.kernel_name} {entry.key.call['values']}"
        of_config = trials.get((choice.key, choice.config_digest), [])
        made_from = [trial for trial in of_config if trial.generation <= choice.generation]
        marks: tuple[str, ...] = ()
        if made_from:
            marks = max(made_from, key=lambda trial: trial.generation).outcome.marks
        if Mark.CONTENDED.reason_in(marks):
            found.left_out.append(f"{what}: it was timed while the program used the device")
            continue
        drawn = [mark for mark in marks if Mark.REGENERATED.reason_in([mark])]
        kept = tuple(dict.fromkeys([*choice.marks, *drawn]))
        try:
            found.entries.append(checked(replace(entry, choice=replace(choice, marks=kept))))
        except PackError as error:
            found.left_out.append(f"{what}: {error}")
    return found


def merged(*sources: Iterable[StoredChoice]) -> list[StoredChoice]:
    """Return all choices, one per key and config list; their order does not matter."""
    best: dict[tuple[str, str], StoredChoice] = {}
    for entry in itertools.chain(*sources):
        other = best.setdefault((entry.key.digest, entry.choice.declared), entry)
        if wins(entry.choice, other.choice):
            best[entry.key.digest, entry.choice.declared] = entry
    return list(best.values())


def packs_of(entries: Iterable[StoredChoice]) -> dict[str, list[StoredChoice]]:
    """Return the choices by the file name of their pack, sorted."""
    packs: dict[str, list[StoredChoice]] = {}
    for entry in entries:
        packs.setdefault(name_of(entry), []).append(entry)
    return dict(sorted(packs.items()))


def write(path: Path, text: str) -> None:
    """Replace a file completely or not at all; raises `PackError`."""
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with written_beside(path, text.encode()) as new:
            new.chmod(0o644)  # to be reviewed, and read by other users of a container
            new.replace(path)
    except OSError as error:
        raise PackError(f"cannot write {path}: {error.strerror or error}") from error


def import_into(store: Store, entries: Sequence[StoredChoice], origin: str = IMPORTED) -> Imported:
    """Write all choices into a database or, if one fails, none; raises `StoreError`.

    Existing choices of the same generation stay, because processes may have adopted them, as do
    those of a later generation. The stored source and file of a key's kernel stay too.
    """
    known = [entry for entry in entries if not entry.unknown]
    prepared = [(e.choice, KEY.seal(e.key), CHOICE.seal(e.choice)) for e in known]
    counts = Counter(unknown=len(entries) - len(known))
    with store.connection.transaction() as sqlite:
        for choice, of_key, row in prepared:
            KEY.put_if_absent(sqlite, of_key)
            of_list = sqlite.execute(CHOICES_OF_LIST, (choice.key, choice.declared)).fetchall()
            current = next(CHOICE.sound(of_list), None)
            if current is not None and current.generation > choice.generation:
                counts["older"] += 1
                continue
            stored = CHOICE.put_if_absent(sqlite, {**row, "origin": origin}) or choice
            is_same = stored.config_digest == choice.config_digest
            counts["new" if stored is choice else "known" if is_same else "kept"] += 1
    return Imported(**counts)
