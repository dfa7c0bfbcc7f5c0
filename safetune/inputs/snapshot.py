"""The caller's tensors, copied once into memory that children can map.

Storages that overlap in memory become one block, so aliasing arguments still alias. The copies stay
on their devices if there is room (`hand_over`), otherwise in a memory file. The caller's own memory
is not shared, so nothing that a config writes can reach the caller. This module finds whatever
makes a copy impossible, in the caller, before any child starts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from safetune.both import backend
from safetune.errors import BackendError, TooMuchPinned
from safetune.inputs import hand_over, memory_budget, pointers, random_inputs, spans
from safetune.inputs.call import Call, leaves, may_be_address, owners_of
from safetune.inputs.hand_over import HandOver
from safetune.inputs.spans import BlockSpec, Noise, Place, Span, TensorSpec
from safetune.messages import logger
from safetune.settings import Settings


def copy_inputs(
    call: Call,
    tensors: Sequence[torch.Tensor],
    free_memory: Callable[[int], None],
    on_devices: bool = True,
    outputs: Collection[str] = (),
) -> Snapshot:
    """Return the copies of a call's tensors that a child gets besides the packed call.

    Args:
        tensors: all tensors of the call and its hooks, in the order of the packed call.
        free_memory: ends the idle child of a device if memory is short.
        on_devices: whether the copies may use device memory until the snapshot is closed.
        outputs: arguments that are written; their copies get device memory first.

    Raises:
        KernelNotTransferable: a tensor has no plain storage.
        NotReproducible: an argument contains addresses, or the copies do not fit.
    """
    owners = owners_of(call.named(), tensors)
    made = call.hooks.inputs is not None
    kept = [i for i, owner in enumerate(owners) if not (made and owner)]
    copied, names = [tensors[i] for i in kept], [owners[i] for i in kept]
    spans.merged_spans(copied)  # raises for a tensor whose storage is not plain
    if not made:
        _check_tables(copied, names, call.interpreted)
        for name, argument in call.named().items():
            if numbers := [leaf for leaf in leaves(argument) if may_be_address(leaf)]:
                pointers.check(name, numbers, call.interpreted)
    rooms = {} if call.interpreted else _check_devices(copied, names, free_memory)
    limit = Settings.current().copy_limit
    if pinned := pinned_spans(copied, call.index):
        check_pinned(pinned, copied, names, limit)
        where = backend.required()
        with where.relaxed_capture():  # queued work may write to it
            where.bytes_of(call.index).wait(where.launch_stream())
    snapshot = Snapshot(copied, names, limit, rooms if on_devices else {}, outputs, call.index)
    absent = {i: spans.Absent.of(tensor) for i, tensor in enumerate(tensors) if i not in kept}
    snapshot.layout = replace(snapshot.layout, absent=absent)
    return snapshot


class Snapshot:
    """The bytes behind some tensors, in a memory file that children can map.

    Args:
        owners: the argument of each tensor, empty for a hook's. Only tensors of arguments are drawn
            at random.
        limit: the most bytes to copy; float blocks beyond it are drawn at random. None: no limit.
        rooms: the bytes for copies on each device, if its driver can share memory.
        outputs: the arguments whose copies get device memory first.
        index: the device that reads pinned memory; -1 if no device reads host memory.

    Attributes:
        regenerated: the arguments with a tensor that is drawn, not copied.

    Raises:
        KernelNotTransferable: a tensor has no plain storage.
        NotReproducible: the host has too little memory for the copy.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        owners: Sequence[str] = (),
        limit: int | None = None,
        rooms: Mapping[str, int] = MappingProxyType({}),
        outputs: Collection[str] = (),
        index: int = -1,
    ) -> None:
        names = tuple(owners) or ("",) * len(tensors)
        merged = spans.merged_spans(tensors)
        specs = tuple(spans.tensor_spec(tensor, merged) for tensor in tensors)
        drawn = _drawn(specs, names, merged, limit)
        noises = {}
        for block in drawn:  # like its largest view
            views = [t for t, spec in zip(tensors, specs, strict=True) if spec.block == block]
            noises[block] = random_inputs.noise_like(max(views, key=torch.numel), seed=block)
        written = {s.block for s, owner in zip(specs, names, strict=True) if owner in outputs}
        order = sorted(range(len(merged)), key=lambda n: (n not in written, -merged[n].size))
        wanted = [number for number in order if number not in noises]
        self._on_device = _handed_over(merged, wanted, rooms) if rooms else HandOver()
        devices = dict.fromkeys(pinned_spans(tensors, index), f"{spans.PINNED}:{index}")
        blocks = tuple(_lay_out(merged, noises, self._on_device.places, devices))
        shared = tuple((device, memory.size) for device, memory in self._on_device.memories)
        self.layout = spans.Layout(blocks, specs, shared=shared)
        pairs = zip(specs, names, strict=True)
        self.regenerated = tuple(dict.fromkeys(name for spec, name in pairs if spec.block in drawn))
        sizes = memory_budget.sizes(names, [merged[spec.block].size for spec in specs])
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._close_shared)
            self.fd = self._copy(tensors, merged, sizes)
            on_error.pop_all()

    @property
    def shared_fds(self) -> tuple[int, ...]:
        """The descriptors of the layout's shared memory."""
        return tuple(memory.fd for _, memory in self._on_device.memories)

    def close(self) -> None:
        """Close the memory; children keep their mappings of it."""
        os.close(self.fd)
        self._close_shared()

    def _close_shared(self) -> None:
        """Free device memory, except blocks that a child still maps."""
        for _, memory in self._on_device.memories:
            memory.close()

    def _copy(
        self, tensors: Sequence[torch.Tensor], merged: Sequence[Span], sizes: Mapping[str, int]
    ) -> int:
        """Return a memory file with the blocks that are not drawn, except those on a device."""
        blocks = self.layout.blocks
        size = max(1, sum(map(_filed, blocks)))
        # Tensors on the CPU are on the CPU in the child as well: once more, beside the file.
        on_host = [block for block in blocks if block.device == "cpu" or block.is_pinned]
        needed = size + sum(block.size for block in on_host)
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
                for span, tensor in {spans.span_of(tensor): tensor for tensor in tensors}.items():
                    index = spans.block_of(span, merged)
                    block, begin = blocks[index], span.start - merged[index].start
                    skipped = max(0, block.head - begin)
                    if block.noise is not None or skipped >= span.size:
                        continue
                    offset = block.offset + begin + skipped - block.head
                    target = torch.frombuffer(
                        memory, dtype=torch.uint8, count=span.size - skipped, offset=offset
                    )
                    with spans.reading(tensor.device):
                        target.copy_(spans.storage_bytes(tensor)[skipped:])
                    del target  # the mapping cannot be closed under a tensor
            on_error.pop_all()
        return fd


