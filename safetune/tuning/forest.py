"""The default proposer: a random forest on the configs that were measured, asked of the rest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import sklearn
from sklearn.tree import ExtraTreeRegressor

from safetune.tuning.search import BATCH, History, Neighbour, one_step

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from triton.runtime.autotuner import Config

    Floats = NDArray[np.float32]

#: The share of a budget that is measured before the first forest is grown, and its limits.
_INITIAL_SHARE, _LEAST, _MOST = 0.25, 8, 24
#: No forest is grown on fewer configs that work.
_FEWEST = 3
#: A slower config counts as this many times slower than the best, and so does one that fails.
_SLOWEST = 8.0
#: What is added to the logarithm of a config's time if most trees say that it fails: a forest of
#: its own says it, because the best configs are often beside those that need too much memory.
_FAILS = 10.0
_TREES = 120
#: How much of the trees' disagreement a promising config is given.
_OPTIMISM = 1.0
#: A neighbour counts half at this distance, and not at all beyond the second.
_HALF, _FARTHEST = 1.0, 4.0


class Forest:
    """Predicts the logarithm of each config's time, and proposes those that may be fastest."""

    name = "forest"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._of_configs: tuple[Any, Floats, dict[int, list[int]]] | None = None
        self._prior: tuple[Any, Floats | None] | None = None

    def propose(self, history: History, remaining: int) -> Sequence[Config]:
        """Return the configs with the least predicted time that were not tried."""
        configs = history.configs
        count = min(remaining, BATCH)
        indexes = {id(config): index for index, config in enumerate(configs)}
        tried = {indexes[id(trial.config)]: trial.time_ms for trial in history.trials}
        left = np.array([index for index in range(len(configs)) if index not in tried])
        if not len(left):
            return []
        draw = np.random.default_rng(self._seed + len(tried))
        features, prior = self.features(configs), self.prior(history)
        known = sum(time_ms is not None for time_ms in tried.values())
        initial = int(min(max(_INITIAL_SHARE * (len(tried) + remaining), _LEAST), _MOST))
        if prior is None and (len(tried) < initial or known < _FEWEST):
            count = min(remaining, max(initial - len(tried), _LEAST))
            return [configs[i] for i in _spread(features, list(tried), left, count, draw)]
        if prior is not None and known < _FEWEST:
            order = left[np.argsort(prior[left], kind="stable")]
            return [configs[i] for i in order[:count]]
        columns = features if prior is None else np.column_stack([features, prior])
        base = np.zeros(len(configs), np.float32) if prior is None else prior
        seen, seed = np.array(list(tried)), self._seed + len(tried)
        works = np.array([time_ms is not None for time_ms in tried.values()])
        target = _relative(list(tried.values())) - base[seen]
        mean, spread = _predicted(columns[seen[works]], target[works], columns[left], seed)
        fails: Floats = np.zeros(len(left), np.float32)
        if not works.all():
            fails, _ = _predicted(columns[seen], (~works).astype(np.float32), columns[left], seed)
        score = base[left] + mean - _OPTIMISM * spread + _FAILS * (fails > 0.5)
        order = left[np.argsort(score, kind="stable")].tolist()
        return [configs[i] for i in _apart(order, self._known(configs)[2], count)]

    def features(self, configs: Sequence[Config]) -> Floats:
        """Return what `features_of` returns, computed once."""
        return self._known(configs)[1]

    def _known(self, configs: Sequence[Config]) -> tuple[Any, Floats, dict[int, list[int]]]:
        """Return a list of configs, their features, and those one step from each."""
        if self._of_configs is None or self._of_configs[0] is not configs:
            self._of_configs = configs, features_of(configs), one_step(configs)
        return self._of_configs

    def prior(self, history: History) -> Floats | None:
        """Return what neighbours say of each config's time: a weighted mean; None without any."""
        if self._prior is None or self._prior[0] is not history.neighbours:
            self._prior = history.neighbours, self._of_neighbours(history)
        return self._prior[1]

    def _of_neighbours(self, history: History) -> Floats | None:
        features = self.features(history.configs)
        indexes = {id(config): index for index, config in enumerate(history.configs)}
        total, weights = np.zeros(len(history.configs), np.float32), 0.0
        for each in history.neighbours:
            if len(each.trials) < _LEAST or each.distance > _FARTHEST:
                continue
            weight = 0.5 ** (each.distance / _HALF)
            total += weight * _of_neighbour(each, features, indexes, self._seed)
            weights += weight
        return total / np.float32(weights) if weights else None


