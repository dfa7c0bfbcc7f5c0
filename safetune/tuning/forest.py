"""The default proposer: a random forest on the configs that were measured, asked of the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.ensemble import ExtraTreesRegressor

from safetune.tuning.search import BATCH, History, Neighbour

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from triton.runtime.autotuner import Config

    Floats = NDArray[np.float32]

#: The share of a budget that is measured before the first forest is grown, and its limits.
_INITIAL_SHARE, _LEAST, _MOST = 0.25, 8, 24
#: A config that fails counts as this many times slower than the best, and so does a slower one.
_SLOWEST = 8.0
_TREES = 60
#: How much of the trees' disagreement a promising config is given.
_OPTIMISM = 1.0
#: A neighbour counts half at this distance, and not at all beyond the second.
_HALF, _FARTHEST = 1.0, 4.0


class Forest:
    """Predicts the logarithm of each config's time, and proposes those that may be fastest."""

    name = "forest"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._features: tuple[Any, Floats] | None = None
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
        works = [time_ms for time_ms in tried.values() if time_ms is not None]
        initial = int(min(max(_INITIAL_SHARE * (len(tried) + remaining), _LEAST), _MOST))
        if prior is None and (len(tried) < initial or not works):
            count = min(remaining, max(initial - len(tried), _LEAST))
            return [configs[i] for i in _spread(features, list(tried), left, count, draw)]
        if prior is not None and len(works) < 3:
            order = left[np.argsort(prior[left], kind="stable")]
            return [configs[i] for i in order[:count]]
        columns = features if prior is None else np.column_stack([features, prior])
        seen = np.array(list(tried))
        target = _relative(list(tried.values()))
        base = np.zeros(len(configs), np.float32) if prior is None else prior
        mean, spread = _predicted(
            columns[seen], target - base[seen], columns[left], self._seed + len(tried)
        )
        score = base[left] + mean - _OPTIMISM * spread
        return [configs[i] for i in left[np.argsort(score, kind="stable")][:count]]

    def features(self, configs: Sequence[Config]) -> Floats:
        """Return what `features_of` returns, computed once."""
        if self._features is None or self._features[0] is not configs:
            self._features = configs, features_of(configs)
        return self._features[1]

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


def features_of(configs: Sequence[Config]) -> Floats:
    """Return a row of numbers for each config: its parameters, and sums and differences of pairs.

    Numbers are logarithms: a sum of two is the size of a tile, a difference its shape.
    """
    values = [config.all_kwargs() for config in configs]
    names = dict.fromkeys(name for each in values for name in each)
    columns = {name: _column([each.get(name) for each in values]) for name in names}
    varied = [column for column in columns.values() if np.ptp(column) > 0]
    pairs = [
        combined
        for place, one in enumerate(varied)
        for other in varied[:place]
        for combined in (one + other, one - other)
    ]
    return (
        np.column_stack([*varied, *pairs]).astype(np.float32)
        if varied
        else np.zeros((len(configs), 1), np.float32)
    )


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
    """Return the mean of the trees' predictions, and their standard deviation."""
    forest = ExtraTreesRegressor(_TREES, min_samples_leaf=1, max_features=0.5, random_state=seed)
    forest.fit(rows, target)
    found = np.stack([tree.tree_.predict(wanted)[:, 0] for tree in forest.estimators_])
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
