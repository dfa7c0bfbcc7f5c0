"""Finds the configs that compute the right result, as far as the configs themselves show it.

`judge` uses only what the launches of all configs have left (`OutputReport`). It sorts the configs
into groups that agree, and decides from which group to choose. Results that depend on the grid,
such as partial sums and random numbers, are not held against each other.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from safetune.frozen import dataclass
from safetune.outcome import Difference, Group, Mark, OutputReport, Verdict

#: A majority has at least this many configs: of two that differ, either may be wrong.
MIN_MAJORITY = 3

#: Results may differ by this many times the difference between two runs of most configs, but by no
#: more than this share of their typical size: whatever varies by more is not rounding.
_SPREAD_FACTOR = 4.0
_LARGEST_SPREAD = 0.25

#: Of the groups of one config, a config is compared with so many first ones, which all others were
#: compared with, and so many latest ones.
_FIRST, _LATEST = 8, 64

#: In a dispute, a config may be chosen too if it differs from the largest group in at most this
#: share of the elements, by at most so many times their typical size: sums whose terms cancel
#: differ so, if they are taken in another order.
_FEW, _NEAR = 1e-5, 10.0

#: What a config sets that its kernel does not see.
_OF_THE_LAUNCH = ("num_warps", "num_ctas", "num_stages", "maxnreg", "ir_override")

Grid = tuple[int, ...]
Options = Mapping[str, str]


@dataclass(frozen=True)
class Judgement:
    """The verdicts on the configs."""

    candidates: frozenset[int]  # the configs that may be chosen
    #: For each config the number of configs in its group, itself included. Stored members of an
    #: earlier tuning count, launched or not.
    sizes: Mapping[int, int]
    #: The verdict and the reason for each config that is wrong.
    rejected: Mapping[int, tuple[Verdict, str]] = field(default_factory=dict)
    #: For each config that is not rejected its part in the dispute; empty without one.
    disputed: Mapping[int, str] = field(default_factory=dict)
    varies: bool = False  # whether configs with other tiles have other results by design
    #: Whether more launches would not change the candidates: all agree, or most do.
    clear: bool = True

    def marks(self, config: int) -> tuple[str, ...]:
        """Return the marks of a config that is not rejected."""
        dispute = self.disputed.get(config)
        return (
            *([Mark.DISPUTED.of(dispute)] if dispute else []),
            *([] if config in self.candidates else [Mark.OUTVOTED.value]),
            *([Mark.VARIES.value] if self.varies else []),
        )


class Votes:
    """The results of one tuning's configs, as far as they have been examined."""

    def __init__(self) -> None:
        self.reports: dict[int, OutputReport] = {}
        self._kept: dict[int, Group] = {}
        self._sizes = Counter[int]()

    def add(self, config: int, report: OutputReport) -> None:
        """Add a config's report; it replaces an earlier one."""
        before = self.reports.get(config)
        if before is not None:
            self._sizes[before.group] -= 1
        self._sizes[report.group] += 1
        self.reports[config] = report
        if report.new_group is not None:
            self._kept[config] = report.new_group

    def groups(self) -> list[Group]:
        """Return the groups that a config is compared with, largest first.

        In a list in which each config has a result of its own, these are few.
        """
        sizes, kept = self._sizes, list(self._kept.values())
        large = [group for group in kept if sizes[group.number] > 1]
        found = {group.number: group for group in (*kept[:_FIRST], *kept[-_LATEST:], *large)}
        return sorted(found.values(), key=lambda group: (-sizes[group.number], group.number))

    def notes(self) -> list[str]:
        """Return what to report to the user, one sentence for each finding."""
        unowned = Counter(name for report in self.reports.values() for name in report.unowned)
        return [
            f"{count} of its configs wrote into the storage behind {name}, outside every argument; "
            "each launch overwrites whatever the caller keeps there"
            for name, count in unowned.items()
        ]


