"""The result of one config per group of agreeing configs, to compare others with.

A child holds the first ones, and the last one that was needed. Any other, such as that of a child
that has died, is made again: by a launch of the group's config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from safetune.child.arguments import Arguments, Copy
from safetune.outcome import Group

#: Up to so many results are held, and more while they are within so many bytes. The first of them
#: stay; the last one makes room for the next.
LEAST_HELD, HELD_BYTES = 8, 1 << 28


class Results:
    """The results of groups.

    Args:
        relaunch: runs a config again, by its number.
    """

    def __init__(self, arguments: Arguments, relaunch: Callable[[int], object]) -> None:
        self._arguments = arguments
        self._relaunch = relaunch
        #: By group the copies of its blocks, by their numbers.
        self._held: dict[int, dict[int, Copy]] = {}
        size = sum(block.spec.size for block in arguments.blocks)
        self._most_held = max(LEAST_HELD, HELD_BYTES // max(1, size))

    def keep(self, config: int, blocks: Sequence[int], written: tuple[int, ...]) -> Group:
        """Keep the live result for a new group.

        Launches have written to `blocks`; for `written` see `OutputReport`.
        """
        sums = self._arguments.sums
        written_to = {number: self._arguments.blocks[number] for number in blocks}
        self._held.pop(config, None)  # of an earlier group
        size = sum(block.spec.size for block in written_to.values())
        if all(block.bytes.has_room(size) for block in written_to.values()):
            self._hold(config, {number: block.save() for number, block in written_to.items()})
        return Group(config, tuple(blocks), tuple(sums[number] for number in blocks), written)

    def holds(self, group: Group) -> bool:
        """Whether a group's result can be read without another launch."""
        return group.number in self._held or not group.blocks

    def same(self, group: Group, number: int) -> bool:
        """Whether a block is bitwise equal to a group's result."""
        pristine = self._arguments.pristine_sums[number]
        theirs = dict(zip(group.blocks, group.sums, strict=True)).get(number, pristine)
        return self._arguments.sums[number] == theirs

    def bits(self, group: Group, number: int) -> Copy:
        """Return one block of a group's result."""
        if number not in group.blocks:
            return self._arguments.blocks[number].pristine()
        if group.number not in self._held:
            self._hold(group.number, self._made_again(group))
        return self._held[group.number][number]

    def _hold(self, group: int, copies: dict[int, Copy]) -> None:
        if len(self._held) == self._most_held:
            self._held.popitem()
        self._held[group] = copies

    def _made_again(self, group: Group) -> dict[int, Copy]:
        """Launch a group's config once more; the live result stays what it is."""
        with self._arguments.set_aside(group.blocks) as found:
            self._relaunch(group.number)
        return found
