"""Memory that Triton requests at a launch: global scratch, for device-side tensor descriptors.

Triton has no allocator of its own. The user's is in a context variable, which new threads and
autograd's backward threads do not see. A launch without an allocator fails before anything reaches
the device. It is then repeated with this module's allocator, which later launches of the kernel use
at once. A visible user allocator takes precedence. This module's is set only during such launches.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from safetune import forks, triton_launch
from safetune.both import backend

#: The least alignment of an allocation, whichever allocator torch uses: cudaMalloc's.
_BASE_ALIGNMENT = 256
_MOST_ALIGNMENT = 4096

_lock = forks.lock()

#: The largest request so far, by device. `safetune.graph` reserves as much for a capture.
_largest: dict[int, int] = {}

#: By capture: how many requests had to go to the driver for memory.
_driver_calls: Counter[int] = Counter()

#: By capture: whether torch's allocator took part in it, and keeps its memory for the graph.
_pooled: dict[int, bool] = {}

#: By capture and stream, shared by its launches, which follow each other: what was reserved, until
#: the capture ends; and what a capture uses that torch's allocator does not know of. Nothing
#: tells when that graph ends, so this memory is kept until the process ends.
_kept: dict[tuple[int, int], list[Block]] = {}


class Block:
    """Device memory from torch's caching allocator, reused in the order of one stream.

    Args:
        size: bytes, at least.
        alignment: in bytes.
        stream: the raw handle of the launching stream; None: torch's current one.
    """

    def __init__(self, size: int, alignment: int, stream: int | None) -> None:
        import torch

        self._delete: Callable[[int], None] = torch.cuda.caching_allocator_delete
        self._base = 0
        self.size = size
        self.alignment = alignment
        padding = max(0, alignment - _BASE_ALIGNMENT)
        # For this stream, not torch's current one: memory that is freed while a kernel runs may
        # only be used again behind that kernel, on its own stream.
        self._base = torch.cuda.caching_allocator_alloc(size + padding, stream=stream)
        self._address = self._base + -self._base % alignment

    def data_ptr(self) -> int:
        """Return the address; called by Triton's launcher."""
        return self._address

    def __del__(self) -> None:
        if self._base:
            with contextlib.suppress(Exception):  # torch may be gone already, at exit
                self._delete(self._base)


def allocate(size: int, alignment: int, stream: int | None) -> Block:
    """Return scratch for one launch on the current device; an allocator in Triton's sense."""
    import torch

    device = torch.cuda.current_device()
    with _lock:
        _largest[device] = max(size, _largest.get(device, 0))
    found = backend.current()
    capture = 0 if found is None or stream is None else found.capture_id(stream)
    if stream is None or not capture or not size:
        return Block(size, alignment, stream)
    return _for_graph(size, alignment, stream, capture)


def launch(run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `run`, with `allocate` as Triton's allocator unless the user's own is visible."""
    with scratch_allocator():
        return run(*args, **kwargs)


@contextlib.contextmanager
def scratch_allocator() -> Iterator[None]:
    """Give plain Triton kernels scratch memory in this thread, in the body.

    An allocator that the thread already sees stays in place. Kernels under `@safetune` need none.
    """
    with triton_launch.default_allocator(allocate):
        yield


def reserve(capture: int, stream: int) -> None:
    """Give a capture's graph as much scratch memory as the largest request so far on this device.

    If there is too little memory, nothing is reserved; a launch that needs some then raises.
    """
    if not _largest:
        return
    import torch

    size = _largest.get(torch.cuda.current_device(), 0)
    if size:
        with contextlib.suppress(torch.OutOfMemoryError):
            _kept.setdefault((capture, stream), []).append(Block(size, _MOST_ALIGNMENT, stream))


def driver_calls(capture: int) -> int:
    """Return how many scratch requests of a capture made torch ask the driver for memory."""
    return _driver_calls[capture]


def release(capture: int) -> None:
    """At the end of a capture, return the reserved blocks to the graph's pool, which keeps them."""
    _driver_calls.pop(capture, None)
    if _pooled.pop(capture, True):
        for key in [key for key in list(_kept) if key[0] == capture]:
            del _kept[key]


def _for_graph(size: int, alignment: int, stream: int, capture: int) -> Block:
    """Return memory that the graph being captured has for itself as long as it lives."""
    for kept in _kept.get((capture, stream), ()):
        if kept.size >= size and kept.alignment % alignment == 0:
            return kept
    before = _driver_allocations()
    block = Block(size, alignment, stream)
    if _driver_allocations() > before:
        _driver_calls[capture] += 1
    if capture not in _pooled:
        _pooled[capture] = _is_pooled(block.data_ptr())
    if not _pooled[capture]:
        _kept.setdefault((capture, stream), []).append(block)
    return block


def _driver_allocations() -> int:
    """How often torch's allocator has asked the driver for memory of the current device."""
    import torch

    return int(torch.cuda.memory_stats().get("num_device_alloc", 0))


def _is_pooled(address: int) -> bool:
    """Whether an address lies in a private pool of torch's; True if torch cannot tell."""
    import torch

    with contextlib.suppress(Exception):  # only torch's native allocator can say
        for segment in torch.cuda.memory_snapshot():
            start = segment["address"]
            if start <= address < start + segment["total_size"]:
                return tuple(segment["segment_pool_id"]) != (0, 0)
    return True
