"""The caller's tensors, copied once into a memory file that children can map.

Storages that overlap in memory become one block, so arguments that alias each other still do. No
CUDA memory is shared between the processes, so nothing that a config writes can reach the caller.
What makes a copy impossible is found here, in the caller, before any child starts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from safetune.errors import from_signal_handler
from safetune.inputs import memory_budget, pointers, random_inputs, spans
from safetune.inputs.call import Call, leaves, owners_of
from safetune.inputs.spans import ALIGNMENT, Absent, BlockSpec, Layout, Noise, Span, TensorSpec
from safetune.settings import Settings


def copy_inputs(
    call: Call, tensors: Sequence[torch.Tensor], free_memory: Callable[[int], None]
) -> Snapshot:
    """Return the copies of a call's tensors that a child gets, besides the packed call.

    Args:
        tensors: all of the call's, in the order of the packed call; also those of hooks.
        free_memory: ends the idle child of a device, where memory is short.

    Raises:
        NotReproducible: an argument holds addresses, or the copies do not fit.
    """
    owners = owners_of(call.named(), tensors)
    made = call.hooks.inputs is not None
    kept = [i for i, owner in enumerate(owners) if not (made and owner)]
    copied, names = [tensors[i] for i in kept], [owners[i] for i in kept]
    if not made:
        for name, argument in call.named().items():
            numbers = filter(pointers.is_plausible, leaves(argument))
            pointers.check(name, numbers, call.interpreted)
    if not call.interpreted:
        _check_devices(copied, names, free_memory)
    snapshot = Snapshot(copied, names, Settings.current().copy_limit)
    if not made:
        try:
            _check_tables(snapshot, names, call.interpreted)
        except BaseException:
            snapshot.close()
            raise
    absent = {i: Absent.of(tensor) for i, tensor in enumerate(tensors) if i not in kept}
    snapshot.layout = replace(snapshot.layout, absent=absent)
    return snapshot


class Snapshot:
    """The bytes behind some tensors, in a memory file that children can map.

    Args:
        owners: the argument that each tensor belongs to, or nothing for a hook's. Only tensors of
            arguments are drawn at random.
        limit: the bytes to copy before float blocks are drawn at random; None copies all.

    Attributes:
        regenerated: the arguments with a tensor that is not copied but drawn.

    Raises:
        KernelNotTransferable: a tensor has no plain storage.
        NotReproducible: the host has no memory left for the copy.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[str] = (), limit: int | None = None
    ) -> None:
        names = tuple(owners) or ("",) * len(tensors)
        merged = spans.merged_spans(tensors)
        specs = tuple(spans.tensor_spec(tensor, merged) for tensor in tensors)
        drawn = _drawn(specs, names, merged, limit)
        noises = {}
        for block in drawn:  # like its largest view
            views = [t for t, spec in zip(tensors, specs, strict=True) if spec.block == block]
            noises[block] = random_inputs.noise_like(max(views, key=torch.numel), seed=block)
        self.layout = Layout(tuple(_lay_out(merged, noises)), specs)
        pairs = zip(specs, names, strict=True)
        self.regenerated = tuple(dict.fromkeys(name for spec, name in pairs if spec.block in drawn))
        sizes = memory_budget.sizes(names, [merged[spec.block].size for spec in specs])
        self.fd = self._copy(tensors, merged, sizes)

    def close(self) -> None:
        """Close the memory file; children that have mapped it keep their mapping."""
        os.close(self.fd)

    def _copy(
        self, tensors: Sequence[torch.Tensor], merged: Sequence[Span], sizes: Mapping[str, int]
    ) -> int:
        """Return a memory file with the blocks that are not drawn."""
        blocks = self.layout.blocks
        size = max(1, sum(spans.aligned(block.size) for block in blocks if block.noise is None))
        # Tensors on the CPU are on the CPU in the child, too: once more, beside the file.
        needed = size + sum(block.size for block in blocks if block.device == "cpu")
        memory_budget.check_host(needed, sizes)
        with contextlib.ExitStack() as on_error:
            try:
                fd = os.memfd_create("safetune-arguments", os.MFD_CLOEXEC)
                on_error.callback(os.close, fd)
                os.posix_fallocate(fd, 0, size)  # writing to pages that cannot be had is a SIGBUS
                memory = mmap.mmap(fd, size)
            except OSError as error:
                if from_signal_handler(error):
                    raise
                free = memory_budget.host_free()
                raise memory_budget.too_large("host memory", needed, free, sizes, error) from error
            with memory:
                for span, tensor in {spans.span_of(tensor): tensor for tensor in tensors}.items():
                    index = spans.block_of(span, merged)
                    if not span.size or blocks[index].noise is not None:
                        continue
                    offset = blocks[index].offset + span.start - merged[index].start
                    target = torch.frombuffer(
                        memory, dtype=torch.uint8, count=span.size, offset=offset
                    )
                    with spans.reading(tensor.device):
                        target.copy_(spans.storage_bytes(tensor))
                    del target  # the mapping cannot be closed under a tensor
            on_error.pop_all()
        return fd


def _check_tables(snapshot: Snapshot, owners: Sequence[str], interpreted: bool) -> None:
    """Raise `NotReproducible` for an address among the integers that have been copied."""
    layout = snapshot.layout
    with mmap.mmap(snapshot.fd, 0) as memory:
        for spec, owner in zip(layout.tensors, owners, strict=True):
            block = layout.blocks[spec.block]
            if not owner or spec.dtype not in ("int64", "uint64") or 0 in spec.shape:
                continue
            begin = block.offset + spec.byte_offset
            count = (block.size - spec.byte_offset) // 8
            flat = torch.frombuffer(memory, dtype=torch.int64, count=count, offset=begin)
            candidates = pointers.plausible(flat.as_strided(spec.shape, spec.stride))
            del flat  # the mapping cannot be closed under a tensor
            pointers.check(owner, candidates, interpreted)


def _check_devices(
    tensors: Sequence[torch.Tensor], owners: Sequence[str], free_memory: Callable[[int], None]
) -> None:
    """Raise if a device has no memory for another copy of the call's tensors there."""
    for index in sorted({tensor.get_device() for tensor in tensors} - {-1}):
        pairs = zip(tensors, owners, strict=True)
        here, names = zip(*(pair for pair in pairs if pair[0].get_device() == index), strict=True)
        memory_budget.check_device(
            index,
            sum(span.size for span in spans.merged_spans(here)),
            memory_budget.sizes(names, [tensor.untyped_storage().nbytes() for tensor in here]),
            free_memory,
        )


def _drawn(
    specs: Sequence[TensorSpec], owners: Sequence[str], merged: Sequence[Span], limit: int | None
) -> list[int]:
    """Return the blocks to draw, the largest first, until the others have `limit` bytes at most."""
    of_hooks = {spec.block for spec, owner in zip(specs, owners, strict=True) if not owner}
    left = sum(span.size for span in merged)
    drawn: list[int] = []
    for index, span in sorted(enumerate(merged), key=lambda pair: -pair[1].size):
        if limit is None or left <= limit:
            break
        views = [spec for spec in specs if spec.block == index]
        if index not in of_hooks and random_inputs.is_drawable(views, span.start % ALIGNMENT):
            drawn.append(index)
            left -= span.size
    return drawn


def _lay_out(merged: Sequence[Span], noises: Mapping[int, Noise]) -> Iterator[BlockSpec]:
    offset = 0
    for index, span in enumerate(merged):
        noise = noises.get(index)
        yield BlockSpec(span.device, offset, span.size, span.start % ALIGNMENT, noise)
        offset += 0 if noise else spans.aligned(span.size)
