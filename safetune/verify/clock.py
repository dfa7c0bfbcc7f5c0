"""A vector clock: up to which time one program has seen the accesses of the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: The time of an access that never happened.
NEVER = -1


@dataclass(frozen=True)
class Clock:
    """For each program, the time up to which its accesses come before.

    Only programs between the first and the last known program have an entry, because a grid has
    many programs, and each may release an element of its own.

    Attributes:
        first: the number of the program with the first entry.
    """

    first: int
    times: np.ndarray

    def at(self, programs: np.ndarray) -> np.ndarray:
        """Return the times of some programs; `NEVER` for unknown programs."""
        places = programs - self.first
        known = (places >= 0) & (places < len(self.times))
        return np.where(known, self.times[np.where(known, places, 0)], NEVER)

    def joined(self, other: Clock | None) -> Clock:
        """Return the clock of a program that has seen everything that both have seen."""
        if other is None:
            return self
        first = min(self.first, other.first)
        end = max(clock.first + len(clock.times) for clock in (self, other))
        times = np.full(end - first, NEVER, dtype=np.int64)
        for clock in (self, other):
            part = times[clock.first - first :][: len(clock.times)]
            np.maximum(part, clock.times, out=part)
        return Clock(first, times)
