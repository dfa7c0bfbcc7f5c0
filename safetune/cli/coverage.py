"""`safetune coverage`: which calls of a recorded run have a choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from safetune.cli.command import command
from safetune.cli.layout import print_records
from safetune.cli.output import (
    call_words,
    counted,
    print_json,
    stdout_console,
)
from safetune.cli.stored import open_store
from safetune.errors import TargetError
from safetune.outcome import duration
from safetune.settings import Mode, Settings

if TYPE_CHECKING:
    from safetune.offline.coverage import Covered

#: How many calls without a choice of their own are listed.
_MOST_LISTED = 10


@command("coverage", "safetune coverage", "safetune coverage --json")
@click.option(
    "--calls",
    "database",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The calls that another safetune.db has recorded.",
)
def coverage_command(database: Path | None, as_json: bool) -> None:
    """Show which of the calls that SAFETUNE_MODE=record has recorded have a choice.

    A call is launched with the choice of its key in the store (exact) or in a pack, with that of
    the nearest key of its kernel, or with the first config (nothing).
    """
    from safetune.offline.coverage import coverage
    from safetune.store.local.store import Store
    from safetune.store.lookup import open_lookup

    store = open_store() if database is None else Store.open_read_only(database)
    calls, keys = store.calls(), store.keys()
    if not calls:
        raise TargetError("no call is recorded; run the program with SAFETUNE_MODE=record")
    lookup = open_lookup(replace(Settings.current(), mode=Mode.FROZEN))
    covered = sorted(coverage(calls, keys, lookup), key=lambda each: -each.time_ms)
    if as_json:
        print_json(_data(covered))
    else:
        _print(covered)


def _print(covered: Sequence[Covered]) -> None:
    from safetune.offline.coverage import shares

    console = stdout_console()
    names = dict.fromkeys(each.call.name for each in covered)
    rows = {name: [each for each in covered if each.call.name == name] for name in names}
    records = [
        {
            "kernel": name,
            "keys": len(entries),
            "calls": sum(each.calls for each in entries),
            "time": duration(sum(each.time_ms for each in entries)),
            **{kind: " / ".join(map(_percent, both)) for kind, both in shares(entries).items()},
        }
        for name, entries in (*rows.items(), ("all", covered))
    ]
    print_records(console, "shares of calls / of time", records)
    missing = [each for each in covered if not each.found.is_of_key]
    for each in missing[:_MOST_LISTED]:
        call = f"{each.call.name} {call_words(each.call.arguments['call'])}"
        often = f"{counted(each.calls, 'call')}, {duration(each.time_ms)}"
        console.print(f"{each.found.value}: {call}, {often}")
    if len(missing) > _MOST_LISTED:
        console.print(f"and {counted(len(missing) - _MOST_LISTED, 'more key')}")


def _percent(share: float) -> str:
    """Return a share as text; only all of it is 100 %."""
    return "100 %" if share == 1 else f"{min(share * 100, 99.9):.3g} %"


def _data(covered: Sequence[Covered]) -> dict[str, Any]:
    from safetune.offline.coverage import shares

    calls = [
        {
            "kernel": each.call.name,
            "call": each.call.arguments.get("call"),
            "key": each.call.key,
            "found": each.found.value,
            "calls": each.calls,
            "time_ms": each.time_ms,
        }
        for each in covered
    ]
    both = shares(covered).items()
    by_calls, by_time = ({kind: shared[place] for kind, shared in both} for place in (0, 1))
    return {"by_calls": by_calls, "by_time": by_time, "calls": calls}
