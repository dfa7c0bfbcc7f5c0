"""A child's memory, on a device or on the host, and what is done with bytes there.

Both kinds have the operations of `DeviceBytes`, on addresses. Those of the host use torch; they are
for the interpreter and for arguments on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

from safetune.inputs.spans import Noise, itemsize
from safetune.isolation import backend
from safetune.isolation.device_bytes import FLOATS, Run, View

HOST = "cpu"

#: Words of 8 bytes that are mixed at once.
_CHUNK = 1 << 20
#: Those of the device's kernel, as numbers with a sign.
_MULTIPLIER = 0xD6E8FEB86659FD93 - (1 << 64)
_PLACE = 0x9E3779B97F4A7C15 - (1 << 64)


class HostMemory:
    """Memory of the host that nothing else uses."""

    pinned = True

    def __init__(self, size: int) -> None:
        import torch

        self.bytes = torch.empty(max(1, size), dtype=torch.uint8)
        self.address: int = self.bytes.data_ptr()
        self.size = size


class HostBytes:
    """What is done with bytes of the host; see `DeviceBytes`."""

    name = HOST

    def allocate(self, size: int) -> HostMemory:
        """Return new memory."""
        return HostMemory(size)

    allocate_anywhere = allocate

    def tensor(self, memory: HostMemory, run: Run) -> Any:
        """Return a run of bytes as a tensor, without a copy."""
        begin = run.address - memory.address
        return memory.bytes[begin : begin + run.size]

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes."""
        ctypes.memmove(target, source, size)

    load = unload = copy

    def has_room(self, size: int) -> bool:
        """Whether the host has memory for this, without asking it."""
        return True

    def set_bytes(self, run: Run, value: int) -> None:
        """Set every byte of a run."""
        ctypes.memset(run.address, value, run.size)

    def checksums(self, runs: Sequence[Run]) -> list[int]:
        """Return 64 bits for each run of bytes."""
        return [_checksum(run) for run in runs]

    def unlike(self, views: Sequence[tuple[View, int]]) -> list[int]:
        """Return how many elements of each view have other bits than a value."""
        return [int((_elements(view) != _signed(value, view.width)).sum()) for view, value in views]

    def fill(self, view: View, value: int) -> None:
        """Set the bits of all elements."""
        _elements(view).fill_(_signed(value, view.width))

    def gather(self, view: View, numbers: Sequence[int]) -> list[int]:
        """Return the bits of some elements."""
        elements, mask = _elements(view), (1 << 8 * view.width) - 1
        return [value & mask for value in elements[_places(elements, numbers)].tolist()]

    def scatter(self, view: View, numbers: Sequence[int], values: Sequence[int]) -> None:
        """Set the bits of some elements."""
        import torch

        elements = _elements(view)
        new = torch.tensor([_signed(value, view.width) for value in values], dtype=elements.dtype)
        elements[_places(elements, numbers)] = new


_host = HostBytes()


def bytes_on(device: str) -> Any:
    """Return what works on bytes of a device, or of the host."""
    kind, _, index = device.partition(":")
    return _host if kind == HOST else backend.required().bytes_of(int(index or 0))


def draw(where: Any, memory: Any, run: Run, noise: Noise) -> None:
    """Fill a run with random values."""
    if where is _host or noise.dtype not in FLOATS:
        from safetune.inputs import random_inputs

        random_inputs.draw(where.tensor(memory, run), noise, where.name)
        return
    width = itemsize(noise.dtype)
    used = run.size // width * width
    where.set_bytes(Run(run.address + used, run.size - used), 0)
    limits = (noise.mean, noise.std, noise.low, noise.high)
    where.draw(noise.dtype, Run(run.address, used), width, noise.seed, limits)


def _raw(address: int, size: int) -> Any:
    import torch

    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


def _elements(view: View) -> Any:
    """Return the elements of a view as a tensor of integers."""
    import torch

    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[view.width]
    sizes, steps = zip(*view.inner, strict=True) if view.inner else ((), ())
    outer = view.count // max(1, math.prod(sizes))
    shape, stride = (outer, *reversed(sizes)), (view.step, *reversed(steps))
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if not view.count:
        return torch.empty(shape, dtype=kind)
    return _raw(view.address, extent * view.width).view(kind).as_strided(shape, stride)


def _signed(value: int, width: int) -> int:
    top = 1 << 8 * width
    value %= top
    return value - top if width > 1 and value >= top // 2 else value


def _places(elements: Any, numbers: Sequence[int]) -> tuple[Any, ...]:
    import torch

    from safetune.child import compare

    return compare.unravelled(torch.tensor(numbers, dtype=torch.int64), elements.shape)


def _checksum(run: Run) -> int:
    """Return what the device's kernel computes."""
    import torch

    before, total = run.address % 16, 0
    padded = -(-(before + run.size) // 8) * 8
    for begin in range(0, padded, 8 * _CHUNK):
        size = min(8 * _CHUNK, padded - begin)
        first, last = max(begin, before), min(begin + size, before + run.size)
        words = torch.zeros(size // 8, dtype=torch.int64)
        part = _raw(run.address + first - before, last - first)
        words.view(torch.uint8)[first - begin : last - begin] = part
        words += _weights()[: size // 8] + _signed(begin // 8 * _PLACE, 8)
        for _ in range(2):
            words ^= (words >> 32) & 0xFFFFFFFF
            words *= _MULTIPLIER
        total += int(words.sum())
    return total % (1 << 64)


@functools.cache
def _weights() -> Any:
    import torch

    return torch.arange(_CHUNK) * _PLACE
