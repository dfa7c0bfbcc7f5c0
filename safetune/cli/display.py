"""The progress of a sweep, in all its processes.

A tuning process shows its own progress. A worker tells its parent how many configs it has tried,
and the parent shows the progress of all workers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from safetune.miss.how_far import HowFar, seconds_left

if TYPE_CHECKING:
    from safetune.cli.workers import Event
    from safetune.miss.reporting import Tally
    from safetune.offline.plan import Planned

#: Of each key of a plan its tunings, and the configs to measure.
Counts = Mapping[str, tuple[int, int]]

#: How often a worker tells how far it is.
TELL_S = 1.0


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
