"""Which configs compute the right result, as far as the configs themselves show it.

`judge` is a function of what the launches of all configs have left (`OutputReport`): it sorts the
configs into groups that agree, and settles which group the choice is made from.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from safetune.frozen import dataclass
from safetune.outcome import Group, GroupDifference, Mark, OutputReport, Verdict

#: A majority has at least this many configs: of two that differ, either may be wrong.
MIN_MAJORITY = 3

#: Results may differ by this many times the difference between two runs of most configs, but by no
#: more than this share of their typical size: whatever varies by more is not rounding.
_SPREAD_FACTOR = 4.0
_LARGEST_SPREAD = 0.25

Grid = tuple[int, ...]


@dataclass(frozen=True)
class Judgement:
    """What becomes of the configs."""

    candidates: frozenset[int]  # the configs that agree and may be chosen
    #: For each config the number of configs in its group, itself included. Stored members of an
    #: earlier tuning count, launched or not.
    sizes: Mapping[int, int]
    #: The verdict and the reason for each config that is wrong.
    rejected: Mapping[int, tuple[Verdict, str]] = field(default_factory=dict)
    #: For each config that is not rejected its part in the dispute; empty without one.
    disputed: Mapping[int, str] = field(default_factory=dict)
    #: Whether more launches would not change the candidates: all agree, or most do.
    clear: bool = True

    def marks(self, config: int) -> tuple[str, ...]:
        """Return the marks of a config that is not rejected."""
        if config not in self.disputed:
            return ()
        outvoted = () if config in self.candidates else (Mark.OUTVOTED.value,)
        return (Mark.DISPUTED.of(self.disputed[config]), *outvoted)


class Votes:
    """What the configs of one tuning have computed, as far as they have been examined."""

    def __init__(self) -> None:
        self.reports: dict[int, OutputReport] = {}
        self._kept: dict[int, Group] = {}
        self._sizes = Counter[int]()

    def add(self, config: int, report: OutputReport) -> None:
        """Take a config's report, in place of an earlier one."""
        before = self.reports.get(config)
        if before is not None and before.group is not None:
            self._sizes[before.group] -= 1
        if report.group is not None:
            self._sizes[report.group] += 1
        self.reports[config] = report
        if report.new_group is not None:
            self._kept[config] = report.new_group

    def groups(self) -> list[Group]:
        """Return the groups whose results are kept, the largest first."""
        sizes = self._sizes
        return sorted(self._kept.values(), key=lambda group: (-sizes[group.number], group.number))

    def unplaced(self) -> list[int]:
        """Return the configs that agree with no result that was kept, if they may be the majority:
        then they are to be examined again. Groups of one config make room for theirs.
        """
        found = [config for config, report in self.reports.items() if report.group is None]
        sizes = self._sizes
        most = max(sizes.values(), default=0)
        if 2 * (most + len(found)) <= len(self.reports):
            return []
        if found:
            self._kept = {n: group for n, group in self._kept.items() if sizes[n] > 1}
        return found

    def notes(self) -> list[str]:
        """Return what to report to the user, one sentence for each finding."""
        unowned = Counter(name for report in self.reports.values() for name in report.unowned)
        return [
            f"{count} of its configs wrote into the storage behind {name} where no argument has "
            "elements; what the caller keeps there is overwritten by each launch"
            for name, count in unowned.items()
        ]


def judge(
    reports: Mapping[int, OutputReport],
    grids: Mapping[int, Grid],
    stored: Mapping[int, int] | None = None,
    waiting: int = 0,
) -> Judgement:
    """Settle which of the configs in `reports` are right.

    The configs of the largest group are. The others are wrong where it is a strict majority of at
    least three, and disputed where it is not. Of equal groups the one that has more stored members
    counts as the larger, then the one with the config declared first.

    Args:
        grids: the launch grid of each config.
        stored: the size of the group in which an earlier tuning judged a config.
        waiting: how many configs of that tuning have not been launched again.
    """
    evidence = _Evidence(reports, grids)
    classes = evidence.classes()
    if not classes:
        return Judgement(frozenset(), {})
    weights = [_weight(members, stored or {}) for members in classes]
    sizes = {c: w for members, w in zip(classes, weights, strict=True) for c in members}
    if len(classes) == 1:
        return Judgement(frozenset(classes[0]), sizes)
    counts, total = [len(members) for members in classes], len(reports) + waiting
    if not waiting and counts.count(max(counts)) > 1:
        counts, total = weights, sum(weights)
    lead = max(range(len(classes)), key=lambda i: (counts[i], -min(classes[i])))
    right, votes = classes[lead], counts[lead]
    candidates = frozenset(right)
    others = sorted(reports.keys() - candidates)
    clear = votes >= MIN_MAJORITY and 2 * votes > total
    wrong = [c for c in others if clear and not evidence.is_unclear(c, right)]
    reason = f"{votes} of {total} configs agree on another result"
    rejected = {c: evidence.verdict(c, right, reason) for c in wrong}
    disputed = {}
    if len(wrong) < len(others):
        disputed = {
            c: f"{sizes[c]} of {total} configs have this result"
            for c in reports
            if c not in rejected
        }
    return Judgement(candidates, sizes, rejected, disputed, clear and not disputed)


def _weight(members: Sequence[int], stored: Mapping[int, int]) -> int:
    """Return how many configs are in a group, with those of an earlier tuning."""
    known = [stored[config] for config in members if stored.get(config)]
    return len(members) + max(0, max(known, default=0) - len(known))


