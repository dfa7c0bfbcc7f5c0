"""Checks what a config's launch wrote to the arguments, and whether other configs write the same.

The first launch starts from the caller's bits. Write-only arguments hold poison instead, so an
element that a config leaves out differs from the others' results. Its result is compared with one
result per group of agreeing configs (`results`). If the checksums show equal bytes, nothing is
compared. Launches of one config must leave the same bits each time; the checksums of every
`restore` show whether they do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from safetune.both.device_bytes import NATIVE_FLOATS
from safetune.child import stand_ins, tolerance
from safetune.child.arguments import Arguments, Copy, poison_of
from safetune.child.results import Results
from safetune.errors import InvalidSetting
from safetune.inputs.spans import FLOATS, TensorSpec, itemsize
from safetune.outcome import Difference, Effects, Group, GroupDifference, OutputReport

#: A config that is launched again is launched so often at most.
_MOST_REPEATS = 32
#: The other float inputs on which configs are to have the same bits.
_DRAWS = 2

#: Launches a config, hooks included, and returns when the device has finished. It calls what it is
#: given just before the kernel runs.
Launch = Callable[[Callable[[], object]], object]


class OutOfBounds(Exception):
    """A launch wrote outside the storages of its arguments."""


class WrongResult(Exception):
    """A launch produced another result than the user's reference."""


