"""The default proposer: a Gaussian process fitted to measured times, which predicts the other
configs.

It sees the logarithms of the parameters; a logistic regression predicts which configs fail. The
settings of both are the same for every key: a search measures too few configs to fit them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern
from sklearn.linear_model import LogisticRegression

from safetune.tuning.search import BATCH, History, Neighbour, one_step

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from triton.runtime.autotuner import Config

    Floats = NDArray[np.float64]

#: The share of a budget that is drawn at random before the first prediction, and its limits.
_INITIAL_SHARE, _LEAST, _MOST = 0.25, 8, 24
#: A slower config counts as this many times slower than the best, and so does one that fails.
_SLOWEST = 8.0
#: What is added to the logarithm of a config's time if it more likely fails than not. Failing is
#: apart from times, because the best configs are often beside those that need too much memory.
_FAILS = 10.0
#: How far apart configs say little of one another, in standard deviations of a parameter; the share
#: of the times' variance that is noise.
_REACH, _NOISE = 1.2, 0.01
#: How much of its standard deviation a promising config is given.
_OPTIMISM = 1.0
#: The logistic regression's inverse strength of regularization.
_FREEDOM = 10.0
#: Of more configs the fastest are fitted, and others are predicted in parts: both for the memory.
_MOST_FITTED, _MOST_PREDICTED = 1000, 4096
#: A neighbour counts half at this distance, and not at all beyond the second.
_HALF, _FARTHEST = 1.0, 4.0


class GaussianProcess:
    """Predicts the logarithm of each config's time, and proposes those that may be fastest."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._of_configs: tuple[Any, Floats, dict[int, list[int]]] | None = None
        self._of_neighbours: tuple[Any, Floats | None] | None = None

    def propose(self, history: History, remaining: int) -> Sequence[Config]:
        """Return the untried configs with the lowest predicted times; at first, random ones."""
        configs = history.configs
        indexes = {id(config): index for index, config in enumerate(configs)}
        tried = {indexes[id(trial.config)]: trial.time_ms for trial in history.trials}
        left = np.array([index for index in range(len(configs)) if index not in tried])
        if not len(left):
            return []
        features, near = self._known(configs)
        prior, works = self.prior(history), any(tried.values())
        initial = int(min(max(_INITIAL_SHARE * (len(tried) + remaining), _LEAST), _MOST))
        if prior is None and (len(tried) < initial or not works):
            count = min(remaining, max(initial - len(tried), _LEAST), len(left))
            draw = np.random.default_rng(self._seed + len(tried))
            return [configs[i] for i in draw.choice(left, count, replace=False)]
        count = min(remaining, BATCH)
        if prior is not None and not works:
            return [configs[i] for i in left[np.argsort(prior[left], kind="stable")][:count]]
        scores = _scores(features, prior, tried, left)
        order = left[np.argsort(scores, kind="stable")].tolist()
        return [configs[i] for i in _apart(order, near, count)]

    def _known(self, configs: Sequence[Config]) -> tuple[Floats, dict[int, list[int]]]:
        """Return the features of a list of configs, and those one step from each: computed once."""
        if self._of_configs is None or self._of_configs[0] is not configs:
            self._of_configs = configs, features_of(configs), one_step(configs)
        return self._of_configs[1:]

    def prior(self, history: History) -> Floats | None:
        """Return the neighbours' weighted mean estimate of each config's time; None without one."""
        if self._of_neighbours is None or self._of_neighbours[0] is not history.neighbours:
            near = [each for each in history.neighbours if _counts(each)]
            weights = [0.5 ** (each.distance / _HALF) for each in near]
            features, _ = self._known(history.configs)
            times = [_times_of(each, history.configs, features) for each in near]
            mean = np.average(times, axis=0, weights=weights) if near else None
            self._of_neighbours = history.neighbours, mean
        return self._of_neighbours[1]


def _counts(neighbour: Neighbour) -> bool:
    return len(neighbour.trials) >= _LEAST and neighbour.distance <= _FARTHEST


