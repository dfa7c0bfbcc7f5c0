"""The time of one launch: device events around the kernel alone, from a cold L2.

Hooks and restores run between the timed spans, never inside one. The interpreter has no device, so
it uses the wall clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from safetune.both.protocol import Budget
from safetune.outcome import Timing

Launch = Callable[[], object]

#: After this many launches a config is given up if it takes this many times as long as the best.
#: Two launches say little: the faster of them counts, and the time is called coarse.
_RUNGS = ((2, 2.0), (5, 1.3), (15, 1.15))
#: A launch counts as not held up if the device waited for the host for at most this share of it.
_HARMLESS = 0.01


class InvalidTime(Exception):
    """A measured time is not a positive, finite number."""


class Sample(NamedTuple):
    """The time of one launch; the device may have waited for the host during it."""

    ms: float
    waited_ms: float = 0.0  # at most

    @property
    def is_clean(self) -> bool:
        """Whether the device never waited for the host."""
        return self.waited_ms <= _HARMLESS * self.ms


def measure(launch: Launch, before: Launch, after: Launch, timer: Timer, budget: Budget) -> Timing:
    """Time `launch` and return its median and spread in milliseconds.

    Args:
        before, after: run around every launch, untimed.

    Raises:
        InvalidTime: the clock gave zero, a negative number or NaN.
    """
    samples: list[Sample] = []
    rungs = _RUNGS if budget.best_ms else ((budget.least, math.inf),)
    for launches, ratio in (*rungs, (budget.most, math.inf)):
        affordable = int(budget.time_ms / _median(samples)) if samples else 0
        wanted = min(launches, max(budget.least, affordable))
        if wanted > len(samples):
            samples += timer.samples(launch, before, after, wanted - len(samples))
        _check(_median(samples))
        if budget.best_ms and _at_least(samples) > ratio * budget.best_ms:
            return summarize(_clean(samples), "coarse" if len(samples) < budget.least else "screen")
        if sum(sample.ms for sample in samples) > timer.long_ms:
            break
    # The first launches found cold instruction caches and low clocks.
    cold = budget.least // 2 if len(samples) > budget.least else 0
    warm = [sample for sample in samples[cold:] if sample.is_clean]
    return summarize(_clean(warm or samples), "screen")


def _median(samples: Sequence[Sample]) -> float:
    return statistics.median_low(sample.ms for sample in samples)


def _clean(samples: Sequence[Sample]) -> list[float]:
    """Return the times of the launches that the host did not hold up; of all, if it held up all."""
    return [each.ms for each in samples if each.is_clean] or [each.ms for each in samples]


def _at_least(samples: Sequence[Sample]) -> float:
    """Return what a launch takes at least: a stall of the host gives no config up."""
    clean = [sample.ms for sample in samples if sample.is_clean]
    if len(clean) < 2:
        clean = [sample.ms - sample.waited_ms for sample in samples]
    return statistics.median_low(clean)


def summarize(samples: Sequence[float], stage: str) -> Timing:
    """Return the median and the 20th and 80th percentiles of times in milliseconds."""
    ordered = sorted(samples)
    _check(ordered[0])
    _check(ordered[-1])
    return Timing(
        median_ms=statistics.median(ordered),
        p20_ms=ordered[int(0.2 * (len(ordered) - 1))],
        p80_ms=ordered[math.ceil(0.8 * (len(ordered) - 1))],
        count=len(ordered),
        stage=stage,
    )


def from_do_bench(result: Any) -> Timing:
    """Return the timing from a user's `do_bench(call, quantiles=(0.5, 0.2, 0.8))`."""
    values = [*map(float, result if isinstance(result, (list, tuple)) else [result])]
    median = values[0]
    _check(median)
    p20, p80 = values[1:3] if len(values) >= 3 else (median, median)
    return Timing(median_ms=median, p20_ms=p20, p80_ms=p80, count=1, stage="do_bench")


def _check(milliseconds: float) -> None:
    if not (math.isfinite(milliseconds) and milliseconds > 0):
        raise InvalidTime(f"measured {milliseconds} ms")


class Timer:
    """The wall clock, for the interpreter, whose launches are slow enough for it.

    Args:
        long_ms: two launches suffice once they have taken this long together. Their times say
            nothing about a GPU.
    """

    def __init__(self, long_ms: float = 50.0) -> None:
        self.long_ms = long_ms

    def samples(self, launch: Launch, before: Launch, after: Launch, count: int) -> list[Sample]:
        """Return the times of `count` launches, or of at least two if they are slow."""
        times: list[float] = []
        while len(times) < count and (len(times) < 2 or sum(times) < self.long_ms):
            before()
            start = time.perf_counter()
            launch()
            times.append((time.perf_counter() - start) * 1e3)
            after()
        return [*map(Sample, times)]

    def is_busy(self) -> bool:
        """Whether other work is on the device now; the host's clock cannot tell."""
        return False

    def disturb(self) -> None:
        """Give the device other work during the next launch; here there is no device."""

    def synchronize(self) -> None:
        """Wait until all launches are done."""
