"""How long a sequence of launches takes on the device: replays of one CUDA graph between events.

No system's host overhead counts in a graph. Operands are rotated, so that no call finds in the L2
cache what an earlier one left there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import recording

Call = Callable[[], object]

#: Calls of one replay: enough that its own start does not count.
REPLAY_S = 4e-3
MOST_CALLS = 400

#: How long a GPU works before anything is timed: one that was idle has not its clocks yet.
WARM_UP_S = 0.1


class Replay:
    """Some calls, captured once and replayed; in the interpreter they are run, and timed, as is."""

    def __init__(self, make: Callable[[], Sequence[Call]]) -> None:
        """Warm the calls up, so that everything is compiled and tuned, and capture them.

        `make` returns the calls. It runs on the stream that is captured, because the backward pass
        runs on that of its forward pass.
        """
        self.graph: Any = None
        if recording.interpreted():
            self.calls = list(make())[:1]
            self.calls[0]()
            return
        import torch

        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.calls = list(make())
            for _ in range(2):
                self.calls[0]()
            self.stream.synchronize()
            wanted = max(1, min(MOST_CALLS, int(REPLAY_S / self._one_call_s())))
            self.calls *= -(-wanted // len(self.calls))
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                for call in self.calls:
                    call()
            self.graph.replay()
            self.stream.synchronize()

    def _one_call_s(self) -> float:
        began = time.perf_counter()
        for call in self.calls:
            call()
        self.stream.synchronize()
        return (time.perf_counter() - began) / len(self.calls)

    def warm_up(self) -> None:
        """Replay for `WARM_UP_S`, untimed."""
        began = time.perf_counter()
        while self.graph is not None and time.perf_counter() - began < WARM_UP_S:
            self.microseconds()

    def microseconds(self) -> float:
        """Replay once and return the mean time of a call."""
        if self.graph is None:
            began = time.perf_counter()
            self.calls[0]()
            return (time.perf_counter() - began) * 1e6
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            start.record()
            self.graph.replay()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / len(self.calls)


def copy_bandwidth(gibibytes: float, copies: int = 8) -> float:
    """Return the TB/s of `copy_`, read and written bytes together: the best of five batches.

    Launched, not replayed: a graph has a node of another kind for a copy, and that is slower.
    """
    import torch

    if recording.interpreted():
        gibibytes, copies = 2**-10, 1
    source = torch.empty(int(gibibytes * 2**30), dtype=torch.int8, device=recording.torch_device())
    target = torch.empty_like(source)
    return (
        2 * source.numel() * copies / min(_batch_us(target, source, copies) for _ in range(5)) / 1e6
    )


def _batch_us(target: Any, source: Any, copies: int) -> float:
    import torch

    if recording.interpreted():
        began = time.perf_counter()
        target.copy_(source)
        return (time.perf_counter() - began) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    start.record()
    for _ in range(copies):
        target.copy_(source)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def operand_sets(bytes_each: int) -> int:
    """Return how many sets of operands go round: twice, and four times the L2 cache, at least."""
    import torch

    if recording.interpreted():
        return 1
    cache = torch.cuda.get_device_properties().L2_cache_size
    return max(2, min(64, -(-4 * cache // bytes_each)))
