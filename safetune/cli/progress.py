"""The live line of `safetune tune`: the running config, done and failed counts, best so far."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from safetune.cli.tables import milliseconds

if TYPE_CHECKING:
    from safetune.offline import Task
    from safetune.tuning.tuner import Observer
    from safetune.tuning.tuner import Progress as Step


class TuningProgress:
    """A progress bar on standard error; nothing at all when it is not a terminal or `quiet`.

    One line, for the tuning that runs; it is gone when the last has ended.
    """

    def __init__(self, tunings: int, quiet: bool) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed  {task.fields[best]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[config]}", markup=False),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._numbers = itertools.count(1)
        self._tunings = tunings
        self._line = self._bar.add_task("", total=None, failed=0, best="", config="")

    def __enter__(self) -> TuningProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def observer(self, task: Task) -> Observer:
        """Return the function that a tuning of `task` reports to."""
        self._bar.reset(
            self._line,
            total=None,
            description=f"{next(self._numbers)}/{self._tunings} {task.kernel.name} "
            f"{task.workload.name} {task.dtype}",
            failed=0,
            best="",
            config="",
        )
        failed: set[str] = set()
        medians: list[float] = []

        def observe(step: Step) -> None:
            from safetune.config import config_text

            config = config_text(step.config)
            if step.outcome is not None and not step.outcome.ok:
                failed.add(config)
            if step.outcome is not None and step.outcome.timing is not None:
                medians.append(step.outcome.timing.median_ms)
            self._bar.update(
                self._line,
                completed=step.done,
                total=step.total,
                failed=len(failed),
                best=f"best {milliseconds(min(medians))}" if medians else "",
                config=f"{step.stage}: {config}",
            )

        return observe
