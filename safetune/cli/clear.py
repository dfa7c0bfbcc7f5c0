"""`safetune clear`: delete what is stored for a kernel, once it is clear for which."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import click

from safetune.cli.command import DAY_S, Filter, command, filtered, older_than_option
from safetune.cli.output import counted, date, echo, print_json
from safetune.cli.stored import kernel_argument, matching, open_store, shared_directory
from safetune.errors import TargetError
from safetune.store.local.store import Store
from safetune.store.records import KeyRecord


class _Known(NamedTuple):
    """A key, and when its newest trial or choice was made; 0 if it has none."""

    key: KeyRecord
    newest: float


@command(
    "clear",
    "safetune clear add_kernel --yes",
    "safetune clear add_kernel --file my_kernels.py --device H100 --older-than 90",
)
@kernel_argument
@filtered("device", "file")
@older_than_option("Only keys with no trial and no choice in the last DAYS.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(kernel: str, only: Filter, older_than: float | None, yes: bool, as_json: bool) -> None:
    """Delete the trials and choices of KERNEL.

    Prints what it will delete, and asks first. Without a terminal, or if several files have a
    kernel of this name, it deletes nothing unless you give --yes, or choose a file with --file.
    """
    store = open_store()
    before = math.inf if older_than is None else time.time() - older_than * DAY_S
    keys = matching(
        kernel,
        store,
        _known(store, kernel),
        lambda each: only.matches(each.key) and each.newest < before,
    )
    if not yes:
        _ask(kernel, keys, as_json)
    everything = only == Filter() and older_than is None
    digests = None if everything else {each.key.digest for each in keys}
    store.clear(kernel, digests)
    if shared := shared_directory():
        shared.forget(kernel, digests)
    if as_json:
        print_json({"kernel": kernel, "cleared": len(keys)})
    else:
        echo(f"cleared {counted(len(keys), 'key')} of {kernel}")


def _known(store: Store, kernel: str) -> list[_Known]:
    made = {entry.key.digest: entry.choice.created for entry in store.choices(kernel)}
    return [
        _Known(key, max([made.get(key.digest, 0.0), *(trial.created for trial in trials)]))
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
