"""Blocks of a call, copied on their devices into memory that a child can map.

It is a copy, so nothing that a config writes can reach the caller. All blocks of a device are in
one piece of memory, which is freed when the tuning and its child have ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from safetune.inputs.spans import ALIGNMENT, BlockSpec, Span, aligned
from safetune.isolation import backend
from safetune.isolation.device_bytes import SharedMemory


@dataclass(frozen=True)
class HandOver:
    """The pieces of shared memory, and by the number of each block in one its place there."""

    memories: tuple[SharedMemory, ...] = ()
    devices: tuple[str, ...] = ()
    places: tuple[tuple[int, tuple[int, int]], ...] = ()

    @property
    def layout(self) -> tuple[tuple[str, int], ...]:
        """Device and size of each piece."""
        return tuple(zip(self.devices, [memory.size for memory in self.memories], strict=True))

    def close(self) -> None:
        """Give the memory back, but for what a child still maps."""
        for memory in self.memories:
            memory.close()

    def read(self, block: BlockSpec, target: int) -> None:
        """Copy a block to the host."""
        index = torch.device(self.devices[block.place - 1]).index
        where = backend.required()
        with where.relaxed_capture(), self.memories[block.place - 1].open() as address:
            where.bytes_of(index).unload(target, address + block.offset, block.size)


def copied(merged: Sequence[Span], numbers: Iterable[int], devices: Sequence[str]) -> HandOver:
    """Return copies of the blocks of these numbers that are on these devices.

    The work that is queued on a device's current stream is waited for.

    Raises `BackendError` where a driver refuses, or has no memory left.
    """
    wanted = list(numbers)
    memories: list[SharedMemory] = []
    places: dict[int, tuple[int, int]] = {}
    with contextlib.ExitStack() as on_error:
        for device in devices:
            end = 0
            here = [n for n in wanted if merged[n].device == device and merged[n].size]
            for number in here:
                misalignment = merged[number].start % ALIGNMENT
                places[number] = (len(memories) + 1, end + misalignment)
                end += aligned(misalignment + merged[number].size)
            found, index = backend.required(), torch.device(device).index
            with found.reading(index):
                memory = found.bytes_of(index).share(max(1, end))
                on_error.callback(memory.close)
                memories.append(memory)
                _copy(memory, [(places[number][1], merged[number]) for number in here], index)
        on_error.pop_all()
    return HandOver(tuple(memories), tuple(devices), tuple(places.items()))


def _copy(memory: SharedMemory, blocks: Sequence[tuple[int, Span]], index: int) -> None:
    where, stream = backend.required().bytes_of(index), backend.required().launch_stream()
    with memory.open() as address:
        for offset, span in blocks:
            where.copy(address + offset, span.start, span.size, stream)
        where.wait(stream)
