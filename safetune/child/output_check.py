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
from safetune.errors import InvalidSetting
from safetune.inputs.spans import TensorSpec, aligned, view_of
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
        first: dict[TensorSpec, int] = {}
        for index, view in enumerate(arguments.views):
            if set(filter(None, names[index].split(", "))) - set(scratch):
                first.setdefault(view, index)
        self._compared = list(first.values())

    def expect(self, expected: Mapping[str, Any], what: str) -> None:
        """Compare every later launch with these values, by argument name.

        Raises `InvalidSetting`, which says of `what`, where one is not a value of its argument.
        """
        for name, value in expected.items():
            owners = enumerate(self._names)
            index = next((i for i, names in owners if name in names.split(", ")), None)
            if index is None:
                raise InvalidSetting(f"{what} returned {name!r}, which is not a tensor argument")
            mine = self._arguments.tensors[index]
            try:
                theirs = torch.as_tensor(value).detach().to(mine.dtype)
            except (TypeError, ValueError) as error:
                kind = type(value).__name__
                raise InvalidSetting(f"{what} returned a {kind} for {name}: {error}") from error
            if theirs.shape != mine.shape:
                shapes = f"{tuple(theirs.shape)} for {name}, whose shape is {tuple(mine.shape)}"
                raise InvalidSetting(f"{what} returned a tensor of shape {shapes}")
            self._expected[index] = theirs.clone()

    def examine(self, launch: Callable[[], object], groups: Sequence[Group]) -> OutputReport:
        """Launch a config a few times from the caller's bits and report what it has written.

        `launch` returns when the device has finished; the largest of `groups` comes first. Raises
        `OutOfBounds`, `WrongResult`, and what `launch` raises.
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
        report = OutputReport(None, unowned=unowned, difference=difference)
        if group is not None:
            report = OutputReport(group.number, unowned=unowned)
        elif new_group is not None:
            report = replace(report, group=new_group.number, new_group=new_group)
        same = group or new_group
        if same is None or slow:
            return report
        depends, masks = self._with_poison(launch, same)
        return replace(report, depends_on_prior_output=depends, written_masks=masks)

    def check_guards(self) -> None:
        """Raise `OutOfBounds` if a launch has written beside a storage."""
        locations = [
            f"{side} the storage of {self._names_in(block)}"
            for block, side in self._arguments.breached()
        ]
        if locations:
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
        group = Group(number, tuple(self._written), (), ())
        rms, spread = [0.0] * len(self._compared), [0.0] * len(self._compared)
        for position, mine, _ in self._pairs(group):
            rms[position] = compare.rms(mine)
        if self._atomics:
            self._run(launch)
            for position, mine, theirs in self._pairs(group):
                spread[position] = compare.spread(mine, theirs)
        return replace(group, rms=tuple(rms), spread=tuple(spread))

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
            kept = self._in_file(memory, group.number, number)
            bits = block.another().copy_(kept)
            del kept  # the mapping cannot be closed under a tensor
        on_device = sum(kept.numel() for kept in self._on_device.values())
        if on_device + bits.numel() <= _ON_DEVICE_BYTES:
            self._on_device[group.number, number] = bits
        return bits

    def _keep(self, group: int) -> bool:
        """Copy the written blocks into the file; False where it cannot grow."""
        end = max(1, (group + 1) * self._slot)  # an empty file cannot be mapped
        try:
            if os.fstat(self._fd).st_size < end:
                os.ftruncate(self._fd, end)
            for number in self._written:
                # Memory that a mapping lacks is a SIGBUS; this fails before.
                size = max(1, self._arguments.blocks[number].spec.size)
                os.posix_fallocate(self._fd, group * self._slot + self._offsets[number], size)
        except OSError:
            return False
        with mmap.mmap(self._fd, 0) as memory:
            for number in self._written:
                live = self._arguments.blocks[number].live
                if live.numel():
                    self._in_file(memory, group, number).copy_(live)
        return True

    def _in_file(self, memory: mmap.mmap, group: int, number: int) -> torch.Tensor:
        size = self._arguments.blocks[number].spec.size
        offset = group * self._slot + self._offsets[number]
        return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)

    def _names_in(self, block: int) -> str:
        views = enumerate(self._arguments.views)
        names = dict.fromkeys(self._names[i] for i, view in views if view.block == block)
        return "/".join(filter(None, names)) or "a tensor that a hook holds"
