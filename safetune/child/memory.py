"""A child's memory, on a device or on the host, and what is done with bytes there.

Both kinds have the operations of `DeviceBytes`, on addresses. Those with torch are for the
interpreter, for arguments on the CPU, and for a driver that does not run the kernels in PTX.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Sequence
from typing import Any

from safetune.errors import BackendError, HandOverFailed
from safetune.inputs.spans import Noise, itemsize
from safetune.isolation import backend
from safetune.isolation.device_bytes import NATIVE_FLOATS, Run, View
from safetune.isolation.device_memory import Bytes

HOST = "cpu"

#: Words of 8 bytes that are mixed at once.
_CHUNK = 1 << 20
#: Those of the device's kernel, as numbers with a sign.
_MULTIPLIER = 0xD6E8FEB86659FD93 - (1 << 64)
_PLACE = 0x9E3779B97F4A7C15 - (1 << 64)


@functools.cache
def bytes_on(device: str) -> Any:
    """Return what works on bytes of a device, or of the host."""
    kind, _, index = device.partition(":")
    if kind != HOST:
        try:
            found = backend.required().bytes_of(int(index or 0))
            if found.works():
                return found
        except MemoryError:  # which may pass
            raise
        except BackendError:
            pass
    return TorchBytes(device)


def mapped(device: str, fd: int, size: int) -> Any:
    """Return the device memory behind a descriptor of the parent's, which is closed.

    Raises `HandOverFailed` where that cannot be had.
    """
    try:
        where = bytes_on(device)
        if isinstance(where, TorchBytes):
            raise HandOverFailed("kernels in PTX do not run here")
        return where.mapped(fd, size)
    except BackendError as error:
        raise HandOverFailed(f"memory of {device} could not be shared: {error}") from error
    finally:
        os.close(fd)


def draw(where: Any, memory: Any, run: Run, noise: Noise) -> None:
    """Fill a run with random values."""
    if isinstance(where, TorchBytes) or noise.dtype not in NATIVE_FLOATS:
        from safetune.inputs import random_inputs

        random_inputs.draw(where.tensor(memory, run), noise, where.name)
        return
    width = itemsize(noise.dtype)
    used = run.size // width * width
    where.set_bytes(Run(run.address + used, run.size - used), 0)
    limits = (noise.mean, noise.std, noise.low, noise.high)
    where.draw(noise.dtype, Run(run.address, used), width, noise.seed, limits)


class TorchMemory:
    """Memory that nothing else uses, from torch's allocator."""

    def __init__(self, size: int, device: str) -> None:
        import torch

        self.pinned = device == HOST
        self.bytes = torch.empty(max(1, size), dtype=torch.uint8, device=device)
        self.address: int = self.bytes.data_ptr()
        self.size = size


class TorchBytes:
    """What is done with bytes of the host, or of a device, by torch; see `DeviceBytes`.

    Args:
        name: of the device, as torch has it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._weights: Any = None

    def allocate(self, size: int) -> TorchMemory:
        return TorchMemory(size, self.name)

    allocate_anywhere = allocate_pinned = allocate

    def has_room(self, size: int) -> bool:
        """Whether there is memory for this; it is not asked for."""
        return self.name == HOST

    def tensor(self, memory: TorchMemory, run: Run) -> Any:
        """Return a run of bytes as a tensor, without a copy."""
        begin = run.address - memory.address
        return memory.bytes[begin : begin + run.size]

    def copy(self, target: int, source: int, size: int) -> None:
        self._raw(Run(target, size)).copy_(self._raw(Run(source, size)))

    def load(self, target: int, source: int, size: int) -> None:
        self._raw(Run(target, size)).copy_(_on_host(Run(source, size)))

    def unload(self, target: int, source: int, size: int) -> None:
        _on_host(Run(target, size)).copy_(self._raw(Run(source, size)))

    def set_bytes(self, run: Run, value: int) -> None:
        self._raw(run).fill_(value)

    def checksums(self, runs: Sequence[Run]) -> list[int]:
        return [self._checksum(run) for run in runs]

    def unlike(self, views: Sequence[tuple[View, int]]) -> list[int]:
        import torch

        pairs = [(self._elements(view), _signed(value, view.width)) for view, value in views]
        return [int(torch.count_nonzero(elements != value)) for elements, value in pairs]

    def fill(self, view: View, value: int) -> None:
        self._elements(view).fill_(_signed(value, view.width))

    def gather(self, view: View, numbers: Sequence[int]) -> list[int]:
        elements, mask = self._elements(view), (1 << 8 * view.width) - 1
        return [value & mask for value in elements[_places(elements, numbers)].tolist()]

    def scatter(self, view: View, numbers: Sequence[int], values: Sequence[int]) -> None:
        elements = self._elements(view)
        new = elements.new_tensor([_signed(value, view.width) for value in values])
        elements[_places(elements, numbers)] = new

    def _raw(self, run: Run) -> Any:
        import torch

        if self.name == HOST or not run.size:
            return _on_host(run)
        return torch.as_tensor(Bytes(*run), device=self.name)

    def _elements(self, view: View) -> Any:
        """Return the elements of a view as a tensor of integers."""
        import torch

        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[view.width]
        sizes, steps = zip(*view.inner, strict=True) if view.inner else ((), ())
        outer = view.count // max(1, math.prod(sizes))
        shape, stride = (outer, *reversed(sizes)), (view.step, *reversed(steps))
        if not view.count:
            return torch.empty(shape, dtype=kind, device=self.name)
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        whole = self._raw(Run(view.address, extent * view.width))
        return whole.view(kind).as_strided(shape, stride)

    def _checksum(self, run: Run) -> int:
        """Return what the device's kernel computes."""
        import torch

        if self._weights is None:
            self._weights = torch.arange(_CHUNK, device=self.name) * _PLACE
        before, total = run.address % 16, 0
        padded = -(-(before + run.size) // 8) * 8
        for begin in range(0, padded, 8 * _CHUNK):
            size = min(8 * _CHUNK, padded - begin)
            first, last = max(begin, before), min(begin + size, before + run.size)
            words = torch.zeros(size // 8, dtype=torch.int64, device=self.name)
            part = self._raw(Run(run.address + first - before, last - first))
            words.view(torch.uint8)[first - begin : last - begin] = part
            words += self._weights[: size // 8] + _signed(begin // 8 * _PLACE, 8)
            for _ in range(2):
                words ^= (words >> 32) & 0xFFFFFFFF
                words *= _MULTIPLIER
            total += int(words.sum())
        return total % (1 << 64)


def _on_host(run: Run) -> Any:
    import torch

    if not run.size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(
        (ctypes.c_ubyte * run.size).from_address(run.address), dtype=torch.uint8
    )


def _signed(value: int, width: int) -> int:
    top = 1 << 8 * width
    value %= top
    return value - top if width > 1 and value >= top // 2 else value


def _places(elements: Any, numbers: Sequence[int]) -> tuple[Any, ...]:
    import torch

    from safetune.child import compare

    flat = torch.tensor(numbers, dtype=torch.int64, device=elements.device)
    return compare.unravelled(flat, elements.shape)
