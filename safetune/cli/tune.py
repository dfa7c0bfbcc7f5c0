"""`safetune tune`: tune kernels offline for the workloads that they declare."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from safetune.cli import targets, workers
from safetune.cli.command import ARGUMENTS, Number, command
from safetune.cli.display import LOOK_S, Display, FleetDisplay, Teller, repeated
from safetune.cli.output import echo, prints_to_stderr
from safetune.cli.plan import print_plan
from safetune.cli.report import Report
from safetune.cli.stored import check_writable
from safetune.errors import (
    Busy,
    InvalidConfig,
    KernelNotTransferable,
    NotExclusive,
    NothingToMeasure,
    NoWorkingConfig,
    StoreError,
    TargetError,
    WorkloadError,
)

if TYPE_CHECKING:
    from safetune.offline.plan import Plan, Planned, Sketch
    from safetune.offline.replay import LeftOut
    from safetune.offline.shards import Part, Turn, Turns
    from safetune.offline.tasks import OfflineKernel
    from safetune.tuning.requests import SearchBudget

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
@click.option("--device", metavar="DEVICE", help="The torch device to tune on, e.g. cuda:1.")
@click.option("--devices", metavar="all|0,3", help="Tune on these GPUs of this machine at once.")
@click.option(
    "--shard",
    metavar="auto|2/4",
    help="Begin with this part of the list; auto: by the rank that srun or torchrun sets.",
)
@click.option(
    "--ray", metavar="ADDRESS", help="Tune on all GPUs of a Ray cluster, e.g. auto; needs ray."
)
@click.option("--worker", hidden=True, help="As `2/4@SECONDS`: what --devices starts.")
@click.option(
    "--force", is_flag=True, help="Measure configs again even if their outcome is stored."
)
@click.option(
    "--budget",
    metavar="CONFIGS|TIME",
    callback=lambda _, __, text: _budget(text),
    help="Measure the most promising configs only: 200 of each key, or for 5m in all.",
)
@click.option(
    "--isolation",
    type=click.Choice(["config", "worker"]),
    help="A new process for every config, or one process until a config breaks it.",
)
@click.option(
    "--recorded", is_flag=True, help="Tune the calls that SAFETUNE_MODE=record has recorded."
)
@click.option(
    "--top",
    metavar="SHARE",
    type=Number(0, 1, min_open=True),
    help="With --recorded: only the keys that take this share of the time, e.g. 0.95.",
)
@click.option("--zeros", is_flag=True, help="With --recorded: fill integer tensors with zeros.")
@click.option(
    "--allow-disputed", is_flag=True, help="Exit with 0 even if the result of a choice is disputed."
)
@click.option("--dry-run", is_flag=True, help="Print what would be measured, and measure nothing.")
@click.option("--all", "everything", is_flag=True, help="Print every config, not only the choices.")
def tune_command(**given: Any) -> None:
    """Tune the kernels of TARGET and store every outcome.

    TARGET is package.module[:kernel], file.py[:kernel] or a directory: all files below it that
    declare workloads. With --recorded, TARGET is optional if the modules of the kernels can be
    imported.

    Exits with 1 if a kernel has no working config, if its configs disagree about the result and
    nothing shows which are right, if a kernel refuses a recorded call, or if no recorded call can
    be tuned; with 2 if a tuning cannot begin or outcomes cannot be stored.
    """
    options = SimpleNamespace(**given)
    if options.worker:  # it has the command line of its parent
        options.devices = options.ray = None
    _check(options)
    part = _part(options)
    elsewhere = bool(options.devices or options.ray) and not options.dry_run
    # A cluster may have GPUs where this machine has none.
    switched = not (options.ray and elsewhere) and targets.use_interpreter_without_gpu()
    devices = targets.devices_of(options.devices) if options.devices else {}
    tell = workers.printer() if options.worker else None
    report = Report(options.allow_disputed, options.everything, tell)
    try:
        if elsewhere:
            _tell_switched(switched)
            _tune_elsewhere(options, devices, report)
            sys.exit(report.print(options.as_json))
        with prints_to_stderr():
            sketches = _asked_for(options, report.left_out)
            _tell_switched(switched)
            if not options.dry_run:
                check_writable()
            plan = _planned(sketches, options)
            if not options.dry_run:
                failed = _tune_all(plan, options, part, report)
                _check_written()
                if failed and tell is None:  # a worker has told its parent
                    raise failed[0]
    except Exception:
        if report.tuned or report.left_out or report.not_begun:
            report.print(options.as_json)
        raise
    if options.dry_run:
        print_plan(plan, report.left_out, options.as_json)
    else:
        sys.exit(report.print(options.as_json))


def _check(options: SimpleNamespace) -> None:
    targets.check_wanted(options.target, options.shape, options.dtype, options.recorded)
    for name, given in (("--zeros", options.zeros), ("--top", options.top is not None)):
        if given and not options.recorded:
            raise click.UsageError(f"{name} needs --recorded.")
    if options.device and options.devices:
        raise click.UsageError("--device names one GPU and --devices several: give one.")
    if options.ray and (options.device or options.devices or options.shard):
        raise click.UsageError("With --ray, Ray places the work: give no device and no shard.")


def _asked_for(options: SimpleNamespace, left_out: list[LeftOut]) -> list[Sketch]:
    """Return the tunings that the command line asks for.

    Makes the arguments of all of them once, one after the other: a mistake shows before anything
    is tuned.
    """
    kernels = targets.kernels_of(options.target, with_workload=not options.recorded)
    if options.recorded:
        return _recorded(kernels, options, left_out)
    return _declared(kernels, options)


def _declared(kernels: Sequence[OfflineKernel], options: SimpleNamespace) -> list[Sketch]:
    from safetune.offline import plan, tasks

    _prepare(kernels, options)
    names: list[str] = []

    def wanted(name: str) -> bool:
        names.append(name)
        return not options.shape or name in options.shape

    sketches = [
        sketch
        for kernel in kernels
        for stream in tasks.streams(kernel, options.device, options.dtype)
        for sketch in plan.sketches(stream, wanted, options.force)
    ]
    if not names:
        listed = ", ".join(kernel.name for kernel in kernels)
        raise TargetError(f"the workloads of {listed} yield nothing")
    targets.check_shapes(options.shape, names)
    return sketches


def _recorded(
    named: Sequence[OfflineKernel], options: SimpleNamespace, left_out: list[LeftOut]
) -> list[Sketch]:
    """Return the tunings of the recorded calls, of the named kernels if any."""
    from safetune.offline import replay, shares, tasks

    store = tasks.open_tuning_store(options.dry_run)
    stored = targets.recorded(store, named)
    if options.top is not None:
        stored = shares.top(stored, options.top)
    found = replay.sort_out(stored, named, options.zeros, left_out)
    left_out[:] = [left for left in left_out if store.choice(left.call.key) is None]
    _prepare([kernel for _, kernel in found], options)
    return list(replay.sketches(found, options.device, options.force, left_out))


def _prepare(kernels: Sequence[OfflineKernel], options: SimpleNamespace) -> None:
    """Check that the kernels can run, and set what the command line has in place of decorators."""
    targets.check_device(kernels, options.device)
    for kernel in kernels:
        kernel.tuner.budget = options.budget or kernel.tuner.budget
        if options.isolation is not None:
            kernel.tuner.isolate(options.isolation)


def _budget(text: str | None) -> SearchBudget | None:
    if text is None:  # as where a shell asks for the options: nothing is imported
        return None
    from safetune.tuning.requests import SearchBudget

    return SearchBudget.parse("safetune tune", text)


def _planned(sketches: Sequence[Sketch], options: SimpleNamespace) -> Plan:
    from safetune.offline.plan import plan
    from safetune.offline.tasks import open_tuning_store

    return plan(sketches, open_tuning_store(options.dry_run), _most_s(options))


def _most_s(options: SimpleNamespace) -> float:
    """Return the time that all tunings of a process may take together."""
    return math.inf if options.budget is None else options.budget.seconds


def _part(options: SimpleNamespace) -> Part | None:
    """Return what this process does of the whole; None where it does all of it.

    Restricts the process to its GPU and CPU cores: nothing may have used the driver yet.
    """
    from safetune.offline import shards

    if not (options.shard or options.worker):
        return None
    shard = shards.parse(options.shard, os.environ) if options.shard else shards.Shard()
    if options.worker:
        return workers.begin_worker(options.worker, shard)
    if options.device is None and options.devices is None:
        number, count = shards.on_node(os.environ)
        targets.use_gpu_of_rank(number)
        workers.use_cores_of_rank(number, count)
    return shards.Part(shard, time.time())


def _tell_switched(switched: bool) -> None:
    if switched:
        echo("No GPU found: running in Triton's interpreter on the CPU.", err=True)


def _tune_elsewhere(
    options: SimpleNamespace, devices: dict[str, dict[str, str]], report: Report
) -> None:
    """Have workers tune, and note what they tell."""
    given = click.get_current_context().meta[ARGUMENTS]
    arguments = [word for word in given if word != "--json"]
    if options.ray:
        from safetune.cli.ray_workers import tune_on_ray

        events = tune_on_ray(options.ray, arguments, targets.is_interpreted())
    else:
        events = workers.tune_on(devices, arguments)
    shown = FleetDisplay(hidden=options.as_json, most_s=_most_s(options))
    with prints_to_stderr(), shown as display:
        for name, event in events:
            display.take(name, event)
            report.take(name, event)
    report.check_begun()


def _tune_all(
    plan: Plan, options: SimpleNamespace, part: Part | None, report: Report
) -> list[Exception]:
    """Tune what this process gets of a plan; return why some of it could not begin."""
    from torch import OutOfMemoryError

    from safetune.offline.plan import Sweep
    from safetune.offline.tasks import help_with_task, tune_task
    from safetune.tuning.single_flight import WaitBudget

    turns, failed = _turns(plan, part, options.force, report), list[Exception]()
    sweep = Sweep(turns.own, plan.most_s)
    report.begin(plan)
    shared = part is not None and part.shard.workers > 1
    with contextlib.ExitStack() as shown:
        display = shown.enter_context(Display(plan, hidden=options.as_json or bool(report.tell)))
        if report.tell:
            look = Teller(display, report.tell).look
            shown.enter_context(repeated(look, LOOK_S, LOOK_S))
        for turn in turns:
            busy, sketch = turn.helps, turn.item.sketch
            display.begin(sketch.words)
            budget = WaitBudget(0.0, exclusive=turn.is_of_shards) if part else None
            task = None
            try:
                if turn.helps:
                    help_with_task(sketch.request, sketch.make, display.watch)
                else:
                    task = sweep.task(turn.item)
                    result = tune_task(task, display.watch, options.force, budget, shared)
                    report.add(turn, result)
            except NoWorkingConfig as error:
                if task is not None:  # else the process that tunes the key reports it
                    report.add_failed(turn, task, error)
            except NotExclusive:
                report.left += 1
            except Busy:
                busy = True
            except (*_OF_ONE_KEY, OutOfMemoryError) as error:
                if not turn.helps:  # raised now, it would end every process of a sweep
                    failed.append(_without_locals(error))
                    report.add_not_begun(turn, error)
            display.end()
            if busy:
                turns.put_back(turn)
    return failed


def _without_locals(error: Exception) -> Exception:
    """Free what the frames of an error hold, which may be most of a device's memory."""
    inner: BaseException | None = error
    while inner is not None:
        for frame, _ in traceback.walk_tb(inner.__traceback__):
            with contextlib.suppress(RuntimeError):  # it still runs
                frame.clear()
                _ = frame.f_locals  # Python 3.11 keeps a copy, which this brings up to date
        inner = inner.__cause__
    return error


