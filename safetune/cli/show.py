"""`safetune show`: why a choice was made, and every trial."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from safetune.cli.command import FILE, Filter, command, filtered, key_option
from safetune.cli.emit import emit
from safetune.cli.listing import choice_data
from safetune.cli.output import echo
from safetune.cli.stored import check_some, open_store
from safetune.show.decorator import decorators
from safetune.show.keys import StoredKey, key_blocks, keys_of, newest_sources
from safetune.show.page import page as html_page
from safetune.show.words import call_data, outcome_data, readable_call
from safetune.store.schema import time_text


@command(
    "show",
    "safetune show add_kernel",
    "safetune show add_kernel --all",
    "safetune show add_kernel --html add_kernel.html",
)
@click.argument("kernel")
@filtered("device", "file")
@key_option
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Print every config of every key, also of sources that were tuned earlier.",
)
@click.option("--python", "as_python", is_flag=True, help="Print the decorator to paste.")
@click.option("--html", "page", metavar="FILE", type=FILE, help="Write one page with charts.")
def show(
    kernel: str,
    only: Filter,
    parts: dict[str, str],
    everything: bool,
    as_python: bool,
    page: Path | None,
) -> None:
    """Explain the choices for KERNEL: key, origin, gain and trials.

    Prints a row for each key. For a single key, or with --all, prints every config with the
    verdict, time and a bar for the speed of its last trial.
    """
    from safetune.store.packs import exchange

    store = open_store()
    keys = [
        key
        for key in keys_of(store, kernel)
        if only.matches(key.key)
        if parts.items() <= readable_call(key.key.call).items()
    ]
    check_some(kernel, store, keys)
    chosen = keys if everything else newest_sources(keys)[0]
    if page is not None:
        exchange.write(page, html_page(kernel, chosen))
        echo(f"written: {page}", err=True)
        return
    blocks = decorators(chosen) if as_python else key_blocks(keys, everything)
    emit([row for key in keys for row in _data(key)], blocks)


def _data(stored: StoredKey) -> Iterator[dict[str, Any]]:
    """Yield the choice if it has no trial here, then the trials."""
    key, entry, rows = stored.key, stored.entry, stored.rows
    of_key = {"kernel": key.kernel_name, "file": key.kernel_file, "line": key.kernel_line}
    if entry is not None and not any(row.chosen for row in rows):
        yield {**choice_data(entry), **of_key, "chosen": True, "origin": entry.origin}
    for trial, row in zip(stored.trials, rows, strict=True):
        yield {
            **of_key,
            "call": call_data(key.call),
            "device": key.device,
            "config": trial.config,
            "generation": trial.generation,
            "created": time_text(trial.created),
            "chosen": row.chosen,
            **outcome_data(trial.outcome),
            "with_other_calls": [outcome_data(outcome) for outcome in row.elsewhere],
        }
