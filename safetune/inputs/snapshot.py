"""The caller's tensors, copied once into a memory file that children can map.

Storages that overlap in memory become one block, so arguments that alias each other still do. No
CUDA memory is shared between the processes, so nothing that a config writes can reach the caller.
What makes a copy impossible is found here, in the caller, before any child starts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from safetune.inputs import memory_budget, pointers, random_inputs
from safetune.inputs.call import Call, owners_of
from safetune.inputs.spans import (
    ALIGNMENT,
    Absent,
    BlockSpec,
    Span,
    TensorSpec,
    aligned,
    block_of,
    merged_spans,
    reading,
    span_of,
    storage_bytes,
    tensor_spec,
)
from safetune.outcome import Mark
from safetune.settings import Settings


class Inputs:
    """The copies of a call's tensors that a child gets, besides the packed call.

    Args:
        tensors: all of the call's, in the order of the packed call; also those of hooks.
        free_memory: ends the idle child of a device, where memory is short.

    Attributes:
        fd: the memory file.
        header: the description of the file, as plain JSON data.
        marks: for every outcome measured on these inputs.

    Raises:
        NotReproducible: an argument holds addresses, or the copies do not fit.
        KernelNotTransferable: a tensor has no plain storage.
    """

    def __init__(
        self, call: Call, tensors: Sequence[torch.Tensor], free_memory: Callable[[int], None]
    ) -> None:
        owners = owners_of(call.named(), tensors)
        made = call.hooks.inputs is not None
        kept = [i for i, owner in enumerate(owners) if not (made and owner)]
        copied, names = [tensors[i] for i in kept], [owners[i] for i in kept]
        if not made:
            pointers.check_numbers(call)
        if not call.interpreted:
            _check_devices(copied, names, free_memory)
        self._snapshot = Snapshot(copied, names, Settings.current().copy_limit)
        self.fd = self._snapshot.fd
        if not made:
            try:
                self._check_tables(names, call.interpreted)
            except BaseException:
                self.close()
                raise
        absent = {str(i): asdict(_absent(t)) for i, t in enumerate(tensors) if i not in kept}
        self.header: dict[str, Any] = {**self._snapshot.header(), "absent": absent}
        drawn = self._snapshot.regenerated
        self.marks = (Mark.REGENERATED.of(", ".join(drawn)),) if drawn else ()

    def close(self) -> None:
        """Close the memory file; children that have mapped it keep their mapping."""
        self._snapshot.close()

    def _check_tables(self, owners: Sequence[str], interpreted: bool) -> None:
        """Look for addresses among the integers that have been copied."""
        with mmap.mmap(self.fd, 0) as memory:
            for spec, owner in zip(self._snapshot.tensors, owners, strict=True):
                block = self._snapshot.blocks[spec.block]
                if not owner or spec.dtype not in ("int64", "uint64") or 0 in spec.shape:
                    continue
                begin = block.offset + spec.byte_offset
                count = (block.size - spec.byte_offset) // 8
                flat = torch.frombuffer(memory, dtype=torch.int64, count=count, offset=begin)
                candidates = pointers.plausible(flat.as_strided(spec.shape, spec.stride))
                del flat  # the mapping cannot be closed under a tensor
                pointers.check(owner, candidates, interpreted)


class Snapshot:
    """The bytes behind some tensors, in a memory file that children can map.

    Args:
        owners: the argument that each tensor belongs to, or nothing for a hook's. Only tensors of
            arguments are drawn at random.
        limit: the bytes to copy before float blocks are drawn at random; None copies all.

    Attributes:
        regenerated: the arguments with a tensor that is not copied but drawn.

    Raises:
        KernelNotTransferable: a tensor has no plain storage (sparse, fake, a wrapper subclass).
        NotReproducible: the host has no memory left for the copy.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[str] = (), limit: int | None = None
    ) -> None:
        names = tuple(owners) or ("",) * len(tensors)
        merged = merged_spans(tensors)
        self.tensors = tuple(tensor_spec(tensor, merged) for tensor in tensors)
        drawn = _drawn(self.tensors, names, merged, limit)
        noises = {block: _noise(block, self.tensors, tensors) for block in drawn}
        self.blocks = tuple(_lay_out(merged, noises))
        self.regenerated = _owners(self.tensors, names, drawn)
        self.fd = self._copy(
            tensors,
            merged,
            memory_budget.sizes(names, [merged[spec.block].size for spec in self.tensors]),
        )

    def header(self) -> dict[str, Any]:
        """Return what a child needs besides the memory file, as plain JSON data."""
        return {
            "blocks": [asdict(block) for block in self.blocks],
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }

    def close(self) -> None:
        """Close the memory file; children that have mapped it keep their mapping."""
        os.close(self.fd)

    def _copy(
        self, tensors: Sequence[torch.Tensor], merged: Sequence[Span], sizes: dict[str, int]
    ) -> int:
        """Return a memory file with the blocks that are not drawn."""
        size = max(1, sum(aligned(block.size) for block in self.blocks if block.noise is None))
        # Tensors on the CPU are on the CPU in the child, too: once more, beside the file.
        needed = size + sum(block.size for block in self.blocks if block.device == "cpu")
        memory_budget.check_host(needed, sizes)
        with contextlib.ExitStack() as on_error:
            try:
                fd = os.memfd_create("safetune-arguments", os.MFD_CLOEXEC)
                on_error.callback(os.close, fd)
                os.posix_fallocate(fd, 0, size)  # writing to pages that cannot be had is a SIGBUS
                memory = mmap.mmap(fd, size)
            except OSError as error:
                free = memory_budget.host_free()
                raise memory_budget.too_large("host memory", needed, free, sizes, error) from error
            with memory:
                self._fill(memory, tensors, merged)
            on_error.pop_all()
        return fd

    def _fill(
        self, memory: mmap.mmap, tensors: Iterable[torch.Tensor], merged: Sequence[Span]
    ) -> None:
        seen: set[Span] = set()
        for tensor in tensors:
            span = span_of(tensor)
            index = block_of(span, merged)
            block = self.blocks[index]
            if span in seen or not span.size or block.noise is not None:
                continue
            seen.add(span)
            offset = block.offset + span.start - merged[index].start
            target = torch.frombuffer(memory, dtype=torch.uint8, count=span.size, offset=offset)
            with reading(tensor.device):
                target.copy_(storage_bytes(tensor))
            del target  # the mapping cannot be closed under a tensor


