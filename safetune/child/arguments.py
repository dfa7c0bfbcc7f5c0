"""The child's copies of the caller's tensors: same bits, shapes, strides, alignment and aliasing.

The child makes them from the parent's copies (see `snapshot`) in its own memory, each storage
between two guard bands. Checksums show what a launch has written, so only that is restored. The
caller's bits come from device memory that the parent shares read-only, or from a memory file; in
that case the child keeps a second copy of what is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from safetune.both.device_bytes import Run, View
from safetune.child import memory
from safetune.frozen import dataclass
from safetune.inputs.spans import ALIGNMENT, FLOATS, BlockSpec, Layout, TensorSpec, itemsize

#: A guard band is a sixteenth of its storage, within these limits: the tail of a last tile falls
#: within it, and the bands of many small arguments stay small.
_MIN_GUARD = 1 << 16
_MAX_GUARD = 1 << 21
#: Harmless in every type: tiny as a float, far from a valid index as an integer.
_GUARD_BYTE = 0xA5
#: What an output holds before a launch that reads none of it: a NaN that no computation leaves, or
#: a byte that is repeated.
_POISON = {"float64": 0x7FF8A5A5A5A5A5A5, "float32": 0x7FC5A5A5, "float16": 0x7EA5}
_POISON |= {"bfloat16": 0x7FE5, "float8_e4m3fn": 0x7F, "float8_e4m3fnuz": 0x80}
_POISON |= {"float8_e5m2": 0x7D, "float8_e5m2fnuz": 0x80}
_POISON_BYTE = 0x5A
#: The bytes of a block that are kept together, on the device or beside it.
_PIECE = 1 << 28


@dataclass(frozen=True)
class Copy:
    """A run of bytes in memory that this object owns."""

    memory: Any
    run: Run

    @classmethod
    def like(cls, spec: BlockSpec, allocate: Callable[[int], Any], guard: int = 0) -> Copy:
        """Return memory for a block's bytes with the same alignment and a guard around it."""
        held = allocate(spec.size + 2 * guard + ALIGNMENT)
        start = guard + (spec.misalignment - held.address - guard) % ALIGNMENT
        return cls(held, Run(held.address + start, spec.size))


