"""The default proposer: a Gaussian process through the measured times, asked of the other configs.

It sees the logarithms of the parameters; a logistic regression says which configs fail. The
settings of both are the same for every key: a search measures too few configs to fit them.
"""

from __future__ import annotations

import itertools
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

#: The share of a budget that is measured before the first prediction, and its limits.
_INITIAL_SHARE, _LEAST, _MOST = 0.25, 8, 24
#: Nothing is predicted from fewer configs that work.
_FEWEST = 3
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

    name = "gaussian_process"

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
        features, prior = self.features(configs), self.prior(history)
        known = sum(time_ms is not None for time_ms in tried.values())
        initial = int(min(max(_INITIAL_SHARE * (len(tried) + remaining), _LEAST), _MOST))
        if prior is None and (len(tried) < initial or known < _FEWEST):
            draw = np.random.default_rng(self._seed + len(tried))
            count = min(remaining, max(initial - len(tried), _LEAST))
            return [configs[i] for i in _spread(shapes_of(features), [*tried], left, count, draw)]
        if prior is not None and known < _FEWEST:
            order = left[np.argsort(prior[left], kind="stable")]
            return [configs[i] for i in order[:count]]
        order = left[np.argsort(_scores(features, prior, tried, left), kind="stable")].tolist()
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
        total, weights = np.zeros(len(history.configs)), 0.0
        for each in history.neighbours:
            if len(each.trials) < _LEAST or each.distance > _FARTHEST:
                continue
            weight = 0.5 ** (each.distance / _HALF)
            total += weight * _of_neighbour(each, features, indexes)
            weights += weight
        return total / weights if weights else None


def _scores(
    features: Floats,
    prior: Floats | None,
    tried: Mapping[int, float | None],
    left: NDArray[Any],
) -> Floats:
    """Return the least logarithm of a time that is likely, of the configs that are left."""
    columns, base = _standard(features), np.zeros(len(features))
    if prior is not None:
        columns, base = np.column_stack([columns, _standard(prior)]), prior
    seen = np.array(list(tried))
    works = np.array([time_ms is not None for time_ms in tried.values()])
    target = _relative(list(tried.values())) - base[seen]
    mean, spread = _predicted(columns[seen[works]], target[works], columns[left])
    score = base[left] + mean - _OPTIMISM * spread
    if not works.all():
        parameters = columns[:, : features.shape[1]]
        score += _FAILS * _fail(parameters[seen], works, parameters[left])
    return score


def _apart(order: Sequence[int], near: dict[int, list[int]], count: int) -> list[int]:
    """Return the first configs of which none is one step from another: they say more together."""
    chosen: list[int] = []
    for index in order:
        if len(chosen) < count and not set(chosen) & set(near[index]):
            chosen.append(index)
    rest = [index for index in order[: 2 * count] if index not in chosen]
    return [*chosen, *rest][:count]


def features_of(configs: Sequence[Config]) -> Floats:
    """Return a row of numbers for each config: the logarithms of the parameters that vary."""
    values = [config.all_kwargs() for config in configs]
    names = dict.fromkeys(name for each in values for name in each)
    columns = [column for name in names for column in _columns([each.get(name) for each in values])]
    varied = [column for column in columns if np.ptp(column) > 0]
    return np.column_stack(varied or [np.zeros(len(configs))])


def shapes_of(features: Floats) -> Floats:
    """Return signed sums of one, two and three features: what the first configs differ in.

    A sum is the size of a tile, a difference its shape, or its size for each warp.
    """
    combined = [
        sum((sign * other for sign, other in zip(signs, others, strict=True)), first)
        for size in (1, 2, 3)
        for first, *others in itertools.combinations(features.T, size)
        for signs in itertools.product((1, -1), repeat=size - 1)
    ]
    return np.column_stack(combined)


def _columns(values: Sequence[Any]) -> list[Floats]:
    """Return the logarithms of numbers; of other values which one it is, but for the first."""
    if all(type(value) in (int, float) for value in values):
        return [np.array([math.copysign(math.log2(1 + abs(v)), v) for v in values])]
    texts = np.array([repr(value) for value in values])
    return [(texts == kind).astype(float) for kind in [*dict.fromkeys(texts.tolist())][1:]]


def _standard(columns: Floats) -> Floats:
    """Return columns of mean 0 and variance 1."""
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


def _of_neighbour(neighbour: Neighbour, features: Floats, indexes: Mapping[int, int]) -> Floats:
    """Return the relative time of each config for a neighbour, predicted where not measured."""
    measured = {
        indexes[id(trial.config)]: trial.time_ms
        for trial in neighbour.trials
        if id(trial.config) in indexes
    }
    if not any(measured.values()):
        return np.zeros(len(features))
    seen, target = np.array(list(measured)), _relative(list(measured.values()))
    found = np.zeros(len(features))
    if len(seen) < len(features):
        columns = _standard(features)
        found, _ = _predicted(columns[seen], target, columns)
    found[seen] = target
    return found


def _spread(
    features: Floats, tried: list[int], left: NDArray[Any], count: int, draw: Any
) -> list[int]:
    """Return configs far from one another and from those tried, begun at random."""
    features = _standard(features)
    chosen = [] if tried else [int(draw.choice(left))]
    apart = np.full(len(left), np.inf)
    for index in tried + chosen:
        apart = np.minimum(apart, ((features[left] - features[index]) ** 2).sum(axis=1))
    while len(chosen) < min(count, len(left)):
        pool = draw.choice(len(left), min(len(left), 64), replace=False)
        place = pool[int(np.argmax(apart[pool]))]
        chosen.append(int(left[place]))
        apart = np.minimum(apart, ((features[left] - features[left[place]]) ** 2).sum(axis=1))
    return chosen
