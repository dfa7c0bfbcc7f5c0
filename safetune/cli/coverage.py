"""`safetune coverage`: which calls of a recorded run have a choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from safetune.cli import targets
from safetune.cli.command import command
from safetune.cli.emit import emit
from safetune.cli.output import counted, echo, prints_to_stderr
from safetune.cli.stored import counts, open_store
from safetune.outcome import duration
from safetune.settings import Mode, Settings
from safetune.show.tables import Block, Table, heading
from safetune.show.words import call_data, call_words

if TYPE_CHECKING:
    from safetune.offline.coverage import Covered
    from safetune.store.local.store import Store

#: How many calls without a choice of their own are listed.
_MOST_LISTED = 10


@command("coverage", "safetune coverage", "safetune coverage my_kernels.py --fail-under 100")
@click.argument("target", nargs=-1)
@click.option(
    "--calls",
    "database",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the recorded calls from another safetune.db.",
)
@click.option(
    "--fail-under",
    metavar="PERCENT",
    type=click.FloatRange(0, 100),
    help="Exit with 1 if fewer than PERCENT of the calls have a choice in the store or in a pack.",
)
def coverage_command(
    target: tuple[str, ...], database: Path | None, fail_under: float | None
) -> None:
    """Show how many of the calls recorded by SAFETUNE_MODE=record have a choice.

    A frozen process launches a call with the choice of its key from the store (exact) or a pack,
    with the choice of the nearest key of its kernel, or with the first config (nothing). A call has
    changed if its kernel was edited, rejects it, or is gone. To see that, the command imports the
    kernels, from TARGET or from the modules that defined them. --fail-under counts lost calls, and
    calls whose kernel could not be imported, as calls without a choice.
    """
    from safetune.store.local.store import Store

    store = open_store() if database is None else Store.open_read_only(database)
    with prints_to_stderr():
        keys = store.keys()
        from safetune.offline.coverage import certain_share, coverage
        from safetune.store.lookup import open_lookup

        calls, kernels = targets.recorded(store, target)
        lookup = open_lookup(replace(Settings.current(), mode=Mode.FROZEN))
        found = coverage(calls, keys, kernels, lookup)
        covered = sorted(found, key=lambda each: -each.time_ms)
    lost = _lost(store)
    emit(_data(covered, lost), _blocks(covered, lost))
    share = certain_share(covered)
    if fail_under is not None and (share < fail_under / 100 or lost):
        had = f"{_percent(share)} of the calls have a choice of their key"
        under = f", which is under {fail_under:g} %" * (share < fail_under / 100)
        echo("; ".join([had + under, *lost]), err=True)
        click.get_current_context().exit(1)


def _lost(store: Store) -> list[str]:
    """Return a line for each way in which calls of the program may not have been recorded."""
    rows = counts(store).get("call", 0)
    lines = []
    if damaged := rows - len(store.calls()):
        lines.append(f"{counted(damaged, 'recorded call')} cannot be read: record again")
    if rows >= store.most_calls:
        lines.append(f"{rows} keys are recorded, and no store keeps more: others may be missing")
    return lines


def _blocks(covered: Sequence[Covered], lost: Sequence[str]) -> Iterator[Block]:
    from safetune.offline.coverage import Found, shares

    names = dict.fromkeys(each.call.name for each in covered)
    groups = {name: [each for each in covered if each.call.name == name] for name in names}
    kinds = [kind.value for kind in Found if any(each.found is kind for each in covered)]
    yield heading("shares of the calls")
    yield Table.of(
        [
            {
                "kernel": name,
                "keys": len(group),
                "calls": sum(each.calls for each in group),
                "time": duration(sum(each.time_ms for each in group)),
                **{kind: _percent(shares(group)[kind][by_time]) for kind in kinds},
            }
            for name, group, by_time in (
                *((name, group, False) for name, group in groups.items()),
                ("all", covered, False),
                ("all, by time", covered, True),
            )
        ],
        spare=("keys", "calls", "time"),
    )
    yield ""
    missing = [each for each in covered if not each.found.is_of_key]
    for each in missing[:_MOST_LISTED]:
        call = f"{each.call.name} {call_words(each.call.arguments['call'])}"
        often = f"{counted(each.calls, 'call')}, {duration(each.time_ms)}"
        why = f": {each.problem}" * (each.found is Found.CHANGED)
        yield f"{each.found.value}: {call}, {often}{why}"
    if len(missing) > _MOST_LISTED:
        yield f"and {counted(len(missing) - _MOST_LISTED, 'more key')}"
    unsure = [each for each in covered if each.problem and each.found is not Found.CHANGED]
    for (name, problem), of_both in Counter((e.call.name, e.problem) for e in unsure).items():
        yield f"not compared with the code: {counted(of_both, 'key')} of {name}: {problem}"
    yield from lost
    if captured := sum(each.captured for each in covered):
        yield (
            f"{counted(captured, 'call')} went into CUDA graphs and count once: replays of a graph "
            "are not counted"
        )


def _percent(share: float) -> str:
    """Return a share as text; only all of it is 100 %."""
    return "100 %" if share == 1 else f"{min(share * 100, 99.9):.3g} %"


def _data(covered: Sequence[Covered], lost: Sequence[str]) -> dict[str, Any]:
    from safetune.offline.coverage import shares

    calls = [
        {
            "kernel": each.call.name,
            "call": call_data(each.call.arguments["call"]),
            "key": each.call.key,
            "found": each.found.value,
            **{name: getattr(each, name) for name in ("calls", "captured", "time_ms", "problem")},
        }
        for each in covered
    ]
    both = shares(covered).items()
    by_calls, by_time = ({kind: shared[place] for kind, shared in both} for place in (0, 1))
    return {"by_calls": by_calls, "by_time": by_time, "calls": calls, "lost": [*lost]}
