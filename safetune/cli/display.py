"""How far a sweep is: one line that changes on a terminal, else a plain line now and then."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from safetune.cli.output import echo
from safetune.cli.plan import about
from safetune.keys.encoding import visible
from safetune.outcome import duration

if TYPE_CHECKING:
    from typing_extensions import Self

    from safetune.offline.plan import Plan
    from safetune.tuning.requests import Progress

#: Seconds until the first plain line, and between two of them.
FIRST_S, EVERY_S = 10.0, 30.0


class Display:
    """Shows on standard error what a sweep does, for as long as it is entered."""

    def __init__(
        self,
        plan: Plan,
        hidden: bool = False,
        pauses_s: tuple[float, float] = (FIRST_S, EVERY_S),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._hidden, self._pauses_s, self._clock = plan, hidden, pauses_s, clock
        self._started = self._begun = clock()
        self._measured = 0  # in the tunings that have ended
        self._words = self._step = ""
        self._number = self._done = self._total = 0
        self._failed: set[str] = set()
        self._best_ms = math.inf
        self._ended = threading.Event()
        console = Console(stderr=True)
        self._live: Live | None = None
        if console.is_terminal and not hidden:
            self._live = Live(get_renderable=self._renderable, console=console, transient=True)

    def __enter__(self) -> Self:
        """Begin to show it."""
        if self._live is not None:
            self._live.start()
        elif not self._hidden:
            threading.Thread(target=self._print_now_and_then, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Show no more; the line of a terminal disappears."""
        self._ended.set()
        if self._live is not None:
            self._live.stop()

    def begin(self, words: str) -> None:
        """Go on with the next tuning."""
        self._measured += self._done
        self._number, self._words, self._step = self._number + 1, words, ""
        self._done = self._total = 0
        self._failed, self._best_ms, self._begun = set(), math.inf, self._clock()

    def observe(self, step: Progress) -> None:
        """Note a step of the tuning."""
        outcome = step.outcome
        self._done, self._total = min(step.done, step.total), step.total
        self._step = step.doing
        if outcome is not None and not outcome.ok:
            self._failed.add(step.text)
        if outcome is not None and outcome.timing is not None:
            self._best_ms = min(self._best_ms, outcome.timing.median_ms)

    def text(self, separator: str) -> str:
        """Return the sweep, the tuning, its configs, the best time, the rate and the time left."""
        parts = [f"{self._number}/{len(self._plan.tunings)} {self._words}"]
        if self._total:
            parts += [f"{self._done}/{self._total}", f"{len(self._failed)} failed"]
        if self._best_ms < math.inf:
            parts.append(f"best {duration(self._best_ms)}")
        parts.append(f"{self._clock() - self._begun:.0f} s")
        measured = self._measured + self._done
        seconds = self._clock() - self._started
        if measured and seconds:
            left_s = (self._plan.new - measured) * seconds / measured
            parts += [f"{measured / seconds:.2g} configs/s", f"about {about(max(0, left_s))} left"]
        return separator.join(parts)

    def _renderable(self) -> Text:
        text = f"{self.text('  ')}  {self._step}" if self._number else ""
        return Text(visible(text), no_wrap=True, overflow="ellipsis")

    def _print_now_and_then(self) -> None:
        pause_s, every_s = self._pauses_s
        while not self._ended.wait(pause_s):
            if self._number:
                echo(f"safetune: {self.text(', ')}", err=True)
            pause_s = every_s
