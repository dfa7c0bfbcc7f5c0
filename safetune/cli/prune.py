"""`safetune prune`: a shorter list of configs, from the trials that are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from safetune.cli import targets
from safetune.cli.output import (
    call_words,
    config_words,
    counted,
    echo,
    empty_table,
    examples,
    print_json,
    prints_to_stderr,
    stdout_console,
)
from safetune.cli.stored import json_option, open_store
from safetune.errors import TargetError
from safetune.frozen import dataclass

if TYPE_CHECKING:
    from safetune.offline.shortlist import Cost, Measured, Shortlist
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


@click.command(
    "prune",
    epilog=examples(
        "safetune prune my_package.kernels:my_kernel",
        "safetune prune kernels.py:my_kernel --keep 12 --diff",
    ),
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
@click.option("--device", metavar="TEXT", help="Only trials on devices with TEXT in their names.")
@click.option("--diff", "only_diff", is_flag=True, help="Print only the diff of the source.")
@json_option
def prune_command(
    target: str,
    within: float,
    keep: int | None,
    device: str | None,
    only_diff: bool,
    as_json: bool,
) -> None:
    """Find the shortest list of configs that keeps every stored key fast.

    TARGET is package.module:kernel or file.py:kernel, and the list is also printed as a diff of
    its source; or TARGET is the name of a stored kernel. All keys count, of every device and
    dtype that is stored; each weighs by its time in runs with SAFETUNE_MODE=record.
    """
    found = _found(target, within, keep or 0, device)
    if only_diff:
        click.echo(found.diff(), nl=False)
    elif as_json:
        print_json(found.data())
    else:
        found.print()


def _found(target: str, within: float, keep: int, device: str | None) -> _Pruned:
    from safetune.offline import shares, shortlist

    store = open_store()
    stored_name = target in store.kernels()
    if not stored_name and target.isidentifier():
        raise TargetError(
            f"no kernel {target} is stored: see `safetune list`, or give package.module:{target}"
        )
    kernel = None if stored_name else _kernel(target)
    name, digest = (kernel.name, kernel.tuner.identity.digest) if kernel else (target, "")
    stored = [
        (key, trials)
        for key, trials in store.trials_of(name)
        if device is None or device.lower() in str(key.device["name"]).lower()
    ]
    newest = shortlist.of_newest(stored, name, digest)
    tried = {trial.config_digest: trial.config for _, trials in newest for trial in trials}
    configs = tried if kernel is None else _declared(kernel, tried)
    keys = shortlist.measured_keys(newest, shares.times_ms(store.calls()), configs)
    if not keys:
        raise TargetError(f"no config of {name} has worked for a stored key")
    found = shortlist.shortest(keys, within, keep)
    return _Pruned(
        kernel=kernel,
        name=name,
        within=within,
        configs=configs,
        keys=keys,
        found=found,
        untried=frozenset(configs.keys() - tried.keys()),
        undeclared=len(tried.keys() - configs.keys()),
        held_out=shortlist.held_out(keys, within, keep),
        longer={
            count: cost
            for count in (len(configs) // 3, len(configs) // 2)
            if count > len(found.kept) and not keep
            if (cost := shortlist.held_out(keys, within, count))
        },
    )


def _kernel(target: str) -> OfflineKernel:
    with prints_to_stderr():
        kernels = targets.kernels_of([target], with_workload=False)
    if len(kernels) > 1:
        names = ", ".join(kernel.name for kernel in kernels)
        raise TargetError(
            f"{target} has {len(kernels)} kernels: name one, as {target}:NAME: {names}"
        )
    return kernels[0]


def _declared(kernel: OfflineKernel, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configs that a kernel declares, in their order."""
    from safetune.config import config_digest, config_record

    records = {config_digest(config): config_record(config) for config in kernel.tuner.configs}
    return {digest: stored.get(digest, record) for digest, record in records.items()}


