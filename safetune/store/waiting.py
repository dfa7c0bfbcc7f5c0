"""Waiting for other processes: pauses that grow, and the seconds that this process has waited."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from safetune import forks


class Waited:
    """The seconds that a process has waited for others; a forked child has not waited yet."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self.start_over()
        forks.register("tuning", after_in_child=self.start_over)

    def start_over(self) -> None:
        """Count from zero."""
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count a wait of some thread."""
        with self._lock:
            self.seconds += seconds


#: The waits of this process, for tunings and for the lock of a database: SAFETUNE_WAIT bounds them.
waited = Waited()

#: The program's own random numbers stay as they are: ranks that wait would differ in them after.
_random = random.SystemRandom()


def pauses(first_s: float, most_s: float) -> Iterator[float]:
    """Yield how long to sleep before the next try, without end.

    Twice as long each time, and drawn at random, so that processes that began together spread out.
    """
    pause_s = first_s
    while True:
        yield _random.uniform(pause_s / 2, pause_s)
        pause_s = min(2 * pause_s, most_s)


def tries(
    wait_s: float, first_s: float, most_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[bool]:
    """Yield for each try whether it is the last one; sleep between them for `wait_s` in all."""
    end = clock() + wait_s
    for pause_s in pauses(first_s, most_s):
        left_s = end - clock()
        yield left_s <= 0
        if left_s <= 0:
            return
        time.sleep(max(0.0, min(pause_s, end - clock())))
