"""A child's memory, on a device or on the host, and the operations on its bytes.

Both kinds have the operations of `DeviceBytes`, on addresses. Host memory serves the interpreter
and arguments on the CPU, and needs torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any

from safetune.both import backend
from safetune.both.device_bytes import NATIVE_FLOATS, Run, View
from safetune.inputs.spans import Noise, itemsize

HOST = "cpu"


@functools.cache
def bytes_on(device: str) -> Any:
    """Return the byte operations for a device, or for the host."""
    kind, _, index = device.partition(":")
    return HostBytes() if kind == HOST else backend.required().bytes_of(int(index or 0))


def mapped(device: str, fd: int, size: int) -> Any:
    """Return the device memory behind a descriptor from the parent, and close the descriptor."""
    try:
        return bytes_on(device).mapped(fd, size)
    finally:
        os.close(fd)


def draw(where: Any, memory: Any, run: Run, noise: Noise) -> None:
    """Fill a run with random values."""
    if isinstance(where, HostBytes) or noise.dtype not in NATIVE_FLOATS:
        from safetune.inputs import random_inputs

        random_inputs.draw(where.tensor(memory, run), noise, where.name)
        return
    width = itemsize(noise.dtype)
    used = run.size // width * width
    where.set_bytes(Run(run.address + used, run.size - used), 0)
    limits = (noise.mean, noise.std, noise.low, noise.high)
    where.draw(noise.dtype, Run(run.address, used), width, noise.seed, limits)


class HostMemory:
    """Host memory with a single user."""

    pinned = True

    def __init__(self, size: int) -> None:
        import torch

        self.bytes = torch.empty(max(1, size), dtype=torch.uint8)
        self.address: int = self.bytes.data_ptr()
        self.size = size


class HostBytes:
    """The operations of `DeviceBytes`, for bytes on the host."""

    name = HOST

    def allocate(self, size: int) -> HostMemory:
        return HostMemory(size)

    allocate_anywhere = allocate_pinned = allocate

    def has_room(self, size: int) -> bool:
        """Whether an allocation of this size is possible; the host is assumed to have room."""
        return True

    def tensor(self, memory: HostMemory, run: Run) -> Any:
        """Return a run of bytes as a tensor, without a copy."""
        begin = run.address - memory.address
        return memory.bytes[begin : begin + run.size]

    def copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    load = copy

    def wait(self, stream: int) -> None:
        """Return at once: host memory has no queued work."""

    def set_bytes(self, run: Run, value: int) -> None:
        ctypes.memset(run.address, value, run.size)

    def checksums(self, runs: Sequence[Run]) -> list[int]:
        digests = (hashlib.blake2b(_content(run), digest_size=8) for run in runs)
        return [int.from_bytes(each.digest(), "big") for each in digests]

    def unlike(self, views: Sequence[tuple[View, int]]) -> list[int]:
        return [
            int((_elements(view) != _signed(value, view.width)).count_nonzero())
            for view, value in views
        ]

    def fill(self, view: View, value: int) -> None:
        _elements(view).fill_(_signed(value, view.width))


def _content(run: Run) -> Any:
    return (ctypes.c_ubyte * run.size).from_address(run.address)


def _elements(view: View) -> Any:
    """Return the elements of a view as a tensor of integers."""
    import torch

    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[view.width]
    sizes, steps = zip(*view.inner, strict=True) if view.inner else ((), ())
    outer = view.count // max(1, math.prod(sizes))
    shape, stride = (outer, *reversed(sizes)), (view.step, *reversed(steps))
    if not view.count:
        return torch.empty(shape, dtype=kind)
    extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    content = _content(Run(view.address, extent * view.width))
    return torch.frombuffer(content, dtype=kind).as_strided(shape, stride)


def _signed(value: int, width: int) -> int:
    top = 1 << 8 * width
    value %= top
    return value - top if width > 1 and value >= top // 2 else value
