"""`safetune list`, `show`, `path` and `clear`: what the store holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from safetune.cli.tables import (
    call_words,
    config_words,
    milliseconds,
    outcome_data,
    outcome_table,
)
from safetune.errors import TargetError
from safetune.settings import Settings

if TYPE_CHECKING:
    from safetune.store.sqlite import Store


def _open() -> Store:
    from safetune.store.sqlite import Store

    return Store.open(Settings.current().cache_dir)


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_choices(as_json: bool) -> None:
    """List the stored choices, one row per kernel, arguments and device."""
    stored = _open().choices()
    if as_json:
        rows = [
            {
                "kernel": entry.key.kernel_name,
                "call": entry.key.call,
                "device": entry.key.device,
                "toolchain": entry.key.toolchain,
                "config": entry.choice.config,
                "median_ms": entry.choice.median_ms,
                "generation": entry.choice.generation,
                "created": entry.choice.created,
            }
            for entry in stored
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table()
    for heading in ("kernel", "arguments", "device", "choice", "median"):
        table.add_column(heading, overflow="fold")
    for entry in stored:
        table.add_row(
            entry.key.kernel_name,
            call_words(entry.key.call),
            entry.key.device["name"],
            config_words(entry.choice.config),
            milliseconds(entry.choice.median_ms),
        )
    Console().print(table if stored else "No choice is stored yet; `safetune tune` makes some.")


@click.command("show")
@click.argument("kernel")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def show(kernel: str, as_json: bool) -> None:
    """Show every stored trial of KERNEL, with what became of it."""
    store = _open()
    choices = {entry.key.digest: entry.choice for entry in store.choices(kernel)}
    stored = store.trials_of(kernel)
    if not stored:
        raise _not_stored(kernel, store)
    tables = []
    for key, trials in stored:
        chosen = choices[key.digest].config_digest if key.digest in choices else None
        rows = [(config_words(t.config), t.outcome, t.config_digest == chosen) for t in trials]
        tables.append((key, rows))
    if as_json:
        data = [
            {
                "kernel": kernel,
                "call": key.call,
                "device": key.device,
                "config": config,
                "chosen": is_choice,
                **outcome_data(outcome),
            }
            for key, rows in tables
            for config, outcome, is_choice in rows
        ]
        click.echo(json.dumps(data, indent=2))
        return
    console = Console()
    for key, rows in tables:
        title = f"{kernel}  {call_words(key.call)}  on {key.device['name']}"
        console.print(outcome_table(title, rows))


@click.command("path")
def path() -> None:
    """Print where the database is, whether it exists or not."""
    from safetune.store.sqlite import DATABASE_NAME

    click.echo(Settings.current().cache_dir / DATABASE_NAME)


@click.command("clear")
@click.argument("kernel")
def clear(kernel: str) -> None:
    """Forget every trial and choice of KERNEL."""
    store = _open()
    if kernel not in store.kernels():
        raise _not_stored(kernel, store)
    count = store.clear(kernel)
    click.echo(f"cleared {count} {'key' if count == 1 else 'keys'} of {kernel}")


def _not_stored(kernel: str, store: Store) -> TargetError:
    stored = ", ".join(store.kernels()) or "none"
    return TargetError(f"no kernel named {kernel!r} is stored; stored are: {stored}")
