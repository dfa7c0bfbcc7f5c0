"""`safetune clear`: delete what is stored for a kernel, or what was not used for long."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import click

from safetune.cli import stored
from safetune.cli.command import Filter, command, filtered
from safetune.cli.emit import emit, wants_json
from safetune.cli.output import counted, describe, echo
from safetune.errors import StoreError, TargetError
from safetune.show.words import date
from safetune.store.local.store import Store
from safetune.store.records import KeyRecord

_UNITS_S = {"h": 3600.0, "d": 86_400.0}


def _seconds(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """Return the seconds in `90d` or `12h`."""
    if text is None:
        return None
    if match := re.fullmatch(r"(\d+|\d*\.\d+)([dh])", text.strip()):
        return float(match[1]) * _UNITS_S[match[2]]
    raise click.BadParameter(f"{text!r} is not a time; give e.g. 90d or 12h")


class _Dated(NamedTuple):
    """A key, and when its newest row was made; 0 if it has none."""

    key: KeyRecord
    newest: float


@command(
    "clear",
    "safetune clear add_kernel --yes",
    "safetune clear --unused-for 90d",
    "safetune clear --failures add_kernel",
    "safetune clear add_kernel --file my_kernels.py --device H100 --unused-for 90d",
)
@stored.kernel_argument(required=False)
@filtered("device", "file")
@click.option(
    "--unused-for",
    "unused_s",
    metavar="TIME",
    callback=_seconds,
    help="Only keys with no trial, choice or recorded call in this time, e.g. 90d.",
)
@click.option(
    "--failures",
    is_flag=True,
    help="Only outcomes of configs that crashed, hung or took the machine down, so that they are "
    "tried again.",
)
@stored.shared_option("Delete them in the shared store too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(
    kernel: str | None,
    only: Filter,
    unused_s: float | None,
    failures: bool,
    shared: bool,
    yes: bool,
) -> None:
    """Delete the trials, choices and recorded calls of KERNEL, or of all kernels.

    Prints what it will delete, and asks first. Without a terminal, or if several files have a
    kernel of this name, it deletes nothing unless you give --yes, or choose a file with --file.
    Without KERNEL, --unused-for must say which keys. With --failures, keys, choices and all other
    outcomes stay, and the command does not ask.
    """
    if kernel is None and unused_s is None and not failures:
        raise click.UsageError("Give a KERNEL, or --unused-for TIME for the keys of all kernels.")
    if failures and shared:
        raise click.UsageError("Give --failures or --shared, not both: only choices are shared.")
    store = stored.open_store()
    before = math.inf if unused_s is None else time.time() - unused_s
    dated = _dated(store, kernel)
    if shared:
        dated = {**_dated(stored.copy_of_shared(), kernel), **dated}
    keys = [key for key in dated.values() if only.matches(key.key) and key.newest < before]
    if kernel is not None:
        stored.check_some(kernel, store, keys)
    if failures:
        count = store.clear_failures([key.key.digest for key in keys])
        text = f"cleared {counted(count, 'failure')} of {kernel or 'all kernels'}"
        emit({"kernel": kernel, "failures": count}, [text])
        return
    if keys and not yes:
        _ask(kernel, keys)
    left = _left_shared(keys, forget=shared or stored.shared_directory() is not None)
    everything = only == Filter() and unused_s is None
    for name in {key.key.kernel_name for key in keys}:
        digests = {key.key.digest for key in keys if key.key.kernel_name == name}
        store.clear(name, None if everything else digests)
    stored.shrink(store)
    what = kernel or counted(len({key.key.kernel_name for key in keys}), "kernel")
    data = {"kernel": kernel, "cleared": len(keys), "left_shared": left}
    lines = [f"cleared {counted(len(keys), 'key')} of {what}"]
    if left:
        lines.append(
            f"the shared store still has {left} of them: --shared deletes them there, and "
            "`safetune tune --force` replaces them"
        )
    emit(data, ["; ".join(lines)])


def _dated(store: Store, kernel: str | None) -> dict[str, _Dated]:
    newest = stored.newest_rows(store)
    return {key.digest: _Dated(key, newest.get(key.digest, 0.0)) for key in store.keys(kernel)}


def _left_shared(keys: Sequence[_Dated], forget: bool) -> int:
    """Return how many of some keys the shared store has; with `forget`, delete them there."""
    if (shared := stored.shared_store()) is None:
        return 0
    digests, left = {key.key.digest for key in keys}, 0
    try:
        with contextlib.closing(shared):
            for space in {key.key.space for key in keys}:
                names = {name for name in shared.names(space) if name.key in digests}
                if forget:
                    shared.forget(space, names)
                else:
                    left += len({name.key for name in names})
    except StoreError as error:
        if forget:
            raise
        echo(f"Warning: the shared store may still hold them: {describe(error)}", err=True)
    return left


def _ask(kernel: str | None, keys: Sequence[_Dated]) -> None:
    """Raise, or end the command, unless the user at a terminal agrees."""
    groups: dict[tuple[str, str], list[_Dated]] = {}
    for key in keys:
        file = key.key.kernel_file or "an unknown file"
        groups.setdefault((key.key.kernel_name, file), []).append(key)
    lines = [f"{name}, {file}: {_summary(group)}" for (name, file), group in groups.items()]
    if kernel is not None and len(groups) > 1:
        raise TargetError(
            f"{len(groups)} files have a kernel named {kernel}: {'; '.join(lines)}. Choose one "
            "with --file, or give --yes to delete all of them"
        )
    if wants_json() or not (sys.stdin.isatty() and sys.stdout.isatty()):
        what = kernel or counted(len(groups), "kernel")
        raise TargetError(f"give --yes to delete {counted(len(keys), 'key')} of {what}")
    echo("\n".join(lines))
    click.confirm("Delete them?", abort=True)


def _summary(keys: Sequence[_Dated]) -> str:
    devices = ", ".join(sorted({str(key.key.device["name"]) for key in keys}))
    newest = max(key.newest for key in keys)
    made = f", the newest of {date(newest)}" if newest else ""
    return f"{counted(len(keys), 'key')} on {devices}{made}"
