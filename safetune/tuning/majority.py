"""Which configs compute something else than the others: a majority must say so."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safetune.outcome import Verdict
from safetune.tuning.evidence import Evidence, Group

#: A majority is of at least so many configs: two that differ say nothing of each other.
MIN_MAJORITY = 3

Grid = tuple[int, ...]


@dataclass(frozen=True)
class Judgement:
    """What becomes of the configs.

    Attributes:
        rejected: for a config that must not be chosen, the verdict and the reason.
        disputed: for every config, how many agree with it, when some disagree and there is no
            majority; else empty.
    """

    rejected: dict[int, tuple[Verdict, str]] = field(default_factory=dict)
    disputed: dict[int, str] = field(default_factory=dict)


class Results:
    """The results of one tuning's configs, as far as they are known."""

    def __init__(self) -> None:
        self._evidence: dict[int, Evidence] = {}
        self._groups: list[Group] = []

    def add(self, config: int, evidence: Evidence) -> None:
        """Take in what a config has shown."""
        if evidence.founded is not None:
            self._groups.append(evidence.founded)
        self._evidence[config] = evidence

    def knows(self, config: int) -> bool:
        """Whether a config has been examined."""
        return config in self._evidence

    def groups(self) -> list[Group]:
        """Return the kinds of result seen so far, the most frequent one first."""
        sizes = Counter(evidence.group for evidence in self._evidence.values())
        return sorted(self._groups, key=lambda group: (-sizes[group.number], group.number))

    def unowned(self) -> dict[str, int]:
        """Return the arguments beside whose elements configs wrote, and how many did."""
        return dict(Counter(name for e in self._evidence.values() for name in e.unowned))

    def judge(self, grids: Mapping[int, Grid]) -> Judgement:
        """Compare the configs in `grids`; each has been added.

        A config is wrong where a strict majority of at least three agrees without it, and the
        launch grid does not explain that: programs that leave one partial result each leave another
        layout for another grid. So the majority must span two grids, or have the config's own, or
        write the very elements that it writes with another number of programs.
        """
        groups = {config: self._evidence[config].group for config in grids}
        majority = _majority(groups)
        if majority is None:
            return Judgement(disputed=_disputed(groups))
        order_dependent = self._order_dependent(majority)
        voters = [config for config in majority if config not in order_dependent]
        if 2 * len(voters) <= len(groups):  # a config that is rejected itself has no vote
            return Judgement(disputed=_disputed(groups))
        seen = {grids[config] for config in voters}
        rejected, unexplained = {}, False
        for config in groups.keys() - majority:
            if len(seen) > 1 or not self._may_be_partial(config, voters, grids):
                reason = f"{len(voters)} of {len(groups)} configs agree on another result"
                detail = self._evidence[config].difference
                rejected[config] = (Verdict.WRONG_RESULT, f"{reason}; {detail}".rstrip("; "))
            else:
                unexplained = True
        if unexplained:
            return Judgement(rejected, _disputed(groups))
        return Judgement(rejected | order_dependent)

    def _may_be_partial(
        self, config: int, agreeing: Sequence[int], grids: Mapping[int, Grid]
    ) -> bool:
        """Whether a config may differ from those of one grid as its programs are others."""
        grid, other = grids[config], grids[agreeing[0]]
        reach = self._evidence[config].reach
        same_elements = bool(reach) and reach in (self._evidence[one].reach for one in agreeing)
        return grid != other and not (same_elements and math.prod(grid) != math.prod(other))

    def _order_dependent(self, agreeing: list[int]) -> dict[int, tuple[Verdict, str]]:
        """Configs that are right only because of what the outputs held, where most are not."""
        stale = [config for config in agreeing if self._evidence[config].stale]
        fresh = len(agreeing) - len(stale)
        if fresh < MIN_MAJORITY or 2 * fresh <= len(agreeing):
            return {}
        reason = (
            f"its result depends on what the outputs held before the launch; that of {fresh} "
            "other configs does not"
        )
        return dict.fromkeys(stale, (Verdict.ORDER_DEPENDENT, reason))


def _majority(groups: Mapping[int, int | None]) -> list[int] | None:
    known = Counter(group for group in groups.values() if group is not None)
    group, size = max(known.items(), key=lambda item: item[1], default=(None, 0))
    if size < MIN_MAJORITY or 2 * size <= len(groups):
        return None
    return [config for config in groups if groups[config] == group]


def notes_of(judgement: Judgement, unowned: Mapping[str, int]) -> list[str]:
    """Return what the user should hear of, a sentence each."""
    notes = [
        f"{count} of its configs wrote into the storage behind {name} where no argument has "
        "elements; what the caller keeps there is overwritten by each launch"
        for name, count in unowned.items()
    ]
    if judgement.disputed:
        kinds = "; ".join(sorted(set(judgement.disputed.values())))
        notes.append(
            f"its configs disagree about the result and none is excluded ({kinds}): name what "
            "need not agree in scratch=[...], or say what is right with reference="
        )
    return notes


def _disputed(groups: Mapping[int, int | None]) -> dict[int, str]:
    sizes = Counter(groups.values())
    if len(sizes) < 2:
        return {}
    return {
        config: f"{1 if group is None else sizes[group]} of {len(groups)} configs have this result"
        for config, group in groups.items()
    }
