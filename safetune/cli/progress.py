"""The live line of `safetune tune`: the running config, done and failed counts, best so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from safetune.cli.tables import milliseconds
from safetune.config import config_text

if TYPE_CHECKING:
    from safetune.offline import Task
    from safetune.tuning.tuner import Observer
    from safetune.tuning.tuner import Progress as Step


class TuningProgress:
    """A progress bar on standard error; nothing at all when it is not a terminal or `quiet`."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed  {task.fields[best]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[config]}"),
            console=console,
            disable=quiet or not console.is_terminal,
        )

    def __enter__(self) -> TuningProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def observer(self, task: Task) -> Observer:
        """Return the function that a tuning of `task` reports to."""
        line = self._bar.add_task(
            f"{task.kernel.name} {task.workload.name} {task.dtype}",
            total=None,
            failed=0,
            best="",
            config="",
        )
        seen: dict[str, Any] = {"failed": 0, "best": float("inf")}

        def observe(step: Step) -> None:
            if step.outcome is not None and not step.outcome.ok:
                seen["failed"] += 1
            if step.outcome is not None and step.outcome.timing is not None:
                seen["best"] = min(seen["best"], step.outcome.timing.median_ms)
            best = "" if seen["best"] == float("inf") else f"best {milliseconds(seen['best'])}"
            self._bar.update(
                line,
                completed=step.done,
                total=step.total,
                failed=seen["failed"],
                best=best,
                config=f"{step.stage}: {config_text(step.config)}",
            )

        return observe
