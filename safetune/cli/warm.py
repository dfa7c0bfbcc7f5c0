"""`safetune warm`: compile the kernels of a frozen program ahead of time, without its GPU."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from safetune.cli import targets
from safetune.cli.command import Filter, command, filtered
from safetune.cli.emit import emit
from safetune.cli.output import prints_to_stderr
from safetune.cli.stored import open_store
from safetune.errors import TargetError
from safetune.settings import Mode, Settings
from safetune.show.tables import Block, Table, heading
from safetune.show.words import left_out_data

if TYPE_CHECKING:
    from safetune.offline.replay import LeftOut
    from safetune.offline.tasks import OfflineKernel
    from safetune.offline.warm import Described, Warmed
    from safetune.store.records import KeyRecord


@command("warm", "safetune warm my_package.kernels --device H100", "safetune warm --recorded")
@targets.workload_options(required=False)
@filtered("device")
@click.option(
    "--recorded",
    is_flag=True,
    help="Compile for the calls that SAFETUNE_MODE=record has recorded, not for workloads.",
)
def warm_command(
    target: tuple[str, ...],
    shape: tuple[str, ...],
    dtype: tuple[str, ...],
    only: Filter,
    recorded: bool,
) -> None:
    """Compile the kernels that TARGET launches under SAFETUNE_MODE=frozen into Triton's cache.

    Compiles the stored config, or the fallback, for each workload of TARGET and each device of a
    key in the store or in packs. Needs no GPU. Exits with 1 if a compilation failed.
    """
    targets.check_wanted(target, shape, dtype, recorded)
    from safetune.offline import replay, warm
    from safetune.store.lookup import open_lookup
    from safetune.store.packs.exchange import collect
    from safetune.store.packs.packs import shipped

    left_out: list[LeftOut] = []
    with prints_to_stderr():
        if recorded:
            stored, kernels = targets.recorded(open_store(), target)
            found = replay.with_kernels(stored, kernels, left_out)
            calls = replay.shapes(found, left_out)
        else:
            kernels = targets.kernels_of(target)
            calls = [task for kernel in kernels for task in warm.declared(kernel, dtype, shape)]
        targets.check_shapes(shape, [task.workload.name for task in calls])
        launched = list({id(task.kernel.tuner): task.kernel for task in calls}.values())
        _check_compiled(launched)
        lookup = open_lookup(replace(Settings.current(), mode=Mode.FROZEN))
        packs = [*Settings.current().packs, *filter(None, [shipped()])]
        collected = [collect(pack).entries for pack in packs if any(pack.glob("*.json"))]
        keys = [*(entry.key for entry in itertools.chain(*collected)), *open_store().keys()]
        devices = _devices(keys, launched, only.device)
        timeout_s = max(kernel.tuner.limits.compile_timeout_s for kernel in launched)
        done = [w for device in devices for w in warm.warm(calls, device, lookup, timeout_s)]
    failed = any(each.error for each in done)
    data = {"compiled": [vars(each) for each in done], "left_out": left_out_data(left_out)}
    emit(data, _blocks(done, left_out))
    sys.exit(1 if failed or not done else 0)


def _check_compiled(kernels: Sequence[OfflineKernel]) -> None:
    if interpreted := [kernel.name for kernel in kernels if kernel.interpreted]:
        raise TargetError(
            f"{', '.join(interpreted)} would run in Triton's interpreter, which compiles nothing: "
            "unset TRITON_INTERPRET"
        )


def _devices(
    keys: Sequence[KeyRecord], kernels: Sequence[OfflineKernel], name: str
) -> list[Described]:
    from safetune.offline import warm

    found = warm.devices_of(keys, kernels, name)
    if not found:
        known = sorted({each.device.name for each in warm.devices_of(keys, kernels)})
        there = (
            f"there are choices for {', '.join(known)}" if known else "tune first, or name packs"
        )
        names = ", ".join(dict.fromkeys(kernel.name for kernel in kernels))
        on = f" for a device {name!r}" if name else ""
        raise TargetError(f"no key of {names} is stored{on}: {there}")
    return found


def _blocks(done: Sequence[Warmed], left_out: Sequence[LeftOut]) -> Iterator[Block]:
    for device in dict.fromkeys(each.device for each in done):
        of_device = [each for each in done if each.device == device]
        rows = [
            {
                **{name: getattr(each, name) for name in ("kernel", "call", "config")},
                "from": each.origin,
                "binary": each.error or ("was there" if each.was_there else "compiled"),
            }
            for each in of_device
        ]
        styles = ["red" if each.error else None for each in of_device]
        yield from (heading(device), Table.of(rows, styles), "")
    made = sum(not each.error and not each.was_there for each in done)
    failed = sum(bool(each.error) for each in done)
    fallbacks = sum(each.origin == "fallback" for each in done)
    yield (
        f"{made} compiled, {sum(each.was_there for each in done)} there before"
        + (f", {failed} failed" if failed else "")
        + (f", {fallbacks} without a stored choice" if fallbacks else "")
    )
    for left in left_out:
        yield f"not compiled: {left.words}: {left.reason}"
