"""Bytes of a device, looked at and changed where they are, without torch and without a compiler.

The kernels are those of `byte_kernels.ptx`; each is loaded when it is first needed. All run on the
default stream of the context that is current in this thread, and a result is waited for.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetune.isolation.cuda_driver import Driver

_PTX = Path(__file__).with_name("byte_kernels.ptx")
_HEADER = re.compile(r"//! (\w+) parameters=(\d+) shared=(\d+) block=(\d+)\n")
_THREADS = 128
#: Enough programs to fill any GPU; each takes several blocks.
_MOST_PROGRAMS = 2048
_ALL = (1 << 64) - 1
#: Results that are fetched at once.
_SLOTS = 1024

#: The float types that `beyond` and `draw` know.
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Run(NamedTuple):
    """`size` bytes at an address."""

    address: int
    size: int


@dataclass(frozen=True)
class View:
    """The elements of a tensor, by their numbers; strides count elements, of `width` bytes.

    Attributes:
        inner: (size, stride) of the dimensions but the outermost, the innermost first.
        step: the stride of the outermost.
    """

    address: int
    width: int
    count: int
    inner: tuple[tuple[int, int], ...]
    step: int

    @classmethod
    def of(cls, address: int, width: int, shape: Sequence[int], stride: Sequence[int]) -> View:
        """Return the elements of a tensor in their order; dimensions that follow on are merged."""
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
    """What is done with bytes of one device, whose context is current in this thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._functions: dict[str, int] = {}
        self._dims: dict[tuple[tuple[int, int], ...], int] = {}
        self._slots = driver.allocate(8 * _SLOTS)

    def checksums(self, runs: Sequence[Run]) -> list[int]:
        """Return 64 bits for each run of bytes; any change of bytes or of their places shows.

        Runs that begin at the same place within 16 bytes can be compared.
        """
        return self._results([("checksum", *_words(run)) for run in runs])

    def unlike(self, views: Sequence[tuple[View, int]]) -> list[int]:
        """Return how many elements of each view have other bits than a value."""
        return self._results(
            [(f"unlike_{view.width}", view.count, (*self._view(view), v)) for view, v in views]
        )

    def beyond(self, dtype: str, mine: View, theirs: int, share: float, floor: float) -> int:
        """Return how many elements are further apart than `share` of theirs plus `floor`.

        Equal ones never are, and two NaN are equal; one that is not finite is, from any other.
        """
        pair = (mine.address, theirs, *self._view(mine)[1:])
        return self._results([(f"beyond_{dtype}", mine.count, (*pair, share, floor))])[0]

    def fill(self, view: View, value: int) -> None:
        """Set the bits of all elements."""
        self._launch(f"fill_{view.width}", view.count, (*self._view(view), value))

    def gather(self, view: View, numbers: Sequence[int]) -> list[int]:
        """Return the bits of some elements."""
        memory = self._some(numbers)
        try:
            self._pick("gather", view, len(numbers), memory)
            held = self._driver.read(memory + 8 * len(numbers), 8 * len(numbers))
        finally:
            self._driver.free(memory)
        return list(struct.unpack(f"<{len(numbers)}Q", held))

    def scatter(self, view: View, numbers: Sequence[int], values: Sequence[int]) -> None:
        """Set the bits of some elements."""
        memory = self._some(numbers)
        try:
            data = struct.pack(f"<{len(values)}Q", *values)
            self._driver.write(memory + 8 * len(numbers), data)
            self._pick("scatter", view, len(numbers), memory)
        finally:
            self._driver.free(memory)

    def draw(self, dtype: str, run: Run, width: int, seed: int, limits: Sequence[float]) -> None:
        """Set floats to normal values of a mean and a deviation, cut to a lowest and a highest."""
        count = run.size // width
        self._launch(f"draw_{dtype}", count, (run.address, count, seed, *limits))

    def _view(self, view: View) -> tuple[int, ...]:
        return view.address, self._uploaded(view.inner), len(view.inner), view.step, view.count

    def _uploaded(self, inner: tuple[tuple[int, int], ...]) -> int:
        if inner and inner not in self._dims:
            data = struct.pack(f"<{2 * len(inner)}q", *(number for dim in inner for number in dim))
            self._dims[inner] = self._driver.allocate(len(data))
            self._driver.write(self._dims[inner], data)
        return self._dims.get(inner, 0)

    def _some(self, numbers: Sequence[int]) -> int:
        """Return memory that holds the numbers of elements, with room for as many values."""
        memory = self._driver.allocate(max(1, 16 * len(numbers)))
        self._driver.write(memory, struct.pack(f"<{len(numbers)}q", *numbers))
        return memory

    def _pick(self, kernel: str, view: View, count: int, memory: int) -> None:
        address, *rest, _ = self._view(view)
        arguments = (address, *rest, count, memory, memory + 8 * count)
        self._launch(f"{kernel}_{view.width}", count, arguments)

    def _results(self, launches: Sequence[tuple[str, int, tuple[Any, ...]]]) -> list[int]:
        """Launch kernels that add to a result each, and return the results."""
        results: list[int] = []
        for begin in range(0, len(launches), _SLOTS):
            some = launches[begin : begin + _SLOTS]
            self._driver.fill(self._slots, 0, 8 * len(some))
            for slot, (name, count, arguments) in enumerate(some):
                self._launch(name, count, (*arguments, self._slots + 8 * slot))
            held = self._driver.read(self._slots, 8 * len(some))
            results += struct.unpack(f"<{len(some)}Q", held)
        return results

    def _launch(self, name: str, count: int, arguments: Sequence[int | float]) -> None:
        if count == 0:
            return
        kernel = _kernels()[name]
        if name not in self._functions:
            module = self._driver.module(kernel.text + b"\0")
            self._functions[name] = self._driver.function(module, name)
        # Picking takes one block a program; the others go on until all elements are done.
        programs = -(-count // kernel.block)
        most = programs if name.startswith(("gather", "scatter")) else _MOST_PROGRAMS
        scratch = [0] * (kernel.parameters - len(arguments))
        self._driver.launch(
            self._functions[name],
            min(programs, most),
            _THREADS,
            (*arguments, *scratch),
            kernel.shared,
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