def _turns(plan: Plan, part: Part | None, again: bool, report: Report) -> Turns[Planned]:
    """Return the tunings that this process may begin with, or take over from others."""
    from safetune.offline import shards, tasks

    if part is None:
        return shards.Turns(shards.Shard().order(plan.tunings), lambda _: shards.State.FREE)
    store, turns = tasks.open_shared_store(), part.shard.order(plan.tunings)
    if store.shared is None or again:
        left = [turn for turn in turns if turn.is_of_shards]
        turns, report.left = turns[: len(turns) - len(left)], len(left)
    states = shards.SweepStates(store, part.since if again else 0.0)

    def state(turn: Turn[Planned]) -> shards.State:
        request = turn.item.sketch.request
        return states(request.key, request.declared, look=not turn.is_of_shards)

    helps, processes = part.shard.workers > 1 and not again, part.shard.count * part.shard.workers
    return shards.Turns(turns, state, again=again, helps=helps, processes=processes)


def _check_written() -> None:
    """Raise `StoreError` if an outcome, or a choice of another node, is not stored."""
    from safetune.offline.tasks import open_tuning_store

    store = open_tuning_store()
    store.write_unsent()
    if store.shared is not None:
        store.shared.write_unkept()
    if store.path is None and store.shared is None:
        raise StoreError("no outcome is stored: the store cannot be opened")
