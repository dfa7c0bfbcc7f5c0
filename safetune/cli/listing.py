"""`safetune list`: the stored choices, and those in packs."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from safetune.cli.command import Filter, command, filtered
from safetune.cli.layout import Column, print_fact
from safetune.cli.output import (
    PACK,
    date,
    describe,
    echo,
    print_json,
    readable_call,
    stdout_console,
)
from safetune.cli.stored import open_store
from safetune.cli.trials import print_choices, time_words
from safetune.errors import SafetuneError
from safetune.frozen import dataclass
from safetune.outcome import Mark
from safetune.settings import Settings
from safetune.store.local.store import AGREED, IMPORTED
from safetune.store.records import ChoiceRecord, KeyRecord

if TYPE_CHECKING:
    from safetune.store.local.store import Store

#: The kernel's digest and the source file are cut to this.
_DIGEST = 8


@dataclass(frozen=True)
class Entry:
    """A choice with its key, and where it is from, as `Store.origin` says it."""

    key: KeyRecord
    choice: ChoiceRecord
    origin: str

    @property
    def short_source(self) -> str:
        """Where it is from, in a word."""
        if self.origin.startswith(PACK):
            return "pack"
        known = {"": "here", IMPORTED: "import", AGREED: "sync()"}
        return known.get(self.origin, "shared")


def by_kernel(key: KeyRecord) -> Any:
    """Return the place of a key among others: by kernel, then by its values."""
    from safetune.store.packs.packs import natural

    return key.kernel_name, key.kernel_file, key.kernel_line, natural(key.call)


_SORTS: dict[str, Callable[[Entry], Any]] = {
    "kernel": lambda entry: by_kernel(entry.key),
    "time": lambda entry: entry.choice.median_ms,
    "date": lambda entry: -entry.choice.created,
}


@command("list", "safetune list", "safetune list --device H100 --since 2026-11-01 --sort time")
@filtered("kernel", "device", "file")
@click.option(
    "--since",
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M"]),
    help="Only choices made on this day or later.",
)
@click.option("--disputed", is_flag=True, help="Only choices whose result is disputed.")
@click.option(
    "--sort",
    type=click.Choice(list(_SORTS)),
    default="kernel",
    show_default=True,
    help="Sort by kernel and file, by time, or the newest first.",
)
def list_choices(
    only: Filter, since: datetime.datetime | None, disputed: bool, sort: str, as_json: bool
) -> None:
    """List the stored choices, one row per kernel, arguments and device.

    Kernels of one name are told apart by file, line and digest. Choices in the directories of
    SAFETUNE_PACKS are listed for keys that have none in the store.
    """
    after = since.timestamp() if since else 0.0
    entries = [
        entry
        for entry in entries_of(open_store())
        if only.matches(entry.key)
        if entry.choice.created >= after
        if not disputed or entry.choice.dispute
    ]
    entries.sort(key=_SORTS[sort])
    if as_json:
        print_json([choice_data(entry) for entry in entries])
        return
    console = stdout_console()
    if not entries and (only != Filter() or since or disputed):
        console.print("No choice matches.")
    elif not entries:
        console.print("No choice is stored yet; run `safetune tune` first.")
    for group in grouped(entries):
        print_kernel(console, group[0].key)
        columns = [
            Column("time", tuple(time_words(entry.choice.median_ms) for entry in group)),
            Column("made", tuple(date(entry.choice.created) for entry in group), spare=2),
            Column("from", tuple(entry.short_source for entry in group), spare=1),
            Column("", tuple(_remarks(entry) for entry in group)),
        ]
        calls = [readable_call(entry.key.call) for entry in group]
        print_choices(console, calls, [entry.choice.config for entry in group], columns)


def entries_of(store: Store, kernel: str | None = None) -> list[Entry]:
    """Return the stored choices, and those in packs for other keys."""
    found = [Entry(e.key, e.choice, store.origin(e.choice)) for e in store.choices(kernel)]
    known = {entry.key.digest for entry in found}
    for each in _in_packs():
        if each.key.digest not in known and kernel in (None, each.key.kernel_name):
            known.add(each.key.digest)
            found.append(each)
    return found


def _in_packs() -> Iterator[Entry]:
    from safetune.store.packs import exchange

    for directory in Settings.current().packs:
        try:
            collected = exchange.collect(directory)
        except (SafetuneError, OSError) as error:
            echo(f"Warning: packs are left out: {describe(error)}", err=True)
            continue
        for entry in collected.entries:
            yield Entry(entry.key, entry.choice, f"{PACK}{directory}")


def grouped(entries: Iterable[Any]) -> list[list[Any]]:
    """Return what is printed in one table: of one kernel, device and toolchain, in its order."""
    groups: dict[tuple[str, ...], list[Any]] = {}
    for entry in entries:
        key, toolchain = entry.key, str(sorted(entry.key.toolchain.items()))
        of = (key.kernel_name, key.kernel_digest, key.device_digest, toolchain)
        groups.setdefault(of, []).append(entry)
    return list(groups.values())


def _remarks(entry: Entry) -> str:
    """The marks of a choice that a table shows."""
    marks = (Mark.DISPUTED, Mark.SEARCHED)
    return ", ".join(mark.value for mark in marks if mark.reason_in(entry.choice.marks))


def print_kernel(console: Console, key: KeyRecord) -> None:
    """Print a kernel's name and place, and the device and toolchain of its keys."""
    console.print(f"{key.kernel_name}  {_place(key)}", style="bold", soft_wrap=True)
    toolchain, name = key.toolchain, str(key.device["name"])
    target = [str(toolchain.get("target"))] * (toolchain.get("target") != name)
    parts = [name, f"Triton {toolchain.get('triton')}", *target]
    print_fact(console, "", f"{', '.join(parts)}, source {key.kernel_digest[:_DIGEST]}")


def _place(key: KeyRecord) -> str:
    return f"{key.kernel_file}:{key.kernel_line}" if key.kernel_file else "(file not known)"


def choice_data(entry: Entry) -> dict[str, Any]:
    """Return a choice as plain JSON data."""
    of_key, of_choice = vars(entry.key), vars(entry.choice)
    return {
        "kernel": entry.key.kernel_name,
        **{name: of_key[f"kernel_{name}"] for name in ("file", "line", "digest")},
        **{name: of_key[name] for name in ("call", "device", "toolchain")},
        **{n: of_choice[n] for n in ("config", "median_ms", "generation", "created", "marks")},
        "origin": entry.origin or "here",
    }
