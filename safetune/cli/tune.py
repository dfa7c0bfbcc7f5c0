"""`safetune tune`: tune kernels offline for the workloads that they declare."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from safetune.cli import targets
from safetune.cli.output import (
    Elsewhere,
    Row,
    counted,
    date,
    echo,
    examples,
    outcome_data,
    print_json,
    print_outcomes,
    stdout_console,
)
from safetune.cli.plan import print_plan
from safetune.cli.stored import check_writable
from safetune.errors import NoWorkingConfig, StoreError, TargetError
from safetune.frozen import dataclass
from safetune.miss.progress import Line

if TYPE_CHECKING:
    from safetune.offline.plan import Plan, Planned, Sketch
    from safetune.offline.replay import LeftOut
    from safetune.offline.tasks import OfflineKernel, Task
    from safetune.tuning.requests import Observer, TuningResult


_OF_TITLE = ("kernel", "shape", "dtype")


@click.command(
    "tune",
    epilog=examples(
        "safetune tune my_kernels.py",
        "safetune tune my_kernels.py:add_kernel --dtype float16",
        "safetune tune my_kernels.py --budget 200",
        "safetune tune --recorded",
    ),
)
@click.argument("target", nargs=-1)
@targets.shape_option
@targets.dtype_option
@click.option("--device", metavar="DEVICE", help="The torch device to tune on, e.g. cuda:1.")
@click.option(
    "--force", is_flag=True, help="Measure configs again even if their outcome is stored."
)
@click.option(
    "--budget",
    metavar="CONFIGS|TIME",
    help="Measure the most promising configs of each key only: 200 of them, or for a time, as 5m.",
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
    type=click.FloatRange(0, 1, min_open=True),
    help="With --recorded: only the keys that make this share of the time, e.g. 0.95.",
)
@click.option("--zeros", is_flag=True, help="With --recorded: fill integer tensors with zeros.")
@click.option(
    "--allow-disputed", is_flag=True, help="Exit with 0 though the result of a choice is disputed."
)
@click.option("--dry-run", is_flag=True, help="Print what would be measured, and measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def tune_command(**given: Any) -> None:
    """Tune the kernels of TARGET and store every outcome.

    TARGET is package.module[:kernel], file.py[:kernel] or a directory: all files below it that
    declare workloads. With --recorded, TARGET is optional if the modules of the kernels can be
    imported.

    Exits with 1 if a kernel has no working config, if its configs disagree about the result and
    nothing shows which are right, or if no recorded call can be tuned; with 2 if outcomes cannot
    be stored.
    """
    options = _Options(**given)
    switched = targets.use_interpreter_without_gpu()
    report = _Report(options.allow_disputed)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the targets print
            sketches = _asked_for(options, report.left_out)
            if switched:
                echo("No GPU found: running in Triton's interpreter on the CPU.", err=True)
            if not options.dry_run:
                check_writable()
            plan = _planned(sketches, options)
            if not options.dry_run:
                _tune_all(plan, options, report)
                _check_written()
    except Exception:
        if report.tuned or report.left_out:
            report.print(options.as_json)
        raise
    if options.dry_run:
        print_plan(plan, report.left_out, options.as_json)
    else:
        sys.exit(report.print(options.as_json))


@dataclass(frozen=True)
class _Options:
    """What the command line says."""

    target: tuple[str, ...]
    shape: tuple[str, ...]
    dtype: tuple[str, ...]
    device: str | None
    force: bool
    budget: str | None
    isolation: str | None
    recorded: bool
    top: float | None
    zeros: bool
    allow_disputed: bool
    dry_run: bool
    as_json: bool

    def __post_init__(self) -> None:
        if not (self.target or self.recorded):
            raise click.UsageError("Missing argument 'TARGET...'.")
        if self.recorded and (self.shape or self.dtype):
            raise click.UsageError(
                "--shape and --dtype choose workloads; with --recorded there are no workloads."
            )
        for name, given in (("--zeros", self.zeros), ("--top", self.top is not None)):
            if given and not self.recorded:
                raise click.UsageError(f"{name} needs --recorded.")


def _asked_for(options: _Options, left_out: list[LeftOut]) -> list[Sketch]:
    """Return the tunings that the command line asks for.

    Makes the arguments of all of them once, one after the other: a mistake shows before anything
    is tuned.
    """
    kernels = targets.kernels_of(options.target, with_workload=not options.recorded)
    if options.recorded:
        return _recorded(kernels, options, left_out)
    return _declared(kernels, options)


def _declared(kernels: Sequence[OfflineKernel], options: _Options) -> list[Sketch]:
    from safetune.offline import plan, tasks

    targets.check_device(kernels, options.device)
    _limit(kernels, options)
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
    named: Sequence[OfflineKernel], options: _Options, left_out: list[LeftOut]
) -> list[Sketch]:
    """Return the tunings of the recorded calls, of the named kernels if any."""
    from safetune.offline import replay, shares, tasks

    names, store = {kernel.name for kernel in named}, tasks.open_tuning_store(options.dry_run)
    stored = [call for call in store.calls() if not named or call.name in names]
    if not stored:
        raise TargetError("no such call is recorded; run the program with SAFETUNE_MODE=record")
    if options.top is not None:
        stored = shares.top(stored, options.top)
    found = replay.sort_out(stored, named, options.zeros, left_out)
    left_out[:] = [left for left in left_out if store.choice(left.call.key) is None]
    targets.check_device([kernel for _, kernel in found], options.device)
    _limit([kernel for _, kernel in found], options)
    return list(replay.sketches(found, options.device, options.force, left_out))


def _limit(kernels: Sequence[OfflineKernel], options: _Options) -> None:
    """Set the budget of the command line in place of the decorators'."""
    from safetune.tuning.requests import SearchBudget

    budget = SearchBudget.parse("safetune tune", options.budget)
    for kernel in kernels:
        kernel.tuner.budget = budget or kernel.tuner.budget


