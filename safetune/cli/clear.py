"""`safetune clear`: delete what is stored for a kernel, once it is clear for which."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import click

from safetune.cli.listing import Filter, filter_options
from safetune.cli.output import Number, counted, date, echo, examples, print_json
from safetune.cli.stored import (
    DAY_S,
    json_option,
    kernel_argument,
    not_stored,
    open_store,
    shared_directory,
)
from safetune.errors import TargetError
from safetune.frozen import dataclass
from safetune.store.local.store import Store
from safetune.store.records import KeyRecord


@dataclass(frozen=True)
class _Known:
    """A key, and when its newest trial or choice was made; 0 if it has none."""

    key: KeyRecord
    newest: float


@click.command(
    "clear",
    epilog=examples(
        "safetune clear add_kernel --yes",
        "safetune clear add_kernel --file my_kernels.py --device H100 --older-than 90",
    ),
)
@kernel_argument
@filter_options
@click.option(
    "--older-than",
    type=Number(min=0),
    metavar="DAYS",
    help="Only keys with no trial and no choice in the last DAYS.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def clear(
    kernel: str, device: str, file: str, older_than: float | None, yes: bool, as_json: bool
) -> None:
    """Delete the trials and choices of KERNEL.

    Prints what it will delete, and asks first. Without a terminal, or if several files have a
    kernel of this name, it deletes nothing unless you give --yes, or choose a file with --file.
    """
    store = open_store()
    if kernel not in store.kernels():
        raise not_stored(kernel, store)
    before = None if older_than is None else time.time() - older_than * DAY_S
    chosen = Filter(device, file)
    keys = [
        each
        for each in _known(store, kernel)
        if chosen.matches(each.key) and (before is None or each.newest < before)
    ]
    if not keys:
        raise TargetError(f"no key of {kernel} matches these options; `safetune show {kernel}`")
    if not yes:
        _ask(kernel, keys, as_json)
    digests = {each.key.digest for each in keys}
    everything = not (device or file or older_than is not None)
    store.clear(kernel, None if everything else digests)
    if shared := shared_directory():
        shared.forget(kernel, None if everything else digests)
    if as_json:
        print_json({"kernel": kernel, "cleared": len(keys)})
    else:
        echo(f"cleared {counted(len(keys), 'key')} of {kernel}")


def _known(store: Store, kernel: str) -> list[_Known]:
    made: dict[str, list[float]] = {}
    for entry in store.choices(kernel):
        made.setdefault(entry.key.digest, []).append(entry.choice.created)
    return [
        _Known(key, max([*made.get(key.digest, ()), *(t.created for t in trials)], default=0.0))
        for key, trials in store.trials_of(kernel)
    ]


def _ask(kernel: str, keys: Sequence[_Known], as_json: bool) -> None:
    """Raise, or end the command, unless the user at a terminal agrees."""
    by_file: dict[str, list[_Known]] = {}
    for each in keys:
        by_file.setdefault(each.key.kernel_file or "a file that is not known", []).append(each)
    lines = [f"  {file}: {_summary(of_file)}" for file, of_file in by_file.items()]
    if len(by_file) > 1:
        files = "; ".join(line.strip() for line in lines)
        raise TargetError(
            f"kernels of {len(by_file)} files are named {kernel}: {files}. Choose one with --file, "
            "or give --yes to delete all of them"
        )
    if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise TargetError(f"give --yes to delete {counted(len(keys), 'key')} of {kernel}")
    echo(f"{kernel}:\n" + "\n".join(lines))
    click.confirm("Delete them?", abort=True)


def _summary(keys: Sequence[_Known]) -> str:
    devices = ", ".join(sorted({str(each.key.device["name"]) for each in keys}))
    newest = max(each.newest for each in keys)
    made = f", the newest of {date(newest)}" if newest else ""
    return f"{counted(len(keys), 'key')} on {devices}{made}"
