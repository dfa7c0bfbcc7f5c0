"""`safetune list`, `show`, `path`, `clear`, `stats` and `gc`: the contents of the store.

No command here creates a database; where there is no file, the store is empty.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click

from safetune.cli.output import (
    Elsewhere,
    call_words,
    config_words,
    counted,
    echo,
    empty_table,
    examples,
    moment,
    outcome_data,
    print_json,
    print_outcomes,
    stdout_console,
)
from safetune.errors import SafetuneError, StoreError, TargetError
from safetune.outcome import duration
from safetune.settings import Settings, display_url, parse_size
from safetune.store.records import StoredChoice

if TYPE_CHECKING:
    from safetune.store.local.db_files import Location
    from safetune.store.local.store import Store
    from safetune.store.records import TrialRecord
    from safetune.store.shared.files import Directory

#: How many kernels an error names.
_MOST_NAMES = 20

_DAY_S = 86_400.0

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of text for people."
)


def _kernel_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """The stored names that begin with a text, for a shell that completes the command line."""
    try:
        return [name for name in open_store().kernels() if name.startswith(incomplete)]
    except SafetuneError:
        return []


kernel_argument = click.argument("kernel", shell_complete=_kernel_names)


@click.command("list", epilog=examples("safetune list", "safetune list --json"))
@json_option
def list_choices(as_json: bool) -> None:
    """List the stored choices, one row per kernel, arguments and device."""
    stored = open_store().choices()
    if as_json:
        print_json([_choice_data(entry) for entry in stored])
        return
    console = stdout_console()
    if not stored:
        console.print("No choice is stored yet; run `safetune tune` first.")
    by_device = itertools.groupby(stored, lambda e: (e.key.kernel_name, e.key.device["name"]))
    for (kernel, device), entries in by_device:
        table = empty_table(f"{kernel}  on {device}", "arguments", "choice", "median")
        for entry in entries:
            table.add_row(
                call_words(entry.key.call),
                config_words(entry.choice.config) + " (disputed)" * bool(entry.choice.dispute),
                duration(entry.choice.median_ms),
            )
        console.print(table)


@click.command("show", epilog=examples("safetune show add_kernel"))
@kernel_argument
@json_option
def show(kernel: str, as_json: bool) -> None:
    """Show the verdict and the time of every config of KERNEL.

    Prints one table per key. For a config that was tried more than once, it shows the last trial.
    """
    store = open_store()
    choices = {entry.key.digest: entry.choice for entry in store.choices(kernel)}
    stored = [(key, _latest(trials)) for key, trials in store.trials_of(kernel)]
    if not stored:
        raise _not_stored(kernel, store)
    console, shown = stdout_console(), []
    for key, trials in stored:
        choice = choices.get(key.digest)
        digest = choice and choice.config_digest
        other = None
        if choice is not None and digest not in {trial.config_digest for trial in trials}:
            origin = store.origin(choice)
            other = Elsewhere(config_words(choice.config), origin, choice.median_ms)
            shown.append(
                _choice_data(StoredChoice(key, choice)) | {"chosen": True, "origin": origin}
            )
        shown += [
            {
                "kernel": kernel,
                "call": key.call,
                "device": key.device,
                "config": trial.config,
                "generation": trial.generation,
                "chosen": trial.config_digest == digest,
                **outcome_data(trial.outcome),
            }
            for trial in trials
        ]
        if not as_json:
            title = f"{kernel}  {call_words(key.call)}  on {key.device['name']}"
            rows = [(config_words(t.config), t.outcome, t.config_digest == digest) for t in trials]
            print_outcomes(console, title, rows, other)
    if as_json:
        print_json(shown)


@click.command("path", epilog=examples("safetune path"))
@json_option
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


@click.command("clear", epilog=examples("safetune clear add_kernel"))
@kernel_argument
@json_option
def clear(kernel: str, as_json: bool) -> None:
    """Delete every trial and choice of KERNEL."""
    store = open_store()
    if kernel not in store.kernels():
        raise _not_stored(kernel, store)
    count = store.clear(kernel)
    if shared := shared_directory():
        shared.forget(kernel)
    if as_json:
        print_json({"kernel": kernel, "cleared": count})
    else:
        echo(f"cleared {counted(count, 'key')} of {kernel}")


@click.command("gc", epilog=examples("safetune gc --older-than 180 --dry-run"))
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    metavar="DAYS",
    help="Delete keys without a trial or choice of the last DAYS, and damaged databases.",
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
@json_option
def gc(
    older_than: float | None,
    dead_toolchains: bool,
    max_size: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete stored keys that are old, of another Triton, or over a size limit.

    A key is deleted with its trials and choices. Keys that are being tuned now stay.
    """
    from safetune.store.local.gc import Rule, sweep

    if older_than is None and not dead_toolchains and max_size is None:
        raise click.UsageError("give --older-than, --dead-toolchains or --max-size")
    rule = Rule(
        before=None if older_than is None else time.time() - older_than * _DAY_S,
        triton=metadata.version("triton") if dead_toolchains else None,
        most_bytes=None if max_size is None else parse_size("--max-size", max_size),
    )
    swept = sweep(open_store(), rule, dry_run)
    if as_json:
        print_json({**asdict(swept), "dry_run": dry_run})
        return
    parts = [counted(getattr(swept, f"{noun}s"), noun) for noun in ("key", "trial", "choice")]
    for count, noun in ((swept.calls, "recorded call"), (swept.files, "damaged database")):
        parts += [counted(count, noun)] * bool(count)
    verb = "would delete" if dry_run else "deleted"
    size = "" if dry_run else f"; {swept.bytes_before} bytes before, {swept.bytes_after} now"
    echo(f"{verb} {', '.join(parts)}{size}")


@click.command("stats", epilog=examples("safetune stats"))
@json_option
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
        store = Store.open(directory)
        with contextlib.closing(store), store.connection.transaction():
            pass


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


def _latest(trials: list[TrialRecord]) -> list[TrialRecord]:
    """The trial of the highest generation for each config, in the order of the first ones."""
    ordered = sorted(trials, key=lambda trial: trial.generation)
    return list({trial.config_digest: trial for trial in ordered}.values())


def _choice_data(entry: StoredChoice) -> dict[str, Any]:
    of_key, of_choice = vars(entry.key), vars(entry.choice)
    return {
        "kernel": entry.key.kernel_name,
        **{name: of_key[name] for name in ("call", "device", "toolchain")},
        **{n: of_choice[n] for n in ("config", "median_ms", "generation", "created", "marks")},
    }


def _not_stored(kernel: str, store: Store) -> TargetError:
    stored = store.kernels()
    more = f" and {len(stored) - _MOST_NAMES} more" if len(stored) > _MOST_NAMES else ""
    names = ", ".join(stored[:_MOST_NAMES]) + more
    known = f"stored kernels: {names}" if stored else "the store is empty"
    return TargetError(f"no kernel named {kernel!r} is stored; {known}")
