"""`safetune tune`: tune kernels offline for the workloads that they declare."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from safetune.cli import targets
from safetune.cli.progress import TuningProgress
from safetune.cli.tables import outcome_data, outcome_table
from safetune.errors import NoWorkingConfig, TargetError

if TYPE_CHECKING:
    from safetune.offline import Task
    from safetune.tuning.tuner import TuningResult


@click.command("tune")
@click.argument("target", nargs=-1, required=True)
@click.option("--shape", multiple=True, metavar="NAME", help="Only workloads of this name.")
@click.option("--dtype", multiple=True, metavar="DTYPE", help="Tune for this torch dtype.")
@click.option("--device", metavar="DEVICE", help="A torch device, e.g. cuda:1.")
@click.option("--force", is_flag=True, help="Measure again what is stored.")
@click.option(
    "--isolation",
    type=click.Choice(["config", "worker"]),
    help="A new process for every config, or one until a config spoils it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def tune_command(
    target: tuple[str, ...],
    shape: tuple[str, ...],
    dtype: tuple[str, ...],
    device: str | None,
    force: bool,
    isolation: str | None,
    as_json: bool,
) -> None:
    """Tune the kernels of TARGET and store every outcome.

    TARGET is package.module[:kernel] or file.py[:kernel]. Exits with 1 when some kernel has no
    working config.
    """
    if targets.use_interpreter_without_gpu():
        click.echo("No GPU found: running in Triton's interpreter on the CPU.", err=True)
    from safetune import offline

    kernels = [kernel for name in target for kernel in targets.kernels_of(name)]
    if isolation is not None:
        for kernel in kernels:
            kernel.tuner.isolate(isolation)
    planned = [t for kernel in kernels for t in offline.tasks(kernel, device, dtype, shape)]
    if not planned:
        names = ", ".join(shape)
        raise TargetError(f"no workload of {', '.join(target)} is named {names}")
    report = _Report(as_json)
    with TuningProgress(quiet=as_json) as progress:
        for task in planned:
            try:
                result = offline.tune_task(task, progress.observer(task), force)
            except NoWorkingConfig as error:
                report.failed(task, error)
            else:
                report.tuned(task, result)
    sys.exit(report.print())


class _Report:
    """What was tuned so far, printed at the end."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._trials: list[dict[str, Any]] = []
        self._tunings: list[dict[str, Any]] = []
        self._tables: list[Any] = []
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
        self._tunings.append({**facts, "measured": measured, "choice": choice})
        for config, outcome, chosen in rows:
            trial = {"config": config, "chosen": chosen, **outcome_data(outcome)}
            self._trials.append({**facts, **trial})
        title = f"{task.kernel.name}  {task.workload.name}  {task.dtype}  ({measured} measured)"
        self._tables.append(outcome_table(title, rows))

    def print(self) -> int:
        """Print everything; return the exit code."""
        measured = sum(tuning["measured"] for tuning in self._tunings)
        if self._as_json:
            data = {"measured": measured, "tunings": self._tunings, "trials": self._trials}
            click.echo(json.dumps(data, indent=2))
        else:
            console = Console()
            for table in self._tables:
                console.print(table)
            console.print(
                f"{len(self._tunings)} tunings, {measured} configs measured"
                + (f", {self._failed} without a working config" if self._failed else "")
            )
        return 1 if self._failed else 0
