"""`safetune prune`: a shorter list of configs, from the trials that are stored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from safetune.cli import targets
from safetune.cli.command import Filter, command, filtered
from safetune.cli.emit import emit
from safetune.cli.output import counted, echo, prints_to_stderr
from safetune.cli.stored import open_store
from safetune.errors import TargetError
from safetune.show.tables import Block, Table, heading, verbatim
from safetune.show.words import call_data, call_words, config_source, config_words

if TYPE_CHECKING:
    from safetune.offline.shortlist import Measured
    from safetune.offline.tasks import OfflineKernel


def _share(_: click.Context, __: click.Parameter, text: str) -> float:
    """Return the share in `1%` or `0.01`."""
    with contextlib.suppress(ValueError):
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if 0 <= share < 1:
            return share
    raise click.BadParameter(f"{text!r} is not a fraction; give e.g. 1% or 0.01")


@command(
    "prune",
    "safetune prune my_package.kernels:my_kernel",
    "safetune prune kernels.py:my_kernel --keep 12",
)
@click.argument("target")
@click.option(
    "--within",
    callback=_share,
    default="1%",
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

    TARGET is package.module:kernel or file.py:kernel, or the name of a stored kernel. Uses the
    stored keys of every device and dtype.
    """
    from safetune.offline import shortlist

    store = open_store()
    kernel = _kernel(target, store.kernels())
    name, digest = (kernel.name, kernel.tuner.identity.digest) if kernel else (target, "")
    stored = [(key, trials) for key, trials in store.trials_of(name) if only.matches(key)]
    newest = shortlist.of_newest(stored, name, digest)
    tried = {trial.config_digest: trial.config for _, trials in newest for trial in trials}
    configs = tried if kernel is None else _declared(kernel, tried)
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
        "declared": len(configs),
        "kept": [configs[digest] for digest in kept],
        "dropped": [
            {"config": config, "won": _won(keys, digest, found)}
            for digest, config in configs.items()
            if digest not in kept
        ],
        "not_declared": len(tried.keys() - configs.keys()),
        "never_tried": [configs[digest] for digest in untried],
        "keys": len(keys),
        "devices": sorted({str(key.key.device["name"]) for key in keys}),
        "cost": vars(shortlist.cost(keys, found)),
        "held_out": held_out and vars(held_out),
    }
    wins = shortlist.wins(keys)
    emit(data, _blocks(data, [wins[digest] for digest in kept]))


def _kernel(target: str, stored: Sequence[str]) -> OfflineKernel | None:
    """Return the kernel of a TARGET; None for the name of a stored one."""
    if target in stored:
        return None
    if target.isidentifier():
        raise TargetError(
            f"no kernel {target} is stored: see `safetune list`, or give package.module:{target}"
        )
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


def _won(keys: Sequence[Measured], digest: str, kept: Iterable[str]) -> list[dict[str, Any]]:
    """Return the keys on which a dropped config was the fastest, and their slowdown without it."""
    return [
        {
            "call": call_data(key.key.call),
            "words": call_words(key.key.call),
            "device": key.key.device["name"],
            "slower": key.slowdown(kept) - 1,
        }
        for key in keys
        if key.winner() == digest
    ]


def _blocks(data: Mapping[str, Any], wins: Sequence[int]) -> Iterator[Block]:
    """Yield the number of remaining configs and its cost, the configs, and the list as source."""
    keys = counted(data["keys"], "key")
    yield (
        f"{data['kernel']}: {len(data['kept'])} of {counted(data['declared'], 'config')} stay, "
        f"by the trials of {keys} on {', '.join(data['devices'])}"
    )
    costs = {
        "slower than with all configs": data["cost"],
        "on keys that the list was not made from": data["held_out"],
    }
    for what, cost in costs.items():
        if cost:
            yield f"{what}: {_cost_words(**cost)}"
    yield from _config_blocks(data, wins)
    if data["dropped"]:
        sources = [f"    {config_source(config)}" for config in data["kept"]]
        yield verbatim("\n".join(["configs=[", *sources, "],"]))


def _cost_words(*, mean: float, worst: float, failed: int, keys: int) -> str:
    without = f"; {counted(failed, 'key')} would have no working config" * bool(failed)
    return f"{mean - 1:.2%} in the geometric mean, {worst - 1:.2%} at worst{without}"


def _config_blocks(data: Mapping[str, Any], wins: Sequence[int]) -> Iterator[Block]:
    """Yield the remaining configs, and the keys on which each dropped one was the fastest."""
    stays = [
        {
            "config": config_words(config),
            "the fastest on": "never tried"
            if config in data["never_tried"]
            else counted(won, "key"),
        }
        for config, won in zip(data["kept"], wins, strict=True)
    ]
    dropped = [
        {
            "config": config_words(each["config"]),
            "was the fastest on": ", ".join(key["words"] for key in each["won"]),
            "slowdown there": f"at most {max(key['slower'] for key in each['won']):.2%}",
        }
        for each in data["dropped"]
        if each["won"]
    ]
    for title, rows in (("stays", stays), ("dropped", dropped)):
        if rows:
            yield from (heading(title), Table.of(rows), "")
    never = [config_words(each["config"]) for each in data["dropped"] if not each["won"]]
    if never:
        yield f"dropped, and never the fastest: {'; '.join(never)}"
