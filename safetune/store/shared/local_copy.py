"""Copies of shared choices in the local database, and this node's own choices for the others.

A choice that another node published replaces the one of the same generation here: all nodes launch
the first that was published. A node publishes what it has measured itself, except what it measured
beside its program's own work, or on random inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from safetune.errors import StoreError
from safetune.keys import encoding
from safetune.messages import logger
from safetune.store.local import rows
from safetune.store.local.connection import Connection
from safetune.store.local.rows import CHOICE, DEVICE, KERNEL, KEY, TRIAL
from safetune.store.records import KeyRecord, StoredChoice
from safetune.store.shared.protocol import Name, encode, namespace

if TYPE_CHECKING:
    import sqlite3

    from safetune.store.shared.files import Directory

#: Few, also where there are many keys.
_TOOLCHAINS = "SELECT DISTINCT device, toolchain FROM key"
_OF_SPACE = (
    "FROM key JOIN choice ON choice.key = key.digest WHERE key.device = ? AND key.toolchain = ?"
)
_COPIED = f"SELECT choice.key, declared, generation {_OF_SPACE} AND origin = ?"
#: The newest choice of each list for which the database also has a trial.
_OWN = (
    f"SELECT choice.key, declared, max(generation) {_OF_SPACE} AND EXISTS (SELECT 1 FROM trial "
    "WHERE trial.key = choice.key AND trial.config_digest = choice.config_digest) "
    "GROUP BY choice.key, declared"
)
_TRIALS = (
    f"{TRIAL.select} WHERE key = ? AND config_digest = ? AND generation <= ? "
    "ORDER BY generation DESC"
)


def is_sound(stored: StoredChoice) -> bool:
    """Whether a choice can be encoded as a record; logs why not."""
    try:
        encode(stored)
    except StoreError as error:
        logger.info("%s", error)
        return False
    return True


def copy_all(connection: Connection, store: Directory) -> None:
    """Copy all records of a directory, of every device and toolchain; raises `StoreError`."""
    for space in store.namespaces():
        missing = store.names(space) - copied(connection, space, store.identity)
        records = [record for record in store.pull(space, missing) if not record.unknown]
        if records:
            adopt(connection, records, origin=store.identity)


def copied(connection: Connection, space: str, origin: str) -> set[Name]:
    """Return the names of the records that are here as they are in one shared store.

    They need not be read again, as a record never changes. What was tuned here, imported, or copied
    from another shared store is not among them: the record of that name is to replace it.
    """
    return _names(connection, _COPIED, space, origin)


def own(connection: Connection, space: str) -> set[Name]:
    """Return the names of this node's own choices in a namespace, the newest of each list."""
    return _names(connection, _OWN, space)


def adopt(
    connection: Connection,
    stored: Iterable[StoredChoice],
    wait_s: float | None = None,
    origin: str = "",
) -> None:
    """Write choices that were made elsewhere, in one transaction; raises `StoreError`.

    Args:
        origin: the shared store that they are the records of.
    """
    choices = [(rows.key_rows(each.key), rows.choice_row(each.choice)) for each in stored]
    of_keys = {(t.name, row["digest"]): (t, row) for key, _ in choices for t, row in key}
    with connection.transaction(wait_s) as sqlite:
        for table, row in of_keys.values():  # this node's row of a kernel has more in it
            table.put_if_absent(sqlite, row)
        for _, choice in choices:
            CHOICE.insert(sqlite, {**choice, "origin": origin}, "REPLACE")


def shareable(connection: Connection, names: Iterable[Name]) -> list[StoredChoice]:
    """Return those choices of this node that other nodes may use.

    Empty where the database cannot be read.
    """
    found = []
    try:
        with connection.reading() as sqlite:
            for name in names:
                choice, key = CHOICE.find(sqlite, *name), _key(sqlite, name.key)
                if choice and key:
                    made_from = (name.key, choice.config_digest, name.generation)
                    trial = next(TRIAL.sound(sqlite.execute(_TRIALS, made_from).fetchall()), None)
                    if trial and trial.outcome.shareable:
                        found.append(StoredChoice(key, choice))
    except StoreError as error:
        logger.info("%s; its choices are not published", error)
        return []
    return found


def _names(connection: Connection, statement: str, space: str, *parameters: str) -> set[Name]:
    try:
        with connection.reading() as sqlite:
            return {
                Name(*row)
                for kind in _kinds(sqlite, space)
                for row in sqlite.execute(statement, (*kind, *parameters)).fetchall()
            }
    except StoreError as error:
        logger.info("%s; it counts as empty", error)
        return set()


def _kinds(sqlite: sqlite3.Connection, space: str) -> Iterator[tuple[str, str]]:
    """The device and toolchain columns of the keys in a namespace."""
    for digest, toolchain in sqlite.execute(_TOOLCHAINS).fetchall():
        device = DEVICE.find(sqlite, digest)
        with contextlib.suppress(TypeError, ValueError, RecursionError):  # it is not JSON
            if device and namespace(device["record"], encoding.loads(toolchain)) == space:
                yield digest, toolchain


def _key(sqlite: sqlite3.Connection, digest: str) -> KeyRecord | None:
    key = KEY.find(sqlite, digest)
    kernel = key and KERNEL.find(sqlite, key["kernel"])
    device = key and DEVICE.find(sqlite, key["device"])
    return rows.key_record(key, kernel, device) if kernel and device else None
