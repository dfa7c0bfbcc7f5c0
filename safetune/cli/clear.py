"""`safetune clear`: delete what is stored for a kernel, or what was not used for long."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence

import click

from safetune.cli import stored
from safetune.cli.command import Filter, command, filtered
from safetune.cli.emit import emit, wants_json
from safetune.cli.output import counted, echo
from safetune.errors import TargetError
from safetune.store.records import KeyRecord

_UNITS_S = {"h": 3600.0, "d": 86_400.0}


def _seconds(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """Return the seconds in `90d` or `12h`."""
    if text is None:
        return None
    if match := re.fullmatch(r"(\d+|\d*\.\d+)([dh])", text.strip()):
        return float(match[1]) * _UNITS_S[match[2]]
    raise click.BadParameter(f"{text!r} is not a time; give e.g. 90d or 12h")


@command(
    "clear",
    "safetune clear add_kernel --yes",
    "safetune clear --unused-for 90d",
    "safetune clear --failures add_kernel",
    "safetune clear add_kernel --file my_kernels.py --device H100 --unused-for 90d",
)
@click.argument("kernel", required=False)
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

    Prints what it will delete, and asks first; without a terminal it deletes nothing unless you
    give --yes. --file tells kernels of one name apart. Without KERNEL, --unused-for must say which
    keys. With --failures, keys, choices and all other outcomes stay, and the command does not ask.
    """
    if kernel is None and unused_s is None and not failures:
        raise click.UsageError("Give a KERNEL, or --unused-for TIME for the keys of all kernels.")
    if failures and shared:
        raise click.UsageError("Give --failures or --shared, not both: only choices are shared.")
    store = stored.open_store()
    before = math.inf if unused_s is None else time.time() - unused_s
    known, newest = list(store.keys(kernel)), stored.newest_rows(store)
    if shared:
        copy = stored.copy_of_shared()
        known += copy.keys(kernel)
        newest = {**stored.newest_rows(copy), **newest}
    keys = [
        key
        for key in {key.digest: key for key in known}.values()
        if only.matches(key) and newest.get(key.digest, 0.0) < before
    ]
    if kernel is not None:
        stored.check_some(kernel, store, keys)
    if failures:
        count = store.clear_failures([key.digest for key in keys])
        text = f"cleared {counted(count, 'failure')} of {kernel or 'all kernels'}"
        emit({"kernel": kernel, "failures": count}, [text])
        return
    names = {key.kernel_name for key in keys}
    what = kernel or counted(len(names), "kernel")
    if keys and not yes:
        _ask(what, keys)
    everything = only == Filter() and unused_s is None
    for name in names:
        digests = {key.digest for key in keys if key.kernel_name == name}
        store.clear(name, None if everything else digests)
    left = _left_shared(keys, forget=shared or stored.shared_directory() is not None)
    data = {"kernel": kernel, "cleared": len(keys), "left_shared": left}
    lines = [f"cleared {counted(len(keys), 'key')} of {what}"]
    if left:
        lines.append(
            f"the shared store still has {left} of them: --shared deletes them there, and "
            "`safetune tune --force` replaces them"
        )
    emit(data, ["; ".join(lines)])


def _left_shared(keys: Sequence[KeyRecord], forget: bool) -> int:
    """Return how many of some keys the shared store has; with `forget`, delete them there."""
    if (shared := stored.shared_store()) is None:
        return 0
    digests, left = {key.digest for key in keys}, 0
    with contextlib.closing(shared):
        for space in {key.space for key in keys}:
            names = {name for name in shared.names(space) if name.key in digests}
            if forget:
                shared.forget(space, names)
            else:
                left += len({name.key for name in names})
    return left


def _ask(what: str, keys: Sequence[KeyRecord]) -> None:
    """Raise, or end the command, unless the user at a terminal agrees."""
    if wants_json() or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise TargetError(f"give --yes to delete {counted(len(keys), 'key')} of {what}")
    groups = Counter((key.kernel_name, key.kernel_file, key.device["name"]) for key in keys)
    for (name, file, device), count in groups.items():
        echo(f"{name}, {file or 'an unknown file'}: {counted(count, 'key')} on {device}")
    click.confirm("Delete them?", abort=True)
