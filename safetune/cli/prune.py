"""`safetune prune`: a shorter list of configs, from the trials that are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from safetune.cli import targets
from safetune.cli.command import Filter, command, filtered
from safetune.cli.layout import print_records
from safetune.cli.output import (
    call_words,
    config_words,
    counted,
    echo,
    print_json,
    prints_to_stderr,
    stdout_console,
)
from safetune.cli.stored import open_store
from safetune.errors import TargetError

if TYPE_CHECKING:
    from safetune.offline.shortlist import Measured
    from safetune.offline.tasks import OfflineKernel


class _Share(click.ParamType):  # type: ignore[type-arg]
    """`1%` or `0.01`."""

    name = "share"

    def convert(self, value: Any, parameter: Any, context: Any) -> float:
        text = str(value).strip()
        try:
            found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            found = -1.0
        if not 0 <= found < 1:
            self.fail(f"{text!r} is not a share; give e.g. 1% or 0.01", parameter, context)
        return found


@command(
    "prune",
    "safetune prune my_package.kernels:my_kernel",
    "safetune prune kernels.py:my_kernel --keep 12 --diff",
)
@click.argument("target")
@click.option(
    "--within",
    type=_Share(),
    default="1%",
    show_default=True,
    metavar="SHARE",
    help="How much slower than with all configs a key may be.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    metavar="N",
    help="Keep N configs, not the fewest: the others are for keys that were not measured.",
)
@filtered("device")
@click.option("--diff", "only_diff", is_flag=True, help="Print only the diff of the source.")
def prune_command(
    target: str, within: float, keep: int | None, only: Filter, only_diff: bool, as_json: bool
) -> None:
    """Find the shortest list of configs that keeps every stored key fast.

    TARGET is package.module:kernel or file.py:kernel, and the list is also printed as a diff of
    its source; or TARGET is the name of a stored kernel. All keys count, of every device and
    dtype that is stored; each weighs by its time in runs with SAFETUNE_MODE=record.
    """
    from safetune.offline import shares, shortlist

    store = open_store()
    kernel = _kernel(target, store.kernels())
    name, digest = (kernel.name, kernel.tuner.identity.digest) if kernel else (target, "")
    stored = [(key, trials) for key, trials in store.trials_of(name) if only.matches(key)]
    newest = shortlist.of_newest(stored, name, digest)
    tried = {trial.config_digest: trial.config for _, trials in newest for trial in trials}
    configs = tried if kernel is None else _declared(kernel, tried)
    keys = shortlist.measured_keys(newest, shares.times_ms(store.calls()), configs)
    if not keys:
        raise TargetError(f"no config of {name} has worked for a stored key")
    found = shortlist.shortest(keys, within, keep or 0)
    untried = configs.keys() - tried.keys()
    kept = [digest for digest in configs if digest in found.kept or digest in untried]
    if only_diff:
        click.echo(_diff(kernel, name, kept), nl=False)
        return
    longer = sorted({n for n in (len(configs) // 3, len(configs) // 2) if n > len(found.kept)})
    costs = shortlist.held_out(keys, within, [keep] if keep else [0, *longer])
    held_out = costs.pop(keep or 0, None)
    data = {
        "kernel": name,
        "within": within,
        "declared": len(configs),
        "kept": [configs[digest] for digest in kept],
        "dropped": [
            {"config": config, "won": _won(keys, digest, found.kept)}
            for digest, config in configs.items()
            if digest not in kept
        ],
        "not_declared": len(tried.keys() - configs.keys()),
        "never_tried": [configs[digest] for digest in untried],
        "shortest": found.proven,
        "keys": len(keys),
        "devices": sorted({str(key.key.device["name"]) for key in keys}),
        "cost": vars(shortlist.cost(keys, found.kept)),
        "held_out": held_out and vars(held_out),
        "longer": [{"keep": n, "held_out": vars(cost)} for n, cost in costs.items()],
    }
    if as_json:
        print_json(data)
        return
    _print_cost(data, by_time=len({key.weight for key in keys}) > 1)
    wins = shortlist.wins(keys)
    _print_configs(data, [wins[digest] for digest in kept])
    _print_diff(kernel, name, kept if data["dropped"] else ())


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
            f"{target} has {len(kernels)} kernels: name one, as {target}:NAME: {names}"
        )
    return kernels[0]


def _declared(kernel: OfflineKernel, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configs that a kernel declares, in order; warn where stored ones lack."""
    from safetune.config import config_digest, config_record

    records = {config_digest(config): config_record(config) for config in kernel.tuner.configs}
    if lacking := len(stored.keys() - records.keys()):
        echo(
            f"Warning: on this machine the list lacks {counted(lacking, 'config')} with trials: if "
            "it depends on the device, run this on a machine that has one",
            err=True,
        )
    return {digest: stored.get(digest, record) for digest, record in records.items()}


