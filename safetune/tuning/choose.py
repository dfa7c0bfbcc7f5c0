"""Which config is the fastest, given that every measurement is noisy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from safetune.outcome import Timing

#: Configs within this ratio of the best screening median go to the final.
FINAL_RATIO = 1.08
#: No more than so many, the best ones.
MAX_FINALISTS = 10
#: Medians within this ratio count as equal; the config declared first then wins.
TIE_RATIO = 1.005
MIN_ROUNDS, MAX_ROUNDS = 4, 16
#: A difference counts if it is so many standard errors of the mean away from none.
_CONFIDENCE = 3.0


def finalists(
    timings: Mapping[int, Timing], new: Collection[int], incumbent: int | None
) -> list[int]:
    """Return the configs whose order screening leaves open.

    With an incumbent only new configs can challenge it: what it has beaten once is not run again.
    """
    rivals = {i: t for i, t in timings.items() if incumbent is None or i in new or i == incumbent}
    if not rivals:
        return []
    limit = FINAL_RATIO * min(timing.median_ms for timing in rivals.values())
    near = [index for index, timing in rivals.items() if timing.median_ms <= limit]
    near.sort(key=lambda index: rivals[index].median_ms)
    return sorted(near[:MAX_FINALISTS])


def in_turn(racers: Sequence[int], turn: int) -> list[int]:
    """Return the racers with another one first every second turn, and backwards in between.

    Who ran before decides how warm the device is, and by that its clock: so nobody always follows
    the same one.
    """
    cut = turn // 2 % len(racers) if racers else 0
    order = [*racers[cut:], *racers[:cut]]
    return order[::-1] if turn % 2 else order


def beaten(rounds: Mapping[int, Sequence[Timing]]) -> set[int]:
    """Return the racers that more rounds would not bring to the front.

    A racer is compared with the leader round by round, since both meet the same clock there, and is
    beaten once it is slower by more than the noise of that.
    """
    leader = _leader(rounds)
    return {index for index in rounds if index != leader and _ratio(rounds, index, leader)[0] > 1}


def clear(rounds: Mapping[int, Sequence[Timing]]) -> bool:
    """Whether more rounds would not change the winner: every rival is beaten, or as good."""
    leader = _leader(rounds)
    for index in rounds:
        low, high = _ratio(rounds, index, leader) if index != leader else (1.0, 1.0)
        if low <= 1 and high > TIE_RATIO:
            return False
    return True


def combine(rounds: Sequence[Timing]) -> Timing:
    """Return one timing for several rounds: the median of each figure."""
    return Timing(
        median_ms=statistics.median(timing.median_ms for timing in rounds),
        p20_ms=statistics.median(timing.p20_ms for timing in rounds),
        p80_ms=statistics.median(timing.p80_ms for timing in rounds),
        count=sum(timing.count for timing in rounds),
        stage="final",
    )


def best(timings: Mapping[int, Timing]) -> int:
    """Return the fastest config's number; of those that tie with it, the one declared first."""
    limit = TIE_RATIO * min(timing.median_ms for timing in timings.values())
    return min(index for index, timing in timings.items() if timing.median_ms <= limit)


def _leader(rounds: Mapping[int, Sequence[Timing]]) -> int:
    return min(rounds, key=lambda index: combine(rounds[index]).median_ms)


def _ratio(rounds: Mapping[int, Sequence[Timing]], index: int, leader: int) -> tuple[float, float]:
    """Return between which bounds a racer's time over the leader's is, by their common rounds."""
    pairs = zip(rounds[index], rounds[leader], strict=False)
    ratios = [mine.median_ms / theirs.median_ms for mine, theirs in pairs]
    if len(ratios) < MIN_ROUNDS:
        return 0.0, math.inf
    error = _CONFIDENCE * statistics.stdev(ratios) / math.sqrt(len(ratios))
    middle = statistics.mean(ratios)
    return middle - error, middle + error
