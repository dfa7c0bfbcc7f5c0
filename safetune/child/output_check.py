"""What a config's launch has done to the arguments, and whether other configs do the same.

The first launch starts from the caller's bits. Its result is compared with those of other configs,
one for each group of configs that agree (`results`). Where every byte is the same, the checksums
say so, and nothing is compared. A last launch starts with the outputs overwritten: it shows whether
the result of a config depends on what the outputs held before, and how many elements it writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from safetune.child import memory, stand_ins, tolerance
from safetune.child.arguments import Arguments, Copy
from safetune.child.results import Results
from safetune.child.tolerance import Difference
from safetune.errors import InvalidSetting
from safetune.inputs.spans import FLOATS, TensorSpec, itemsize
from safetune.isolation.device_bytes import NATIVE_FLOATS
from safetune.outcome import Effects, Group, GroupDifference, OutputReport

#: A config whose first launch takes longer is launched once, whether it is slow or was held up.
_SLOW_S = 2.0
#: More results than a few are kept while they are within this size in bytes.
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
        fd, relaunch, kept_bytes: see `Results`.
        slow_s: seconds; a config whose first launch takes longer is launched once.
    """

    def __init__(
        self,
        arguments: Arguments,
        names: Sequence[str],
        scratch: Sequence[str],
        effects: Effects,
        fd: int,
        relaunch: Callable[[int], object],
        kept_bytes: int = _KEPT_BYTES,
        slow_s: float = _SLOW_S,
    ) -> None:
        self._arguments = arguments
        self._names = names
        self._effects = effects
        self._slow_s = slow_s
        self._results = Results(arguments, fd, kept_bytes, relaunch)
        self._expected: dict[int, Any] = {}
        self._input_sizes: dict[int, float] = {}
        self._samples: dict[tuple[int, int], list[int]] = {}
        self._written: list[int] = []
        self._poisoned: list[int] = []
        self._reset: list[int] = []
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
        import torch

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
        slow = time.perf_counter() - start > self._slow_s
        if not self._written and not slow:
            self._probe(launch)
            self._run(launch)
        self._check_expected()
        group, differences = self._find(groups)
        difference = self._largest_difference(groups[0]) if differences else ""
        new_group = self._results.keep(config, groups, self._written) if group is None else None
        if new_group is not None:
            self._note_sample(new_group)
        same = group or new_group
        number = None if same is None else same.number
        mine: list[Any] = []
        if new_group is not None and differences:
            mine = [_compare().sample(self._arguments.tensors[i]) for i in self._compared]
        unowned = tuple(self._names_in(block) for block in self._arguments.unowned())
        report = OutputReport(number, new_group, differences, (), (), (), unowned, difference)
        if same is None or slow:
            return report
        if self._effects.atomics:
            self._run(launch)
            report = replace(report, spread=self._difference(same).excess)
        stale, written, writes = self._with_poison(launch, same, new_group is not None)
        report = replace(report, stale=stale, written=written)
        if new_group is None:
            return report
        known = {group.number: group for group in groups}
        differences = tuple(
            replace(each, common=self._in_common(known[each.group], mine, writes))
            for each in differences
        )
        return replace(report, new_group=replace(new_group, writes=writes), differences=differences)

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
        if 0 in view.stride or itemsize(view.dtype) > 8:
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
        self, launch: Callable[[], object], group: Group, is_new: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
        """Overwrite the outputs and launch: return for each tensor whether this changes it, the
        number of elements that are written and, of a new group, which of a sample are.
        """
        arguments = self._arguments
        written = {arguments.views[index].block for index in self._overwritable}
        written.intersection_update(self._written)
        poisoned = [
            index
            for index in self._overwritable
            if arguments.views[index].block in written or self._is_only_stored(index)
        ]
        arguments.restore(but=poisoned)
        arguments.poison(poisoned)
        if not poisoned:
            return (), (), ()
        self._poisoned, self._reset = poisoned, []
        launch()
        self._poisoned = []
        self.check_guards()
        self._written = self._arguments.find_written()
        known = [i for i in poisoned if i not in self._reset or self._is_only_stored(i)]
        counts = self._arguments.overwritten(known)
        sampled = known if is_new else ()
        samples = {index: self._arguments.sample_overwritten(index) for index in sampled}
        seen = poisoned if self._effects.atomics else self._compared
        stale = self._changed(group, [i for i in seen if i not in self._reset])
        return (
            stale,
            tuple(counts.get(index, 0) for index in self._compared),
            tuple(samples.get(index, "") for index in self._compared),
        )

    def after_hooks(self) -> None:
        """Take down which overwritten tensors the hooks before a launch have reset, and overwrite
        those that the kernel does not read again: what it writes is to be counted, too.
        """
        self._reset = [i for i, n in self._arguments.overwritten(self._poisoned).items() if n]
        self._arguments.poison(index for index in self._reset if self._is_only_stored(index))

    def _in_common(
        self, group: Group, mine: Sequence[Any], writes: Sequence[str]
    ) -> tuple[int, ...]:
        """Return, for each tensor, how many sampled elements differ that this config and the first
        of a group both write.
        """
        import torch

        found = dict.fromkeys(self._compared, 0)
        samples = zip(self._compared, mine, writes, group.writes, strict=False)
        known = {index: (ours, digits) for index, ours, *digits in samples}
        for index, theirs in self._others(group):
            if index in known and all(known[index][1]):
                ours, digits = known[index]
                masks = [torch.frombuffer(bytearray.fromhex(d), dtype=torch.uint8) for d in digits]
                both = (masks[0] & masks[1]).bool().to(ours.device)
                other = _compare().sample(self._arguments.tensor(theirs, index)).to(ours.device)
                noise = self._rounding(index)
                found[index] = _compare().difference(ours[both], other[both], noise).elements
        return tuple(found.values())

    def _check_expected(self) -> None:
        for index, expected in self._expected.items():
            mine = self._arguments.tensors[index]
            if _compare().difference(mine, expected, self._rounding(index)).elements:
                raise WrongResult(
                    f"{self._names[index]} differs from the reference by up to "
                    f"{_compare().spread(mine, expected):.3g}"
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
        found = dict.fromkeys(self._compared, Difference())
        for index, theirs in self._others(group, seen):
            found[index] = self._tensor_difference(index, theirs)
        excess, elements = zip(*found.values(), strict=True) if found else ((), ())
        return GroupDifference(group.number, excess, elements)

    def _changed(self, group: Group, seen: Iterable[int]) -> tuple[int, ...]:
        """Return for each tensor whether the live result differs from a group's: more than 0."""
        found = dict.fromkeys(self._compared, 0)
        apart = [index for index in self._unlike(group, seen) if self._is_apart(group, index)]
        found.update(dict.fromkeys(apart, 1))
        for index, theirs in self._others(group, [i for i in seen if i not in apart]):
            close = None if self._effects.any_order else self._are_close(index, theirs)
            if close is None:
                found[index] = self._tensor_difference(index, theirs).elements
            else:
                found[index] = int(not close)
        return tuple(found.values())

    def _is_apart(self, group: Group, index: int) -> bool:
        """Whether a sample shows that a live tensor differs from a group's."""
        theirs = self._samples.get((group.number, index))
        if theirs is None or self._effects.any_order:
            return False
        where, dtype = self._arguments.where(index), self._arguments.views[index].dtype
        view, noise = self._arguments.elements(index), self._rounding(index)
        return tolerance.are_apart(where, view, theirs, dtype, noise)

    def _are_close(self, index: int, theirs: Copy) -> bool | None:
        """Whether a live tensor agrees with a group's; None where only torch can tell."""
        where = self._arguments.where(index)
        if isinstance(where, memory.TorchBytes):
            return None
        pair = self._arguments.elements(index), self._arguments.elements(index, theirs)
        dtype = self._arguments.views[index].dtype
        return tolerance.are_close(where, *pair, dtype, self._rounding(index))

    def _note_sample(self, group: Group) -> None:
        """Keep a sample of the live result of a new group."""
        for index in self._compared:
            where, view = self._arguments.where(index), self._arguments.elements(index)
            native = self._arguments.views[index].dtype in NATIVE_FLOATS
            if native and not isinstance(where, memory.TorchBytes):
                self._samples[group.number, index] = tolerance.sample(where, view)

    def _tensor_difference(self, index: int, theirs: Copy) -> Difference:
        """Return how a live tensor differs from one over a copy of its block."""
        if self._are_close(index, theirs):
            return Difference()
        compare = _compare()  # before a tensor is made, which needs torch too
        mine, other = self._arguments.tensors[index], self._arguments.tensor(theirs, index)
        return compare.difference(mine, other, self._rounding(index), self._effects.any_order)

    def _rounding(self, index: int) -> float:
        """Return the difference that rounding alone explains in a tensor, see `tolerance`."""
        arguments, inputs = self._arguments, dict[float, int]()
        for position, view in enumerate(arguments.views):
            if view.dtype in FLOATS and not arguments.blocks[view.block].written:
                if position not in self._input_sizes:
                    self._input_sizes[position] = self._typical_size(position)
                size = self._input_sizes[position]
                inputs[size] = inputs.get(size, 0) + math.prod(view.shape)
        view = arguments.views[index]
        return tolerance.rounding(inputs, math.prod(view.shape), view.dtype)

    def _typical_size(self, index: int) -> float:
        where, dtype = self._arguments.where(index), self._arguments.views[index].dtype
        if dtype in NATIVE_FLOATS:
            return tolerance.typical_size(where, self._arguments.elements(index), dtype)
        return _compare().typical_size(self._arguments.tensors[index])

    def _largest_difference(self, group: Group) -> str:
        compare = _compare()  # before a tensor is made, which needs torch too
        tensors, over = self._arguments.tensors, self._arguments.tensor
        worst = {
            self._names[index]: compare.spread(tensors[index], over(theirs, index))
            for index, theirs in self._others(group)
        }
        name = max(worst, key=lambda name: worst[name], default="")
        return f"{name} differs by up to {worst[name]:.3g}" if name else ""

    def _others(
        self, group: Group, seen: Iterable[int] | None = None
    ) -> Iterator[tuple[int, Copy]]:
        """Yield (index, the group's block) of the compared tensors whose block is not the same."""
        for index in self._unlike(group, seen):
            yield index, self._results.bits(group, self._arguments.views[index].block)

    def _unlike(self, group: Group, seen: Iterable[int] | None) -> list[int]:
        """Return the compared tensors whose block is not the same as in a group's result."""
        wanted = self._compared if seen is None else [i for i in self._compared if i in seen]
        views = self._arguments.views
        return [i for i in wanted if not self._results.same(group, views[i].block)]

    def _names_in(self, block: int) -> str:
        views = enumerate(self._arguments.views)
        names = dict.fromkeys(self._names[i] for i, view in views if view.block == block)
        return "/".join(filter(None, names)) or "a tensor that a hook holds"


def _compare() -> Any:
    """Return the module that compares results which differ; it uses torch."""
    stand_ins.need_torch("comparing results that differ")
    from safetune.child import compare

    return compare