@dataclass(eq=False)
class OutputCheck:
    """Checks the outputs of one call's launches.

    Args:
        names: the arguments of each tensor of the call (see `call.owners_of`).
        scratch: arguments that are not compared.
        effects: the kernel's writes according to its text.
        launch_of: returns the launch of a config number.
        slow_s: seconds; a config whose first launch takes longer is launched once, whether it is
            slow or was held up. After this time no other results are made again for a config.

    Attributes:
        left: the config that ran since the last `restore`, and how often; None if unknown.
        varied: (config, position among the compared tensors, its name) of each tensor whose bits
            differed between launches of one config.
    """

    arguments: Arguments
    names: Sequence[str]
    scratch: Sequence[str]
    effects: Effects
    launch_of: Callable[[int], Launch]
    slow_s: float = 2.0

    def __post_init__(self) -> None:
        self._results = Results(self.arguments, self._relaunch)
        self._expected: dict[int, Any] = {}
        self._input_sizes: dict[int, float] = {}
        self.left: tuple[int, int] | None = None
        self.varied: set[tuple[int, int, str]] = set()
        self._sums: dict[tuple[int, int], list[int]] = {}  # that as many launches left before
        owned = [set(filter(None, each.split(", "))) for each in self.names]
        views = self.arguments.views
        ignored = {i for i, own in enumerate(owned) if not own - set(self.scratch)}
        compared = {view: i for i, view in reversed([*enumerate(views)]) if i not in ignored}
        self._compared = sorted(compared.values())
        ignored_blocks = {views[i].block for i in ignored}
        self._repeating = [i for i in self._compared if views[i].block not in ignored_blocks]
        stored = set(self.effects.only_stored)
        read = [i for i, own in enumerate(owned) if not own or own - stored]
        self._read_blocks = {views[i].block for i in read}
        self._inputs = sorted({views[i].block for i in read if owned[i]})
        self._overwritten = [i for i in self._compared if self._may_overwrite(views[i])]

    def expect(self, expected: Mapping[str, Any], what: str) -> None:
        """Compare all later launches with these values, by argument name.

        Raises `InvalidSetting`, naming `what`, if a value does not fit its argument.
        """
        import torch

        for name, value in expected.items():
            owners = enumerate(self.names)
            index = next((i for i, names in owners if name in names.split(", ")), None)
            if index is None:
                raise InvalidSetting(f"{what} returned {name!r}, which is not a tensor argument")
            mine = self.arguments.tensors[index]
            try:
                theirs = torch.as_tensor(value).detach().to(mine.dtype)
            except (TypeError, ValueError) as error:
                kind = type(value).__name__
                raise InvalidSetting(f"{what} returned a {kind} for {name}: {error}") from error
            if theirs.shape != mine.shape:
                shapes = f"{tuple(theirs.shape)} for {name}, whose shape is {tuple(mine.shape)}"
                raise InvalidSetting(f"{what} returned a tensor of shape {shapes}")
            self._expected[index] = theirs.clone()

    def examine(self, groups: Sequence[Group], config: int) -> OutputReport:
        """Launch a config from the caller's bits and report what it has written.

        `groups` starts with the largest. Raises `OutOfBounds`, `WrongResult`, and the errors of the
        launch.
        """
        if self._expected:
            self._run(config, lambda: None)
            self._check_expected()
        start = time.perf_counter()
        written = self._run(config, self._overwrite)
        slow = time.perf_counter() - start > self.slow_s
        group, differences = self._find(groups)
        counts = self._counts(group)
        worst = ""
        if differences:  # the first is from the largest group that it was compared with
            pairs = zip(self._compared, differences[0].tensors, strict=True)
            worst = self._differs(*max(pairs, key=lambda pair: (pair[1].excess, pair[1].fine)))
        same = group or self._results.keep(config, written, counts)
        views, sums = self.arguments.views, self.arguments.sums
        report = OutputReport(
            group=same.number,
            new_group=None if group else same,
            differences=differences,
            written=counts,
            sums=tuple(sums[views[i].block] for i in self._compared),
            unowned=tuple(self._names_in(block) for block in self.arguments.unowned()),
            difference=worst,
        )
        if not self.effects.atomics or slow:
            return report
        self._run(config, self._overwrite)
        again = self._difference(same)
        return replace(report, spread=tuple(tensor.excess for tensor in again.tensors))

    def repeat(
        self, config: int, least: int, seconds: float, disturb: Callable[[], object]
    ) -> None:
        """Launch a config repeatedly for some time; call `disturb` before every second launch."""
        start, launch = time.perf_counter(), self.launch_of(config)
        for count in range(_MOST_REPEATS):
            if count >= least and time.perf_counter() - start > seconds:
                break
            self.restore()
            if count % 2:
                disturb()
            launch(lambda: None)
            self.left = config, 1
        self.restore()
        self.check_guards()

    def bits(self, config: int) -> tuple[int, ...]:
        """Return checksums of the compared tensors after a config ran on the caller's bits and on
        other float inputs, which are the same for every config.
        """
        stand_ins.need_torch("drawing other inputs")
        arguments, found = self.arguments, list[int]()
        for draw in range(1 + _DRAWS):

            def ready(seed: int = draw) -> None:
                self._overwrite()
                if seed:
                    arguments.redraw(self._inputs, seed)

            self.restore()
            try:
                self.launch_of(config)(ready)
                sums = arguments.checksums()
            finally:
                if draw:
                    arguments.put_back(self._inputs)
            self.check_guards()
            found += [sums[arguments.views[index].block] for index in self._compared]
        self.restore()
        return tuple(found)

    def restore(self) -> None:
        """Restore the caller's bits; compare the result with that of earlier launches.

        The number of launches matters if a config reads what it has written.
        """
        self.arguments.restore()
        if self.left is None or not self.effects.repeats:
            return
        config, launches = self.left
        self.left = None
        written = {number for number, block in enumerate(self.arguments.blocks) if block.written}
        key = config, launches if written & self._read_blocks else 0
        sums = self.arguments.sums
        before = self._sums.setdefault(key, sums)
        for index in self._repeating:
            block = self.arguments.views[index].block
            if before[block] != sums[block]:
                self.varied.add((config, self._compared.index(index), self.names[index]))

    def check_guards(self) -> None:
        """Raise `OutOfBounds` if a launch has written outside a storage."""
        locations = [
            f"{side} the storage of {self._names_in(block)}"
            for block, side in self.arguments.breached()
        ]
        if locations:
            raise OutOfBounds(f"it wrote {' and '.join(locations)}")

    def _run(self, config: int, ready: Callable[[], object]) -> list[int]:
        """Launch a config from the caller's bits; return the blocks that launches have written."""
        self.restore()
        self.launch_of(config)(ready)
        self.check_guards()
        return self.arguments.find_written()

    def _relaunch(self, config: int) -> None:
        self.launch_of(config)(self._overwrite)

    def _may_overwrite(self, view: TensorSpec) -> bool:
        """Whether nothing that a launch does depends on what it finds in a tensor."""
        is_plain = 0 not in view.stride and itemsize(view.dtype) <= 8
        return is_plain and view.block not in self._read_blocks

    def _overwrite(self) -> None:
        self.arguments.poison(self._overwritten)

    def _counts(self, group: Group | None) -> tuple[int, ...]:
        """Return how many elements of each compared tensor the last launch has written; 0 where
        atomics may have added to what was there.
        """
        arguments = self.arguments
        blocks = [arguments.views[index].block for index in self._compared]
        if group is not None and all(self._results.same(group, block) for block in blocks):
            return group.written
        whole = 0 if self.effects.atomics else 1
        found = {
            index: whole * math.prod(arguments.views[index].shape)
            for index, block in zip(self._compared, blocks, strict=True)
            if arguments.blocks[block].written
        }
        found.update(arguments.overwritten(self._overwritten))
        return tuple(found.get(index, 0) for index in self._compared)

    def _check_expected(self) -> None:
        for index, expected in self._expected.items():
            mine = self.arguments.tensors[index]
            found = _compare().difference(mine, expected, self._rounding(index))
            if found.elements:
                raise WrongResult(self._differs(index, found, " from the reference"))

    def _find(self, groups: Sequence[Group]) -> tuple[Group | None, tuple[GroupDifference, ...]]:
        """Return the first group whose result is in the live arguments, and how others differ.

        No result is made again once that has taken long: it is the time of the config that ran.
        """
        differences: list[GroupDifference] = []
        start = time.perf_counter()
        for group in groups:
            if not self._results.holds(group) and time.perf_counter() - start > self.slow_s:
                continue
            difference = self._difference(group)
            fine = self.effects.repeats and any(each.fine for each in difference.tensors)
            if not fine and not any(each.elements for each in difference.tensors):
                return group, tuple(differences)
            differences.append(difference)
        return None, tuple(differences)

    def _difference(self, group: Group) -> GroupDifference:
        """Return how the live result differs from a group's."""
        found = dict.fromkeys(self._compared, Difference())
        for index, theirs in self._others(group):
            if self._are_near(index, theirs):
                continue
            compare = _compare()  # before a tensor is made, which needs torch too
            mine, other = self.arguments.tensors[index], self.arguments.tensor(theirs, index)
            hole = poison_of(self.arguments.views[index].dtype)
            how = self._rounding(index), self.effects.any_order, hole
            found[index] = compare.difference(mine, other, *how)
        return GroupDifference(group.number, tuple(found.values()))

    def _are_near(self, index: int, theirs: Copy) -> bool:
        """Whether a live tensor differs from one over a copy of its block by rounding alone, where
        torch, which would have to be imported, is not needed to see it.
        """
        if not stand_ins.lacks_torch():
            return False
        pair = self.arguments.elements(index), self.arguments.elements(index, theirs)
        where, dtype = self.arguments.where(index), self.arguments.views[index].dtype
        fine = self.effects.repeats
        return tolerance.are_near(where, *pair, dtype, self._rounding(index), fine)

    def _rounding(self, index: int) -> float:
        """Return the difference that rounding alone explains in a tensor, see `tolerance`."""
        arguments, inputs = self.arguments, dict[float, int]()
        for position, view in enumerate(arguments.views):
            if view.dtype in FLOATS and not arguments.blocks[view.block].written:
                if position not in self._input_sizes:
                    self._input_sizes[position] = self._typical_size(position)
                size = self._input_sizes[position]
                inputs[size] = inputs.get(size, 0) + math.prod(view.shape)
        view = arguments.views[index]
        return tolerance.rounding(inputs, math.prod(view.shape), view.dtype)

    def _typical_size(self, index: int) -> float:
        dtype = self.arguments.views[index].dtype
        if stand_ins.lacks_torch() and dtype in NATIVE_FLOATS:
            where, view = self.arguments.where(index), self.arguments.elements(index)
            return tolerance.typical_size(where, view, dtype)
        return float(_compare().typical_size(self.arguments.tensors[index]))

    def _differs(self, index: int, found: Difference, what: str = "") -> str:
        how = "within the tolerance, but by more than a few units in the last place"
        if found.elements:
            how = "beyond any tolerance (zeros, NaN or infinities)"
            if math.isfinite(found.excess):
                how = f"by {found.excess:.3g} times its typical size more than the tolerance"
        return f"{self.names[index]} differs{what} {how}"

    def _others(self, group: Group) -> Iterator[tuple[int, Copy]]:
        """Yield (index, the group's block) of the compared tensors whose block is not the same."""
        for index in self._compared:
            block = self.arguments.views[index].block
            if not self._results.same(group, block):
                yield index, self._results.bits(group, block)

    def _names_in(self, block: int) -> str:
        views = enumerate(self.arguments.views)
        names = dict.fromkeys(self.names[i] for i, view in views if view.block == block)
        return "/".join(filter(None, names)) or "a tensor that a hook holds"


def _compare() -> Any:
    """Return the module that compares results which differ; it uses torch."""
    stand_ins.need_torch("comparing results that differ")
    from safetune.child import compare

    return compare
