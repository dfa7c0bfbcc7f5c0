"""Blocks of a call, copied on their devices into memory that a child can map.

A child gets a copy, so nothing that a config writes can reach the caller. All blocks of a device
share one piece of memory, which is freed after the tuning and its child have ended. If there is
little room, some blocks, or the rest of one, go through a memory file instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from safetune.both import backend
from safetune.both.device_memory import SharedMemory
from safetune.inputs.spans import ALIGNMENT, Place, Span, aligned

#: A block that does not fit is cut at a multiple of this.
_CUT = 1 << 21


@dataclass(frozen=True)
class HandOver:
    """The pieces of shared memory, and the place of each block in them, by block number."""

    memories: tuple[tuple[str, SharedMemory], ...] = ()  # each with its device
    places: Mapping[int, Place] = field(default_factory=dict)


def copied(merged: Sequence[Span], numbers: Sequence[int], rooms: Mapping[str, int]) -> HandOver:
    """Return copies of blocks on their devices, or of as many bytes as there is room for.

    Waits for the work queued on a device's current stream.

    Args:
        numbers: of the blocks to copy, the most important first.
        rooms: the most bytes to use, by device.

    Raises `BackendError` if a driver refuses or is out of memory.
    """
    memories: list[tuple[str, SharedMemory]] = []
    places: dict[int, Place] = {}
    with contextlib.ExitStack() as on_error:
        for device, room in rooms.items():
            here = _places([n for n in numbers if merged[n].device == device], merged, room)
            if not here:
                continue
            places.update({n: replace(place, memory=len(memories)) for n, place in here.items()})
            found, index = backend.required(), torch.device(device).index
            with found.reading(index):
                size = max(place.offset + place.size for place in here.values())
                memory = found.bytes_of(index).share(size)
                on_error.callback(memory.close)
                memories.append((device, memory))
                _copy(memory, [(place, merged[n].start) for n, place in here.items()], index)
        on_error.pop_all()
    return HandOver(tuple(memories), places)


def _places(numbers: Sequence[int], merged: Sequence[Span], room: int) -> dict[int, Place]:
    places, end = {}, 0
    for number in numbers:
        size, start = merged[number].size, end + merged[number].start % ALIGNMENT
        if start + size > room:
            size = max(0, room - start) // _CUT * _CUT
        if size:
            places[number] = Place(0, start, size)
            end = aligned(start + size)
    return places


def _copy(memory: SharedMemory, blocks: Sequence[tuple[Place, int]], index: int) -> None:
    where, stream = backend.required().bytes_of(index), backend.required().launch_stream()
    with memory.open() as address:
        for place, source in blocks:
            where.copy(address + place.offset, source, place.size, stream)
        where.wait(stream)