def judge(
    reports: Mapping[int, OutputReport],
    grids: Sequence[Grid],
    options: Sequence[Options] = (),
    draws: bool = False,
    stored: Mapping[int, int] | None = None,
    waiting: int = 0,
) -> Judgement:
    """Decide which of the configs in `reports` are right.

    Those in the largest group are. The others are wrong if it is a strict majority of at least
    three, and disputed otherwise: then the ones that are near may be chosen, too. Of equal groups,
    the one with more stored members counts as larger, then the one with the config declared first.

    Args:
        grids: the launch grid of each config.
        options: what each config sets, as text by name.
        draws: whether the kernel draws random numbers.
        stored: the size of the group in which an earlier tuning judged a config.
        waiting: how many configs of that tuning have not been launched again.
    """
    results = _Results(reports, grids, options, draws)
    classes = results.classes()
    if not classes:
        return Judgement(frozenset(), {})
    weights = [_weight(members, stored or {}) for members in classes]
    sizes = {c: w for members, w in zip(classes, weights, strict=True) for c in members}
    counts, total = [len(members) for members in classes], len(reports) + waiting
    if not waiting and counts.count(max(counts)) > 1:
        counts, total = weights, sum(weights)
    lead = max(range(len(classes)), key=lambda i: (counts[i], -min(classes[i])))
    right, votes = classes[lead], counts[lead]
    others = sorted(reports.keys() - right)
    clear = not others or (votes >= MIN_MAJORITY and 2 * votes > total)
    wrong = [c for c in others if clear and not results.is_unclear(c, right)]
    accepted = votes + len(others) - len(wrong)
    reason = f"{accepted} of {total} configs agree on another result"
    rejected = {c: results.verdict(c, right[0], reason) for c in wrong}
    unsettled = reports.keys() - rejected.keys() if len(wrong) < len(others) else ()
    disputed = {c: f"{sizes[c]} of {total} configs have this result" for c in unsettled}
    candidates = frozenset(right) - results.outliers(right)
    candidates |= {c for c in disputed.keys() - {*right} if results.is_near(c, right[0])}
    clear = clear and not disputed
    return Judgement(candidates, sizes, rejected, disputed, results.varies, clear)


def _weight(members: Sequence[int], stored: Mapping[int, int]) -> int:
    """Return how many configs are in a group, with those of an earlier tuning."""
    known = [stored[config] for config in members if stored.get(config)]
    return len(members) + max(0, max(known, default=0) - len(known))


