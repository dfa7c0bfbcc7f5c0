"""`safetune path`, `stats` and `gc`, and how every command opens the store.

No command here creates a database; where there is no file, the store is empty.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import click

from safetune.cli.command import DAY_S, command, older_than_option
from safetune.cli.output import counted, echo, moment, print_json
from safetune.errors import SafetuneError, StoreError, TargetError
from safetune.settings import Settings, display_url, parse_size

if TYPE_CHECKING:
    from safetune.store.local.db_files import Location
    from safetune.store.local.store import Store
    from safetune.store.shared.files import Directory

#: How many kernels an error names.
_MOST_NAMES = 20

_Each = TypeVar("_Each")


def _kernel_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """The stored names that begin with a text, for a shell that completes the command line."""
    try:
        return [name for name in open_store().kernels() if name.startswith(incomplete)]
    except SafetuneError:
        return []


kernel_argument = click.argument("kernel", shell_complete=_kernel_names)


@command("path", "safetune path")
def path(as_json: bool) -> None:
    """Print the path of the database, whether or not it exists."""
    where, settings = located(), Settings.current()
    if as_json:
        exists = where.database is not None and where.database.exists()
        data = {"path": where.database and str(where.database), "exists": exists}
        print_json({**data, **_network(where)})
        return
    if warning := where.warning(settings):
        echo(warning, err=True)
    if where.database is not None:
        echo(where.database)


@command("gc", "safetune gc --older-than 180 --dry-run")
@older_than_option(
    "Delete keys with no trial and no choice in the last DAYS, and damaged databases."
)
@click.option(
    "--dead-toolchains",
    is_flag=True,
    help="Delete keys of every Triton version except the installed one.",
)
@click.option(
    "--max-size",
    metavar="SIZE",
    help="Delete the oldest keys until the database has about this size.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
def gc(
    older_than: float | None,
    dead_toolchains: bool,
    max_size: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete stored keys that are old, of another Triton version, or over a size limit.

    A key is deleted with its trials and choices. Keys that are being tuned now stay.
    """
    from safetune.store.local.gc import Rule, sweep

    if older_than is None and not dead_toolchains and max_size is None:
        raise click.UsageError("give --older-than, --dead-toolchains or --max-size")
    rule = Rule(
        before=None if older_than is None else time.time() - older_than * DAY_S,
        triton=import_module("triton").__version__ if dead_toolchains else None,
        most_bytes=None if max_size is None else parse_size("--max-size", max_size),
    )
    swept = sweep(open_store(), rule, dry_run)
    if as_json:
        print_json({**asdict(swept), "dry_run": dry_run})
        return
    parts = [counted(getattr(swept, f"{noun}s"), noun) for noun in ("key", "trial", "choice")]
    for count, noun in ((swept.calls, "recorded call"), (swept.files, "damaged database")):
        parts += [counted(count, noun)] * bool(count)
    if swept.empty:
        parts[0] += f" ({swept.empty} without a trial)"
    verb = "would delete" if dry_run else "deleted"
    size = "" if dry_run else f"; {swept.bytes_before} bytes before, {swept.bytes_after} now"
    echo(f"{verb} {', '.join(parts)}{size}")


@command("stats", "safetune stats")
def stats(as_json: bool) -> None:
    """Show the size, the contents and the age of the store."""
    from safetune.store.local import gc

    found = {**gc.stats(open_store()), **_network(located())}
    if as_json:
        print_json(found)
        return
    width = max(map(len, found))
    for name, value in found.items():
        echo(f"{name.replace('_', ' '):<{width}}  {_stats_words(name, value)}")


def _stats_words(name: str, value: Any) -> str:
    if name in ("oldest", "newest") and value is not None:
        return moment(value)
    if isinstance(value, dict):
        return ", ".join(f"{count} {each or '?'}" for each, count in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(value) or "-"
    return "-" if value in (None, "") else str(value)


def located(writes: bool = False) -> Location:
    """Return where choices are kept."""
    from safetune.store.local.db_files import locate

    return locate(Settings.current(), writes=writes)


def _network(where: Location) -> dict[str, str]:
    return {"network": where.network, "shared": display_url(where.shared(Settings.current()))}


def check_writable() -> None:
    """Raise `StoreError` unless the database can be written to."""
    from safetune.store.local.store import Store

    where, settings = located(writes=True), Settings.current()
    directory = where.directory
    if directory is None and not where.shared(settings):
        raise StoreError(f"no outcome can be stored: {where.warning(settings)}")
    if directory is not None:
        store = Store.open(directory, settings.wait_s)
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


def open_store(writes: bool = False) -> Store:
    """Return the store, or an empty one where there is no database, unless it is written to.

    With the choices of all nodes, where the cache directory is on a network.
    """
    from safetune.store.local.store import Store

    database = located(writes).database
    try:
        is_there = writes or (database is not None and bool(database.stat()))
    except FileNotFoundError:
        is_there = False
    except OSError:
        is_there = True  # opening the store reports the error
    store = Store.open(database.parent) if database and is_there else Store.in_memory()
    if shared := shared_directory(writes):
        from safetune.store.shared import local_copy

        local_copy.copy_all(store.connection, shared)
    return store


def matching(
    kernel: str, store: Store, stored: Sequence[_Each], wanted: Callable[[_Each], bool]
) -> list[_Each]:
    """Return the wanted ones of what is stored of a kernel; raises `TargetError` without any."""
    if found := [each for each in stored if wanted(each)]:
        return found
    if stored:
        raise TargetError(f"no key of {kernel} matches these options; `safetune show {kernel}`")
    names = store.kernels()
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    listed = ", ".join(names[:_MOST_NAMES]) + more
    known = f"stored kernels: {listed}" if names else "the store is empty"
    raise TargetError(f"no kernel named {kernel!r} is stored; {known}")