def _absent(tensor: torch.Tensor) -> Absent:
    return Absent(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        device=tensor.device.type,
    )


def _check_devices(
    tensors: Sequence[torch.Tensor], owners: Sequence[str], free_memory: Callable[[int], None]
) -> None:
    """Raise if a device has no memory for another copy of the call's tensors there."""
    for index in sorted({tensor.get_device() for tensor in tensors} - {-1}):
        here = [i for i, tensor in enumerate(tensors) if tensor.get_device() == index]
        storages = [tensors[i].untyped_storage().nbytes() for i in here]
        memory_budget.check_device(
            index,
            sum(span.size for span in merged_spans([tensors[i] for i in here])),
            memory_budget.sizes([owners[i] for i in here], storages),
            free_memory,
        )


def _drawn(
    specs: Sequence[TensorSpec], owners: Sequence[str], merged: Sequence[Span], limit: int | None
) -> list[int]:
    """Return the blocks to draw at random."""
    if limit is None or sum(span.size for span in merged) <= limit:
        return []
    of_hooks = {spec.block for spec, owner in zip(specs, owners, strict=True) if not owner}
    drawable = [
        index
        for index, span in enumerate(merged)
        if index not in of_hooks
        and random_inputs.is_drawable(
            [spec for spec in specs if spec.block == index], span.start % ALIGNMENT
        )
    ]
    return random_inputs.chosen([span.size for span in merged], drawable, limit)


def _noise(
    block: int, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Return how to draw a block: like its largest view."""
    views = [tensor for spec, tensor in zip(specs, tensors, strict=True) if spec.block == block]
    return random_inputs.noise_like(max(views, key=torch.numel), seed=block)


def _owners(
    specs: Sequence[TensorSpec], owners: Sequence[str], blocks: Sequence[int]
) -> tuple[str, ...]:
    """Return the arguments that have a tensor in one of these blocks."""
    pairs = zip(specs, owners, strict=True)
    return tuple(dict.fromkeys(owner for spec, owner in pairs if spec.block in blocks))


def _lay_out(merged: Sequence[Span], noises: dict[int, dict[str, Any]]) -> Iterator[BlockSpec]:
    offset = 0
    for index, span in enumerate(merged):
        noise = noises.get(index)
        yield BlockSpec(span.device, offset, span.size, span.start % ALIGNMENT, noise)
        offset += 0 if noise else aligned(span.size)