def _won(keys: Sequence[Measured], digest: str, kept: Iterable[str]) -> list[dict[str, Any]]:
    """Return the keys on which a dropped config was the fastest, and what they lose."""
    return [
        {
            "call": key.key.call,
            "device": key.key.device["name"],
            "slower": key.slowdown(kept) - 1,
        }
        for key in keys
        if key.winner() == digest
    ]


def _diff(kernel: OfflineKernel | None, name: str, kept: Sequence[str]) -> str:
    """Return the diff of the source; raises `TargetError` where it cannot be made."""
    from safetune.keys.kernel_digest import base_function
    from safetune.offline import source_edit

    if kernel is None:
        raise TargetError(
            f"{name} is the name of a stored kernel: a diff needs its source, as "
            "package.module:kernel or file.py:kernel"
        )
    return source_edit.diff(base_function(kernel.tuner.fn)[1], kernel.tuner.configs, kept)


def _print_diff(kernel: OfflineKernel | None, name: str, kept: Sequence[str]) -> None:
    try:
        if kernel is not None and kept:
            echo(_diff(kernel, name, kept))
    except TargetError as error:
        echo(f"Warning: no diff: {error}", err=True)


def _print_cost(found: Mapping[str, Any], by_time: bool) -> None:
    """Print how many configs stay, and what that costs."""
    kept, keys = len(found["kept"]), counted(found["keys"], "key")
    echo(
        f"{found['kernel']}: {kept} of {counted(found['declared'], 'config')} stay, "
        f"by the trials of {keys} on {', '.join(found['devices'])}"
    )
    costs = {
        "slower than with all configs": found["cost"],
        "on keys that the list was not made from": found["held_out"],
        **{f"on such keys with --keep {n['keep']}": n["held_out"] for n in found["longer"]},
    }
    for what, cost in costs.items():
        if cost:
            echo(f"{what}: {_words(**cost, by_time=by_time)}")
    if not found["shortest"]:
        echo("The search ended at its time limit: a shorter list may exist.")
    judged = (found["held_out"] or {"keys": 0})["keys"]
    if judged < found["keys"] > 1:
        echo(
            f"Only {judged} of {keys} were judged by lists that were not made from them: the time "
            "limit of that search"
        )


def _words(
    *, mean: float, weighted: float, worst: float, failed: int, by_time: bool, keys: int
) -> str:
    weighed = f"{weighted - 1:.2%} by recorded time, " * by_time
    without = f"; {counted(failed, 'key')} would have no working config" * bool(failed)
    return f"{mean - 1:.2%} in the geometric mean, {weighed}{worst - 1:.2%} at worst{without}"


def _print_configs(found: Mapping[str, Any], wins: Sequence[int]) -> None:
    """Print the configs that stay, and the keys on which each dropped one was the fastest."""
    stays = [
        {
            "config": config_words(config),
            "the fastest on": "never tried"
            if config in found["never_tried"]
            else counted(won, "key"),
        }
        for config, won in zip(found["kept"], wins, strict=True)
    ]
    dropped = [
        {
            "config": config_words(each["config"]),
            "was the fastest on": ", ".join(call_words(key["call"]) for key in each["won"]),
            "slowdown there": f"at most {max(key['slower'] for key in each['won']):.2%}",
        }
        for each in found["dropped"]
        if each["won"]
    ]
    for title, records in (("stays", stays), ("dropped", dropped)):
        if records:
            print_records(stdout_console(), title, records)
    never = [config_words(each["config"]) for each in found["dropped"] if not each["won"]]
    if never:
        echo(f"dropped, and never the fastest: {'; '.join(never)}")
