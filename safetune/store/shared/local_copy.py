"""Copies of shared choices in the local database, and this node's own choices for the others.

Another node's published choice replaces the local one of the same generation, because all nodes
launch the choice that was published first. A node publishes its own measurements, except those
taken beside its program's work or on random inputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from safetune.errors import StoreError
from safetune.messages import logger
from safetune.store.local.connection import Connection
from safetune.store.local.rows import CHOICE, KEY, OWN, TRIAL
from safetune.store.records import PINNED_LIST, StoredChoice
from safetune.store.shared.protocol import Name, encode

if TYPE_CHECKING:
    from safetune.store.shared.protocol import SharedStore

_OF_SPACE = "FROM key JOIN choice ON choice.key = key.digest WHERE key.space = ?"
_COPIED = f"SELECT choice.key, declared, generation {_OF_SPACE} AND origin IN (?, ?)"
#: The newest choice of each list for which the database also has a trial, and none that is pinned.
_OWN = (
    f"SELECT choice.key, declared, max(generation) {_OF_SPACE} AND EXISTS (SELECT 1 FROM trial "
    "WHERE trial.key = choice.key AND trial.config_digest = choice.config_digest) "
    f"AND declared <> '{PINNED_LIST}' "
    "GROUP BY choice.key, declared"
)
_TRIALS = (
    f"{TRIAL.select} WHERE key = ? AND config_digest = ? AND generation <= ? "
    "ORDER BY generation DESC"
)


def is_sound(stored: StoredChoice) -> bool:
    """Whether a choice can be encoded as a record; logs the reason if not."""
    try:
        encode(stored)
    except StoreError as error:
        logger.info("%s", error)
        return False
    return True


def copy_all(connection: Connection, store: SharedStore) -> None:
    """Copy all records of a store, for all devices and toolchains; raises `StoreError`."""
    for space in store.namespaces():
        missing = store.names(space) - copied(connection, space, store.identity)
        for batch in store.pull(space, missing):
            known = [record for record in batch if not record.unknown]
            adopt(connection, known, origin=store.identity)


def copied(connection: Connection, space: str, origin: str) -> set[Name]:
    """Return the names of the records whose local copy is identical to one shared store's.

    They need no rereading, because a record never changes. Excludes choices tuned here, imported,
    or copied from another shared store: the record of that name must replace them.
    """
    return _names(connection, _COPIED, space, origin, f"{OWN}{origin}")


def own(connection: Connection, space: str) -> set[Name]:
    """Return the names of this node's own choices in a namespace, the newest per list."""
    return _names(connection, _OWN, space)


def adopt(
    connection: Connection,
    stored: Iterable[StoredChoice],
    origin: str = "",
) -> None:
    """Write choices made elsewhere, in one transaction; raises `StoreError`.

    Args:
        origin: the shared store whose records they are, after `OWN` if this node made them.
    """
    sealed = [(KEY.seal(each.key), CHOICE.seal(each.choice)) for each in stored]
    with connection.transaction() as sqlite:
        for key, choice in sealed:
            KEY.put_if_absent(sqlite, key)  # this node's row of a key has more in it
            CHOICE.insert(sqlite, {**choice, "origin": origin}, "REPLACE")


def shareable(connection: Connection, names: Iterable[Name]) -> list[StoredChoice]:
    """Return this node's choices with these names that other nodes may use.

    Empty if the database cannot be read.
    """
    found = []
    try:
        with connection.reading() as sqlite:
            for name in names:
                choice, key = CHOICE.find(sqlite, *name), KEY.find(sqlite, name.key)
                if choice and key:
                    made_from = (name.key, choice.config_digest, name.generation)
                    trial = next(TRIAL.sound(sqlite.execute(_TRIALS, made_from).fetchall()), None)
                    if trial and trial.outcome.shareable:
                        found.append(StoredChoice(key, choice))
    except StoreError as error:
        logger.info("%s; not publishing its choices", error)
        return []
    return found


def _names(connection: Connection, statement: str, *parameters: str) -> set[Name]:
    try:
        with connection.reading() as sqlite:
            return {Name(*row) for row in sqlite.execute(statement, parameters).fetchall()}
    except StoreError as error:
        logger.info("%s; treating it as empty", error)
        return set()
