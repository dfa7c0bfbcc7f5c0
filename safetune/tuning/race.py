"""The final: the near-best configs run in turns, so that drift of the clock hits all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from safetune.child.timing import Budget
from safetune.outcome import Outcome, Timing
from safetune.tuning import choose

#: Kernel time of one config in one round, and how many launches that may be.
_ROUND_MS = 4.0
_MIN_LAUNCHES, _MAX_LAUNCHES = 2, 20
#: When every racer has had the least number of rounds, the final ends after so long.
_LIMIT_S = 1.5


def race(
    racers: Mapping[int, Timing],
    measure: Callable[[int, Budget], Outcome],
    short: bool = False,
) -> tuple[dict[int, Timing], dict[int, Outcome]]:
    """Run the racers in rounds until the winner is clear or the time is up.

    Args:
        racers: with their screening times, which decide how many launches make a round.
        short: few rounds of few launches, where one takes long: in the interpreter, or with the
            user's own benchmark function.

    Returns:
        The final timing of each, and the outcome of those that failed on the way.
    """
    start = time.perf_counter()
    rounds: dict[int, list[Timing]] = {index: [] for index in racers}
    failed: dict[int, Outcome] = {}
    running = list(racers)
    for turn in range(choose.MIN_ROUNDS if short else choose.MAX_ROUNDS):
        for index in choose.in_turn(running, turn):
            outcome = measure(index, _budget(racers[index], short))
            if outcome.timing is None:
                failed[index] = outcome
                running.remove(index)
                del rounds[index]
            else:
                rounds[index].append(outcome.timing)
        late = turn + 1 >= choose.MIN_ROUNDS and time.perf_counter() - start > _LIMIT_S
        if not rounds or late or choose.clear(rounds):
            break
        running = [index for index in running if index not in choose.beaten(rounds)]
    return {index: choose.combine(timings) for index, timings in rounds.items()}, failed


def _budget(screened: Timing, short: bool) -> Budget:
    launches = math.ceil(_ROUND_MS / screened.median_ms)
    least, most = (1, _MIN_LAUNCHES) if short else (_MIN_LAUNCHES, _MAX_LAUNCHES)
    return Budget(estimate_launches=min(max(launches, least), most), time_ms=0.0)
