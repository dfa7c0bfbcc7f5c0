"""Finds the fastest config, given that every measurement is noisy.

Configs close to the best after screening run again, in rounds, so that clock drift affects all
alike.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from safetune.both.protocol import GRAPH_LAUNCHES, Budget
from safetune.outcome import Outcome, Timing

#: Configs within this ratio of the best screening median go to the final.
FINAL_RATIO = 1.08
#: A coarse time is of the first launches. It counts where those that were faster proved wrong.
_COARSE_DOUBT = 1.5
#: At most this many configs, the best ones, go to the final.
MAX_FINALISTS = 10
#: Configs of a kernel that screening times below this may be timed as replays of a graph. Around
#: each launch is more than a microsecond that does not count there, and caches are in another
#: state, so more configs go to that final.
SHORT_MS, SHORT_RATIO, MAX_SHORT = 0.05, 1.25, 20
#: Medians within this ratio count as equal; the config declared first then wins.
TIE_RATIO = 1.005
#: A race may end while it is open whether an earlier config ties, if it is not slower than this.
_GOOD_RATIO = 1.01
MIN_ROUNDS, MAX_ROUNDS = 4, 16
#: A difference counts if it is at least this many standard errors of the mean.
_CONFIDENCE = 3.0

#: Kernel time of one config in one round, and the limits of its launches.
_ROUND_MS = 4.0
_MIN_LAUNCHES, _MAX_LAUNCHES = 2, 20
#: The same for replays; another one, which is not timed, comes before each.
_REPLAYED_MS = 2.0
#: The final ends after this time, once every finalist has had `MIN_ROUNDS`.
_LIMIT_S = 1.5


def finalists(outcomes: Mapping[int, Outcome], way: str = "events") -> list[list[int]]:
    """Return the configs that may be the fastest, by the tuning that timed them.

    Times from two tunings are never compared, because clocks, drivers and neighbours differ. Each
    tuning keeps those near its fastest config, even if a later tuning has timed that one again, so
    no config is beaten by one that it never met.
    """
    ratio, most = (FINAL_RATIO, MAX_FINALISTS) if way == "events" else (SHORT_RATIO, MAX_SHORT)
    times = {index: outcome.times() for index, outcome in outcomes.items()}
    fastest: dict[str, float] = {}
    for tuning, median_ms in itertools.chain(*(of_config.items() for of_config in times.values())):
        fastest[tuning] = min(median_ms, fastest.get(tuning, math.inf))
    groups: dict[str, dict[int, float]] = {}
    for index, outcome in outcomes.items():
        if (timing := outcome.timing) is not None:
            last = next(reversed(times[index]))
            if timing.undisturbed_ms <= ratio * fastest[last] * _doubt(timing):
                groups.setdefault(last, {})[index] = timing.undisturbed_ms
    return [heapq.nsmallest(most, near, key=near.__getitem__) for near in groups.values()]


def race(
    racers: Mapping[int, Timing],
    measure: Callable[[Mapping[int, Budget]], Mapping[int, Outcome]],
    short: bool = False,
    way: str = "events",
) -> tuple[dict[int, Timing], dict[int, Outcome], list[int]]:
    """Run the finalists in rounds until the winner is clear or the time is up.

    Args:
        racers: the finalists with their screening times, which decide how many launches make a
            round.
        short: use few rounds of few launches, for long launches: in the interpreter, or with the
            user's own benchmark function.
        way: how all of them are timed, a `MeasurePolicy`.

    Returns:
        The final timing of each config, the outcome of each that failed on the way, and the configs
            that may win: those that ran every round or, if all of these failed, the others. Only
            their times were taken at the same moments.
    """
    start = time.perf_counter()
    rounds: dict[int, list[Timing]] = {index: [] for index in racers}
    failed: dict[int, Outcome] = {}
    running = list(racers)
    for turn in range(MIN_ROUNDS if short else MAX_ROUNDS):
        budgets = {index: _budget(racers[index], short, way) for index in in_turn(running, turn)}
        for index, outcome in measure(budgets).items():
            if outcome.timing is None:
                failed[index] = outcome
                running.remove(index)
                del rounds[index]
            else:
                rounds[index].append(outcome.timing)
        late = turn + 1 >= MIN_ROUNDS and time.perf_counter() - start > _LIMIT_S
        # Without those that were beaten: the clock may have been faster in their few rounds.
        current = {index: rounds[index] for index in running}
        if not running or late or clear(current):
            break
        slower = beaten(current)
        running = [index for index in running if index not in slower]
    if not running:
        common = min(map(len, rounds.values()), default=0)
        rounds, running = {i: timings[:common] for i, timings in rounds.items()}, [*rounds]
    stage = "final" if way == "events" else way
    return {index: combine(timings, stage) for index, timings in rounds.items()}, failed, running


def in_turn(racers: Sequence[int], turn: int) -> list[int]:
    """Return the racers, rotated by one every second turn and reversed in between.

    The previous config affects the device's temperature, and so its clock: no config should always
    follow the same one.
    """
    cut = turn // 2 % len(racers) if racers else 0
    order = [*racers[cut:], *racers[:cut]]
    return order[::-1] if turn % 2 else order


def beaten(rounds: Mapping[int, Sequence[Timing]]) -> set[int]:
    """Return the racers that more rounds would not bring to the front.

    A racer is compared with the leader round by round, because both run at the same clock there. It
    is beaten once it is slower by more than the noise of these ratios and, if declared before the
    leader, does not tie with it.
    """
    leader, bounds = _ratios(rounds)
    return {i for i, (low, _) in bounds.items() if low > (TIE_RATIO if i < leader else 1)}


def clear(rounds: Mapping[int, Sequence[Timing]]) -> bool:
    """Whether more rounds would find no better config.

    No config declared after the leader is faster by more than a tie. One declared before it does
    not tie with it, or might tie but would be equally good.
    """
    leader, bounds = _ratios(rounds)
    return all(
        (low > TIE_RATIO or high <= _GOOD_RATIO) if index < leader else low > 2 - TIE_RATIO
        for index, (low, high) in bounds.items()
    )


def combine(rounds: Sequence[Timing], stage: str = "final") -> Timing:
    """Return one timing for several rounds: the median of each field, and of undisturbed times."""
    return Timing(
        median_ms=statistics.median(timing.undisturbed_ms for timing in rounds),
        p20_ms=statistics.median(timing.p20_ms for timing in rounds),
        p80_ms=statistics.median(timing.p80_ms for timing in rounds),
        count=sum(timing.count for timing in rounds),
        stage=stage,
    )


def best(timings: Mapping[int, Timing]) -> int:
    """Return the fastest config; among ties, the first declared."""
    times = dict(zip(timings, _comparable(timings.values()), strict=True))
    limit = TIE_RATIO * min(times.values())
    return min(index for index, time_ms in times.items() if time_ms <= limit)


def _comparable(timings: Collection[Timing]) -> list[float]:
    """Return the medians. If many launches of one config were held up, by another process that the
    device serves in turn, return the 20th percentiles of all.
    """
    is_held_up = any(timing.is_held_up for timing in timings)
    return [timing.p20_ms if is_held_up else timing.median_ms for timing in timings]


def _doubt(timing: Timing) -> float:
    """Return the factor by which screening may overestimate a config's time."""
    return _COARSE_DOUBT if timing.stage == "coarse" else 1.0


