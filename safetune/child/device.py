"""The device in a measuring child: timing and scratch memory."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from safetune import triton_launch
from safetune.both.device_bytes import DeviceBytes, Run
from safetune.both.device_memory import Bytes
from safetune.both.timing import Launch, Sample, Timer
from safetune.inputs.memory_budget import FLUSH

#: What is overwritten before a launch: this many times the L2 cache, and at least so much that the
#: launch is queued meanwhile.
_CACHES, _LEAST_FLUSHED = 2, 64 << 20
#: How often it is flushed at most before one launch, where Python takes long to launch.
_MOST_FLUSHES = 8
#: How many late launches in a row double the flushes, and how many in time halve them. A late one
#: alone, as the first after a pause, is left out of the time of its config.
_LATE, _IN_TIME = 2, 16
#: A launch that takes this long was interrupted: to flush more often would not help the next ones.
_STALL_S = 0.5e-3

#: What one program reads to find out whether other work is on the device, how often, and how many
#: times as long as the median one of them takes then. One takes 0.14 ms on an H200. Together they
#: take longer than a slice (2.5 ms there), as a process that begins is given a whole one.
_WALKED_BYTES, _WALKS, _CUT_IN = 2 << 20, 24, 2.0


class DeviceTimer(Timer):
    """Driver events on the default stream, with the L2 cache flushed before each launch.

    The flush is queued before the first event, so the launch is queued by the time the device gets
    there, and Python's own time stays out of the span. If the device got there first, because this
    process was delayed, the sample has an upper bound of its wait.
    """

    def __init__(self, where: DeviceBytes, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(long_ms=math.inf)
        self._clock = clock
        self._events: list[int] = []
        self._driver, self._where = where.driver, where
        self._walked: Bytes | None = None
        self._flushed = where.allocate(_flushed_bytes(where.l2_bytes()))
        self._flushes = 1
        self._were_late, self._in_a_row = False, 0

    def samples(self, launch: Launch, before: Launch, after: Launch, count: int) -> list[Sample]:
        """Return the times of `count` launches."""
        flushed = self._flushed

        def prepare() -> None:
            before()
            for _ in range(self._flushes):
                self._driver.fill(flushed.address, 0, flushed.size // 4, width=4)

        def done(is_late: bool, took_s: float) -> None:
            if not is_late or took_s < _STALL_S:
                self._give_time(is_late)
            after()

        return self._spans(launch, prepare, done, count)

    def replays(self, replay: Launch, launches: int, count: int) -> list[Sample]:
        """Return per-launch times from `count` replays of a graph with several launches.

        An untimed replay precedes each: it brings caches into the state within a replay, and keeps
        the device busy until the timed replay is queued.
        """
        spans = self._spans(replay, replay, lambda is_late, took_s: None, count)
        return [Sample(span.ms / launches, span.waited_ms / launches) for span in spans]

    def _spans(
        self, launch: Launch, prepare: Launch, done: Callable[[bool, float], None], count: int
    ) -> list[Sample]:
        """Return the times of `count` launches, each queued behind what `prepare` queues.

        `done` is told whether the device was there first, and how long it took to queue the launch.
        """
        driver, waited = self._driver, list[float]()
        while len(self._events) < 2 * count:
            self._events.append(driver.event())
        pairs = list(zip(self._events[:count], self._events[count : 2 * count], strict=True))
        for start, end in pairs:
            prepare()
            began = self._clock()
            driver.record(start)
            launch()
            driver.record(end)
            took_s = self._clock() - began
            is_late = driver.has_happened(start)
            waited.append(1e3 * took_s if is_late else 0.0)
            done(is_late, took_s)
        driver.synchronize()
        times = [driver.elapsed_ms(start, end) for start, end in pairs]
        return [*map(Sample, times, waited)]

    def is_busy(self) -> bool:
        """Whether other work is on the device now.

        A device serves one process at a time, in slices of milliseconds. If it serves others too,
        one of many equal launches, which are short beside a slice, takes as long as one.
        """
        if self._walked is None:
            self._walked = self._where.allocate(_WALKED_BYTES)
        where, driver, run = self._where, self._driver, Run(self._walked.address, _WALKED_BYTES)
        while len(self._events) <= _WALKS:
            self._events.append(driver.event())
        is_late = False
        where.walk(run)  # the others are queued behind it
        for event in self._events[:_WALKS]:
            driver.record(event)
            where.walk(run)
            is_late |= driver.has_happened(event)
        driver.record(self._events[_WALKS])
        driver.synchronize()
        spans = [*map(driver.elapsed_ms, self._events[:_WALKS], self._events[1 : _WALKS + 1])]
        return not is_late and max(spans) > _CUT_IN * statistics.median(spans)

    def _give_time(self, is_late: bool) -> None:
        """Set how long the device is busy before the next launch, which is queued meanwhile."""
        self._in_a_row = self._in_a_row + 1 if is_late == self._were_late else 1
        self._were_late = is_late
        if self._in_a_row == (_LATE if is_late else _IN_TIME):
            flushes = 2 * self._flushes if is_late else self._flushes // 2
            self._flushes, self._in_a_row = min(max(flushes, 1), _MOST_FLUSHES), 0

    def disturb(self) -> None:
        """Overwrite memory on another stream during the next launch: the programs then run in
        another order, which exposes races that an idle device hides.
        """
        words, beside = self._flushed.size // 4, self._where.side_stream
        for _ in range(_MOST_FLUSHES):
            self._driver.fill(self._flushed.address, 0, words, width=4, stream=beside)

    def synchronize(self) -> None:
        """Wait until all launches are done; raises their errors in the context."""
        self._driver.synchronize()

    def __del__(self) -> None:
        for event in self._events:
            with contextlib.suppress(Exception):
                self._driver.drop_event(event)


def _flushed_bytes(cache: int) -> int:
    """Return how much is overwritten to empty a cache; 256 MiB, as in Triton, for one of unknown
    size.
    """
    return min(max(_CACHES * cache, _LEAST_FLUSHED), FLUSH) if cache else FLUSH


class Scratch:
    """The scratch memory that Triton requests at a launch. Launches run in order on one stream, so
    all of a kind share it.
    """

    def __init__(self, where: DeviceBytes) -> None:
        self._where = where
        self.memory: Any = where.allocate(0)

    def allocate(self, size: int, alignment: int, stream: int | None) -> int:
        """Return an address of scratch memory; an allocator in Triton's sense."""
        if self.memory.size < size + alignment:
            self.memory = self._where.allocate(size + alignment)
        address = int(self.memory.address)
        return address + -address % alignment

    def launch(self, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call what launches."""
        with triton_launch.default_allocator(self.allocate):
            return run(*args, **kwargs)
