"""Which config is the fastest, given that every measurement is noisy."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence

from safetune.outcome import Timing

#: Configs within this ratio of the best screening median go to the final.
FINAL_RATIO = 1.05
#: No more than so many, the best ones.
MAX_FINALISTS = 6
#: Medians within this ratio count as equal; the config declared first then wins.
TIE_RATIO = 1.005
ROUND_LAUNCHES = 10
MAX_ROUNDS = 5


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


def rotated(racers: Sequence[int], turn: int) -> list[int]:
    """Return the racers with another one first each turn; the first one finds a cooler device."""
    cut = turn % len(racers) if racers else 0
    return [*racers[cut:], *racers[:cut]]


def clear(timings: Mapping[int, Sequence[Timing]]) -> bool:
    """Whether more rounds would not change the winner: each rival is slower in every round."""
    if len(timings) < 2:
        return True
    rounds = min(len(values) for values in timings.values())
    if rounds < 2:
        return False
    winner = best({index: combine(values) for index, values in timings.items()})
    return all(
        timings[winner][turn].median_ms < values[turn].median_ms
        for index, values in timings.items()
        if index != winner
        for turn in range(rounds)
    )


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
