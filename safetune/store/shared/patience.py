"""How long the callers of a shared store wait for it, and how long it may put them off."""

from __future__ import annotations

import math
from collections.abc import Callable

from safetune import forks


class Budget:
    """Seconds that callers may wait, which come back as time passes."""

    def __init__(self, clock: Callable[[], float], total_s: float, back_s: float) -> None:
        """Allow `total_s`, all of which are back after `back_s`."""
        self._clock = clock
        self._total_s = total_s
        self._each_s = back_s / total_s
        self._lock = forks.lock()
        self.refill()

    def refill(self) -> None:
        """Start with all of it."""
        self._full_at = 0.0

    def spend(self, seconds: float = 0.0) -> float:
        """Take seconds off; return what is left."""
        with self._lock:
            now = self._clock()
            self._full_at = max(self._full_at, now) + seconds * self._each_s
            return max(0.0, self._total_s - (self._full_at - now) / self._each_s)


class PutOff:
    """For how long a store has only said that it cannot answer now."""

    def __init__(self, asked_every_s: float) -> None:
        """Count from the first such answer; anew where it was not asked for `asked_every_s`."""
        self._asked_every_s = asked_every_s
        self.end()

    def end(self) -> None:
        """Note any other answer."""
        self._from = self._last = -math.inf

    def seconds(self, now: float) -> float:
        """Note such an answer; return since when there were only such ones."""
        if now - self._last > self._asked_every_s:
            self._from = now
        self._last = now
        return now - self._from
