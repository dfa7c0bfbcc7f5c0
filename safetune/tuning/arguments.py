"""The child's copies of the caller's tensors: same bits, shapes, strides, alignment and aliasing.

They are made from the memory file that the parent wrote (see `snapshot`), in memory of the child's
own.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch

from safetune.tuning import regenerate
from safetune.tuning.layout import ALIGNMENT, BlockSpec, TensorSpec


class Arguments:
    """The child's copies of the caller's tensors, which can be put back to the caller's bits."""

    def __init__(self, header: dict[str, Any], fd: int) -> None:
        size = os.fstat(fd).st_size
        # A private mapping: what a candidate does on the CPU stays in this process.
        memory = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE)
        os.close(fd)
        file_bytes = torch.frombuffer(memory, dtype=torch.uint8)
        blocks = [BlockSpec(**block) for block in header["blocks"]]
        self._live = [_place(file_bytes, block) for block in blocks]
        self._pristine = [live.clone() for live in self._live]
        specs = [TensorSpec(**tensor) for tensor in header["tensors"]]
        self.tensors = [_view(self._live[spec.block], spec) for spec in specs]

    def restore(self) -> None:
        """Put every byte back to what the caller had when tuning began."""
        for live, pristine in zip(self._live, self._pristine, strict=True):
            live.copy_(pristine)


def _place(file_bytes: torch.Tensor, block: BlockSpec) -> torch.Tensor:
    """Copy or draw a block on its device, at the caller's alignment."""
    room = torch.empty(block.size + 2 * ALIGNMENT, dtype=torch.uint8, device=block.device)
    shift = (block.misalignment - room.data_ptr()) % ALIGNMENT
    live = room[shift : shift + block.size]
    if block.noise is not None:
        regenerate.draw(live, block)
    else:
        live.copy_(file_bytes[block.offset : block.offset + block.size])
    return live


def _view(live: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    offset = live.storage_offset() + spec.byte_offset
    itemsize = torch.empty(0, dtype=dtype).element_size()
    if offset % itemsize:
        raise ValueError(f"a {spec.dtype} tensor at a byte offset of {offset}")
    view = torch.empty(0, dtype=dtype, device=live.device)
    return view.set_(live.untyped_storage(), offset // itemsize, spec.shape, spec.stride)