def pinned_spans(tensors: Sequence[torch.Tensor], index: int) -> list[Span]:
    """Return the spans of host memory among tensors that kernels on a device can read."""
    found = backend.current() if index >= 0 else None
    if found is None:
        return []
    on_host = [span for span in spans.merged_spans(tensors) if span.device == "cpu" and span.size]
    return [span for span in on_host if found.is_known_pointer(span.start)]


def check_pinned(
    pinned: Sequence[Span], tensors: Sequence[torch.Tensor], owners: Sequence[str], limit: int
) -> None:
    """Raise `TooMuchPinned` if a child may not pin this much; other processes cannot use pinned
    memory.
    """
    size, free = sum(span.size for span in pinned), memory_budget.host_free() // 2
    if size <= min(limit, free):
        return
    of = {owner for t, owner in zip(tensors, owners, strict=True) if t.device.type == "cpu"}
    why = f"SAFETUNE_COPY_LIMIT of {limit:,}" if limit < free else f"half of the {2 * free:,} free"
    raise TooMuchPinned(
        f"{', '.join(sorted(filter(None, of))) or 'a hook'}: a copy of {size:,} bytes of pinned "
        f"host memory is over the limit of a tuning process ({why} bytes)"
    )


def _check_tables(
    tensors: Sequence[torch.Tensor], owners: Sequence[str], interpreted: bool
) -> None:
    """Raise `NotReproducible` for an address among the integers of arguments."""
    for tensor, owner in zip(tensors, owners, strict=True):
        if owner and tensor.dtype in (torch.int64, torch.uint64):
            with spans.reading(tensor.device):
                values = tensor.detach().cpu()
            pointers.check(owner, pointers.plausible(values), interpreted)


def _check_devices(
    tensors: Sequence[torch.Tensor], owners: Sequence[str], free_memory: Callable[[int], None]
) -> dict[str, int]:
    """Return how much room each device has, see `memory_budget.check_device`; raise like it."""
    found = {}
    for device in sorted({str(tensor.device) for tensor in tensors if tensor.get_device() >= 0}):
        pairs = zip(tensors, owners, strict=True)
        here, names = zip(*(pair for pair in pairs if str(pair[0].device) == device), strict=True)
        found[device] = memory_budget.check_device(
            torch.device(device).index,
            sum(span.size for span in spans.merged_spans(here)),
            memory_budget.sizes(names, [tensor.untyped_storage().nbytes() for tensor in here]),
            free_memory,
        )
    return found


def _handed_over(
    merged: Sequence[Span], wanted: Sequence[int], rooms: Mapping[str, int]
) -> HandOver:
    """Return copies of blocks on devices; none where a driver refuses."""
    try:
        return hand_over.copied(merged, wanted, rooms)
    except BackendError as error:
        logger.debug("passing arguments through host memory: %s", error)
        return HandOver()


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
        if index not in of_hooks and random_inputs.is_drawable(views, span.start % spans.ALIGNMENT):
            drawn.append(index)
            left -= span.size
    return drawn


def _lay_out(
    merged: Sequence[Span],
    noises: Mapping[int, Noise],
    places: Mapping[int, Place],
    devices: Mapping[Span, str],
) -> Iterator[BlockSpec]:
    end = 0
    for index, span in enumerate(merged):
        misalignment = span.start % spans.ALIGNMENT
        found = noises.get(index), places.get(index)
        block = BlockSpec(devices.get(span, span.device), end, span.size, misalignment, *found)
        yield block
        end += _filed(block)


def _filed(block: BlockSpec) -> int:
    """Return the bytes that a block takes in the file."""
    return 0 if block.noise else spans.aligned(block.size - block.head)