def _budget(screened: Timing, short: bool, way: str) -> Budget:
    if way != "events":
        replays = math.ceil(_REPLAYED_MS / (GRAPH_LAUNCHES * screened.median_ms))
        return Budget(least=min(max(replays, 3), _MAX_LAUNCHES), time_ms=0.0, way=way)
    launches = math.ceil(_ROUND_MS / screened.median_ms)
    least, most = (1, _MIN_LAUNCHES) if short else (_MIN_LAUNCHES, _MAX_LAUNCHES)
    return Budget(least=min(max(launches, least), most), time_ms=0.0)


def _ratios(rounds: Mapping[int, Sequence[Timing]]) -> tuple[int, dict[int, tuple[float, float]]]:
    """Return the leader, and the bounds of each other racer's time over the leader's, from their
    common rounds.
    """
    medians = {i: statistics.median(t.undisturbed_ms for t in each) for i, each in rounds.items()}
    leader = min(medians, key=medians.__getitem__)
    bounds = {}
    for index in rounds.keys() - {leader}:
        pairs = map(_comparable, zip(rounds[index], rounds[leader], strict=False))
        ratios = [mine / theirs for mine, theirs in pairs]
        count, mean = len(ratios), statistics.fmean(ratios)
        if count < MIN_ROUNDS:
            bounds[index] = 0.0, math.inf
            continue
        # `statistics.stdev` takes most of a race's time on the host, for digits that do not count.
        deviation = math.dist(ratios, [mean] * count) / math.sqrt(count - 1)
        error = _CONFIDENCE * deviation / math.sqrt(count)
        bounds[index] = mean - error, mean + error
    return leader, bounds
