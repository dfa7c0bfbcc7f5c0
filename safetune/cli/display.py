"""How far a sweep is: lines that change on a terminal, else plain lines now and then.

A process that tunes shows one line. A worker of several tells its parent where it is, which shows a
line for each.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from safetune.cli.output import echo
from safetune.cli.plan import about
from safetune.frozen import dataclass
from safetune.keys.encoding import visible
from safetune.messages import EVERY_S, FIRST_S
from safetune.outcome import duration

if TYPE_CHECKING:
    from typing_extensions import Self

    from safetune.cli.workers import Event
    from safetune.miss.reporting import Tally
    from safetune.offline.plan import Plan

#: How often a worker looks whether it has something to tell, and tells that it is there.
LOOK_S, _TELL_S = 1.0, 10.0

#: Making the arguments may take this long, and a step of a tuning, beside its own limits.
_MARGIN_S = 600.0


@dataclass(frozen=True)
class Place:
    """Where a process is: the configs that it has tried in all, its tuning, and what it does."""

    tried: int
    steps: list[str]  # the words of the tuning, empty between two, and how far it is
    doing: str = ""


def end_process(seconds: float) -> None:
    """End this process, in which a call does not return: other workers then have its keys."""
    echo(f"Error: nothing has happened for {seconds:.0f} s; this process ends", err=True)
    os._exit(2)


@contextlib.contextmanager
def repeated(call: Callable[[], object], first_s: float, every_s: float) -> Iterator[None]:
    """Call a function after a while, and then every so often, in a thread."""
    ended = threading.Event()

    def run() -> None:
        pause_s = first_s
        while not ended.wait(pause_s):
            call()
            pause_s = every_s

    threading.Thread(target=run, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


class _Shown:
    """Shows lines on standard error for as long as it is entered; then a terminal's disappear.

    A subclass says which: `rows`, none before there is something to show.
    """

    def __init__(self, hidden: bool, pauses_s: tuple[float, float]) -> None:
        self._shown: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        console = Console(stderr=True)
        if console.is_terminal and not hidden:
            self._shown = Live(get_renderable=self._renderable, console=console, transient=True)
        elif not hidden:
            self._shown = repeated(self._print, *pauses_s)

    def rows(self, separator: str) -> list[str]:
        """Return the lines."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Begin to show it."""
        self._shown.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Show no more."""
        self._shown.__exit__(None, None, None)

    def _renderable(self) -> Text:
        text = "\n".join(map(visible, self.rows("  ")))
        return Text(text, no_wrap=True, overflow="ellipsis")

    def _print(self) -> None:
        for row in self.rows(", "):
            echo(f"safetune: {row}", err=True)


class Display(_Shown):
    """Shows what this process does of a sweep."""

    def __init__(
        self,
        plan: Plan,
        hidden: bool = False,
        pauses_s: tuple[float, float] = (FIRST_S, EVERY_S),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._clock = plan, clock
        self._started = clock()
        self._measured = 0  # in the tunings that have ended
        self._words, self._number = "", 0
        self._tally: Tally | None = None  # of the tuning, once it has begun
        super().__init__(hidden, pauses_s)

    def begin(self, words: str) -> None:
        """Go on with the next tuning."""
        self.end()
        self._number, self._words = self._number + 1, words

    def watch(self, tally: Tally) -> None:
        """Show what the tally of the tuning says."""
        self._tally = tally

    def end(self) -> None:
        """The tuning is over; the next one may have to wait."""
        self._measured += self._done
        self._words, self._tally = "", None

    @property
    def _done(self) -> int:
        """The configs tried in this tuning; those of the final were counted."""
        return min(self._tally.done, self._tally.total) if self._tally else 0

    @property
    def place(self) -> Place:
        """Where this process is."""
        tally = self._tally
        steps = [self._words]
        if tally:
            steps += [f"{self._done}/{tally.total}", f"{tally.failed} failed"]
            if tally.best_ms < math.inf:
                steps.append(f"best {duration(tally.best_ms)}")
            steps.append(f"{tally.seconds:.0f} s")
        return Place(self._measured + self._done, steps, tally.doing if tally else "")

    @property
    def stuck_after_s(self) -> float:
        """How long nothing may change: a tuning gives up what takes longer."""
        if not self._words or (self._tally and self._tally.waits_for):
            return math.inf
        limits = self._tally.request.limits if self._tally else None
        return _MARGIN_S + (limits.compile_timeout_s + limits.run_timeout_s if limits else 0.0)

    @property
    def steps(self) -> tuple[object, ...]:
        """What changes whenever something happens."""
        return self._number, self._words, self._tally and self._tally.steps

    def rows(self, separator: str) -> list[str]:
        """Return the sweep, the tuning, its configs, the best time, the rate and the time left.

        One line, once a tuning has begun.
        """
        if not self._words:
            return []
        place, plan = self.place, self._plan
        parts = [f"{self._number}/{len(plan.tunings)} {place.steps[0]}", *place.steps[1:]]
        parts += _rate(place.tried, plan.new, self._clock() - self._started, plan.most_s)
        return [separator.join(filter(None, [*parts, place.doing]))]


class FleetDisplay(_Shown):
    """Shows what the workers of a sweep tell: a line for each, and one for all."""

    def __init__(
        self,
        hidden: bool = False,
        pauses_s: tuple[float, float] = (FIRST_S, EVERY_S),
        clock: Callable[[], float] = time.monotonic,
        most_s: float = math.inf,
    ) -> None:
        self._clock, self._started, self._most_s = clock, clock(), most_s
        self._tunings = self._new = 0
        self._tuned: set[tuple[str, ...]] = set()
        self._places: dict[str, Place] = {}
        super().__init__(hidden, pauses_s)

    def take(self, name: str, event: Event) -> None:
        """Note what a worker tells, or that it has dropped out."""
        if "planned" in event:
            self._tunings, self._new = event["planned"], max(self._new, event["new"])
        elif "at" in event:
            self._places = {**self._places, name: Place(**event["at"])}
        elif "facts" in event:
            self._tuned.add(tuple(event["facts"][each] for each in ("key", "shape", "dtype")))
        elif "dropped" in event:
            tried = self._places[name].tried if name in self._places else 0
            self._places = {**self._places, name: Place(tried, ["dropped out"])}

    def rows(self, separator: str) -> list[str]:
        """Return the lines, once a worker has told what there is to do."""
        places, seconds = self._places, self._clock() - self._started
        if not places:
            return []
        tried = min(sum(place.tried for place in places.values()), self._new)
        parts = [f"{len(self._tuned)}/{self._tunings} tunings", f"{tried}/{self._new} configs"]
        lines = [parts + _rate(tried, self._new, seconds, self._most_s)]
        for name, place in places.items():
            steps = [*place.steps, place.doing] if place.steps[0] else ["waits for the others"]
            lines.append([f"{name}: {steps[0]}", *filter(None, steps[1:])])
        return [separator.join(line) for line in lines]


class Teller:
    """Tells the parent of a worker where it is, and ends a worker in which nothing happens."""

    def __init__(
        self,
        display: Display,
        tell: Callable[[Event], None],
        end: Callable[[float], object] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._display, self._tell, self._end, self._clock = display, tell, end, clock
        self._steps: tuple[object, ...] = ()
        self._changed_at = self._tell_at = -math.inf

    def look(self) -> None:
        """Tell where the worker is, if anything has happened or it was not told for a while."""
        now, steps = self._clock(), self._display.steps
        if steps != self._steps or now >= self._tell_at:
            self._tell({"at": vars(self._display.place)})
            self._tell_at = now + _TELL_S
        if steps != self._steps:
            self._steps, self._changed_at = steps, now
        elif now - self._changed_at > self._display.stuck_after_s:
            self._end(now - self._changed_at)


def _rate(tried: int, new: int, seconds: float, most_s: float) -> list[str]:
    """Return the rate and the time left, as text; nothing before the first config."""
    if not tried or not seconds:
        return []
    left_s = min((new - tried) * seconds / tried, most_s - seconds)
    return [f"{tried / seconds:.2g} configs/s", f"about {about(max(0, left_s))} left"]
