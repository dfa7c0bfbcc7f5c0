"""What a config's launch has done to the arguments, and whether other configs do the same.

The first launch starts from the caller's bits. Its result is compared with those of other configs,
one for each group of configs that agree; these are kept in a file of results, which outlives a
child. A last launch starts with the outputs overwritten: it shows whether the result of a config
depends on what the outputs held before, and how many elements it writes.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from safetune.child import compare
from safetune.child.arguments import Arguments
from safetune.errors import InvalidSetting
from safetune.inputs.spans import FLOATS, TensorSpec, aligned, view_of
from safetune.outcome import Effects, Group, GroupDifference, OutputReport

#: Results up to this size in bytes stay on the device between configs.
_ON_DEVICE_BYTES = 1 << 26
#: A config whose launch takes longer is launched once.
_SLOW_S = 2.0
#: The file of results holds at least this many, and more while they are within this size in bytes.
MIN_KEPT = 8
_KEPT_BYTES = 1 << 28


class OutOfBounds(Exception):
    """A launch wrote outside the storages of its arguments."""


class WrongResult(Exception):
    """A launch left another result than the user's reference."""


class OutputCheck:
    """Checks the outputs of one call's launches.

    Args:
        names: of the arguments, for each tensor of the call (see `call.owners_of`).
        scratch: names of arguments that are not compared.
        effects: what the kernel's text says of its writes.
        fd: the file of results, which grows as results are kept in it.
        kept_bytes: up to this size it holds more results than `MIN_KEPT`.
    """

    def __init__(
        self,
        arguments: Arguments,
        names: Sequence[str],
        scratch: Sequence[str],
        effects: Effects,
        fd: int,
        kept_bytes: int = _KEPT_BYTES,
    ) -> None:
        self._kept_bytes = kept_bytes
        self._arguments = arguments
        self._names = names
        self._effects = effects
        self._fd = fd
        self._expected: dict[int, torch.Tensor] = {}
        self._on_device: dict[tuple[int, int], torch.Tensor] = {}
        self._input_sizes: dict[int, float] = {}
        self._written: list[int] = []
        self._poisoned: list[int] = []
        self._reset: list[int] = []
        sizes = [aligned(block.spec.size) for block in arguments.blocks]
        *self._offsets, self._slot = accumulate(sizes, initial=0)
        first: dict[TensorSpec, int] = {}
        for index, view in enumerate(arguments.views):
            if set(filter(None, names[index].split(", "))) - set(scratch):
                first.setdefault(view, index)
        self._compared = list(first.values())
        self._overwritable = [index for index in self._compared if self._may_overwrite(index)]

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

    def examine(
        self, launch: Callable[[], object], groups: Sequence[Group], config: int
    ) -> OutputReport:
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
        group, differences = self._find(groups)
        difference = self._largest_difference(groups[0]) if differences else ""
        new_group = self._keep(config, groups) if group is None else None
        same = group or new_group
        number = None if same is None else same.number
        report = OutputReport(number, new_group, differences, (), (), (), unowned, difference)
        if same is None or slow:
            return report
        mine = []
        if new_group is not None and differences:
            mine = [compare.sample(self._arguments.tensors[index]) for index in self._compared]
        if self._effects.atomics:
            self._run(launch)
            report = replace(report, spread=self._difference(same).excess)
        stale, written, writes = self._with_poison(launch, same)
        report = replace(report, stale=stale, written=written)
        if new_group is None:
            return report
        known = {group.number: group for group in groups}
        common = [self._in_common(known[d.group], mine, writes) for d in differences]
        return replace(
            report,
            new_group=replace(new_group, writes=writes),
            differences=tuple(map(_with_common, differences, common)),
        )

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
        probes = self._arguments.plant_probes(self._overwritable)
        launch()
        self.check_guards()
        self._arguments.collect_probes(probes)

    def _may_overwrite(self, index: int) -> bool:
        """Whether a launch may find other values in this tensor than the caller's.

        Through a parameter that is only stored to, nothing is read. Else an integer may be an
        index, and a kernel with atomics may rightly add to zeros of the caller's.
        """
        view = self._arguments.views[index]
        if 0 in view.stride or self._arguments.tensors[index].itemsize > 8:
            return False
        is_float = view.dtype in FLOATS and not self._effects.atomics
        return is_float or self._is_only_stored(index)

    def _is_only_stored(self, index: int) -> bool:
        view, views = self._arguments.views[index], self._arguments.views
        owners = [
            n for n, other in zip(self._names, views, strict=True) if other.block == view.block
        ]
        names = {name for each in owners for name in each.split(", ")}
        return names <= set(self._effects.only_stored)

    def _with_poison(
        self, launch: Callable[[], object], group: Group
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
        """Overwrite the outputs and launch: return the number of elements of each tensor that this
        changes, the number of those that are written, and which of a sample are.
        """
        self._arguments.restore()
        written = {self._arguments.views[index].block for index in self._overwritable}
        written.intersection_update(self._arguments.find_written())
        poisoned = [
            index
            for index in self._overwritable
            if self._arguments.views[index].block in written or self._is_only_stored(index)
        ]
        self._arguments.poison(poisoned)
        if not poisoned:
            return (), (), ()
        self._poisoned, self._reset = poisoned, []
        launch()
        self._poisoned = []
        self.check_guards()
        self._written = self._arguments.find_written()
        known = [i for i in poisoned if i not in self._reset or self._is_only_stored(i)]
        masks = {index: self._arguments.overwritten(index) for index in known}
        seen = poisoned if self._effects.atomics else self._compared
        stale = self._difference(group, [i for i in seen if i not in self._reset]).elements
        return (
            stale,
            tuple(int(masks[i].sum()) if i in masks else 0 for i in self._compared),
            tuple(_digits(compare.sample(masks[i])) if i in masks else "" for i in self._compared),
        )

    def after_hooks(self) -> None:
        """Take down which overwritten tensors the hooks before a launch have reset, and overwrite
        those that the kernel does not read again: what it writes is to be counted, too.
        """
        self._reset = [i for i in self._poisoned if bool(self._arguments.overwritten(i).any())]
        self._arguments.poison(index for index in self._reset if self._is_only_stored(index))

    def _in_common(
        self, group: Group, mine: Sequence[torch.Tensor], writes: Sequence[str]
    ) -> tuple[int, ...]:
        """Return, for each tensor, how many sampled elements differ that this config and the first
        of a group both write.
        """
        found = dict.fromkeys(self._compared, 0)
        samples = zip(self._compared, mine, writes, group.writes, strict=False)
        known = {index: (ours, digits) for index, ours, *digits in samples}
        for index, _, tensor in self._pairs(group):
            if index in known and all(known[index][1]):
                ours, digits = known[index]
                masks = [torch.frombuffer(bytearray.fromhex(d), dtype=torch.uint8) for d in digits]
                both = (masks[0] & masks[1]).bool().to(ours.device)
                theirs = compare.sample(tensor).to(ours.device)
                noise = self._rounding(index)
                found[index] = compare.difference(ours[both], theirs[both], noise).elements
        return tuple(found.values())

    def _check_expected(self) -> None:
        for index, expected in self._expected.items():
            mine = self._arguments.tensors[index]
            if compare.difference(mine, expected, self._rounding(index)).elements:
                raise WrongResult(
                    f"{self._names[index]} differs from the reference by up to "
                    f"{compare.spread(mine, expected):.3g}"
                )

    def _find(self, groups: Sequence[Group]) -> tuple[Group | None, tuple[GroupDifference, ...]]:
        """Return the first group whose result is in the live arguments, and how others differ."""
        differences: list[GroupDifference] = []
        for group in groups:
            difference = self._difference(group)
            if not any(difference.elements):
                return group, tuple(differences)
            differences.append(difference)
        return None, tuple(differences)

    def _difference(self, group: Group, seen: Iterable[int] | None = None) -> GroupDifference:
        """Return how the live result differs from a group's, in some tensors or all compared."""
        found = dict.fromkeys(self._compared, compare.Difference())
        for index, mine, theirs in self._pairs(group):
            if seen is None or index in seen:
                noise, any_order = self._rounding(index), self._effects.any_order
                found[index] = compare.difference(mine, theirs, noise, any_order)
        excess, elements = zip(*found.values(), strict=True) if found else ((), ())
        return GroupDifference(group.number, excess, elements)

    def _rounding(self, index: int) -> float:
        """Return the difference that rounding alone explains in a tensor, see `compare`."""
        arguments, inputs = self._arguments, dict[float, int]()
        for position, view in enumerate(arguments.views):
            if view.dtype in FLOATS and not arguments.blocks[view.block].written:
                if position not in self._input_sizes:
                    size = compare.typical_size(arguments.tensors[position])
                    self._input_sizes[position] = size
                size = self._input_sizes[position]
                inputs[size] = inputs.get(size, 0) + arguments.tensors[position].numel()
        tensor = arguments.tensors[index]
        return compare.rounding(inputs, tensor.numel(), tensor.dtype)

    def _largest_difference(self, group: Group) -> str:
        worst = {
            self._names[index]: compare.spread(mine, theirs)
            for index, mine, theirs in self._pairs(group)
        }
        name = max(worst, key=lambda name: worst[name], default="")
        return f"{name} differs by up to {worst[name]:.3g}" if name else ""

    def _pairs(self, group: Group) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield (index, the live tensor, the group's) of the compared tensors."""
        blocks = {*self._written, *group.blocks}
        for index in self._compared:
            view = self._arguments.views[index]
            if view.block in blocks:
                theirs = view_of(self._bits(group, view.block), view)
                yield index, self._arguments.tensors[index], theirs

    def _bits(self, group: Group, number: int) -> torch.Tensor:
        """Return one block of a group's result: kept in the file, or else the caller's bits."""
        if (group.number, number) in self._on_device:
            return self._on_device[group.number, number]
        block = self._arguments.blocks[number]
        if number not in group.blocks:
            return block.pristine()
        with mmap.mmap(self._fd, 0, flags=mmap.MAP_PRIVATE) as memory:
            kept = self._in_file(memory, group.slot, number)
            bits = block.another().copy_(kept)
            del kept  # the mapping cannot be closed under a tensor
        on_device = sum(kept.numel() for kept in self._on_device.values())
        if on_device + bits.numel() <= _ON_DEVICE_BYTES:
            self._on_device[group.number, number] = bits
        return bits

    def _keep(self, config: int, groups: Sequence[Group]) -> Group | None:
        """Keep the live result as that of a new group; None where the file cannot hold it."""
        taken = {group.slot for group in groups}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        if slot >= max(MIN_KEPT, self._kept_bytes // max(1, self._slot)):
            return None
        end = (slot + 1) * self._slot
        try:
            if os.fstat(self._fd).st_size < end:
                os.ftruncate(self._fd, end)
            for number in self._written:
                # Memory that a mapping lacks is a SIGBUS; this fails before.
                size = max(1, self._arguments.blocks[number].spec.size)
                os.posix_fallocate(self._fd, slot * self._slot + self._offsets[number], size)
        except OSError:
            return None
        group = Group(config, slot, tuple(self._written))
        self._forget(config)
        if not self._written:
            return group
        with mmap.mmap(self._fd, 0) as memory:
            for number in self._written:
                live = self._arguments.blocks[number].live
                if live.numel():
                    self._in_file(memory, slot, number).copy_(live)
        return group

    def _forget(self, number: int) -> None:
        """Drop what is on the device of an earlier group of this number."""
        for key in [key for key in self._on_device if key[0] == number]:
            del self._on_device[key]

    def _in_file(self, memory: mmap.mmap, slot: int, number: int) -> torch.Tensor:
        size = self._arguments.blocks[number].spec.size
        offset = slot * self._slot + self._offsets[number]
        return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)

    def _names_in(self, block: int) -> str:
        views = enumerate(self._arguments.views)
        names = dict.fromkeys(self._names[i] for i, view in views if view.block == block)
        return "/".join(filter(None, names)) or "a tensor that a hook holds"


def _with_common(difference: GroupDifference, common: tuple[int, ...]) -> GroupDifference:
    return replace(difference, common=common)


def _digits(mask: torch.Tensor) -> str:
    return bytes(mask.bool().to(torch.uint8).tolist()).hex()
