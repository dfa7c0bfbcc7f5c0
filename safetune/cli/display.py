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
from safetune.messages import EVERY_S, FIRST_S
from safetune.outcome import duration

if TYPE_CHECKING:
    from typing_extensions import Self

    from safetune.miss.reporting import Tally
    from safetune.offline.plan import Plan


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
        self._started = clock()
        self._measured = 0  # in the tunings that have ended
        self._words, self._number = "", 0
        self._tally: Tally | None = None  # of the tuning, once it has begun
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
        self._number, self._words, self._tally = self._number + 1, words, None

    def watch(self, tally: Tally) -> None:
        """Show what the tally of the tuning says."""
        self._tally = tally

    @property
    def _done(self) -> int:
        """The configs tried in this tuning; those of the final were counted."""
        return min(self._tally.done, self._tally.total) if self._tally else 0

    def text(self, separator: str) -> str:
        """Return the sweep, the tuning, its configs, the best time, the rate and the time left."""
        parts, tally = [f"{self._number}/{len(self._plan.tunings)} {self._words}"], self._tally
        if tally:
            parts += [f"{self._done}/{tally.total}", f"{tally.failed} failed"]
            if tally.best_ms < math.inf:
                parts.append(f"best {duration(tally.best_ms)}")
            parts.append(f"{tally.seconds:.0f} s")
        measured = self._measured + self._done
        seconds = self._clock() - self._started
        if measured and seconds:
            left_s = (self._plan.new - measured) * seconds / measured
            left_s = min(left_s, self._plan.most_s - seconds)
            parts += [f"{measured / seconds:.2g} configs/s", f"about {about(max(0, left_s))} left"]
        doing = tally.doing if tally else ""
        return separator.join([*parts, doing] if doing else parts)

    def _renderable(self) -> Text:
        text = self.text("  ") if self._number else ""
        return Text(visible(text), no_wrap=True, overflow="ellipsis")

    def _print_now_and_then(self) -> None:
        pause_s, every_s = self._pauses_s
        while not self._ended.wait(pause_s):
            if self._number:
                echo(f"safetune: {self.text(', ')}", err=True)
            pause_s = every_s