def _times_of(neighbour: Neighbour, configs: Sequence[Config], features: Floats) -> Floats:
    """Return the relative time of each config for a neighbour, predicted where not measured."""
    indexes = {id(config): index for index, config in enumerate(configs)}
    measured = {
        indexes[id(trial.config)]: trial.time_ms
        for trial in neighbour.trials
        if id(trial.config) in indexes
    }
    if not any(measured.values()):
        return np.zeros(len(features))
    seen, target = np.array(list(measured)), _relative(list(measured.values()))
    times = np.zeros(len(features))
    if len(seen) < len(features):
        times, _ = _predicted(features[seen], target, features)
    times[seen] = target
    return times


def _scores(
    features: Floats,
    prior: Floats | None,
    tried: Mapping[int, float | None],
    left: NDArray[Any],
) -> Floats:
    """Return the least logarithm of a time that is likely, of the configs that are left."""
    base = np.zeros(len(features)) if prior is None else prior
    columns = np.column_stack([features, _standard(base)])
    seen = np.array(list(tried))
    works = np.array([time_ms is not None for time_ms in tried.values()])
    target = _relative(list(tried.values())) - base[seen]
    mean, spread = _predicted(columns[seen[works]], target[works], columns[left])
    score = base[left] + mean - _OPTIMISM * spread
    if not works.all():
        score += _FAILS * _fail(features[seen], works, features[left])
    return score


def _apart(order: Sequence[int], near: dict[int, list[int]], count: int) -> list[int]:
    """Return the first configs that are at least two steps apart: they tell more together."""
    chosen: list[int] = []
    for index in order:
        if len(chosen) < count and not set(chosen) & set(near[index]):
            chosen.append(index)
    rest = [index for index in order[: 2 * count] if index not in chosen]
    return [*chosen, *rest][:count]


def features_of(configs: Sequence[Config]) -> Floats:
    """Return a row per config with mean 0 and variance 1: logarithms of numbers, one-hot others."""
    values = [config.all_kwargs() for config in configs]
    names = dict.fromkeys(name for each in values for name in each)
    columns = [column for name in names for column in _columns([each.get(name) for each in values])]
    return _standard(np.column_stack(columns or [np.zeros(len(configs))]))


def _columns(values: Sequence[Any]) -> list[Floats]:
    if all(type(value) in (int, float) for value in values):
        return [np.array([math.copysign(math.log2(1 + abs(v)), v) for v in values])]
    texts = np.array([repr(value) for value in values])
    return [(texts == kind).astype(float) for kind in dict.fromkeys(texts.tolist())]


def _standard(columns: Floats) -> Floats:
    return np.asarray((columns - columns.mean(axis=0)) / np.maximum(columns.std(axis=0), 1e-6))


def _relative(times: Sequence[float | None]) -> Floats:
    """Return the logarithms of times over the best one."""
    best = min(time_ms for time_ms in times if time_ms is not None)
    slowest = math.log(_SLOWEST)
    return np.array([slowest if t is None else min(math.log(t / best), slowest) for t in times])


def _predicted(rows: Floats, target: Floats, wanted: Floats) -> tuple[Floats, Floats]:
    """Return the mean and the standard deviation of a Gaussian process through some targets."""
    fitted = np.argsort(target, kind="stable")[:_MOST_FITTED]
    kernel = Matern(length_scale=_REACH, nu=2.5)
    process = GaussianProcessRegressor(kernel, alpha=_NOISE, optimizer=None, normalize_y=True)
    process.fit(rows[fitted], target[fitted])
    parts = range(0, len(wanted), _MOST_PREDICTED)
    found = [process.predict(wanted[i : i + _MOST_PREDICTED], return_std=True) for i in parts]
    mean, spread = (np.concatenate(each) for each in zip(*found, strict=True))
    return mean, spread


def _fail(rows: Floats, works: NDArray[Any], wanted: Floats) -> NDArray[Any]:
    """Return which configs more likely fail than not.

    Memory grows with each parameter that it depends on, so that a plane between the logarithms
    separates better than the boxes of trees do: they left out the best configs, at the edge.
    """
    regression = LogisticRegression(C=_FREEDOM, max_iter=1000).fit(rows, works)
    return np.asarray(~regression.predict(wanted))