class _Results:
    """What the configs have left in each tensor, and which of it agrees.

    Attributes:
        varies: whether configs with other tiles have other results by design.
    """

    def __init__(
        self,
        reports: Mapping[int, OutputReport],
        grids: Sequence[Grid],
        options: Sequence[Options],
        draws: bool,
    ) -> None:
        self._reports, self._grids, self._draws = reports, grids, draws
        self._options = options
        #: The grid of each config or, where all have one, its tile in words.
        self._tiles: Sequence[object] = grids
        if options and len({grids[config] for config in reports}) == 1:
            names = {name for each in options for name in each}.difference(_OF_THE_LAUNCH)
            self._tiles = [tuple(each.get(name) for name in sorted(names)) for each in options]
        spreads = [report.spread for report in reports.values() if report.spread]
        self._spread = [
            min(_SPREAD_FACTOR * statistics.median_low(values), _LARGEST_SPREAD)
            for values in zip(*spreads, strict=True)
        ]
        #: The group of each config; a number of its own where its runs differ.
        self._of = {config: self._number(config) for config in reports}
        self._between: dict[tuple[int, int], tuple[Difference, ...]] = {}
        for config, report in reports.items():
            for other in report.differences:
                self._between.setdefault((self._of[config], other.group), other.tensors)
                self._between.setdefault((other.group, self._of[config]), other.tensors)
        self._tensors = range(len(next(iter(self._between.values()), ())))
        self._by_tile: set[int] = set()
        self._by_tile = {tensor for tensor in self._tensors if self._follows_tile(tensor)}
        self.varies = bool(self._by_tile)

    def classes(self) -> list[list[int]]:
        """Return the configs in groups that agree, each group with its largest part first.

        Two results agree with a third one, the one that most configs have; whether they agree with
        each other does not count.
        """
        alike: dict[int, list[int]] = defaultdict(list)
        for config in sorted(self._reports):
            alike[self._of[config]].append(config)
        found: list[list[int]] = []
        for group in sorted(alike.values(), key=len, reverse=True):
            own: list[int] = []
            for config in group:
                next((m for m in found if self._agree(config, m[0])), own).append(config)
            if own:
                found.append(own)
        return found

    def verdict(self, config: int, right: int, reason: str) -> tuple[Verdict, str]:
        """Return the verdict of a config that has another result than one of the majority."""
        if self._is_unsteady(config):
            return (
                Verdict.WRONG_RESULT,
                "its result varies between runs, more than for most configs",
            )
        found = self._difference(config, right) or ()
        apart = [tensor for tensor, each in enumerate(found) if each.elements]
        if apart and all(
            not found[tensor].common
            and self._written(config, tensor) < self._written(right, tensor)
            for tensor in apart
        ):
            return Verdict.ORDER_DEPENDENT, (
                "it leaves out elements that most configs write, so its result depends on what the "
                "outputs held before the launch"
            )
        difference = self._reports[config].difference
        return Verdict.WRONG_RESULT, f"{reason}; {difference}".rstrip("; ")

    def is_unclear(self, config: int, right: Sequence[int]) -> bool:
        """Whether another tile may explain how a config differs from a majority with one tile."""
        tiles = {self._tiles[other] for other in right}
        return (
            len(tiles) == 1 and self._tiles[config] not in tiles and not self._is_unsteady(config)
        )

    def is_near(self, config: int, right: int) -> bool:
        """Whether two configs differ in very few elements, and only slightly there."""
        found = self._difference(config, right)
        return (
            found is not None
            and not self._is_unsteady(config)
            and all(
                each.elements == each.common <= _FEW * self._written(right, tensor)
                and each.excess <= _NEAR
                for tensor, each in enumerate(found)
            )
        )

    def outliers(self, members: Sequence[int]) -> set[int]:
        """Return the configs that others outvote though they are within the tolerance.

        Where at least three others have the same bits, and have at least two values of each name
        in which a config differs from them, neither value matters: a few units in the last place
        are left to it.
        """
        found: set[int] = set()
        for tensor in self._tensors if self._options else ():
            sums = {config: self._reports[config].sums[tensor] for config in members}
            (bits, count), (_, second) = [*Counter(sums.values()).most_common(2), (0, 0)][:2]
            if count >= MIN_MAJORITY and count > second:
                same = [config for config in members if sums[config] == bits]
                others = set(members).difference(same)
                found.update(config for config in others if self._is_off(config, same, tensor))
        return found

    def _is_off(self, config: int, same: Sequence[int], tensor: int) -> bool:
        difference = self._difference(config, same[0])
        if difference is None or not difference[tensor].fine:
            return False
        own = self._options[config]
        values = {name: {self._options[other].get(name) for other in same} for name in own}
        return all(own[name] in each or len(each) > 1 for name, each in values.items())

    def _number(self, config: int) -> int:
        return -1 - config if self._is_unsteady(config) else self._reports[config].group

    def _is_unsteady(self, config: int) -> bool:
        """Whether two runs of a config differ by more than those of most configs do."""
        spread = self._reports[config].spread
        return any(s > most for s, most in zip(spread, self._spread, strict=False))

    def _follows_tile(self, tensor: int) -> bool:
        """Whether what a tensor holds is a matter of the tile: no two configs with other tiles
        agree in it. Numbers may be drawn so. Else all with one tile have to agree, and faults have
        to be out of the question: each config has a tile of its own, or two tiles have several.
        """
        sizes = Counter(self._tiles[config] for config in self._reports)
        if len(sizes) < (2 if self._draws else 3):
            return False
        firsts = {(self._of[config], self._tiles[config]): config for config in self._reports}
        found: dict[bool, bool] = {True: True, False: True}  # whether all with one tile agree,
        for one, other in itertools.combinations(firsts.values(), 2):
            alike = self._tiles[one] == self._tiles[other]
            found[alike] &= self._same(one, other, tensor) == alike
            if not found[False]:
                return False
        several = sum(size > 1 for size in sizes.values())
        return self._draws or (found[True] and several != 1)

    def _agree(self, one: int, other: int) -> bool:
        alike = self._of[one] == self._of[other]
        known = self._difference(one, other) is not None
        return alike or (known and all(self._same(one, other, t) for t in self._tensors))

    def _same(self, one: int, other: int, tensor: int) -> bool:
        """Whether two configs have the same in a tensor, for all that noise and grids explain."""
        if self._of[one] == self._of[other]:
            return True
        found = self._difference(one, other)
        if found is None:
            return False
        if tensor in self._by_tile and (self._draws or self._tiles[one] != self._tiles[other]):
            return True
        difference, allowed = found[tensor], self._spread[tensor] if self._spread else 0.0
        return (
            not difference.elements
            or difference.excess <= allowed
            or self._is_layout(one, other, tensor, padding=not difference.common)
        )

    def _difference(self, one: int, other: int) -> tuple[Difference, ...] | None:
        return self._between.get((self._of[one], self._of[other]))

    def _is_layout(self, one: int, other: int, tensor: int, padding: bool) -> bool:
        """Whether two configs differ in how a grid lays out their results.

        Each program may leave a result of its own in a tensor: then the number of elements written
        follows that of programs, along some axes. Or programs write whole tiles, beyond what all
        have to write: then their sizes are powers of two, and no tile is written in vain.
        """
        written = [self._written(each, tensor) for each in (one, other)]
        grids = [self._grids[each] for each in (one, other)]
        if not all(written):
            return False
        if padding:
            tiles = [count / math.prod(grid) for count, grid in zip(written, grids, strict=True)]
            least = [_without_last_tiles(*each) for each in zip(written, grids, strict=True)]
            return all(math.frexp(tile)[0] == 0.5 for tile in tiles) and max(least) < min(written)
        axes = (each for size in (1, 2, 3) for each in itertools.combinations(range(3), size))
        programs = ([_programs(grid, each) for grid in grids] for each in axes)
        return any(a != b and written[0] * b == written[1] * a for a, b in programs)

    def _written(self, config: int, tensor: int) -> int:
        written = self._reports[config].written
        return written[tensor] if tensor < len(written) else 0


def _programs(grid: Grid, axes: Iterable[int]) -> int:
    return math.prod(grid[axis] for axis in axes if axis < len(grid))


def _without_last_tiles(written: int, grid: Grid) -> float:
    """Return how many elements a grid of tiles writes but for the last tile along each axis."""
    sizes = [size for size in grid if size > 1] or [1]
    return written * math.prod(1 - 1 / size for size in sizes)
