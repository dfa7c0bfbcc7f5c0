"""Progress as the parts of a line, and the time to show it."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator

from safetune.frozen import dataclass
from safetune.outcome import duration

#: Seconds before a launch shows its line where it can move; shorter tunings show nothing.
DELAY_S = 2.0

#: The characters of a key in a line of text: the config after it stays whole.
_MOST_OF_KEY = 60


@dataclass(frozen=True)
class HowFar:
    """The progress of a tuning, or of a sweep of several, as the parts of a line in order.

    Attributes:
        done, total: configs tried, and to be tried.
        bad: the number of configs that failed.
        best_ms: the best time so far; infinite before the first.
        first_ms: the time of the first declared config; infinite if it has none.
        left_s: the time that the rest may take; infinite if unknown.
    """

    name: str = ""
    done: int = 0
    total: int = 0
    bad: int = 0
    best_ms: float = math.inf
    first_ms: float = math.inf
    seconds: float = 0.0
    left_s: float = math.inf
    key: str = ""
    doing: str = ""

    def __str__(self) -> str:
        key = self.key if len(self.key) <= _MOST_OF_KEY else f"{self.key[: _MOST_OF_KEY - 1]}…"
        counts = (f"{self.name} {self.count}", self.failed, self.best, self.times)
        parts = (*counts, key, self.doing)
        return ", ".join(filter(None, parts))

    @property
    def count(self) -> str:
        """Configs done, and all."""
        return f"{self.done}/{self.total}"

    @property
    def failed(self) -> str:
        """The configs that failed, if any."""
        return f"{self.bad} failed" if self.bad else ""

    @property
    def best(self) -> str:
        """The best time, and its speedup over the first config."""
        gain = f" ({self.first_ms / self.best_ms:.1f}x)" if self.first_ms < math.inf else ""
        return f"best {duration(self.best_ms)}{gain}" if self.best_ms < math.inf else ""

    @property
    def times(self) -> str:
        """The time passed, and the time left."""
        passed = clock_time(self.seconds)
        return f"{passed} < {clock_time(self.left_s)}" if self.left_s < math.inf else passed

    @property
    def rest(self) -> str:
        """The key, and the current step of the tuning; the step first until a config is done."""
        parts = (self.key, self.doing) if self.done else (self.doing, self.key)
        return ", ".join(filter(None, parts))


def clock_time(seconds: float) -> str:
    """Return seconds as `1:05` or `1:00:05`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def seconds_left(seconds: float, done: int, total: int) -> float:
    """Return the time for the rest at the rate so far; infinite before the first config."""
    return seconds * (total - done) / done if done else math.inf


@contextlib.contextmanager
def repeated(
    call: Callable[[], object],
    first_s: float,
    every_s: float,
    ended: threading.Event | None = None,
) -> Iterator[None]:
    """Call a function in a thread after `first_s`, and then at intervals."""
    ended = ended or threading.Event()

    def run() -> None:
        pause_s = first_s
        while not ended.wait(pause_s):
            call()
            pause_s = every_s

    thread = threading.Thread(target=run, name="safetune-progress", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the process cannot start another thread
        yield
        return
    try:
        yield
    finally:
        ended.set()
        thread.join()
