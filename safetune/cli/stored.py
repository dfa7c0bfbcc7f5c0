"""`safetune list`, `show`, `path` and `clear`: the contents of the store.

No command here creates a database; where there is no file, the store is empty.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import TYPE_CHECKING, Any

import click

from safetune.cli.messages import echo
from safetune.cli.tables import (
    Elsewhere,
    call_words,
    config_words,
    counted,
    empty_table,
    outcome_data,
    print_outcomes,
    stdout_console,
)
from safetune.errors import TargetError
from safetune.miss.progress import milliseconds
from safetune.settings import Settings, display_url
from safetune.store.records import StoredChoice

if TYPE_CHECKING:
    from pathlib import Path

    from safetune.store.local.store import Store
    from safetune.store.location import Location
    from safetune.store.records import TrialRecord
    from safetune.store.shared.directory import Directory

#: How many kernels an error names.
_MOST_NAMES = 20

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of text for people."
)


@click.command("list")
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
    for (kernel, device), entries in itertools.groupby(stored, key=_kernel_and_device):
        table = empty_table(f"{kernel}  on {device}", "arguments", "choice", "median")
        for entry in entries:
            table.add_row(
                call_words(entry.key.call),
                config_words(entry.choice.config) + " (disputed)" * bool(entry.choice.dispute),
                milliseconds(entry.choice.median_ms),
            )
        console.print(table)


@click.command("show")
@click.argument("kernel")
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


@click.command("path")
@json_option
def path(as_json: bool) -> None:
    """Print the path of the database, whether or not it exists."""
    where = located()
    if as_json:
        exists = where.database is not None and where.database.exists()
        shared = where.shared(Settings.current())
        data = {"path": where.database and str(where.database), "exists": exists}
        print_json({**data, "network": where.network, "shared": display_url(shared)})
        return
    if warning := where.warning(Settings.current()):
        echo(warning, err=True)
    if where.database is not None:
        echo(where.database)


@click.command("clear")
@click.argument("kernel")
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


def located(writes: bool = False) -> Location:
    """Return where choices are kept."""
    from safetune.store.location import locate

    return locate(Settings.current(), writes=writes)


def check_writable() -> None:
    """Raise `StoreError` unless the database can be written to."""
    from safetune.store.local.store import Store

    directory = located(writes=True).directory
    if directory is not None:
        store = Store.open(directory)
        with contextlib.closing(store), store.connection.transaction():
            pass


def shared_directory(writes: bool = False) -> Directory | None:
    """Return the cache directory as a shared store, if it is one by default."""
    choices = located(writes).choices
    if choices is None:
        return None
    from safetune.store.shared.directory import Directory

    return Directory(choices)


def open_store() -> Store:
    """Return the store, or an empty one where there is no database.

    With the choices of all nodes, where the cache directory is on a network.
    """
    store = _open_database(located().database)
    if shared := shared_directory():
        from safetune.store.shared import local_copy

        local_copy.copy_all(store.connection, shared)
    return store


def _open_database(database: Path | None) -> Store:
    from safetune.store.local.store import Store

    if database is None:
        return Store.in_memory()
    try:
        database.stat()
    except FileNotFoundError:
        return Store.in_memory()
    except OSError:
        pass  # opening the store reports the error
    return Store.open(database.parent)


def _latest(trials: list[TrialRecord]) -> list[TrialRecord]:
    """The trial of the highest generation for each config, in the order of the first ones."""
    latest: dict[str, TrialRecord] = {}
    for trial in sorted(trials, key=lambda trial: trial.generation):
        latest[trial.config_digest] = trial
    return list(latest.values())


def _choice_data(entry: StoredChoice) -> dict[str, Any]:
    key, choice = entry.key, entry.choice
    return {
        "kernel": key.kernel_name,
        **{name: getattr(key, name) for name in ("call", "device", "toolchain")},
        **{
            name: getattr(choice, name)
            for name in ("config", "median_ms", "generation", "created", "marks")
        },
    }


def _kernel_and_device(entry: StoredChoice) -> tuple[str, str]:
    return entry.key.kernel_name, entry.key.device["name"]


def print_json(data: Any) -> None:
    """Print JSON for programs."""
    click.echo(json.dumps(data, indent=2))


def _not_stored(kernel: str, store: Store) -> TargetError:
    stored = store.kernels()
    more = f" and {len(stored) - _MOST_NAMES} more" if len(stored) > _MOST_NAMES else ""
    names = ", ".join(stored[:_MOST_NAMES]) + more
    known = f"stored kernels: {names}" if stored else "the store is empty"
    return TargetError(f"no kernel named {kernel!r} is stored; {known}")
