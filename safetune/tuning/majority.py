"""Which configs compute another result than a majority of the configs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safetune.isolation.protocol import Group, OutputReport
from safetune.outcome import Verdict

#: A majority has at least this many configs: of two that differ, either may be wrong.
MIN_MAJORITY = 3

Grid = tuple[int, ...]


@dataclass(frozen=True)
class VoteResult:
    """What becomes of the configs.

    Attributes:
        rejected: the verdict and the reason for each config that must not be chosen.
        disputed: for every config, how many agree with it, if some disagree and there is no
            majority; else empty.
    """

    rejected: dict[int, tuple[Verdict, str]] = field(default_factory=dict)
    disputed: dict[int, str] = field(default_factory=dict)


class Votes:
    """What the configs of one tuning have computed, as far as they have been examined."""

    def __init__(self) -> None:
        self._reports: dict[int, OutputReport] = {}
        self._groups: list[Group] = []

    def add(self, config: int, report: OutputReport) -> None:
        """Count a config's result."""
        if report.new_group is not None:
            self._groups.append(report.new_group)
        self._reports[config] = report

    def __contains__(self, config: int) -> bool:
        """Whether a config has been examined."""
        return config in self._reports

    def groups(self) -> list[Group]:
        """Return the groups seen so far, the largest first."""
        sizes = Counter(report.group for report in self._reports.values())
        return sorted(self._groups, key=lambda group: (-sizes[group.number], group.number))

    def unowned(self) -> dict[str, int]:
        """Return how many configs wrote beside the elements of an argument, by argument."""
        return dict(Counter(name for r in self._reports.values() for name in r.unowned))

    def count(self, grids: Mapping[int, Grid]) -> VoteResult:
        """Compare the configs in `grids`; each has been added.

        A config is wrong if a strict majority of at least three agrees on another result and the
        launch grid does not explain that. (Where each program leaves a partial result, another grid
        gives another layout.) So the majority must span two grids, or have the config's own grid,
        or write the same elements as the config with another number of programs.
        """
        groups = {config: self._reports[config].group for config in grids}
        majority = _majority(groups)
        order_dependent = self._order_dependent(majority)
        voters = [config for config in majority if config not in order_dependent]
        if 2 * len(voters) <= len(groups):  # a config that is rejected itself has no vote
            return VoteResult(disputed=_disputed(groups))
        seen = {grids[config] for config in voters}
        rejected, unexplained = {}, False
        for config in groups.keys() - majority:
            if len(seen) > 1 or not self._may_be_partial(config, voters, grids):
                reason = f"{len(voters)} of {len(groups)} configs agree on another result"
                detail = self._reports[config].difference
                rejected[config] = (Verdict.WRONG_RESULT, f"{reason}; {detail}".rstrip("; "))
            else:
                unexplained = True
        if unexplained:
            return VoteResult(rejected, _disputed(groups))
        return VoteResult(rejected | order_dependent)

    def _may_be_partial(
        self, config: int, agreeing: Sequence[int], grids: Mapping[int, Grid]
    ) -> bool:
        """Whether another grid may explain that a config differs from those of one grid."""
        own, theirs = grids[config], grids[agreeing[0]]
        masks = self._reports[config].written_masks
        their_masks = [self._reports[other].written_masks for other in agreeing]
        same_elements = bool(masks) and masks in their_masks
        return own != theirs and not (same_elements and math.prod(own) != math.prod(theirs))

    def _order_dependent(self, agreeing: list[int]) -> dict[int, tuple[Verdict, str]]:
        """Return the agreeing configs whose result depends on what the outputs held before, if the
        results of most do not.
        """
        stale = [config for config in agreeing if self._reports[config].depends_on_prior_output]
        fresh = len(agreeing) - len(stale)
        if fresh < MIN_MAJORITY or 2 * fresh <= len(agreeing):
            return {}
        reason = (
            f"its result depends on what the outputs held before the launch; that of {fresh} "
            "other configs does not"
        )
        return dict.fromkeys(stale, (Verdict.ORDER_DEPENDENT, reason))


def _majority(groups: Mapping[int, int | None]) -> list[int]:
    """Return the configs of the group that has a majority; none where there is no majority."""
    known = Counter(group for group in groups.values() if group is not None)
    for group, size in known.most_common(1):
        if size >= MIN_MAJORITY and 2 * size > len(groups):
            return [config for config in groups if groups[config] == group]
    return []


def notes_of(unowned: Mapping[str, int]) -> list[str]:
    """Return what to report to the user, one sentence for each finding."""
    return [
        f"{count} of its configs wrote into the storage behind {name} where no argument has "
        "elements; what the caller keeps there is overwritten by each launch"
        for name, count in unowned.items()
    ]


def _disputed(groups: Mapping[int, int | None]) -> dict[int, str]:
    sizes = Counter(groups.values())
    if len(sizes) < 2:
        return {}
    return {
        config: f"{1 if group is None else sizes[group]} of {len(groups)} configs have this result"
        for config, group in groups.items()
    }