def _apart(order: Sequence[int], near: dict[int, list[int]], count: int) -> list[int]:
    """Return the first configs of which none is one step from another: they say more together."""
    chosen: list[int] = []
    for index in order:
        if len(chosen) < count and not set(chosen) & set(near[index]):
            chosen.append(index)
    rest = [index for index in order[: 2 * count] if index not in chosen]
    return [*chosen, *rest][:count]


def features_of(configs: Sequence[Config]) -> Floats:
    """Return a row of numbers for each config: its parameters, and signed sums of two and three.

    Numbers are logarithms: a sum is the size of a tile, a difference its shape, or its size for
    each warp.
    """
    values = [config.all_kwargs() for config in configs]
    names = dict.fromkeys(name for each in values for name in each)
    columns = [_column([each.get(name) for each in values]) for name in names]
    varied = [column for column in columns if np.ptp(column) > 0]
    combined = [
        sum((sign * other for sign, other in zip(signs, others, strict=True)), first)
        for size in (1, 2, 3)
        for first, *others in itertools.combinations(varied, size)
        for signs in itertools.product((1, -1), repeat=size - 1)
    ]
    return np.column_stack(combined or columns).astype(np.float32)


def _column(values: Sequence[Any]) -> Floats:
    if all(type(value) in (int, float) for value in values):
        return np.array([math.copysign(math.log2(1 + abs(v)), v) for v in values], np.float32)
    kinds = {text: place for place, text in enumerate(dict.fromkeys(map(repr, values)))}
    return np.array([kinds[repr(value)] for value in values], np.float32)


def _relative(times: Sequence[float | None]) -> Floats:
    """Return the logarithms of times over the best one."""
    best = min(time_ms for time_ms in times if time_ms is not None)
    slowest = math.log(_SLOWEST)
    logs = [slowest if t is None else min(math.log(t / best), slowest) for t in times]
    return np.array(logs, np.float32)


def _predicted(rows: Floats, target: Floats, wanted: Floats, seed: int) -> tuple[Floats, Floats]:
    """Return the mean of the trees' predictions, and their standard deviation.

    `ExtraTreesRegressor` grows such trees too, in three times the time: it copies its settings.
    """
    rows, wanted = np.ascontiguousarray(rows), np.ascontiguousarray(wanted)
    draw = np.random.RandomState(seed)
    trees = [ExtraTreeRegressor(max_features=0.5, random_state=draw) for _ in range(_TREES)]
    with sklearn.config_context(skip_parameter_validation=True):
        grown = [tree.fit(rows, target, check_input=False).tree_ for tree in trees]
    found = np.stack([tree.predict(wanted)[:, 0] for tree in grown])
    return found.mean(axis=0), found.std(axis=0)


def _of_neighbour(
    neighbour: Neighbour, features: Floats, indexes: Mapping[int, int], seed: int
) -> Floats:
    """Return the relative time of each config for a neighbour, predicted where not measured."""
    measured = {
        indexes[id(trial.config)]: trial.time_ms
        for trial in neighbour.trials
        if id(trial.config) in indexes
    }
    if not any(measured.values()):
        return np.zeros(len(features), np.float32)
    seen, target = np.array(list(measured)), _relative(list(measured.values()))
    found = np.zeros(len(features), np.float32)
    if len(seen) < len(features):
        found = _predicted(features[seen], target, features, seed)[0].astype(np.float32)
    found[seen] = target
    return found


def _spread(
    features: Floats, tried: list[int], left: NDArray[Any], count: int, draw: Any
) -> list[int]:
    """Return configs far from one another and from those tried, begun at random."""
    scaled = (features - features.mean(axis=0)) / np.maximum(features.std(axis=0), 1e-6)
    chosen = [] if tried else [int(draw.choice(left))]
    apart = np.full(len(left), np.inf)
    for index in tried + chosen:
        apart = np.minimum(apart, ((scaled[left] - scaled[index]) ** 2).sum(axis=1))
    while len(chosen) < min(count, len(left)):
        pool = draw.choice(len(left), min(len(left), 64), replace=False)
        place = pool[int(np.argmax(apart[pool]))]
        chosen.append(int(left[place]))
        apart = np.minimum(apart, ((scaled[left] - scaled[left[place]]) ** 2).sum(axis=1))
    return chosen
