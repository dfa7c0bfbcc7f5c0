"""How long a launch takes on the device: events around it alone, from a cold L2."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import recording

Launch = Callable[[], object]


def timed(launch: Launch, launches: int) -> list[float]:
    """Return the milliseconds of `launches` launches, after one that is not timed.

    The L2 cache is flushed before each. In the interpreter the wall clock is read instead.
    """
    launch()
    if recording.interpreted():
        return [_wall_clock(launch) for _ in range(launches)]
    flush = _flush_buffer().zero_
    spans = _spans(launches)
    for start, end in spans:
        flush()
        start.record()
        launch()
        end.record()
    synchronize()
    return [start.elapsed_time(end) for start, end in spans]


def medians_in_turns(launches: Mapping[str, Launch], turns: int, each: int) -> dict[str, float]:
    """Return the median milliseconds of launches that take turns, `each` of them at a time."""
    if recording.interpreted():
        turns, each = min(turns, 2), 1
    samples: dict[str, list[float]] = {name: [] for name in launches}
    for turn in range(turns):
        for name in recording.in_turn(list(launches), turn):
            samples[name] += timed(launches[name], each)
    return {name: statistics.median(times) for name, times in samples.items()}


def host_us(call: Launch, calls: int) -> float:
    """Return the host's microseconds for a call, over a batch that starts on an idle device."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - start
    synchronize()
    return seconds / calls * 1e6


def synchronize() -> None:
    """Wait for the device."""
    import torch

    if not recording.interpreted():
        torch.cuda.synchronize()


def _wall_clock(launch: Launch) -> float:
    start = time.perf_counter()
    launch()
    return (time.perf_counter() - start) * 1e3


@functools.cache
def _flush_buffer() -> Any:
    """Four times the L2 cache. Twice as much evicts all else, but takes 40 us on an H100: a slow
    host does not launch a kernel within that, and its own time would be measured.
    """
    import torch

    return torch.empty(
        4 * torch.cuda.get_device_properties().L2_cache_size, dtype=torch.int8, device="cuda"
    )


_events: list[tuple[Any, Any]] = []


def _spans(count: int) -> list[tuple[Any, Any]]:
    """Return pairs of events, the same ones each time: to make one takes as long as a launch."""
    import torch

    while len(_events) < count:
        event = functools.partial(torch.cuda.Event, enable_timing=True)
        _events.append((event(), event()))
    return _events[:count]
