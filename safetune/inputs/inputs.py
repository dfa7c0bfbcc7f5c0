"""The inputs of a call in the child: copies of the caller's, random values, or those of `inputs=`.

What makes that impossible is found here, in the caller, before any child starts.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from safetune.inputs import memory_budget, pointers
from safetune.inputs.call import Call, leaves, owners_of
from safetune.inputs.snapshot import Snapshot
from safetune.inputs.spans import Absent, merged_spans
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
            _check_numbers(call)
        if not call.interpreted:
            _check_devices(copied, names, free_memory)
        self._snapshot = Snapshot(copied, names, Settings.current().copy_limit)
        self.fd = self._snapshot.fd
        if not made:
            try:
                _check_tables(self._snapshot, names, call.interpreted)
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


def _absent(tensor: torch.Tensor) -> Absent:
    return Absent(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        device=tensor.device.type,
    )


def _check_numbers(call: Call) -> None:
    """Look for addresses among the Python integers."""
    numbers = [
        (name, value)
        for name, argument in call.named().items()
        for value in leaves(argument)
        if pointers.is_plausible(value)
    ]
    if numbers:
        live = pointers.is_live(call.interpreted)
        for name, value in numbers:
            if live(value):
                raise pointers.not_reproducible(name, value)


def _check_tables(snapshot: Snapshot, owners: Sequence[str], interpreted: bool) -> None:
    """Look for addresses among the integers that have been copied."""
    live = None
    for spec, owner in zip(snapshot.tensors, owners, strict=True):
        block = snapshot.blocks[spec.block]
        if not owner or spec.dtype not in ("int64", "uint64") or 0 in spec.shape:
            continue
        with mmap.mmap(snapshot.fd, 0) as memory:
            begin = block.offset + spec.byte_offset
            count = (block.size - spec.byte_offset) // 8
            flat = torch.frombuffer(memory, dtype=torch.int64, count=count, offset=begin)
            candidates = pointers.plausible(flat.as_strided(spec.shape, spec.stride))
            del flat  # the mapping cannot be closed under a tensor
        if candidates:
            live = live or pointers.is_live(interpreted)
            for address in candidates:
                if live(address):
                    raise pointers.not_reproducible(owner, address)


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
