"""How good a choice is after a search of some configs, replayed on stored trials without a GPU.

`search_trials` has measured every config of some spaces for several keys. For every key, strategy
and budget, SEEDS searches see the times that a tuning would have seen; of the best they have found,
the one that was fastest in the long measurement is the choice, as the final rounds of a tuning
decide. Its regret is how much slower it is than the best config of the whole list.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import search_trials

SEEDS = 200
BUDGETS = (32, 100)
STRATEGIES = ("random", "forest", "forest_neighbours")
NEIGHBOURS = 2


@dataclass(frozen=True)
class Key:
    """The stored trials of one key: what a search sees of each config, and its time in truth."""

    name: str
    values: tuple[int, ...]
    seen: tuple[float | None, ...]
    truth: tuple[float, ...]

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Key:
        """Return the key of an entry in a space's file; a config that failed takes for ever."""
        seen = [
            time_ms if verdict == "ok" else None
            for time_ms, verdict in zip(stored["median_ms"], stored["verdicts"], strict=True)
        ]
        pairs = zip(seen, stored["long_ms"], strict=True)
        truth = tuple(math.inf if s is None else s if long is None else long for s, long in pairs)
        return cls(stored["name"], tuple(stored["values"]), tuple(seen), truth)

    def regret(self, tried: Sequence[int]) -> float:
        """Return how much slower the choice among these configs is than the best of all."""
        from safetune.tuning.race import FINAL_RATIO, MAX_FINALISTS

        times = {index: time_ms for index in tried if (time_ms := self.seen[index]) is not None}
        if not times:
            return math.inf
        limit = FINAL_RATIO * min(times.values())
        near = [index for index, time_ms in times.items() if time_ms <= limit]
        finalists = heapq.nsmallest(MAX_FINALISTS, near, key=times.__getitem__)
        return min(self.truth[index] for index in finalists) / min(self.truth) - 1.0

    def distance(self, other: Key) -> float:
        """Return how far two keys are apart, as `safetune` says it of their values."""
        pairs = zip(self.values, other.values, strict=True)
        return sum(abs(math.log2(1 + one) - math.log2(1 + two)) for one, two in pairs)


@functools.cache
def space(path: Path) -> tuple[tuple[Any, ...], dict[str, Key]]:
    """Return the configs of a space and its keys."""
    import triton

    stored = search_trials.load(path)
    options = ("num_warps", "num_stages", "num_ctas", "maxnreg")
    configs = tuple(
        triton.Config(
            {name: value for name, value in values.items() if name not in options},
            **{name: values[name] for name in options if name in values},
        )
        for values in stored["configs"]
    )
    return configs, {key["name"]: Key.of(key) for key in stored["keys"]}


@functools.cache
def start(path: Path, name: str, neighbours: int) -> Any:
    """Return what a search for a key knows at its start."""
    from safetune.tuning.search import History, Neighbour, Trial

    configs, keys = space(path)
    key = keys[name]
    nearest = sorted((k for k in keys.values() if k is not key), key=key.distance)[:neighbours]
    known = tuple(
        Neighbour(
            values=dict(enumerate(other.values)),
            distance=key.distance(other),
            choice=configs[min(range(len(configs)), key=other.truth.__getitem__)],
            trials=tuple(map(Trial, configs, other.seen)),
        )
        for other in nearest
    )
    return History(path.stem, dict(enumerate(key.values)), {}, {}, configs, (), known)


@functools.cache
def _forest() -> Any:
    """The one whose cached features serve every search; its seed is set for each."""
    from safetune.tuning.forest import Forest

    return Forest()


def search(path: Path, name: str, strategy: str, seed: int, budget: int) -> list[int]:
    """Return the configs that a search measures."""
    from safetune.tuning.search import Search

    if strategy == "random":
        count = len(space(path)[0])
        return random.Random(seed).sample(range(count), min(budget, count))
    proposer = _forest()
    proposer._seed = 1000 * seed
    history = start(path, name, NEIGHBOURS if strategy == "forest_neighbours" else 0)
    asked, times = Search(history, proposer, _near(path)), dict[int, float | None]()
    _, keys = space(path)
    while batch := asked.ask(times, budget - len(times)) if len(times) < budget else []:
        times |= {index: keys[name].seen[index] for index in batch}
    return list(times)


@functools.cache
def _near(path: Path) -> Any:
    from safetune.tuning.search import one_step

    return one_step(space(path)[0])
