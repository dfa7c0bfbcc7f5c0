"""The result of one config per group of agreeing configs, to compare others with.

Small results are in a results file, which outlives a child. Large results stay in the child that
made them; a child that lacks one launches the config again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from safetune.child import memory
from safetune.child.arguments import Arguments, Block, Copy
from safetune.inputs.spans import aligned
from safetune.outcome import Group

#: Results up to this size in bytes go through the file.
_IN_FILE_BYTES = 1 << 26
#: There is a place for at least this many, and for more while they are within `kept_bytes`.
MIN_KEPT = 8


class Results:
    """The kept results, by group number.

    Args:
        fd: the results file, which grows with each kept result.
        kept_bytes: the file size up to which more than `MIN_KEPT` results are kept.
        relaunch: runs a config again, by its number.
    """

    def __init__(
        self,
        arguments: Arguments,
        fd: int,
        kept_bytes: int,
        relaunch: Callable[[int], object],
    ) -> None:
        self._arguments = arguments
        self._fd = fd
        self._kept_bytes = kept_bytes
        self._relaunch = relaunch
        self._held: dict[tuple[int, int], Copy] = {}
        sizes = [aligned(block.spec.size) for block in arguments.blocks]
        *self._offsets, self._slot = accumulate(sizes, initial=0)

    def keep(
        self, config: int, groups: Sequence[Group], blocks: Sequence[int], written: tuple[int, ...]
    ) -> Group | None:
        """Keep the live result for a new group; None if there is no room for it.

        Launches have written to `blocks`; for `written` see `OutputReport`.
        """
        taken = {group.slot for group in groups}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        if slot >= max(MIN_KEPT, self._kept_bytes // max(1, self._slot)):
            return None
        sums = self._arguments.sums
        group = Group(config, slot, tuple(blocks), tuple(sums[n] for n in blocks), written)
        for key in [key for key in self._held if key[0] == config]:  # of an earlier group
            del self._held[key]
        if self._is_in_file(group):
            return group if self._store(group) else None
        for number in blocks:
            block = self._block(number)
            if block.bytes.has_room(block.spec.size):
                self._held[config, number] = block.save()
        return group

    def same(self, group: Group, number: int) -> bool:
        """Whether a block is bitwise equal to a group's result."""
        pristine = self._arguments.pristine_sums[number]
        theirs = dict(zip(group.blocks, group.sums, strict=True)).get(number, pristine)
        return self._arguments.sums[number] == theirs

    def bits(self, group: Group, number: int) -> Copy:
        """Return one block of a group's result."""
        block = self._block(number)
        if number not in group.blocks:
            return block.pristine()
        if (group.number, number) not in self._held:
            if self._is_in_file(group):
                return self._fetched(group, number)
            self._make_again(group)
        return self._held[group.number, number]

    def _is_in_file(self, group: Group) -> bool:
        blocks = [self._block(number) for number in group.blocks]
        on_host = any(block.spec.device == memory.HOST for block in blocks)
        small = sum(block.spec.size for block in blocks) <= _IN_FILE_BYTES
        return small or on_host

    def _make_again(self, group: Group) -> None:
        """Launch a group's config once more; the live result stays what it is."""
        with self._arguments.set_aside(group.blocks) as found:
            self._relaunch(group.number)
        self._held.update({(group.number, number): copy for number, copy in found.items()})

    def _store(self, group: Group) -> bool:
        """Write the live result to the file; False where that cannot hold it."""
        end = (group.slot + 1) * self._slot
        try:
            if os.fstat(self._fd).st_size < end:
                os.ftruncate(self._fd, end)
            for number in group.blocks:
                # Memory that a mapping lacks is a SIGBUS; this fails before.
                size = max(1, self._block(number).spec.size)
                os.posix_fallocate(self._fd, self._place(group, number), size)
        except OSError:
            return False
        if group.blocks:
            with self._mapping() as address:
                for number in group.blocks:
                    live, where = self._block(number).live.run, self._block(number).bytes
                    where.unload(address + self._place(group, number), live.address, live.size)
        return True

    def _fetched(self, group: Group, number: int) -> Copy:
        """Return a block of a result in the file, and hold it if there is room for that."""
        block = self._block(number)
        held = block.another()
        with self._mapping() as address:
            block.put(held, address + self._place(group, number))
        total = sum(other.run.size for other in self._held.values())
        if total + block.spec.size <= _IN_FILE_BYTES:
            self._held[group.number, number] = held
        return held

    @contextlib.contextmanager
    def _mapping(self) -> Iterator[int]:
        """Yield the address of the file in here."""
        with mmap.mmap(self._fd, 0) as mapped:
            first = ctypes.c_char.from_buffer(mapped)
            try:
                yield ctypes.addressof(first)
            finally:
                del first  # the mapping cannot be closed under it

    def _place(self, group: Group, number: int) -> int:
        return group.slot * self._slot + self._offsets[number]

    def _block(self, number: int) -> Block:
        return self._arguments.blocks[number]
