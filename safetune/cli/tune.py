"""`safetune tune`: tune kernels offline for the workloads that they declare."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from safetune.cli import targets, workers
from safetune.cli.command import ARGUMENTS, command, text_of
from safetune.cli.display import TELL_S, Sweep
from safetune.cli.emit import wants_json
from safetune.cli.output import echo, prints_to_stderr, show_traceback
from safetune.cli.plan import print_plan
from safetune.cli.report import (
    Report,
    failed_event,
    not_begun_event,
    planned_event,
    tuned_event,
)
from safetune.cli.stored import check_writable
from safetune.errors import (
    Busy,
    InvalidConfig,
    KernelNotTransferable,
    NothingToMeasure,
    NoWorkingConfig,
    StoreError,
    TargetError,
    WorkloadError,
)
from safetune.settings import SearchBudget

if TYPE_CHECKING:
    from safetune.cli.workers import Parent
    from safetune.offline.plan import Plan, Planned
    from safetune.offline.replay import LeftOut
    from safetune.offline.shards import Shard
    from safetune.offline.tasks import OfflineKernel

#: What keeps a tuning from its begin, and says nothing of the others.
_OF_ONE_KEY = (
    InvalidConfig,
    KernelNotTransferable,
    NothingToMeasure,
    TargetError,
    WorkloadError,
)


@command(
    "tune",
    "safetune tune my_kernels.py",
    "safetune tune my_kernels.py:add_kernel --dtype float16",
    "safetune tune my_kernels.py --budget 200",
    "safetune tune --recorded --devices all",
    "srun safetune tune my_kernels.py --shard auto",
)
@targets.workload_options(required=False)
@click.option(
    "--devices",
    metavar="all|0,3",
    callback=text_of,
    help="Tune on these GPUs of this machine at once.",
)
@click.option(
    "--shard",
    metavar="auto|2/4",
    callback=text_of,
    help="Tune this part of the list; `auto` takes the rank that srun or torchrun sets.",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    callback=text_of,
    help="Tune on all GPUs of a Ray cluster, e.g. auto; needs ray.",
)
@click.option("--worker", hidden=True, help="As `2/4`: what --devices starts.")
@click.option(
    "--force", is_flag=True, help="Measure configs again even if their outcome is stored."
)
@click.option(
    "--budget",
    metavar="CONFIGS|TIME",
    callback=lambda _, __, text: SearchBudget.parse("safetune tune", text),
    help="Measure only the most promising configs: 200 for each key, or for 5m in total.",
)
@click.option(
    "--recorded", is_flag=True, help="Tune the calls that SAFETUNE_MODE=record has recorded."
)
@click.option(
    "--top",
    metavar="SHARE",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --recorded: only the keys that take this share of the time, e.g. 0.95.",
)
@click.option(
    "--allow-disputed", is_flag=True, help="Exit with 0 even if the result of a choice is disputed."
)
@click.option("--dry-run", is_flag=True, help="Print what would be measured, and measure nothing.")
def tune_command(**given: Any) -> None:
    """Tune the kernels of TARGET and store every outcome.

    TARGET is package.module[:kernel], file.py[:kernel] or a directory: all files below it that
    declare workloads. With --recorded, TARGET is optional if the modules of the kernels can be
    imported.

    Exits with 1 if a kernel has no working config or its configs disagree about the result without
    a majority, if the kernel of a recorded call was edited, rejects the call or is not found, or if
    no recorded call can be tuned; with 2 if a tuning cannot begin or outcomes cannot be stored.
    """
    options = SimpleNamespace(**given)
    if options.worker:  # it has the command line of its parent
        options.devices = options.ray = ""
    _check(options)
    parent = workers.Parent(options.worker) if options.worker else None
    shard = _shard(options)
    elsewhere = bool(options.devices or options.ray) and not options.dry_run
    # A cluster may have GPUs where this machine has none.
    switched = not (options.ray and elsewhere) and targets.use_interpreter_without_gpu()
    devices = targets.devices_of(options.devices) if options.devices else {}
    if switched:
        echo("No GPU found: running in Triton's interpreter on the CPU.", err=True)
    report = Report(options.allow_disputed)
    left_out: list[LeftOut] = []
    try:
        if elsewhere:
            _tune_elsewhere(options, devices, report)
            sys.exit(report.print())
        from safetune.offline.plan import plan as make_plan
        from safetune.offline.tasks import open_tuning_store

        with prints_to_stderr():
            sketches = _asked_for(options, left_out)
            if not options.dry_run:
                check_writable()
            store = open_tuning_store(options.dry_run)
            plan = make_plan(shard.of(sketches), store, _most_s(options))
            if not options.dry_run:
                _tune_all(plan, left_out, options, parent, report)
                _check_written()
                report.check_begun()
    except Exception:
        if parent is None:
            report.take(planned_event((), left_out))
        if report.tuned or report.left_out or report.not_begun:
            report.print()
        raise
    if options.dry_run:
        print_plan(plan, left_out)
    elif parent is None:
        sys.exit(report.print())


def _check(options: SimpleNamespace) -> None:
    targets.check_wanted(options.target, options.shape, options.dtype, options.recorded)
    if options.top is not None and not options.recorded:
        raise click.UsageError("--top needs --recorded.")
    if options.ray and (options.devices or options.shard):
        raise click.UsageError("Give no device and no shard with --ray: Ray places the work.")


def _asked_for(options: SimpleNamespace, left_out: list[LeftOut]) -> list[Planned]:
    """Return the tunings that the command line asks for.

    Makes the arguments of all of them once, one after the other, so that a mistake shows before
    anything is tuned.
    """
    if options.recorded:
        return _recorded(options, left_out)
    return _declared(targets.without_left(targets.kernels_of(options.target)), options)


def _declared(kernels: Sequence[OfflineKernel], options: SimpleNamespace) -> list[Planned]:
    from safetune.offline import plan, tasks

    _prepare(kernels, options)
    names: list[str] = []

    def wanted(name: str) -> bool:
        names.append(name)
        return not options.shape or name in options.shape

    sketches = [
        sketch
        for kernel in kernels
        for stream in tasks.streams(kernel, None, options.dtype)
        for sketch in plan.sketches(stream, wanted, options.force)
    ]
    if not names:
        listed = ", ".join(kernel.name for kernel in kernels)
        raise TargetError(f"the workload functions of {listed} yield nothing")
    targets.check_shapes(options.shape, names)
    return sketches


def _recorded(options: SimpleNamespace, left_out: list[LeftOut]) -> list[Planned]:
    """Return the tunings of the recorded calls, only of the kernels of TARGETs if there are any."""
    from safetune.offline import replay, shares, tasks

    store = tasks.open_tuning_store(options.dry_run)
    stored, named = targets.recorded(store, options.target)
    if options.top is not None:
        stored = shares.top(stored, options.top)
    found = replay.with_kernels(stored, named, left_out)
    _prepare([kernel for _, kernel in found], options)
    sketches = list(replay.sketches(found, options.force, left_out))
    left_out[:] = [left for left in left_out if left.failed or store.choice(left.call.key) is None]
    return sketches


def _prepare(kernels: Sequence[OfflineKernel], options: SimpleNamespace) -> None:
    """Check that the kernels can run, and apply the options that override their decorators."""
    targets.check_device(kernels)
    for kernel in kernels:
        kernel.tuner.budget = options.budget or kernel.tuner.budget


def _most_s(options: SimpleNamespace) -> float:
    """Return the time that all tunings of a process may take together."""
    return math.inf if options.budget is None else options.budget.seconds


def _shard(options: SimpleNamespace) -> Shard:
    """Return the part of the list that this process, with its workers, tunes.

    Restricts the process of a launcher to its GPU and CPU cores: nothing may have used the driver
    yet.
    """
    from safetune.offline import shards

    if not options.shard:
        return shards.Shard()
    shard = shards.parse(options.shard, os.environ)
    if not (options.worker or options.devices):
        rank = shards.on_node(os.environ)
        targets.use_gpu_of_rank(rank.index)
        workers.use_cores_of_rank(rank)
    return shard


def _tune_elsewhere(
    options: SimpleNamespace, devices: dict[str, dict[str, str]], report: Report
) -> None:
    """Start workers, and record their events."""
    given = click.get_current_context().meta[ARGUMENTS]
    arguments = [word for word in given if word != "--json"]
    if options.ray:
        from safetune.cli.ray_workers import tune_on_ray

        events = tune_on_ray(options.ray, arguments, targets.is_interpreted())
    else:
        events = workers.tune_on(devices, arguments)
    sweep = Sweep(_most_s(options))
    with prints_to_stderr(), _showing(sweep):
        for name, event in events:
            sweep.take(event, name)
            report.take(event, name)
    report.check_begun()


def _tune_all(
    plan: Plan,
    left_out: Sequence[LeftOut],
    options: SimpleNamespace,
    parent: Parent | None,
    report: Report,
) -> None:
    """Tune a plan, in a worker the parent's keys."""
    from torch import OutOfMemoryError

    from safetune.miss.how_far import repeated
    from safetune.offline import plan as plans
    from safetune.offline.tasks import tune_task
    from safetune.tuning.single_flight import WaitBudget

    tell = parent.tell if parent else report.take
    tunings = plans.longest_first(plan.tunings) if parent else list(plan.tunings)
    # The parent names about every n-th one to each of n workers.
    shared_time = plans.SharedTime(parent.part.of(tunings) if parent else tunings, plan.most_s)
    sweep, planned_work = Sweep(plan.most_s), planned_event(tunings, left_out)
    sweep.take(planned_work)
    tell(planned_work)
    telling = repeated(lambda: tell(sweep.tried), TELL_S, TELL_S)
    with telling if parent else _showing(sweep):
        for planned in parent.named(tunings) if parent else tunings:
            sweep.begin(planned.kernel, f"{planned.shape} {planned.dtype}".strip())
            try:
                task = shared_time.task(planned)
                wait = WaitBudget(0.0) if options.shard else None
                result = tune_task(task, sweep.watch, options.force, wait)
                tell(tuned_event(planned, result))
            except NoWorkingConfig as error:
                tell(failed_event(planned, task, error))
            except Busy:
                tell({"left": 1})
            except (*_OF_ONE_KEY, OutOfMemoryError) as error:
                tell(not_begun_event(planned, error))
                show_traceback()
            sweep.end()


def _showing(sweep: Sweep) -> contextlib.AbstractContextManager[None]:
    from safetune.miss.reporting import showing

    return contextlib.nullcontext() if wants_json() else showing(sweep.how_far, of_command=True)


def _check_written() -> None:
    """Raise `StoreError` if an outcome is not stored."""
    from safetune.offline.tasks import open_tuning_store

    store = open_tuning_store()
    if store.lost is not None:
        raise store.lost
    if store.path is None and store.shared is None:
        raise StoreError("no outcome is stored: the store cannot be opened, see the warning above")