class Block:
    """One storage, or several that overlap: its live bytes, and how to restore the caller's
    bits.
    """

    def __init__(self, spec: BlockSpec, file: Run, shared: Sequence[Any]) -> None:
        guard = min(max(_MIN_GUARD, spec.size // 16), _MAX_GUARD)
        self.spec = spec
        self.bytes = memory.bytes_on(spec.device)
        allocate = self.bytes.allocate_pinned if spec.is_pinned else self.bytes.allocate
        self.live = Copy.like(spec, allocate, guard)
        held, (start, size) = self.live.memory, self.live.run
        self.guards = {
            "before": Run(held.address, start - held.address),
            "after": Run(start + size, held.address + held.size - start - size),
        }
        for band in self.guards.values():
            self.bytes.set_bytes(band, _GUARD_BYTE)
        self._file = file
        #: The caller's bits up to `_kept`, in their order; the rest of them is in the file.
        self._pieces: list[Copy] = []
        if spec.place:
            held = shared[spec.place.memory]
            self._pieces = [Copy(held, Run(held.address + spec.place.offset, spec.head))]
        self._kept = spec.head
        self.written = False
        self.restore()

    def restore(self) -> None:
        """Restore the caller's bits."""
        self._fill(self.live)

    def keep_pristine(self) -> None:
        """Keep a copy of the caller's bits: on the device while there is room, then in pinned
        memory.
        """
        self.written = True
        size = self.spec.size
        if self.spec.device == memory.HOST or self.spec.is_pinned or self._kept == size:
            return  # the memory file is as fast as memory of the host
        if self.spec.noise is not None:  # drawn again in less time than it takes from the host
            if self.bytes.has_room(size):
                self._pieces, self._kept = [self._fill(self.another())], size
            return
        while self._kept < size:
            count = min(_PIECE, size - self._kept)
            roomy = self.bytes.has_room(count)
            held = (self.bytes.allocate if roomy else self.bytes.allocate_pinned)(count)
            piece = Copy(held, Run(held.address, count))
            self._put(piece, 0, self._kept)
            self._pieces.append(piece)
            self._kept += count

    def pristine(self) -> Copy:
        """Return the caller's bits, on the device if they fit."""
        whole = len(self._pieces) == 1 and self._kept == self.spec.size
        return self._pieces[0] if whole else self._fill(self.another())

    def another(self) -> Copy:
        """Return memory of the same size and alignment: on the device, or pinned."""
        return Copy.like(self.spec, self.bytes.allocate_anywhere)

    def save(self) -> Copy:
        """Return a copy of the block's present content."""
        copy = self.another()
        self.bytes.copy(copy.run.address, *self.live.run)
        return copy

    def load(self, copy: Copy) -> None:
        """Overwrite the block with a copy."""
        self.bytes.copy(self.live.run.address, *copy.run)

    def _fill(self, target: Copy) -> Copy:
        """Return `target`, filled with the caller's bits."""
        begin = 0
        for piece in self._pieces:
            self.bytes.copy(target.run.address + begin, *piece.run)
            begin += piece.run.size
        if self.spec.noise is None:
            self._put(target, begin, begin)
        elif not self._pieces:
            memory.draw(self.bytes, target.memory, target.run, self.spec.noise)
        return target

    def _put(self, target: Copy, begin: int, place: int) -> None:
        """Copy the bytes from `place` on into a copy, from `begin` on, out of the file."""
        source = self._file.address + self.spec.offset + place - self.spec.head
        self.put(target, source, begin)

    def put(self, target: Copy, source: int, begin: int = 0) -> None:
        """Fill a copy from pageable host memory, starting at `begin`."""
        address, size = target.run.address + begin, target.run.size - begin
        if target.memory.pinned:
            self.bytes.wait(0)  # a kernel may still write to it
            ctypes.memmove(address, source, size)
        else:
            self.bytes.load(address, source, size)


class Arguments:
    """The tensors of a call, which can be restored to the caller's bits."""

    def __init__(self, layout: Layout, fd: int) -> None:
        size = os.fstat(fd).st_size
        # A private mapping: what a config writes on the CPU stays in this process.
        self._file = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE)
        os.close(fd)
        file = Run(ctypes.addressof(ctypes.c_char.from_buffer(self._file)), size)
        shared = [
            memory.mapped(device, fd, size)
            for (device, size), fd in zip(layout.shared, layout.fds, strict=True)
        ]
        self.blocks = [Block(spec, file, shared) for spec in layout.blocks]
        self.views = layout.tensors
        self.pristine_sums = self.checksums()  # those of the caller's bits
        #: The checksums of the blocks, as `find_written` has found them last.
        self.sums = self.pristine_sums
        self._known = False

    @functools.cached_property
    def tensors(self) -> list[Any]:
        """The arguments as tensors."""
        return [self.tensor(self.blocks[v.block].live, i) for i, v in enumerate(self.views)]

    def tensor(self, held: Copy, index: int) -> Any:
        """Return tensor `index` over a copy of its block."""
        from safetune.inputs import spans

        view = self.views[index]
        block = self.blocks[view.block]
        return spans.view_of(block.bytes.tensor(held.memory, held.run), view)

    def elements(self, index: int, held: Copy | None = None) -> View:
        """Return the elements of a tensor in its block, or in a copy of the block."""
        view = self.views[index]
        start = (held or self.blocks[view.block].live).run.address
        address = start + view.byte_offset
        return View.of(address, itemsize(view.dtype), view.shape, view.stride)

    def restore(self) -> None:
        """Restore every byte to the caller's value when tuning began.

        `sums` then has the checksums from before the restore.
        """
        if not self._known:
            self.find_written()
        for index, block in enumerate(self.blocks):
            if self.sums[index] != self.pristine_sums[index]:
                block.restore()
        self._known = False

    def find_written(self) -> list[int]:
        """Return the blocks that have been written since the beginning."""
        self.sums = self.checksums()
        for block, now, pristine in zip(self.blocks, self.sums, self.pristine_sums, strict=True):
            if now != pristine and not block.written:
                block.keep_pristine()
        self._known = True
        return [index for index, block in enumerate(self.blocks) if block.written]

    @contextlib.contextmanager
    def set_aside(self, wanted: Iterable[int]) -> Iterator[dict[int, Copy]]:
        """Run the body on the caller's bits; restore the blocks' content at the end.

        Afterwards, the yielded dictionary has the wanted blocks as the body left them.
        """
        sums, found = self.sums, dict[int, Copy]()
        kept = {i: block.save() for i, block in enumerate(self.blocks) if block.written}
        self.restore()
        yield found
        found.update({i: self.blocks[i].save() for i in wanted})
        self.restore()
        for index, copy in kept.items():
            self.blocks[index].load(copy)
        self.sums, self._known = sums, True

    def redraw(self, blocks: Iterable[int], seed: int) -> None:
        """Multiply each of these blocks that holds only floats by its own random factors. Call
        `put_back` before any other method that uses the blocks.
        """
        from safetune.inputs import random_inputs

        for index in blocks:
            block, views = self.blocks[index], [v for v in self.views if v.block == index]
            if random_inputs.is_drawable(views, block.spec.misalignment):
                block.bytes.wait(0)  # where the host writes to memory that the device has filled
                values = block.bytes.tensor(block.live.memory, block.live.run)
                number = seed * len(self.blocks) + index
                random_inputs.scale(values, random_inputs.real_dtype(views[0].dtype), number)

    def put_back(self, blocks: Iterable[int]) -> None:
        """Restore the caller's bits in these blocks, which then do not count as written."""
        for index in blocks:
            self.blocks[index].restore()
        self._known = False

    def poison(self, tensors: Iterable[int]) -> None:
        """Overwrite these tensors with poison."""
        self._known = False
        for index in tensors:
            self.where(index).fill(self.elements(index), poison_of(self.views[index].dtype))

    def overwritten(self, tensors: Iterable[int]) -> dict[int, int]:
        """Return how many elements of these tensors no longer hold the poison."""
        poisons = {i: (self.elements(i), poison_of(self.views[i].dtype)) for i in tensors}
        pairs = [(self.views[index].block, pair) for index, pair in poisons.items()]
        return dict(zip(poisons, self._on_each(pairs, _unlike), strict=True))

    def breached(self) -> list[tuple[int, str]]:
        """Return (block, `before` or `after`) for each guard band that has been written."""
        sides = [(i, side) for i, block in enumerate(self.blocks) for side in block.guards]
        bands = [self.blocks[index].guards[side] for index, side in sides]
        views = [View.of(band.address, 1, (band.size,), (1,)) for band in bands]
        pairs = [(i, (view, _GUARD_BYTE)) for (i, _), view in zip(sides, views, strict=True)]
        return list(itertools.compress(sides, self._on_each(pairs, _unlike)))

    def unowned(self) -> list[int]:
        """Return the written blocks with changed bytes that no tensor covers.

        If there are uncovered bytes, overwrites the covered ones.
        """
        written = [index for index, block in enumerate(self.blocks) if block.written]
        return [index for index in written if self._gap_changed(index)]

    def _gap_changed(self, index: int) -> bool:
        block = self.blocks[index]
        views = [i for i, view in enumerate(self.views) if view.block == index]
        if any(self._is_whole_block(self.views[i]) for i in views):
            return False
        sums = []
        for _ in ("now", "before"):
            for i in views:
                view = self.elements(i)
                zeros = _narrow(view) if view.width > 8 else view
                block.bytes.fill(zeros, 0)
            sums += block.bytes.checksums([block.live.run])
            block.restore()
        return sums[0] != sums[1]

    def _is_whole_block(self, view: TensorSpec) -> bool:
        size = math.prod(view.shape) * itemsize(view.dtype)
        return view.is_dense() and size == self.blocks[view.block].spec.size

    def where(self, index: int) -> Any:
        """Return the byte operations for a tensor's memory."""
        return self.blocks[self.views[index].block].bytes

    def checksums(self) -> list[int]:
        """Return the checksum of each block's present content."""
        runs = [(index, block.live.run) for index, block in enumerate(self.blocks)]
        return self._on_each(runs, lambda where, some: where.checksums(some))

    def _on_each(
        self, items: Sequence[tuple[int, Any]], ask: Callable[[Any, list[Any]], list[int]]
    ) -> list[int]:
        """Return what `ask` finds for each (block, item), with one wait for each device."""
        found: dict[int, int] = {}
        places: dict[str, list[int]] = {}
        for place, (block, _) in enumerate(items):
            places.setdefault(self.blocks[block].spec.device, []).append(place)
        for here in places.values():
            where = self.blocks[items[here[0]][0]].bytes
            found.update(zip(here, ask(where, [items[place][1] for place in here]), strict=True))
        return [found[place] for place in range(len(items))]


def _unlike(where: Any, some: list[Any]) -> list[int]:
    return where.unlike(some)


def _narrow(view: View) -> View:
    """The elements of 16 bytes as pairs of 8."""
    inner = tuple((size, 2 * step) for size, step in view.inner)
    return View(view.address, 8, 2 * view.count, ((2, 1), *inner), 2 * view.step)


def poison_of(dtype: str) -> int:
    """Return the poison of a dtype: the bits of an element that no launch has written."""
    if dtype not in FLOATS:
        return int.from_bytes(bytes([_POISON_BYTE] * itemsize(dtype)), "little")
    return _POISON[dtype]
