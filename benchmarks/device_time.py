"""How long a launch takes on the device: events around it alone, from a cold L2."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
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
