"""The live line of a tuning on a terminal: configs done and failed, the best so far."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from safetune.tuning.requests import Observer
    from safetune.tuning.requests import Progress as Step

#: Seconds before a tuning shows its line; shorter tunings show nothing.
DELAY_S = 2.0

#: The columns of the counts, the best time, the elapsed time and the gaps between them.
_COUNTS_WIDTH = 42

_showing = threading.Lock()


class Line:
    """One line on standard error for the running tuning, which disappears at the end.

    It shows nothing if `hidden`, and with `redirect` the output of this process above it.
    """

    def __init__(self, hidden: bool = False, redirect: bool = True) -> None:
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed  {task.fields[best]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[config]}", markup=False),
            console=Console(stderr=True),
            transient=True,
            disable=hidden,
            redirect_stdout=redirect,
            redirect_stderr=redirect,
        )
        self._task = self._bar.add_task("", total=None, failed=0, best="", config="")
        self._failed: set[str] = set()
        self._best_ms = float("inf")
        self._description = ""

    def start(self) -> None:
        """Show the line."""
        self._bar.start()

    def stop(self) -> None:
        """Remove the line."""
        self._bar.stop()

    def begin(self, description: str) -> None:
        """Start over, for another tuning."""
        self._failed, self._best_ms = set(), float("inf")
        self._description = description
        self._bar.reset(
            self._task, total=None, description=description, failed=0, best="", config=""
        )

    def observe(self, step: Step) -> None:
        """Show a step of the tuning."""
        from safetune.config import config_text  # the CLI formats times without Triton

        # A line that is too long is cut in the config.
        columns = max(0, self._bar.console.width - len(self._description) - _COUNTS_WIDTH)
        config = config_text(step.config)
        if step.outcome is not None and not step.outcome.ok:
            self._failed.add(config)
        if step.outcome is not None and step.outcome.timing is not None:
            self._best_ms = min(self._best_ms, step.outcome.timing.median_ms)
        self._bar.update(
            self._task,
            completed=step.done,
            total=step.total,
            failed=len(self._failed),
            best=f"best {duration(self._best_ms)}" if self._best_ms < float("inf") else "",
            config=f"{step.stage}: {config}"[:columns],
        )


@contextlib.contextmanager
def late_line(kernel: str) -> Iterator[Observer]:
    """Show a line for a tuning that takes longer than `DELAY_S`; one at a time in a process.

    The output of the caller's program is not changed.
    """
    line, at_end = Line(redirect=False), contextlib.ExitStack()
    line.begin(f"safetune {kernel}")

    def show() -> None:
        if _showing.acquire(blocking=False):
            at_end.callback(_showing.release)
            at_end.callback(line.stop)
            line.start()

    timer = threading.Timer(DELAY_S, show)
    timer.name, timer.daemon = "safetune-progress", True
    timer.start()
    try:
        yield line.observe
    finally:
        timer.cancel()
        timer.join()
        at_end.close()


def can_move_cursor() -> bool:
    """Return whether standard error, which is a terminal, can show the line."""
    console = Console(stderr=True)
    return console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter


def duration(value: float) -> str:
    """Return a time in milliseconds with three significant digits, in s, ms or us."""
    rounded = float(f"{value:.3g}")
    unit, ms = ("s", 1e3) if rounded >= 1e3 else ("ms", 1.0) if rounded >= 0.1 else ("us", 1e-3)
    number = rounded / ms
    return f"{number:.0f} {unit}" if number >= 1e3 else f"{number:.3g} {unit}"
