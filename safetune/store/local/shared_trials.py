"""Outcomes of one key whose configs several processes of a node measure."""

from __future__ import annotations

from collections.abc import Iterable

from safetune.outcome import TRANSIENT
from safetune.store.local.connection import Connection

_PASSING = ", ".join(f"'{verdict.value}'" for verdict in TRANSIENT)
_TRIED = (
    f"SELECT config_digest FROM trial WHERE key = ? AND created > ? AND verdict NOT IN ({_PASSING})"
)
_FORGET = "DELETE FROM trial WHERE key = ? AND config_digest = ?"


def tried(connection: Connection, key: str, since: float) -> set[str]:
    """Return the configs of a key with an outcome stored after a time; raises `StoreError`.

    Those are not among them that are to be tried again, as they found too little memory.
    """
    with connection.reading() as sqlite:
        return {digest for (digest,) in sqlite.execute(_TRIED, (key, since))}


def forget(connection: Connection, key: str, configs: Iterable[str]) -> None:
    """Delete the outcomes of configs of a key, which are then tried again; raises `StoreError`."""
    with connection.transaction() as sqlite:
        sqlite.executemany(_FORGET, [(key, config) for config in configs])
