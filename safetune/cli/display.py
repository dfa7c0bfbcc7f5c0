"""The progress of a sweep, in all its processes.

A tuning process shows its own progress. A worker tells its parent how many configs it has tried,
and the parent shows the progress of all workers.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from safetune.cli.output import echo
from safetune.miss.how_far import HowFar, seconds_left

if TYPE_CHECKING:
    from safetune.cli.workers import Event
    from safetune.miss.reporting import Tally
    from safetune.offline.plan import Planned

#: Of each key of a plan its tunings, and the configs to measure.
Counts = Mapping[str, tuple[int, int]]

#: How often a worker looks whether it has something to tell.
LOOK_S = 1.0

#: Making the arguments may take this long, and a step of a tuning, beside its own limits.
_MARGIN_S = 600.0


def counts_of(tunings: Iterable[Planned]) -> Counts:
    """Return the amount of work that a plan has for each key."""
    counts: dict[str, tuple[int, int]] = {}
    for planned in tunings:
        number, new = counts.get(planned.key, (0, 0))
        counts[planned.key] = number + 1, new + len(planned.new)
    return counts


class Sweep:
    """The progress of a sweep: of this process's tunings, or as its workers report it."""

    def __init__(
        self, most_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_s, self._clock, self._started = most_s, clock, clock()
        self._planned: Counts = {}
        self._told: dict[str, Event] = {}  # by each worker: how many it tried, and how many failed
        self._ended = self._tried = self._failed = 0  # tunings, and the configs in them
        self._name = self._key = ""
        self._tally: Tally | None = None  # of the tuning, once it has begun

    def take(self, event: Event, name: str = "") -> None:
        """Record the plan of this process, or an event of a worker."""
        for key, (tunings, new) in event.get("plan", {}).items():
            known = self._planned.get(key, (0, 0))[1]  # a later plan finds more stored
            self._planned = {**self._planned, key: (tunings, max(known, new))}
        if "tried" in event:
            self._told = {**self._told, name: event}
        self._ended += "facts" in event

    def begin(self, kernel: str, key: str) -> None:
        """Start the next tuning."""
        self._name, self._key = kernel, key

    def watch(self, tally: Tally) -> None:
        """Show the tally of the tuning."""
        self._tally = tally

    def end(self) -> None:
        """The tuning is over; the next one may have to wait."""
        self._tried, self._failed = self.tried.values()
        self._ended += 1
        self._name, self._tally = "", None

    @property
    def tried(self) -> Event:
        """How many configs this process has tried in all, and how many of them failed."""
        tally = self._tally
        tried, failed = (tally.done, tally.failed) if tally else (0, 0)
        return {"tried": self._tried + tried, "failed": self._failed + failed}

    @property
    def stuck_after_s(self) -> float:
        """The longest time without a change; a tuning gives up anything that takes longer."""
        if not self._name or (self._tally and self._tally.waits_for):
            return math.inf
        limits = self._tally.request.limits if self._tally else None
        return _MARGIN_S + (limits.compile_timeout_s + limits.run_timeout_s if limits else 0.0)

    @property
    def steps(self) -> tuple[object, ...]:
        """A value that changes with every event."""
        return self._ended, self._name, self._tally and self._tally.steps

    def how_far(self) -> HowFar | None:
        """Return the progress of all tunings, with the best time of the current one.

        None before a plan.

        The time left is at most the time that the command has.
        """
        if not self._planned:
            return None
        planned, tally = self._planned.values(), self._tally
        tunings, new = sum(tunings for tunings, _ in planned), sum(new for _, new in planned)
        events = [self.tried, *self._told.values()]
        tried = min(sum(event["tried"] for event in events), new)
        seconds = self._clock() - self._started
        name, key = f"{self._ended}/{tunings} tunings", ""
        if self._name:
            name, key = f"{self._ended + 1}/{tunings} {self._name}", self._key
        return HowFar(
            name,
            tried,
            new,
            sum(event["failed"] for event in events),
            tally.best_ms if tally else math.inf,
            tally.first_ms if tally else math.inf,
            seconds,
            max(0.0, min(seconds_left(seconds, tried, new), self._most_s - seconds)),
            key,
            tally.doing if tally else "",
        )


def end_process(seconds: float) -> None:
    """End this process, because a call does not return; other workers take its keys."""
    echo(f"Error: no progress for {seconds:.0f} s; exiting", err=True)
    os._exit(2)


class Teller:
    """Reports a worker's progress to its parent, and ends a worker in which nothing happens."""

    def __init__(
        self,
        sweep: Sweep,
        tell: Callable[[Event], None],
        end: Callable[[float], object] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sweep, self._tell, self._end, self._clock = sweep, tell, end, clock
        self._steps, self._changed_at = sweep.steps, clock()

    def look(self) -> None:
        """Print how many configs were tried, if there is news."""
        now, steps = self._clock(), self._sweep.steps
        if steps != self._steps:
            self._steps, self._changed_at = steps, now
            self._tell(self._sweep.tried)
        elif now - self._changed_at > self._sweep.stuck_after_s:
            self._end(now - self._changed_at)
