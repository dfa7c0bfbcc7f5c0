"""Reads and changes bytes on a device, without torch and without a compiler.

The kernels come from `byte_kernels.ptx`; each is loaded at its first use. All run on the default
stream of this thread's current context, and calls wait for their results.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetune import forks
from safetune.both import device_memory
from safetune.both.cuda_driver import Driver, DriverError
from safetune.both.device_memory import Bytes, SharedMemory
from safetune.frozen import dataclass

if TYPE_CHECKING:
    import torch

_PTX = Path(__file__).with_name("byte_kernels.ptx")
_HEADER = re.compile(r"//! (\w+) parameters=(\d+) shared=(\d+) block=(\d+)\n")
_THREADS = 128
#: Enough programs to fill any GPU; each takes several blocks.
_MOST_PROGRAMS = 2048
_ALL = (1 << 64) - 1
#: What is left to launches where memory is taken that could be done without.
_MARGIN = 1 << 29
#: Results that are fetched at once.
_SLOTS = 1024

#: The float types that `beyond` and `draw` know.
NATIVE_FLOATS = ("float16", "bfloat16", "float32", "float64")


class Run(NamedTuple):
    """`size` bytes at an address."""

    address: int
    size: int


@dataclass(frozen=True)
class View:
    """The elements of a tensor by index; strides count elements of `width` bytes."""

    address: int
    width: int
    count: int
    #: (size, stride) of the dimensions but the outermost, the innermost first.
    inner: tuple[tuple[int, int], ...]
    step: int  # the stride of the outermost

    @classmethod
    def of(cls, address: int, width: int, shape: Sequence[int], stride: Sequence[int]) -> View:
        """Return the elements of a tensor in order; contiguous dimensions are merged."""
        dims: list[tuple[int, int]] = []
        for size, step in zip(reversed(shape), reversed(stride), strict=True):
            if size == 1:
                continue
            if dims and dims[-1][0] * dims[-1][1] == step:
                dims[-1] = (dims[-1][0] * size, dims[-1][1])
            else:
                dims.append((size, step))
        step = dims.pop()[1] if dims else 1
        return cls(address, width, math.prod(shape), tuple(dims), step)


@dataclass(frozen=True)
class _Kernel:
    """One section of the PTX file."""

    text: bytes
    parameters: int
    shared: int
    block: int


@functools.cache
def _kernels() -> dict[str, _Kernel]:
    parts = _HEADER.split(_PTX.read_text())[1:]
    return {
        parts[i]: _Kernel(parts[i + 4].encode(), *map(int, parts[i + 1 : i + 4]))
        for i in range(0, len(parts), 5)
    }


class DeviceBytes:
    """Operations on the bytes of one device, in its primary context.

    Args:
        name: the device's name in torch.
    """

    def __init__(self, driver: Driver, index: int, name: str) -> None:
        self.name = name
        self.driver = driver
        self._index = index
        self._functions: dict[str, int] = {}
        self._dims: dict[tuple[tuple[int, int], ...], Bytes] = {}

    @functools.cached_property
    def _slots(self) -> Bytes:
        return self.allocate(8 * _SLOTS)

    def l2_bytes(self) -> int:
        """Return the size of the device's L2 cache in bytes; 0 if unknown."""
        return self.driver.l2_bytes(self._index)

    def allocate(self, size: int) -> Bytes:
        """Return new memory; raises `MemoryError` if the device has too little left."""
        return device_memory.allocated(self.driver, self._index, size)

    def allocate_anywhere(self, size: int) -> Bytes:
        """Return new device memory, or pinned host memory if the device is full."""
        try:
            return self.allocate(size)
        except MemoryError:
            return self.allocate_pinned(size)

    def allocate_pinned(self, size: int) -> Bytes:
        """Return new pinned host memory."""
        return device_memory.allocated(self.driver, self._index, size, pinned=True)

    def share(self, size: int) -> SharedMemory:
        """Return memory that another process can map.

        Raises `DriverError` if the device cannot share memory or has too little left.
        """
        if not self.driver.can_share(self._index):
            raise DriverError(f"device {self._index} cannot share memory with another process")
        return SharedMemory(self.driver, self._index, size)

    def mapped(self, fd: int, size: int) -> Bytes:
        """Return the memory behind a descriptor from another process; see `share`."""
        return device_memory.mapped(self.driver, self._index, fd, size)

    def tensor(self, memory: Bytes, run: Run) -> torch.Tensor:
        """Return a run of bytes as a tensor, without a copy."""
        import torch

        begin = run.address - memory.address
        if memory.pinned:
            held = (ctypes.c_ubyte * memory.size).from_address(memory.address)
            held.owner = memory  # type: ignore[attr-defined]
            whole = torch.frombuffer(held, dtype=torch.uint8)
        else:
            whole = torch.as_tensor(memory, device=self.name)
        return whole[begin : begin + run.size]

    def copy(self, target: int, source: int, size: int, stream: int = 0) -> None:
        """Copy bytes between device memory and pinned memory."""
        if size:
            with self.driver.on(self._index):
                self.driver.copy(target, source, size, stream)

    def wait(self, stream: int) -> None:
        """Wait for the work queued on a stream."""
        with self.driver.on(self._index):
            self.driver.wait(stream)

    def load(self, target: int, source: int, size: int) -> None:
        """Copy bytes from pageable host memory."""
        if size:
            with self.driver.on(self._index):
                self.driver.copy_in(target, source, size)

    def has_room(self, size: int) -> bool:
        """Whether an allocation of `size` bytes leaves enough room for a launch's own needs."""
        with self.driver.on(self._index):
            return self.driver.memory()[0] >= size + _MARGIN

    def set_bytes(self, run: Run, value: int) -> None:
        """Set every byte of a run."""
        if run.size:
            with self.driver.on(self._index):
                self.driver.fill(run.address, value, run.size)

    def read(self, address: int, size: int) -> bytes:
        """Return `size` bytes at an address."""
        with self.driver.on(self._index):
            return self.driver.read(address, size) if size else b""

    def checksums(self, runs: Sequence[Run]) -> list[int]:
        """Return a 64-bit checksum per run; any change of the bytes or their order shows.

        Checksums are comparable if the runs start at the same offset within 16 bytes.
        """
        return self._results([("checksum", *_words(run)) for run in runs])

    def unlike(self, views: Sequence[tuple[View, int]]) -> list[int]:
        """Return, for each view, how many elements have bits other than its value."""
        return self._results(
            [(f"unlike_{view.width}", view.count, (*self._view(view), v)) for view, v in views]
        )

    def beyond(self, dtype: str, mine: View, theirs: int, share: float, floor: float) -> int:
        """Return how many floats differ by more than `share` of theirs, and by more than
        `floor`.
        """
        pair = (mine.address, theirs, *self._view(mine)[1:])
        return self._results([(f"beyond_{dtype}", mine.count, (*pair, share, floor))])[0]

    def gather(self, view: View, numbers: Sequence[int]) -> list[int]:
        """Return the bits of some elements."""
        count = len(numbers)
        memory = self._written([*numbers, *numbers])
        values = memory.address + 8 * count
        arguments = (*self._view(view)[:4], count, memory.address, values)
        self._launch(f"gather_{view.width}", count, arguments, most=count)
        return list(struct.unpack(f"<{count}Q", self.read(values, 8 * count)))

    def walk(self, run: Run) -> None:
        """Queue one program that reads a run of bytes, which takes about the same time each
        time.
        """
        count, arguments = _words(run)
        self._launch("checksum", count, (*arguments, self._slots.address), most=1)

    def fill(self, view: View, value: int) -> None:
        """Set the bits of all elements."""
        self._launch(f"fill_{view.width}", view.count, (*self._view(view), value))

    def draw(self, dtype: str, run: Run, width: int, seed: int, limits: Sequence[float]) -> None:
        """Fill floats with normal values: `limits` are mean, deviation, lowest and highest."""
        count = run.size // width
        self._launch(f"draw_{dtype}", count, (run.address, count, seed, *limits))

    def _view(self, view: View) -> tuple[int, ...]:
        dims = self._uploaded(view.inner) if view.inner else 0
        return view.address, dims, len(view.inner), view.step, view.count

    @forks.cached_property
    def side_stream(self) -> int:
        """A stream that does not wait for the default stream."""
        return self.driver.stream(self._index)

    def _uploaded(self, inner: tuple[tuple[int, int], ...]) -> int:
        if inner not in self._dims:
            self._dims[inner] = self._written([number for dim in inner for number in dim])
        return self._dims[inner].address

    def _written(self, numbers: Sequence[int]) -> Bytes:
        memory = self.allocate(8 * len(numbers))
        with self.driver.on(self._index):
            self.driver.write(memory.address, struct.pack(f"<{len(numbers)}q", *numbers))
        return memory

    def _results(self, launches: Sequence[tuple[str, int, tuple[Any, ...]]]) -> list[int]:
        """Launch kernels that add to a result each, and return the results."""
        results: list[int] = []
        slots = self._slots.address
        for begin in range(0, len(launches), _SLOTS):
            some = launches[begin : begin + _SLOTS]
            self.set_bytes(Run(slots, 8 * len(some)), 0)
            for slot, (name, count, arguments) in enumerate(some):
                self._launch(name, count, (*arguments, slots + 8 * slot))
            results += struct.unpack(f"<{len(some)}Q", self.read(slots, 8 * len(some)))
        return results

    def _launch(
        self, name: str, count: int, arguments: Sequence[int | float], most: int = _MOST_PROGRAMS
    ) -> None:
        if count == 0:
            return
        kernel = _kernels()[name]
        programs = min(-(-count // kernel.block), most)  # that go on until all is done
        scratch = [0] * (kernel.parameters - len(arguments))
        with self.driver.on(self._index):
            if name not in self._functions:
                module = self.driver.module(kernel.text + b"\0")
                self._functions[name] = self.driver.function(module, name)
            self.driver.launch(
                self._functions[name], programs, _THREADS, (*arguments, *scratch), kernel.shared
            )


def _words(run: Run) -> tuple[int, tuple[int, ...]]:
    """Return the words of 8 bytes that hold a run, from a multiple of 16 bytes on, and which bits
    of the first two and the last count.
    """
    before = run.address % 16
    count = -(-(before + run.size) // 8) if run.size else 0
    after = count * 8 - before - run.size
    bits = (
        (_ALL << 8 * before) & _ALL if before < 8 else 0,
        (_ALL << 8 * max(0, before - 8)) & _ALL,
    )
    return count, (run.address - before, count, *bits, _ALL >> 8 * after)
