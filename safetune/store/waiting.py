"""Waiting for other processes: pauses that grow."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator


def pauses(first_s: float, most_s: float) -> Iterator[float]:
    """Yield how long to sleep before the next try, without end.

    Twice as long each time, and drawn at random, so that processes that began together spread out.
    """
    pause_s = first_s
    while True:
        yield random.uniform(pause_s / 2, pause_s)
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
