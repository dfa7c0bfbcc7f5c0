"""`safetune list`: the stored choices, and those in packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from safetune.cli.command import Filter, command, filtered
from safetune.cli.emit import emit
from safetune.cli.stored import copy_of_shared, open_store, shared_option
from safetune.show.choices import choice_blocks
from safetune.show.keys import (
    Entry,
    by_kernel,
    entries_of,
    grouped,
    kernel_blocks,
    newest_sources,
    remarks,
    stored_entries,
)
from safetune.show.tables import Block, Column
from safetune.show.words import call_data, date, origin_word, readable_calls, time_words
from safetune.store.schema import time_text


@command("list", "safetune list", "safetune list --device H100")
@filtered("kernel", "device", "file")
@shared_option("List what the shared store has, instead of this node's choices.")
@click.option(
    "--all", "everything", is_flag=True, help="Also list sources that were tuned earlier."
)
def list_choices(only: Filter, shared: bool, everything: bool) -> None:
    """List the stored choices, one row per kernel, arguments and device.

    File, line and digest distinguish kernels with the same name. If a kernel's source has changed,
    only the source that was tuned last is listed. A key without a choice in the store is listed
    with its choice in the directories of SAFETUNE_PACKS.
    """
    stored = stored_entries(copy_of_shared()) if shared else entries_of(open_store())
    entries = [entry for entry in stored if only.matches(entry.key)]
    entries.sort(key=lambda entry: by_kernel(entry.key))
    shown, folded = (entries, "") if everything else newest_sources(entries)
    blocks = _blocks(shown, folded, is_any=bool(stored))
    emit([choice_data(entry) for entry in entries], blocks)


def _blocks(entries: Sequence[Entry], folded: str, is_any: bool) -> Iterator[Block]:
    if not entries:
        nothing = "No choice is stored yet: launch a kernel, or run `safetune tune`."
        yield "No choice matches." if is_any else nothing
    for group in grouped(entries):
        yield from kernel_blocks(group[0].key)
        choices = [entry.choice for entry in group]
        columns = [
            Column("time", [time_words(choice.median_ms) for choice in choices]),
            Column("made", [date(choice.created) for choice in choices], spare=True),
            Column("from", [origin_word(entry.origin) for entry in group], spare=True),
            Column("", [remarks(choice) for choice in choices]),
        ]
        calls = readable_calls([entry.key.call for entry in group])
        yield from choice_blocks(calls, [choice.config for choice in choices], columns)
    if folded:
        yield folded


def choice_data(entry: Entry) -> dict[str, Any]:
    """Return a choice as plain JSON data."""
    of_key, of_choice = vars(entry.key), vars(entry.choice)
    return {
        "kernel": entry.key.kernel_name,
        **{name: of_key[f"kernel_{name}"] for name in ("file", "line", "digest")},
        "call": call_data(entry.key.call),
        **{name: of_key[name] for name in ("device", "toolchain")},
        **{name: of_choice[name] for name in ("config", "median_ms", "generation", "marks")},
        "created": time_text(entry.choice.created),
        "origin": entry.origin or "here",
    }
