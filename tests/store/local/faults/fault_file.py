"""Damage to the file, and files that are not what they should be."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path

from tally import NotHere, Tally, choice, fault, filled, judge, run

from safetune.store.local import db_files
from safetune.store.local.db_files import DATABASE_NAME
from safetune.store.local.store import Store

_MOVED = "renamed and replaced by an empty database; one warning that names it"
_MEMORY = "not changed; one warning; in memory"


def _copies(place: Path, times: int, count: int = 40) -> list[Path]:
    """Copies of one filled database, each in a directory of its own."""
    original = filled(place / "original", count)
    copies = []
    for number in range(times):
        directory = place / str(number)
        directory.mkdir(mode=0o700, parents=True)
        shutil.copy(original, directory)
        copies.append(directory / DATABASE_NAME)
    return copies


@fault("truncated", "the file is cut off anywhere", f"rows are found, or {_MOVED}", 12, 200)
def truncated(place: Path, times: int) -> Tally:
    tally = Tally()
    for number, path in enumerate(_copies(place, times)):
        size = path.stat().st_size * number // times
        os.truncate(path, size)
        # Cut off at its beginning it is the empty file of the next row.
        judge(tally, f"cut off at {size}", path.parent, told=size > 0)
    return tally


@fault("zero-length", "the file is empty", "a new database", 1, 10)
def zero_length(place: Path, times: int) -> Tally:
    tally = Tally()
    for path in _copies(place, times):
        os.truncate(path, 0)
        done = judge(tally, "empty", path.parent, told=False)
        tally.expect(done.warnings == [] and not done.in_memory, f"told {done.warnings}")
        again = run(path.parent, [999])
        tally.expect(999 in again.found, "what was stored afterwards is gone")
    return tally


@fault("garbage", "the file has other content", _MOVED, 4, 50)
def garbage(place: Path, times: int) -> Tally:
    tally = Tally()
    for number, path in enumerate(_copies(place, times)):
        content = path.read_bytes()
        kinds = (
            os.urandom(9000),
            b'{"BLOCK": 64}' * 700,
            content[:100] + os.urandom(len(content) - 100),
            b"x" * 600,
        )
        path.write_bytes(kinds[number % 4])
        done = judge(tally, f"garbage {number % 4}", path.parent)
        tally.expect(
            len(done.warnings) == 1, f"garbage {number % 4}: {len(done.warnings)} warnings"
        )
        tally.expect(not done.in_memory, "no new database took its place")
        kept = db_files.aside(path).read_bytes()
        tally.expect(kept == kinds[number % 4], "it is not kept as it was")
    return tally


@fault("flipped-byte", "one byte of a row is flipped", "the row is absent and reported", 60, 400)
def flipped_byte(place: Path, times: int) -> Tally:
    """Every byte of one choice's record in turn, its header and checksum too."""
    tally = Tally()
    original = filled(place / "original")
    content = original.read_bytes()
    with sqlite3.connect(original) as connection:
        ((record,),) = connection.execute("SELECT record FROM choice WHERE key = 'key-7'")
    connection.close()
    end = content.index(record.encode()) + len(record)
    begin = end - len(record) - len("key-7declaredc7") - 30
    places = range(begin, end)
    for number in range(times):
        position = places[number * len(places) // times]
        path = place / str(number) / DATABASE_NAME
        path.parent.mkdir(mode=0o700)
        changed = bytearray(content)
        changed[position] ^= 1 << (number % 8)
        path.write_bytes(changed)
        judge(tally, f"byte {position - begin} of the row", path.parent)
    return tally


@fault(
    "flipped-anywhere",
    "one byte of the file is flipped, also in an index or a header",
    "never another choice; the run continues",
    40,
    1000,
)
def flipped_anywhere(place: Path, times: int) -> Tally:
    """A miss because of a damaged index cannot be told from one of a key that was never tuned."""
    tally, draw = Tally(), random.Random(0)
    for path in _copies(place, times):
        content = bytearray(path.read_bytes())
        position = draw.randrange(len(content))
        content[position] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        judge(tally, f"byte {position}", path.parent, told=False)
    return tally


@fault("newer-schema", "a newer safetune created it", _MEMORY, 1, 10)
def newer_schema(place: Path, times: int) -> Tally:
    tally = Tally()
    for path in _copies(place, times):
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA journal_mode = delete")
        connection.execute("PRAGMA user_version = 99")
        connection.close()
        content = path.read_bytes()
        done = judge(tally, "newer", path.parent)
        tally.expect(done.in_memory and len(done.warnings) == 1, f"told {done.warnings}")
        tally.expect("newer safetune" in "".join(done.warnings), f"told {done.warnings}")
        tally.expect(path.read_bytes() == content, "it was changed")
    return tally


@fault("missing-column", "a table or a column is missing", _MOVED, 5, 40)
def missing_column(place: Path, times: int) -> Tally:
    tally = Tally()
    statements = (
        "DROP TABLE trial",
        "DROP TABLE call",
        "ALTER TABLE choice DROP COLUMN record",
        "ALTER TABLE key RENAME COLUMN record TO records",
    )
    for number, path in enumerate(_copies(place, times)):
        connection = sqlite3.connect(path)
        connection.execute(statements[number % len(statements)])
        connection.close()
        done = judge(tally, statements[number % len(statements)], path.parent)
        tally.expect(len(done.warnings) == 1 and not done.in_memory, f"told {done.warnings}")
    return tally


@fault("deleted", "the file is deleted while it is open", "created again at the next use", 2, 50)
def deleted(place: Path, times: int) -> Tally:
    return _gone(place, times, lambda path: [each.unlink() for each in path.parent.iterdir()])


@fault("directory-deleted", "its directory is deleted while it is open", "created again", 2, 50)
def directory_deleted(place: Path, times: int) -> Tally:
    return _gone(place, times, lambda path: shutil.rmtree(path.parent))


@fault("replaced", "another database replaces it while it is open", "it is used", 2, 50)
def replaced(place: Path, times: int) -> Tally:
    other = filled(place / "other", count=3)

    def replace(path: Path) -> None:
        copy = path.with_name("copy")
        shutil.copy(other, copy)
        copy.rename(path)
        for log in ("-wal", "-shm"):
            path.with_name(path.name + log).unlink(missing_ok=True)

    return _gone(place, times, replace)


def _gone(place: Path, times: int, take_away) -> Tally:
    tally = Tally()
    for number in range(times):
        tally.tried += 1
        store = Store.open(place / str(number))
        store.put_choice(choice(1))
        take_away(store.path)
        store.put_choice(choice(50))
        tally.expect(store.choice("key-50") == choice(50), "what is stored next is not found")
        store.close()
        again = run(place / str(number), [50])
        tally.lost += 50 not in again.found
    return tally


@fault("linked", "the database or its directory is a symbolic link", _MEMORY, 2, 10)
def linked(place: Path, times: int) -> Tally:
    tally = Tally()
    for number in range(times):
        victim = place / f"victim-{number}"
        directory = place / str(number)
        if number % 2:
            victim.mkdir(mode=0o700, parents=True)
            directory.symlink_to(victim)
        else:
            place.mkdir(exist_ok=True)
            victim.write_bytes(b"precious")
            directory.mkdir(mode=0o700)
            (directory / DATABASE_NAME).symlink_to(victim)
        done = judge(tally, "link", directory)
        tally.expect(done.in_memory and "symbolic link" in "".join(done.warnings), "followed")
        untouched = not list(victim.iterdir()) if number % 2 else victim.read_bytes() == b"precious"
        tally.expect(untouched, "what the link leads to was changed")
    return tally


@fault("foreign-owner", "the database or its directory is another user's", _MEMORY, 2, 10)
def foreign_owner(place: Path, times: int) -> Tally:
    if os.geteuid() != 0:
        raise NotHere("only root can give files to another user")
    tally = Tally()
    for number, path in enumerate(_copies(place, times)):
        os.chown(path if number % 2 else path.parent, 12345, 12345)
        content = path.read_bytes()
        done = judge(tally, "foreign", path.parent)
        tally.expect(done.in_memory and "another user" in "".join(done.warnings), "it was used")
        tally.expect(path.read_bytes() == content, "it was changed")
    return tally


@fault("in-the-way", "a directory or a file is in the way", _MEMORY, 2, 10)
def in_the_way(place: Path, times: int) -> Tally:
    tally = Tally()
    for number in range(times):
        directory = place / str(number)
        if number % 2:
            directory.write_bytes(b"")
        else:
            (directory / DATABASE_NAME).mkdir(parents=True)
        done = judge(tally, "in the way", directory)
        tally.expect(done.in_memory and len(done.warnings) == 1, f"told {done.warnings}")
    return tally
