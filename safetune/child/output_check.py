"""What a config's launch has done to the arguments, and whether other configs do the same.

The first launch starts from the caller's bits. Its result is compared with those of other configs,
one for each group of configs that agree; these are kept in a file of results, which outlives a
child. A second launch starts with the float outputs overwritten: it shows whether the result of a
config depends on what the outputs held before.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from safetune.child import compare
from safetune.child.arguments import Arguments
from safetune.inputs.spans import aligned, view_of
from safetune.isolation.protocol import MAX_GROUPS, Group, OutputReport

#: Results up to this size in bytes stay on the device between configs.
_ON_DEVICE_BYTES = 1 << 26
#: A config whose launch takes longer is not launched again with its outputs overwritten.
_SLOW_S = 2.0


class OutOfBounds(Exception):
    """A launch wrote outside the storages of its arguments."""


class WrongResult(Exception):
    """A launch left another result than the user's reference."""


class OutputCheck:
    """Checks the outputs of one call's launches.

    Args:
        names: of the arguments, for each tensor of the call (see `call.owners_of`).
        scratch: names of arguments that are not compared.
        atomics: whether the kernel has atomic operations: its results may vary from run to run,
            and come in any order.
        fd: the file of results, which grows as results are kept in it.
    """

    def __init__(
        self,
        arguments: Arguments,
        names: Sequence[str],
        scratch: Sequence[str],
        atomics: bool,
        fd: int,
    ) -> None:
        self._arguments = arguments
        self._names = names
        self._atomics = atomics
        self._fd = fd
        self._expected: dict[int, torch.Tensor] = {}
        self._on_device: dict[tuple[int, int], torch.Tensor] = {}
        self._written: list[int] = []
        sizes = [aligned(block.spec.size) for block in arguments.blocks]
        *self._offsets, self._slot = accumulate(sizes, initial=0)
        seen = set()
        self._compared = []
        for index, view in enumerate(arguments.views):
            owners = set(filter(None, names[index].split(", ")))
            if owners - set(scratch) and view not in seen:
                seen.add(view)
                self._compared.append(index)

    def expect(self, expected: Mapping[str, Any]) -> None:
        """Compare every later launch with these values, by argument name.

        Raises:
            ValueError: a name is not a tensor argument's, or a shape is not its tensor's.
        """
        for name, value in expected.items():
            owners = [index for index, names in enumerate(self._names) if name in names.split(", ")]
            if not owners:
                raise ValueError(f"reference= returned {name!r}, which is not a tensor argument")
            index = owners[0]
            mine = self._arguments.tensors[index]
            theirs = torch.as_tensor(value).detach().to(mine.dtype)
            if theirs.shape != mine.shape:
                shapes = f"{tuple(theirs.shape)} for {name}, whose shape is {tuple(mine.shape)}"
                raise ValueError(f"reference= returned a tensor of shape {shapes}")
            self._expected[index] = theirs.clone()

    def examine(self, launch: Callable[[], object], groups: Sequence[Group]) -> OutputReport:
        """Launch a config a few times from the caller's bits and report what it has written.

        Args:
            launch: returns when the device has finished.
            groups: those seen so far, the largest first.

        Raises:
            OutOfBounds, WrongResult, and what `launch` raises.
        """
        start = time.perf_counter()
        self._run(launch)
        slow = time.perf_counter() - start > _SLOW_S
        if not self._written and not slow:
            self._probe(launch)
            self._run(launch)
        unowned = tuple(self._names_in(block) for block in self._arguments.unowned())
        self._check_expected()
        group, new_group, difference = self._find(groups), None, ""
        if group is None:
            difference = self._difference(groups[0]) if groups else ""
            new_group = self._new_group(launch, len(groups))
            if new_group is not None and any(new_group.spread):
                group = self._find(groups, new_group.spread)
        same = group or new_group
        depends = False
        masks: tuple[int, ...] = ()
        if same is not None and not slow:
            depends, masks = self._with_poison(launch, same)
        return OutputReport(
            group=None if same is None else same.number,
            new_group=new_group if group is None else None,
            depends_on_prior_output=depends,
            written_masks=masks,
            unowned=unowned,
            difference=difference if group is None else "",
        )

    def check_guards(self) -> None:
        """Raise `OutOfBounds` if a launch has written beside a storage."""
        breached = self._arguments.breached()
        if breached:
            locations = [
                f"{side} the storage of {self._names_in(block)}" for block, side in breached
            ]
            raise OutOfBounds(f"it wrote {' and '.join(locations)}")

    def _run(self, launch: Callable[[], object]) -> None:
        self._arguments.restore()
        launch()
        self.check_guards()
        self._written = self._arguments.find_written()

    def _probe(self, launch: Callable[[], object]) -> None:
        """Find the outputs that already hold the result, as after an earlier call."""
        self._arguments.restore()
        probes = [] if self._atomics else self._arguments.plant_probes(self._compared)
        launch()
        self.check_guards()
        self._arguments.collect_probes(probes)

    def _with_poison(
        self, launch: Callable[[], object], group: Group
    ) -> tuple[bool, tuple[int, ...]]:
        """Overwrite the float outputs and launch: return whether that changes the result, and a
        hash of the elements written.

        Not with atomics, which may rightly add to zeros of the caller's.
        """
        self._arguments.restore()
        if self._atomics or not self._arguments.poison(self._compared):
            return False, ()
        launch()
        self.check_guards()
        self._written = self._arguments.find_written()
        return self._find([group]) is None, self._arguments.written_masks(self._compared)

    def _check_expected(self) -> None:
        for index, expected in self._expected.items():
            mine = self._arguments.tensors[index]
            scale = compare.Scale(rms=compare.rms(expected))
            if not compare.agree(mine, expected, scale):
                raise WrongResult(
                    f"{self._names[index]} differs from the reference by up to "
                    f"{compare.spread(mine, expected):.3g}"
                )

    def _find(self, groups: Sequence[Group], spread: Sequence[float] = ()) -> Group | None:
        """Return the first group whose result is in the live arguments."""
        for group in groups:
            own = spread or [0.0] * len(self._compared)
            pairs = zip(group.rms, map(max, group.spread, own), strict=True)
            scales = [compare.Scale(*pair) for pair in pairs]
            if all(
                compare.agree(mine, theirs, scales[position], any_order=self._atomics)
                for position, mine, theirs in self._pairs(group)
            ):
                return group
        return None

    def _difference(self, group: Group) -> str:
        worst = {
            self._names[self._compared[position]]: compare.spread(mine, theirs)
            for position, mine, theirs in self._pairs(group)
        }
        name = max(worst, key=lambda name: worst[name], default="")
        return f"{name} differs by up to {worst[name]:.3g}" if name else ""

    def _new_group(self, launch: Callable[[], object], number: int) -> Group | None:
        """Keep the live result as that of a new group; with atomics, launch again to see how well
        it repeats.
        """
        if number >= MAX_GROUPS or not self._keep(number):
            return None
        blocks, nothing = tuple(self._written), (0.0,) * len(self._compared)
        sizes = {position: mine for position, mine, _ in self._pairs(Group(number, blocks, (), ()))}
        rms = [
            compare.rms(sizes[position]) if position in sizes else 0.0
            for position in range(len(nothing))
        ]
        group = Group(number, blocks, tuple(rms), nothing)
        if not self._atomics:
            return group
        self._run(launch)
        spread = list(nothing)
        for position, mine, theirs in self._pairs(group):
            spread[position] = compare.spread(mine, theirs)
        return replace(group, spread=tuple(spread))

    def _pairs(self, group: Group) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield (index among the compared tensors, the live tensor, the group's)."""
        blocks = {*self._written, *group.blocks}
        for position, index in enumerate(self._compared):
            view = self._arguments.views[index]
            if view.block in blocks:
                theirs = view_of(self._bits(group, view.block), view)
                yield position, self._arguments.tensors[index], theirs

    def _bits(self, group: Group, number: int) -> torch.Tensor:
        """Return one block of a group's result: kept in the file, or else the caller's bits."""
        if (group.number, number) in self._on_device:
            return self._on_device[group.number, number]
        block = self._arguments.blocks[number]
        if number not in group.blocks:
            return block.pristine()
        with mmap.mmap(self._fd, 0, flags=mmap.MAP_PRIVATE) as memory:
            kept = torch.frombuffer(
                memory,
                dtype=torch.uint8,
                count=block.spec.size,
                offset=self._offset(group.number, number),
            )
            bits = block.another().copy_(kept)
            del kept  # the mapping cannot be closed under a tensor
        if (
            sum(kept.numel() for kept in self._on_device.values()) + bits.numel()
            <= _ON_DEVICE_BYTES
        ):
            self._on_device[group.number, number] = bits
        return bits

    def _keep(self, number: int) -> bool:
        """Copy the written blocks into the file; False where it cannot grow."""
        end = (number + 1) * self._slot
        try:
            if os.fstat(self._fd).st_size < end:
                os.ftruncate(self._fd, end)
            for block in self._written:
                # Memory that a mapping lacks is a SIGBUS; this fails before.
                size = max(1, self._arguments.blocks[block].spec.size)
                os.posix_fallocate(self._fd, self._offset(number, block), size)
        except OSError:
            return False
        with mmap.mmap(self._fd, 0) as memory:
            for number_of_block in self._written:
                live = self._arguments.blocks[number_of_block].live
                if live.numel():
                    torch.frombuffer(
                        memory,
                        dtype=torch.uint8,
                        count=live.numel(),
                        offset=self._offset(number, number_of_block),
                    ).copy_(live)
        return True

    def _offset(self, group: int, block: int) -> int:
        return group * self._slot + self._offsets[block]

    def _names_in(self, block: int) -> str:
        views = enumerate(self._arguments.views)
        names = dict.fromkeys(self._names[i] for i, view in views if view.block == block)
        return "/".join(filter(None, names)) or "a tensor that a hook holds"