class _Evidence:
    """The differences between groups, and what explains some of them."""

    def __init__(self, reports: Mapping[int, OutputReport], grids: Mapping[int, Grid]) -> None:
        self._reports = reports
        self._grids = grids
        self._between: dict[tuple[int, int], GroupDifference] = {}
        for config, report in reports.items():
            own = config if report.group is None else report.group
            for difference in report.differences:
                self._between.setdefault((own, difference.group), difference)
                self._between.setdefault((difference.group, own), difference)
        spreads = [report.spread for report in reports.values() if report.spread]
        self._spread = [
            min(_SPREAD_FACTOR * statistics.median_low(values), _LARGEST_SPREAD)
            for values in zip(*spreads, strict=True)
        ]

    def classes(self) -> list[list[int]]:
        """Return the configs in groups that agree, each group with its largest part first.

        Two results agree with a third one, the one that most configs have; whether they agree with
        each other does not count.
        """
        alike: dict[int, list[int]] = {}
        apart: list[list[int]] = []
        for config, report in sorted(self._reports.items()):
            if report.group is None or self._varies(report):
                apart.append([config])
            else:
                alike.setdefault(report.group, []).append(config)
        found: list[list[int]] = []
        for group in sorted(alike.values(), key=len, reverse=True):
            own: list[int] = []
            for config in group:
                next((m for m in found if self._agrees(config, m)), own).append(config)
            if own:
                found.append(own)
        return [part for members in found for part in self._by_staleness(members)] + apart

    def verdict(self, config: int, right: Sequence[int], reason: str) -> tuple[Verdict, str]:
        """Return the verdict of a config outside the majority."""
        report = self._reports[config]
        if any(report.stale) and not self._varies(report) and self._agrees(config, right):
            return Verdict.ORDER_DEPENDENT, (
                "its result depends on what the outputs held before the launch; that of "
                f"{len(right)} other configs does not"
            )
        if self._varies(report):
            return Verdict.WRONG_RESULT, "its runs differ by more than those of most configs"
        return Verdict.WRONG_RESULT, f"{reason}; {report.difference}".rstrip("; ")

    def is_unclear(self, config: int, right: Sequence[int]) -> bool:
        """Whether another grid may explain how a config differs from a majority with one grid."""
        grids = {self._grids[other] for other in right}
        difference = self._difference(config, right)
        if len(grids) > 1 or self._grids[config] in grids or difference is None:
            return False
        return all(
            not difference.elements[tensor] or self._may_be_partial(tensor, config, right)
            for tensor in range(len(difference.elements))
        )

    def _varies(self, report: OutputReport) -> bool:
        """Whether two runs of a config differ by more than those of most configs do."""
        return any(s > most for s, most in zip(report.spread, self._spread, strict=False))

    def _by_staleness(self, members: list[int]) -> list[list[int]]:
        """Split off the configs that leave out elements of a tensor, where as many others or more
        write all: their result depends on what the outputs held before. A config of which that is
        not known, as of a slow one, is on neither side.
        """
        stale: set[int] = set()
        reported = {config: self._reports[config].stale for config in members}
        for tensor in range(max(map(len, reported.values()))):
            known = {c: each[tensor] > 0 for c, each in reported.items() if tensor < len(each)}
            found = [c for c in known if known[c]]
            whole = [c for c in known if not known[c]]
            if whole and len(whole) >= len(found):
                stale |= {c for c in found if not self._is_partial(tensor, c, whole)}
        fresh = [config for config in members if config not in stale]
        return [fresh, sorted(stale)] if stale and fresh else [members]

    def _agrees(self, config: int, members: Sequence[int]) -> bool:
        """Whether a config's result is that of a group, for all that noise and grids explain."""
        if self._reports[config].group == self._reports[members[0]].group:
            return True
        difference = self._difference(config, members)
        leading = [c for c in members if self._reports[c].group == self._reports[members[0]].group]
        return difference is not None and all(
            not difference.elements[tensor]
            or difference.excess[tensor] <= self._allowed(tensor)
            or (any(difference.common[tensor:][:1]) and self._is_partial(tensor, config, leading))
            for tensor in range(len(difference.elements))
        )

    def _allowed(self, tensor: int) -> float:
        return self._spread[tensor] if self._spread else 0.0

    def _difference(self, config: int, members: Sequence[int]) -> GroupDifference | None:
        own, theirs = self._reports[config].group, self._reports[members[0]].group
        if own is None or theirs is None:
            return None
        return self._between.get((own, theirs))

    def _is_partial(self, tensor: int, config: int, others: Sequence[int]) -> bool:
        """Whether each program may leave a result of its own in a tensor, so that another grid
        leaves another number of them: then the number of elements written follows that of programs,
        along some axes. (Where the elements agree that both have written, one leaves others out.)
        """
        mine = self._written(tensor, config)
        theirs = [(self._written(tensor, other), self._grids[other]) for other in others]
        if not mine or not all(count for count, _ in theirs):
            return False
        return any(
            all(
                _programs(grid, axes) != _programs(self._grids[config], axes)
                and mine * _programs(grid, axes) == count * _programs(self._grids[config], axes)
                for count, grid in theirs
            )
            for size in (1, 2, 3)
            for axes in itertools.combinations(range(3), size)
        )

    def _may_be_partial(self, tensor: int, config: int, others: Sequence[int]) -> bool:
        """Whether nothing shows that a tensor is not one of partial results."""
        mine = self._written(tensor, config)
        theirs = [(self._written(tensor, other), self._grids[other]) for other in others]
        if not mine or not all(count for count, _ in theirs):
            return True
        own = math.prod(self._grids[config])
        return all(count == mine and math.prod(grid) == own for count, grid in theirs)

    def _written(self, tensor: int, config: int) -> int:
        written = self._reports[config].written
        return written[tensor] if tensor < len(written) else 0


def _programs(grid: Grid, axes: Iterable[int]) -> int:
    return math.prod(grid[axis] for axis in axes if axis < len(grid))
