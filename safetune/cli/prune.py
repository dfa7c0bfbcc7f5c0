"""`safetune prune`: a shorter list of configs, from the trials that are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from safetune.cli import targets
from safetune.cli.command import Filter, command, filtered
from safetune.cli.emit import emit
from safetune.cli.output import counted, echo, prints_to_stderr
from safetune.cli.stored import open_store
from safetune.errors import TargetError
from safetune.show.tables import Block, verbatim
from safetune.show.words import config_source, config_words

if TYPE_CHECKING:
    from safetune.offline.tasks import OfflineKernel


@command(
    "prune",
    "safetune prune my_package.kernels:my_kernel",
    "safetune prune kernels.py:my_kernel --keep 12",
)
@click.argument("target")
@click.option(
    "--within",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.01,
    show_default=True,
    metavar="SHARE",
    help="How much slower a key may become without the dropped configs.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep N configs instead of the fewest; the extra ones serve keys that were not measured.",
)
@filtered("device")
def prune_command(target: str, within: float, keep: int | None, only: Filter) -> None:
    """Find a short list of configs that keeps every stored key fast, and print it as source.

    TARGET is package.module:kernel or file.py:kernel. Uses the stored keys of every device and
    dtype.
    """
    from safetune.offline import shortlist

    store = open_store()
    kernel = _kernel(target)
    name, digest = kernel.name, kernel.tuner.identity.digest
    stored = [(key, trials) for key, trials in store.trials_of(name) if only.matches(key)]
    newest = shortlist.of_newest(stored, name, digest)
    tried = {trial.config_digest: trial.config for _, trials in newest for trial in trials}
    configs = _declared(kernel, tried)
    keys = shortlist.measured_keys(newest, configs)
    if not keys:
        raise TargetError(f"no config of {name} has worked for a stored key")
    found = shortlist.shortest(keys, within, keep or 0)
    untried = configs.keys() - tried.keys()
    kept = [digest for digest in configs if digest in found or digest in untried]
    held_out = shortlist.held_out(keys, within, keep or 0)
    data = {
        "kernel": name,
        "within": within,
        "kept": [configs[digest] for digest in kept],
        "dropped": [config for digest, config in configs.items() if digest not in kept],
        "never_tried": [configs[digest] for digest in untried],
        "keys": len(keys),
        "devices": sorted({str(key.key.device["name"]) for key in keys}),
        "cost": vars(shortlist.cost(keys, found)),
        "held_out": held_out and vars(held_out),
    }
    emit(data, _blocks(data))


def _kernel(target: str) -> OfflineKernel:
    with prints_to_stderr():
        kernels = targets.kernels_of([target], with_workload=False)
    if len(kernels) > 1:
        names = ", ".join(kernel.name for kernel in kernels)
        raise TargetError(
            f"{target} has {len(kernels)} kernels; give {target}:NAME, one of {names}"
        )
    return kernels[0]


def _declared(kernel: OfflineKernel, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configs that a kernel declares, in order; warn if stored ones are missing."""
    from safetune.config import config_digest, config_record

    records = {config_digest(config): config_record(config) for config in kernel.tuner.configs}
    if lacking := len(stored.keys() - records.keys()):
        echo(
            f"Warning: the list on this machine lacks {counted(lacking, 'config')} with trials. If "
            "the list depends on the device, run the command on a machine with that device",
            err=True,
        )
    return {digest: stored.get(digest, record) for digest, record in records.items()}


def _blocks(data: Mapping[str, Any]) -> Iterator[Block]:
    """Yield the number of remaining configs and its cost, and the list as source."""
    declared = counted(len(data["kept"]) + len(data["dropped"]), "config")
    yield (
        f"{data['kernel']}: {len(data['kept'])} of {declared} stay, by the trials of "
        f"{counted(data['keys'], 'key')} on {', '.join(data['devices'])}"
    )
    yield f"slower than with all configs: {_cost_words(**data['cost'])}"
    if data["held_out"]:
        yield f"on keys that the list was not made from: {_cost_words(**data['held_out'])}"
    if data["never_tried"]:
        yield f"never tried, so they stay: {'; '.join(map(config_words, data['never_tried']))}"
    if data["dropped"]:
        sources = [f"    {config_source(config)}" for config in data["kept"]]
        yield verbatim("\n".join(["configs=[", *sources, "],"]))


def _cost_words(*, mean: float, worst: float, failed: int, keys: int) -> str:
    without = f"; {failed} of {counted(keys, 'key')} would have no working config" * bool(failed)
    return f"{mean - 1:.2%} in the geometric mean, {worst - 1:.2%} at worst{without}"