@dataclass(frozen=True)
class _Pruned:
    """A shorter list and what it rests on.

    `untried` configs have no trial, and stay. `undeclared` counts configs with trials that are not
    in the list. `longer` has the costs of longer lists, on keys that they were not made from.
    """

    kernel: OfflineKernel | None
    name: str
    within: float
    configs: Mapping[str, Any]  # by digest, as records
    keys: Sequence[Measured]
    found: Shortlist
    untried: frozenset[str]
    undeclared: int
    held_out: Cost | None
    longer: Mapping[int, Cost]

    @property
    def kept(self) -> list[str]:
        """The configs that stay, in the order of the list."""
        return [c for c in self.configs if c in self.found.kept or c in self.untried]

    def dropped(self) -> dict[str, list[tuple[Measured, float]]]:
        """Return the keys on which each dropped config was the fastest, and their slowdowns."""
        return {
            config: [
                (key, key.slowdown(self.found.kept)) for key in self.keys if key.winner() == config
            ]
            for config in self.configs
            if config not in self.kept
        }

    def cost(self) -> Cost:
        """Return what the list costs on the stored keys."""
        from safetune.offline import shortlist

        return shortlist.cost(self.keys, self.found.kept)

    def diff(self) -> str:
        """Return the diff of the source; raises `TargetError` where it cannot be made."""
        from safetune.keys.kernel_digest import base_function
        from safetune.offline import source_edit

        if self.kernel is None:
            raise TargetError(
                f"{self.name} is the name of a stored kernel: a diff needs its source, as "
                "package.module:kernel or file.py:kernel"
            )
        _, function = base_function(self.kernel.tuner.fn)
        return source_edit.diff(function, self.kernel.tuner.configs, self.kept)

    def data(self) -> dict[str, Any]:
        """Return everything for programs."""
        dropped = {
            config: [
                {"call": key.key.call, "device": key.key.device["name"], "slower": ratio - 1}
                for key, ratio in won
            ]
            for config, won in self.dropped().items()
        }
        return {
            "kernel": self.name,
            "within": self.within,
            "declared": len(self.configs),
            "kept": [self.configs[config] for config in self.kept],
            "dropped": [{"config": self.configs[c], "won": won} for c, won in dropped.items()],
            "not_declared": self.undeclared,
            "never_tried": [self.configs[config] for config in self.untried],
            "shortest": self.found.proven,
            "keys": len(self.keys),
            "devices": sorted({str(key.key.device["name"]) for key in self.keys}),
            "cost": vars(self.cost()),
            "held_out": self.held_out and vars(self.held_out),
            "longer": [{"keep": n, "held_out": vars(cost)} for n, cost in self.longer.items()],
        }

    def print(self) -> None:
        """Print everything for people."""
        console, kept, count = stdout_console(), self.kept, len(self.configs)
        devices = {str(key.key.device["name"]) for key in self.keys}
        console.print(
            f"{self.name}: {len(kept)} of {counted(count, 'config')} stay, "
            f"by the trials of {counted(len(self.keys), 'key')} on {', '.join(sorted(devices))}"
        )
        recorded = len({key.weight for key in self.keys}) > 1
        console.print(f"slower than with all configs: {_words(self.cost(), recorded)}")
        if self.held_out is not None:
            words = _words(self.held_out, recorded)
            console.print(f"on keys that the list was not made from: {words}")
        for count, cost in self.longer.items():
            console.print(f"on such keys with --keep {count}: {_words(cost, recorded)}")
        if self.undeclared:
            console.print(
                f"on this machine the list lacks {counted(self.undeclared, 'config')} with trials: "
                "does it depend on the device?"
            )
        if not self.found.proven:
            console.print("The search ended at its time limit: a shorter list may exist.")
        self._print_configs()
        if self.kernel is not None and len(kept) < count:
            try:
                echo(self.diff())
            except TargetError as error:
                echo(f"Warning: no diff: {error}", err=True)

    def _print_configs(self) -> None:
        """Print the configs that stay, and the keys on which each dropped one was the fastest."""
        from safetune.offline import shortlist

        console, wins, dropped = stdout_console(), shortlist.wins(self.keys), self.dropped()
        table = empty_table("stays", "config", "the fastest on")
        for config in self.kept:
            won = "never tried" if config in self.untried else counted(wins[config], "key")
            table.add_row(config_words(self.configs[config]), won)
        console.print(table)
        table = empty_table("dropped", "config", "was the fastest on", "slowdown there")
        for config, of_config in dropped.items():
            if of_config:
                keys = ", ".join(call_words(key.key.call) for key, _ in of_config)
                slower = f"at most {max(r for _, r in of_config) - 1:.2%}"
                table.add_row(config_words(self.configs[config]), keys, slower)
        never = [config_words(self.configs[c]) for c, of_config in dropped.items() if not of_config]
        if table.row_count:
            console.print(table)
        if never:
            console.print(f"dropped, and never the fastest: {'; '.join(never)}")


def _words(cost: Cost, recorded: bool) -> str:
    by_time = f"{cost.weighted - 1:.2%} by recorded time, " * recorded
    failed = f"; {counted(cost.failed, 'key')} would have no working config" * bool(cost.failed)
    return (
        f"{cost.mean - 1:.2%} in the geometric mean, {by_time}{cost.worst - 1:.2%} at worst{failed}"
    )
