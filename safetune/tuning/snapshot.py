"""The caller's tensors, copied once into a memory file that children can map.

Storages that overlap in memory become one block, so arguments that alias each other still do. No
CUDA memory is shared between the processes: nothing that a candidate writes can reach the caller.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from safetune.errors import KernelNotTransferable
from safetune.tuning.layout import ALIGNMENT, BlockSpec, TensorSpec, aligned


class Snapshot:
    """The bytes behind some tensors, in a memory file that children can map.

    Raises:
        KernelNotTransferable: a tensor has no plain storage (sparse, fake, a wrapper subclass).
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        spans = sorted({_span(tensor) for tensor in tensors})
        merged = _merge(spans)
        self.blocks, starts = _lay_out(merged)
        self.tensors = tuple(_tensor_spec(tensor, merged, starts) for tensor in tensors)
        size = sum(aligned(block.size) for block in self.blocks)
        self.fd = os.memfd_create("safetune-arguments", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, max(size, 1))
        self._copy(tensors, merged)

    def header(self) -> dict[str, Any]:
        """Return what a child needs besides the memory file, as plain JSON data."""
        return {
            "blocks": [asdict(block) for block in self.blocks],
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }

    def close(self) -> None:
        """Let go of the memory file; children that mapped it keep their view."""
        os.close(self.fd)

    def _copy(self, tensors: Iterable[torch.Tensor], merged: Sequence[_Span]) -> None:
        with mmap.mmap(self.fd, 0) as memory:
            seen: set[_Span] = set()
            for tensor in tensors:
                span = _span(tensor)
                if span in seen or span.end == span.start:
                    continue
                seen.add(span)
                index = _block_of(span, merged)
                offset = self.blocks[index].offset + span.start - merged[index].start
                target = torch.frombuffer(
                    memory, dtype=torch.uint8, count=span.end - span.start, offset=offset
                )
                target.copy_(_storage_bytes(tensor))
                del target  # the mapping cannot be closed under a tensor


@dataclass(frozen=True, order=True)
class _Span:
    """A range of addresses on one device."""

    device: str
    start: int
    end: int


def _span(tensor: torch.Tensor) -> _Span:
    try:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise _not_plain(tensor) from error
    if tensor.device.type not in ("cpu", "cuda"):
        raise _not_plain(tensor)
    return _Span(str(tensor.device), start, start + storage.nbytes())


def _not_plain(tensor: torch.Tensor) -> KernelNotTransferable:
    return KernelNotTransferable(
        f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} on {tensor.device} has no plain "
        'storage to copy; pass its plain tensor, or tune this kernel with isolation="inline"'
    )


def _merge(spans: Iterable[_Span]) -> list[_Span]:
    merged: list[_Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and last.device == span.device and span.start < last.end:
            merged[-1] = _Span(last.device, last.start, max(last.end, span.end))
        else:
            merged.append(span)
    return merged


def _lay_out(merged: Sequence[_Span]) -> tuple[tuple[BlockSpec, ...], list[int]]:
    blocks = []
    offset = 0
    for span in merged:
        size = span.end - span.start
        blocks.append(BlockSpec(span.device, offset, size, span.start % ALIGNMENT))
        offset += aligned(size)
    return tuple(blocks), [span.start for span in merged]


def _block_of(span: _Span, merged: Sequence[_Span]) -> int:
    return next(
        index
        for index, block in enumerate(merged)
        if block.device == span.device and block.start <= span.start and span.end <= block.end
    )


def _tensor_spec(
    tensor: torch.Tensor, merged: Sequence[_Span], starts: Sequence[int]
) -> TensorSpec:
    span = _span(tensor)
    block = _block_of(span, merged)
    begin = span.start + tensor.storage_offset() * tensor.element_size()
    return TensorSpec(
        block=block,
        byte_offset=begin - starts[block],
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind a tensor, as bytes; no copy."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))
