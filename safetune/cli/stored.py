"""Opens the store for every command.

No command here creates a database; without a file the store is empty. Commands read its tables with
sqlite-utils, which a launch never imports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from safetune.errors import TargetError
from safetune.settings import Settings

if TYPE_CHECKING:
    from safetune.cli.command import Option
    from safetune.store.local.db_files import Location
    from safetune.store.local.store import Store
    from safetune.store.shared.files import Directory
    from safetune.store.shared.protocol import SharedStore

#: How many kernels an error names.
_MOST_NAMES = 20

#: When the newest row of each key was made.
_NEWEST = (
    "SELECT key, max(created) AS newest FROM (SELECT key, created FROM trial "
    "UNION ALL SELECT key, created FROM choice UNION ALL SELECT key, created FROM call) GROUP BY 1"
)


def located(writes: bool = False) -> Location:
    """Return the place of the choices."""
    from safetune.store.local.db_files import locate

    return locate(Settings.current(), writes=writes)


def check_writable() -> None:
    """Raise `StoreError` unless the database can be written to."""
    from safetune.store.local.store import Store

    store = Store.open(located(writes=True).directory, Settings.current().wait_s)
    with contextlib.closing(store), store.connection.transaction() as connection:
        # SQLite begins a transaction also where it can only read.
        connection.execute("DELETE FROM trial WHERE 0")


def shared_directory(writes: bool = False) -> Directory | None:
    """Return the cache directory as a shared store, if it is one by default."""
    choices = located(writes).choices
    if choices is None:
        return None
    from safetune.store.shared.files import Directory

    return Directory(choices)


def shared_option(text: str) -> Option:
    """Add `--shared`, for the shared store."""
    return click.option("--shared", is_flag=True, help=text)


def shared_store() -> SharedStore | None:
    """Return the shared store; None without one."""
    from safetune.store.shared.opening import open_shared

    url = located().shared(Settings.current())
    return open_shared(url) if url else None


def copy_of_shared() -> Store:
    """Return the contents of the shared store, in memory; raises `TargetError` without one."""
    from safetune.store.local.store import Store
    from safetune.store.shared import local_copy

    if (shared := shared_store()) is None:
        raise TargetError("there is no shared store; set SAFETUNE_SHARED to its URL")
    store = Store.in_memory()
    with contextlib.closing(shared):
        local_copy.copy_all(store.connection, shared)
    return store


def open_store(writes: bool = False) -> Store:
    """Return the store; without a database an empty one, unless the command writes.

    If the cache directory is on a network, it has the choices of all nodes.
    """
    from safetune.store.local.store import Store

    database = located(writes).database
    try:
        is_there = writes or bool(database.stat())
    except FileNotFoundError:
        is_there = False
    except OSError:
        is_there = True  # opening the store reports the error
    store = Store.open(database.parent) if is_there else Store.in_memory()
    if shared := shared_directory(writes):
        from safetune.store.shared import local_copy

        local_copy.copy_all(store.connection, shared)
    return store


def counts(store: Store) -> dict[str, int]:
    """Return the number of rows of each table."""
    with store.tables() as database:
        return {name: database[name].count for name in database.table_names()}


def newest_rows(store: Store) -> dict[str, float]:
    """Return the time of the newest trial, choice or recorded call of each key."""
    with store.tables() as database:
        newest: dict[str, Any] = {row["key"]: row["newest"] for row in database.query(_NEWEST)}
    return {key: made for key, made in newest.items() if type(made) in (int, float)}


def check_some(kernel: str, store: Store, matching: Sequence[object]) -> None:
    """Raise `TargetError` unless a stored key of a kernel matches the options."""
    if matching:
        return
    names = store.kernels()
    if kernel in names:
        raise TargetError(f"no key of {kernel} matches these options; see `safetune show {kernel}`")
    listed = ", ".join(names[:_MOST_NAMES]) + ", …" * (len(names) > _MOST_NAMES)
    known = f"stored kernels: {listed}" if names else "the store is empty"
    raise TargetError(f"no kernel named {kernel!r} is stored; {known}")
