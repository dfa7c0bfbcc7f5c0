"""`safetune tune`: tune kernels offline for the workloads that they declare."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import click

from safetune.cli import targets
from safetune.cli.messages import plain_warnings
from safetune.cli.progress import TuningProgress
from safetune.cli.recorded import RecordedPlan
from safetune.cli.stored import print_json
from safetune.cli.tables import counted, outcome_data, print_outcomes, stdout_console
from safetune.errors import NoWorkingConfig, TargetError

if TYPE_CHECKING:
    from safetune.offline.replay import LeftOut
    from safetune.offline.tasks import OfflineKernel, Task
    from safetune.tuning.requests import TuningResult


@click.command("tune")
@click.argument("target", nargs=-1)
@click.option("--shape", multiple=True, metavar="NAME", help="Only workloads with this name.")
@click.option(
    "--dtype", multiple=True, metavar="DTYPE", help="Call the workloads with this torch dtype."
)
@click.option("--device", metavar="DEVICE", help="The torch device to tune on, e.g. cuda:1.")
@click.option(
    "--force", is_flag=True, help="Measure configs again even if their outcome is stored."
)
@click.option(
    "--isolation",
    type=click.Choice(["config", "worker"]),
    help="A new process for every config, or one process until a config breaks it.",
)
@click.option(
    "--recorded", is_flag=True, help="Tune the calls that SAFETUNE_MODE=record has recorded."
)
@click.option("--zeros", is_flag=True, help="With --recorded: fill integer tensors with zeros.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def tune_command(
    target: tuple[str, ...],
    shape: tuple[str, ...],
    dtype: tuple[str, ...],
    device: str | None,
    force: bool,
    isolation: str | None,
    recorded: bool,
    zeros: bool,
    as_json: bool,
) -> None:
    """Tune the kernels of TARGET and store every outcome.

    TARGET is package.module[:kernel] or file.py[:kernel]. With --recorded, TARGET is optional if
    the modules of the kernels can be imported. Exits with 1 if a kernel has no working config.
    """
    _check_options(target, recorded, zeros, shape, dtype)
    switched = targets.use_interpreter_without_gpu()
    report = _Report(as_json)
    try:
        # Output of a target must not get between the lines of our own output.
        with contextlib.redirect_stdout(sys.stderr), plain_warnings():
            kernels = targets.kernels_of(target, with_workload=not recorded)
            if recorded:
                plan: Plan = RecordedPlan(kernels or None, device, zeros, report.left_out)
            else:
                plan = _DeclaredPlan(kernels, device, dtype, shape)
            count = plan.check()
            if isolation is not None:
                for kernel in plan.kernels:
                    kernel.tuner.isolate(isolation)
            if switched:
                click.echo("No GPU found: running in Triton's interpreter on the CPU.", err=True)
            with TuningProgress(count, quiet=as_json) as progress:
                _tune_all(plan, force, progress, report)
    except Exception:
        if report.tunings or report.left_out:
            report.print()
        raise
    sys.exit(report.print())


class Plan(Protocol):
    """The tunings of one command."""

    @property
    def kernels(self) -> Sequence[OfflineKernel]:
        """The kernels of all tasks."""

    def check(self) -> int:
        """Return the number of tasks; raises an error if any of them cannot be tuned."""

    def __iter__(self) -> Iterator[Task]: ...


def _check_options(
    target: Sequence[str], recorded: bool, zeros: bool, *declared: Sequence[str]
) -> None:
    if not (target or recorded):
        raise click.UsageError("Missing argument 'TARGET...'.")
    if recorded and any(declared):
        raise click.UsageError(
            "--shape and --dtype choose workloads; with --recorded there are no workloads."
        )
    if zeros and not recorded:
        raise click.UsageError("--zeros needs --recorded.")


@dataclass
class _DeclaredPlan:
    """The workloads of some kernels. Iterating makes the arguments of one launch at a time."""

    kernels: Sequence[OfflineKernel]
    device: str | None
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]

    def __iter__(self) -> Iterator[Task]:
        from safetune.offline import tasks

        for kernel in self.kernels:
            yield from tasks.tasks(kernel, self.device, self.dtypes, self.shapes)

    def check(self) -> int:
        """Return the number of tasks after checking each: a mistake shows before anything is tuned.

        Raises:
            NoDevice: a kernel, or `device`, needs a GPU and torch finds no GPU.
            TargetError: no workload has that name, or the workloads yield nothing.
            WorkloadError: a workload function raised, or yielded something other than a `Workload`.
        """
        targets.check_device(self.kernels, self.device)
        every = _DeclaredPlan(self.kernels, self.device, self.dtypes, shapes=())
        names = [task.workload.name for task in every]
        if not names:
            listed = ", ".join(kernel.name for kernel in self.kernels)
            raise TargetError(f"the workloads of {listed} yield nothing")
        for shape in self.shapes:
            if shape not in names:
                known = ", ".join(dict.fromkeys(names))
                raise TargetError(f"no workload is named {shape!r}; the workloads are: {known}")
        return sum(name in self.shapes for name in names) if self.shapes else len(names)


def _tune_all(plan: Plan, force: bool, progress: TuningProgress, report: _Report) -> None:
    from safetune.offline import tasks

    for task in plan:
        try:
            result = tasks.tune_task(task, progress.observer(task), force)
        except NoWorkingConfig as error:
            report.failed(task, error)
        else:
            report.tuned(task, result)


class _Report:
    """The finished tunings, printed at the end."""

    def __init__(self, as_json: bool) -> None:
        self.tunings: list[dict[str, Any]] = []
        self.left_out: list[LeftOut] = []
        self._as_json = as_json
        self._trials: list[dict[str, Any]] = []
        self._tables: list[tuple[str, list[Any]]] = []
        self._failed = 0

    def tuned(self, task: Task, result: TuningResult) -> None:
        from safetune.config import config_text

        rows = [(config_text(c), o, c is result.choice) for c, o in result.outcomes]
        self._add(task, rows, result.measured, config_text(result.choice))

    def failed(self, task: Task, error: NoWorkingConfig) -> None:
        self._failed += 1
        rows = [(config, outcome, False) for config, outcome in error.outcomes]
        self._add(task, rows, error.measured, None)

    def _add(self, task: Task, rows: list[Any], measured: int, choice: str | None) -> None:
        facts = {"kernel": task.kernel.name, "shape": task.workload.name, "dtype": task.dtype}
        self.tunings.append({**facts, "measured": measured, "choice": choice})
        for config, outcome, chosen in rows:
            trial = {"config": config, "chosen": chosen, **outcome_data(outcome)}
            self._trials.append({**facts, **trial})
        title = f"{task.kernel.name}  {task.workload.name}  {task.dtype}  ({measured} measured)"
        self._tables.append((title, rows))

    def print(self) -> int:
        """Print everything; return the exit code."""
        measured = sum(tuning["measured"] for tuning in self.tunings)
        if self._as_json:
            data = {"measured": measured, "tunings": self.tunings, "trials": self._trials}
            left_out = [{"call": left.words, "reason": left.reason} for left in self.left_out]
            print_json({**data, "left_out": left_out})
        else:
            console = stdout_console()
            for title, rows in self._tables:
                print_outcomes(console, title, rows)
            console.print(
                f"{counted(len(self.tunings), 'tuning')}, {counted(measured, 'config')} measured"
                + (f", {self._failed} without a working config" if self._failed else "")
            )
            for left in self.left_out:
                console.print(f"not tuned: {left.words}: {left.reason}")
        return 1 if self._failed else 0
