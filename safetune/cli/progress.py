"""The live line of `safetune tune`: the running config, done and failed counts, best so far."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from rich.console import Console

from safetune.miss.progress import Line

if TYPE_CHECKING:
    from safetune.offline.tasks import Task
    from safetune.tuning.requests import Observer


class TuningProgress:
    """A progress line on standard error; hidden when that is not a terminal, or with `quiet`.

    It shows the tuning that runs, and disappears after the last tuning.
    """

    def __init__(self, tunings: int, quiet: bool) -> None:
        self._line = Line(hidden=quiet or not Console(stderr=True).is_terminal)
        self._numbers = itertools.count(1)
        self._tunings = tunings

    def __enter__(self) -> TuningProgress:
        self._line.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._line.stop()

    def observer(self, task: Task) -> Observer:
        """Return the function that a tuning of `task` reports to."""
        self._line.begin(
            f"{next(self._numbers)}/{self._tunings} {task.kernel.name} "
            f"{task.workload.name} {task.dtype}"
        )
        return self._line.observe
