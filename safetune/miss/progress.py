"""The live line of a tuning on a terminal: configs done and failed, the best so far."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from safetune.outcome import duration

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
            _Doing(self),
            console=Console(stderr=True),
            transient=True,
            disable=hidden,
            redirect_stdout=redirect,
            redirect_stderr=redirect,
        )
        self._task = self._bar.add_task("", total=None, failed=0, best="")
        self._failed: set[str] = set()
        self._best_ms = float("inf")
        self._description = self._step = ""
        #: What the tuning does at this moment: by default its last step.
        self.doing: Callable[[], str] = lambda: self._step

    def start(self) -> None:
        """Show the line."""
        self._bar.start()

    def stop(self) -> None:
        """Remove the line."""
        self._bar.stop()

    def begin(self, description: str, total: int | None = None) -> None:
        """Start over, for another tuning."""
        self._failed, self._best_ms = set(), float("inf")
        self._description, self._step = description, ""
        self._bar.reset(self._task, total=total, description=description, failed=0, best="")

    @property
    def room(self) -> int:
        """The columns that are left for what the tuning does."""
        return max(0, self._bar.console.width - len(self._description) - _COUNTS_WIDTH)

    def observe(self, step: Step) -> None:
        """Show a step of the tuning."""
        if step.outcome is not None and not step.outcome.ok:
            self._failed.add(step.text)
        self._step = step.doing
        if step.outcome is not None and step.outcome.timing is not None:
            self._best_ms = min(self._best_ms, step.outcome.timing.median_ms)
        self._bar.update(
            self._task,
            completed=step.done,
            total=step.total,
            failed=len(self._failed),
            best=f"best {duration(self._best_ms)}" if self._best_ms < float("inf") else "",
        )


class _Doing(ProgressColumn):
    """What a tuning does at this moment. A line that is too long is cut here."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def render(self, task: Task) -> Text:
        """Return the text of this moment."""
        return Text(self._line.doing()[: self._line.room])


@contextlib.contextmanager
def late_line(kernel: str, total: int, doing: Callable[[], str]) -> Iterator[Observer]:
    """Show a line for a tuning that takes longer than `DELAY_S`; one at a time in a process.

    The output of the caller's program is not changed.

    Args:
        doing: returns what the tuning does at the moment.
    """
    line, at_end = Line(redirect=False), contextlib.ExitStack()
    line.begin(f"safetune {kernel}", total)
    line.doing = doing

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
