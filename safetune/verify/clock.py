"""How far one program has seen what the others did: a vector clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: What stands for "never" where a time is expected.
NEVER = -1


@dataclass(frozen=True)
class Clock:
    """For each program the time up to which its accesses come before.

    Only the programs between the first and the last of which anything is known have an entry: a
    grid has many programs, and each may release an element of its own.

    Attributes:
        first: the number of the program that has the first entry.
    """

    first: int
    times: np.ndarray

    def at(self, programs: np.ndarray) -> np.ndarray:
        """Return the times of some programs, `NEVER` where nothing is known."""
        places = programs - self.first
        known = (places >= 0) & (places < len(self.times))
        return np.where(known, self.times[np.where(known, places, 0)], NEVER)

    def joined(self, other: Clock | None) -> Clock:
        """Return the clock of one that has seen what both have."""
        if other is None:
            return self
        first = min(self.first, other.first)
        end = max(clock.first + len(clock.times) for clock in (self, other))
        times = np.full(end - first, NEVER, dtype=np.int64)
        for clock in (self, other):
            part = times[clock.first - first :][: len(clock.times)]
            np.maximum(part, clock.times, out=part)
        return Clock(first, times)
