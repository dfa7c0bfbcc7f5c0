"""How long callers wait for a shared store: a little, and not again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: What callers wait for the store at most, and how long it takes to have it all back.
BUDGET_S = 2.0
RETRY_S = 60.0


class Budget:
    """Seconds to spend, which come back as time goes by."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s = BUDGET_S
        self._at = self._clock()
        self._lock = threading.Lock()

    def left_s(self) -> float:
        """Return what is left."""
        return self.spend(0.0)

    def spend(self, seconds: float) -> float:
        """Take seconds off; return what is left."""
        with self._lock:
            now = self._clock()
            self._left_s += (now - self._at) * BUDGET_S / RETRY_S
            self._left_s = max(0.0, min(self._left_s, BUDGET_S) - seconds)
            self._at = now
            return self._left_s

    def start_over(self) -> None:
        """Forget the lock, in a fork: a thread of the parent may have held it."""
        self._lock = threading.Lock()

    def refill(self) -> None:
        """Have it all back."""
        self._left_s = BUDGET_S