def _planned(sketches: Sequence[Sketch], options: _Options) -> Plan:
    from safetune.offline.plan import plan
    from safetune.offline.tasks import open_tuning_store

    return plan(sketches, open_tuning_store(options.dry_run))


def _tune_all(plan: Plan, options: _Options, report: _Report) -> None:
    line = Line(hidden=options.as_json or not Console(stderr=True).is_terminal)
    line.start()
    try:
        for number, planned in enumerate(plan.tunings, 1):
            sketch = planned.sketch
            line.begin(
                f"{number}/{len(plan.tunings)} {sketch.kernel} {sketch.shape} {sketch.dtype}"
            )
            _tune(planned, options, line.observe, report)
    finally:
        line.stop()


def _tune(planned: Planned, options: _Options, observe: Observer, report: _Report) -> None:
    from safetune.config import config_text
    from safetune.offline.tasks import tune_task

    task = planned.sketch.make()
    if options.isolation is not None:
        task.kernel.tuner.isolate(options.isolation)
    try:
        result = tune_task(task, observe, options.force)
    except NoWorkingConfig as error:
        failed = [(config, outcome, False) for config, outcome in error.outcomes]
        report.add(task, failed, error.measured)
    else:
        rows = [(config_text(c), o, c is result.choice) for c, o in result.outcomes]
        report.add(task, rows, result.measured, result)


def _check_written() -> None:
    """Raise `StoreError` if an outcome is not stored."""
    from safetune.offline.tasks import open_tuning_store

    store = open_tuning_store()
    store.write_unsent()
    if store.path is None and store.shared is None:
        raise StoreError("no outcome is stored: the store cannot be opened")


class _Report:
    """The finished tunings, printed at the end."""

    def __init__(self, allow_disputed: bool) -> None:
        self._allow_disputed = allow_disputed
        self.tuned: list[tuple[dict[str, Any], list[Row], Elsewhere | None]] = []
        self.left_out: list[LeftOut] = []

    def add(
        self, task: Task, rows: list[Row], measured: int, result: TuningResult | None = None
    ) -> None:
        """Note a finished tuning; without a result no config works."""
        from safetune.config import config_text
        from safetune.offline.tasks import open_tuning_store

        facts: dict[str, Any] = {"kernel": task.kernel.name, "shape": task.workload.name}
        facts |= {"dtype": task.dtype, "measured": measured, "choice": None, "disputed": ""}
        facts["created"] = None if result is None else result.stored.created
        facts["phases"] = {} if result is None else dict(result.phases)
        elsewhere = None
        if result is not None:
            choice, stored = config_text(result.choice), result.stored
            facts |= {"choice": choice, "disputed": stored.dispute}
            if not any(chosen for _, _, chosen in rows):
                origin = open_tuning_store().origin(stored)
                elsewhere = Elsewhere(choice, origin, stored.median_ms)
        self.tuned.append((facts, rows, elsewhere))

    def print(self, as_json: bool) -> int:
        """Print everything; return the exit code."""
        tunings = [tuning for tuning, _, _ in self.tuned]
        measured = sum(tuning["measured"] for tuning in tunings)
        failed = sum(tuning["choice"] is None for tuning in tunings)
        disputed = sum(bool(tuning["disputed"]) for tuning in tunings)
        nothing = self.left_out and not tunings
        code = 1 if failed or nothing or (disputed and not self._allow_disputed) else 0
        if as_json:
            trials = [
                {
                    **{name: tuning[name] for name in _OF_TITLE},
                    "config": config,
                    "chosen": chosen,
                    **outcome_data(outcome),
                }
                for tuning, rows, _ in self.tuned
                for config, outcome, chosen in rows
            ]
            left_out = [{"call": left.words, "reason": left.reason} for left in self.left_out]
            data = {"measured": measured, "tunings": tunings, "trials": trials}
            print_json({**data, "left_out": left_out})
            return code
        console = stdout_console()
        for tuning, rows, elsewhere in self.tuned:
            title = "  ".join((*(tuning[name] for name in _OF_TITLE), f"({_news(tuning)})"))
            print_outcomes(console, title, rows, elsewhere)
        already = sum(_is_already_tuned(tuning) for tuning in tunings)
        console.print(
            f"{counted(len(tunings), 'tuning')}, {counted(measured, 'config')} measured"
            + (f", {already} already tuned" if already else "")
            + (f", {failed} without a working config" if failed else "")
            + (f", {disputed} with a disputed result" if disputed else "")
        )
        for left in self.left_out:
            console.print(f"not tuned: {left.words}: {left.reason}")
        return code


def _is_already_tuned(tuning: Mapping[str, Any]) -> bool:
    return tuning["choice"] is not None and not tuning["measured"]


def _news(tuning: Mapping[str, Any]) -> str:
    """What this run did for a tuning."""
    if not _is_already_tuned(tuning):
        return f"{tuning['measured']} measured"
    return f"already tuned {date(tuning['created'])}, --force to measure again"
