"""Waiting for other processes: pauses that grow, and locks on files."""

from __future__ import annotations

import contextlib
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


def flock(descriptor: int, exclusive: bool, wait_s: float) -> bool:
    """Lock an open file; False where others still have it after `wait_s`.

    Raises:
        OSError: its file system has no locks.
        ImportError: this platform has none.
    """
    import fcntl

    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    for _ in tries(wait_s, 0.001, 0.1):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
    return False
