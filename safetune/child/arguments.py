"""The child's copies of the caller's tensors: same bits, shapes, strides, alignment and aliasing.

They are made from the memory file that the parent wrote (see `snapshot`), in memory of the child's
own, each storage between two guard bands. A checksum finds what a launch has written, so only that
is kept twice and put back: the rest of the arguments is on the device once.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from safetune.child import compare
from safetune.inputs import random_inputs
from safetune.inputs.spans import ALIGNMENT, FLOATS, BlockSpec, Layout, TensorSpec, view_of

#: A guard band is a sixteenth of its storage, within these limits: the tail of a last tile falls
#: within it, and the bands of many small arguments stay small.
_MIN_GUARD = 1 << 16
_MAX_GUARD = 1 << 21
#: Harmless in every type: tiny as a float, far from a valid index as an integer.
_GUARD_BYTE = 0xA5
#: What an output holds before a launch that should overwrite it: a float that every type has, or
#: bytes, in tensors that nothing reads.
_POISON = 1.5
_POISON_BYTE = 0x5A
_PROBES = 64
#: Words of 8 bytes that are weighted at once: the product takes as much memory again.
_CHUNK = 1 << 20
_MULTIPLIER = 0x9E3779B97F4A7C1 | 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Block:
    """One storage, or several that overlap: its live bytes, and how to restore the caller's."""

    def __init__(self, spec: BlockSpec, file_bytes: torch.Tensor) -> None:
        guard = min(max(_MIN_GUARD, spec.size // 16), _MAX_GUARD)
        memory, start = _aligned_memory(spec, spec.device, guard)
        self.spec = spec
        self.live = memory[start : start + spec.size]
        self.guards = {"before": memory[:start], "after": memory[start + spec.size :]}
        for band in self.guards.values():
            band.fill_(_GUARD_BYTE)
        self._file_bytes = file_bytes
        self._pristine: torch.Tensor | None = None
        self.written = False
        self._load(self.live)

    def restore(self) -> None:
        """Put the caller's bits back."""
        if self._pristine is None:
            self._load(self.live)
        else:
            self.live.copy_(self._pristine)

    def keep_pristine(self) -> None:
        """Keep a copy of the caller's bits: on the device, or pinned if that is full."""
        self.written = True
        if self.spec.device == "cpu":
            return  # the memory file is as fast
        self._pristine = self._load(self.another())

    def pristine(self) -> torch.Tensor:
        """Return the caller's bits, on the device if they fit."""
        return self._load(self.another()) if self._pristine is None else self._pristine

    def another(self) -> torch.Tensor:
        """Return memory for as many bytes, aligned alike: on the device, or pinned memory."""
        try:
            memory, start = _aligned_memory(self.spec, self.spec.device)
        except torch.OutOfMemoryError:
            memory, start = _aligned_memory(self.spec, "cpu", pinned=True)
        return memory[start : start + self.spec.size]

    def _load(self, target: torch.Tensor) -> torch.Tensor:
        """Return `target`, filled with the caller's bits."""
        spec = self.spec
        if spec.noise is None:
            return target.copy_(self._file_bytes[spec.offset : spec.offset + spec.size])
        random_inputs.draw(target, spec.noise, spec.device)
        return target


@dataclass(frozen=True)
class Probe:
    """The elements `index` of a tensor's `bits`, which hold `poison` for one launch."""

    block: Block
    bits: torch.Tensor
    index: tuple[torch.Tensor, ...]
    values: torch.Tensor
    poison: int


class Arguments:
    """The tensors of a call, which can be put back to the caller's bits."""

    def __init__(self, layout: Layout, fd: int) -> None:
        size = os.fstat(fd).st_size
        # A private mapping: what a config writes on the CPU stays in this process.
        memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE)
        os.close(fd)
        file_bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.blocks = [Block(spec, file_bytes) for spec in layout.blocks]
        self.views = layout.tensors
        self.tensors = [view_of(self.blocks[view.block].live, view) for view in self.views]
        self._sums = checksums([block.live for block in self.blocks])

    def restore(self) -> None:
        """Put every byte back to what the caller had when tuning began."""
        for index in self.find_written():
            self.blocks[index].restore()

    def find_written(self) -> list[int]:
        """Return the blocks that something has written since the beginning."""
        unwritten = [index for index, block in enumerate(self.blocks) if not block.written]
        sums = checksums([self.blocks[index].live for index in unwritten])
        for index, now in zip(unwritten, sums, strict=True):
            if now != self._sums[index]:
                self.blocks[index].keep_pristine()
        return [index for index, block in enumerate(self.blocks) if block.written]

    def poison(self, tensors: Iterable[int]) -> None:
        """Overwrite these tensors."""
        for index in tensors:
            _bits(self.tensors[index]).fill_(_poison_bits(self.tensors[index].dtype))

    def overwritten(self, index: int) -> torch.Tensor:
        """Return which elements of a tensor no longer hold the poison."""
        tensor = self.tensors[index]
        return _bits(tensor) != _poison_bits(tensor.dtype)

    def plant_probes(self, tensors: Iterable[int]) -> list[Probe]:
        """Overwrite a few elements of each of these that is not known as written."""
        probes = []
        for index in tensors:
            tensor, view = self.tensors[index], self.views[index]
            block = self.blocks[view.block]
            repeats = 0 in view.stride or 0 in view.shape
            if repeats or block.written:
                continue
            bits = _bits(tensor).view(tensor.shape or (1,))
            flat = torch.linspace(0, bits.numel() - 1, _PROBES, device=bits.device).long()
            elements = compare.unravelled(flat, bits.shape)
            poison = _poison_bits(tensor.dtype)
            probes.append(Probe(block, bits, elements, bits[elements], poison))
        for probe in probes:
            probe.bits[probe.index] = probe.poison
        return probes

    def collect_probes(self, probes: Sequence[Probe]) -> None:
        """Restore the probed elements; a tensor in which one was overwritten is an output."""
        for probe in reversed(probes):
            overwritten = probe.bits[probe.index] != probe.poison
            if not probe.block.written and bool(overwritten.any()):
                probe.block.keep_pristine()
            probe.bits[probe.index] = probe.values

    def breached(self) -> list[tuple[int, str]]:
        """Return (block, `before` or `after`) for each guard band that has been written."""
        sides = [(i, side) for i, block in enumerate(self.blocks) for side in block.guards]
        bands = [self.blocks[index].guards[side] for index, side in sides]
        touched = _values([(band != _GUARD_BYTE).any() for band in bands])
        return list(itertools.compress(sides, touched))

    def unowned(self) -> list[int]:
        """Return the written blocks in which bytes have changed that no tensor covers."""
        written = [index for index, block in enumerate(self.blocks) if block.written]
        return [index for index in written if self._gap_changed(index)]

    def _gap_changed(self, index: int) -> bool:
        block = self.blocks[index]
        views = [view for view in self.views if view.block == index]
        if any(_is_dense(view, block.spec.size) for view in views):
            return False
        uncovered = torch.ones(block.spec.size, dtype=torch.bool)
        for view in views:
            itemsize = getattr(torch, view.dtype).itemsize
            stride = (*(step * itemsize for step in view.stride), 1)
            if 0 not in view.shape:
                elements = uncovered.as_strided((*view.shape, itemsize), stride, view.byte_offset)
                elements.fill_(False)
        changed = block.live != block.pristine().to(block.live.device)
        return bool((changed & uncovered.to(changed.device)).any())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers of the same size: torch indexes and compares those of every size."""
    return tensor.detach().view(_BITS[tensor.itemsize])


def _poison_bits(dtype: torch.dtype) -> int:
    if str(dtype).removeprefix("torch.") not in FLOATS:
        return int.from_bytes(bytes([_POISON_BYTE] * dtype.itemsize), "little")
    poison = torch.tensor([_POISON], dtype=dtype)
    return int(_bits(poison).item())


def _aligned_memory(
    spec: BlockSpec, device: str, guard: int = 0, pinned: bool = False
) -> tuple[torch.Tensor, int]:
    """Return memory around a block's bytes, and where they begin in it."""
    size = spec.size + 2 * guard + ALIGNMENT
    memory = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
    return memory, guard + (spec.misalignment - memory.data_ptr() - guard) % ALIGNMENT


def _is_dense(view: TensorSpec, size: int) -> bool:
    """Whether a view covers a whole block; its elements are not looked at one by one."""
    itemsize = getattr(torch, view.dtype).itemsize
    expected = 1
    for length, step in sorted(zip(view.shape, view.stride, strict=True), key=lambda pair: pair[1]):
        if length != 1:
            if step != expected:
                return False
            expected *= length
    return expected * itemsize == size


def checksums(runs: Sequence[torch.Tensor]) -> list[int]:
    """Return a checksum for each run of bytes (`uint8`, one dimension, any device).

    Bytes are weighted by position, so a permutation is a change, too. A changed run keeps its
    checksum with a probability of 2^-32 or less.
    """
    return _values([_checksum(run) for run in runs])


def _values(numbers: Sequence[torch.Tensor]) -> list[Any]:
    """Return the values of scalar tensors on any devices, with one wait for each device."""
    found: dict[int, Any] = {}
    for device in {number.device for number in numbers}:
        here = [index for index, number in enumerate(numbers) if number.device == device]
        values = torch.stack([numbers[index] for index in here]).tolist()
        found.update(zip(here, values, strict=True))
    return [found[index] for index in range(len(numbers))]


def _checksum(run: torch.Tensor) -> torch.Tensor:
    head = min(-(run.storage_offset()) % 8, run.numel())
    words = (run.numel() - head) // 8 * 8
    total = _weighted(run[:head].long()) + 3 * _weighted(run[head + words :].long())
    body = run[head : head + words]
    for chunk in body.view(torch.int64).split(_CHUNK) if words else ():
        total = total * _MULTIPLIER + _weighted(chunk)
    return total


def _weighted(words: torch.Tensor) -> torch.Tensor:
    return (words * _weights(words.device)[: words.numel()]).sum()


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers, so that no change of a single word is lost to an overflow."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator) * 2 + 1).to(device)
