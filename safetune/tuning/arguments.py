"""The caller's tensors, copied into a child: same bits, shapes, strides, alignment and aliasing.

The parent copies every storage once into a memory file that it shares with the child; the child
makes device memory of its own from it. Nothing that a candidate writes can reach the caller: no
CUDA memory is shared between the processes. Storages that overlap in memory become one block, so
arguments that alias each other still do.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from safetune.errors import KernelNotTransferable

#: torch's CUDA allocator aligns to 512; more than any instruction asks for.
_ALIGNMENT = 512


@dataclass(frozen=True)
class BlockSpec:
    """One run of bytes: `size` bytes at `offset` in the memory file, to be placed on `device` at
    an address that is `misalignment` past a multiple of 512.
    """

    device: str
    offset: int
    size: int
    misalignment: int


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as a view of a block: dtype name, shape, strides (in elements), byte offset."""

    block: int
    byte_offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


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
        size = sum(_aligned(block.size) for block in self.blocks)
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
        blocks.append(BlockSpec(span.device, offset, size, span.start % _ALIGNMENT))
        offset += _aligned(size)
    return tuple(blocks), [span.start for span in merged]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


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


def _place(file_bytes: torch.Tensor, block: BlockSpec) -> torch.Tensor:
    """Copy a block to its device, at the caller's alignment."""
    room = torch.empty(block.size + 2 * _ALIGNMENT, dtype=torch.uint8, device=block.device)
    shift = (block.misalignment - room.data_ptr()) % _ALIGNMENT
    live = room[shift : shift + block.size]
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
