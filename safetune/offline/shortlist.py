"""The shortest list of configs that keeps every measured key about as fast as its best config.

In: the stored trials of one kernel. Out: which configs stay, and what that costs, also on keys that
were not used to find them.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from safetune.errors import InvalidSetting, SafetuneError, TargetError
from safetune.frozen import dataclass
from safetune.outcome import TRANSIENT, Mark
from safetune.store.records import KeyRecord, TrialRecord

#: The time limit of the search for the list, and of all those for held-out keys together. The lists
#: of kernels take milliseconds.
_LIMIT_S = 20.0
#: By how much of the best time a config's times differ between keys that are alike.
_LIKE = 0.01
#: How many times as slow as the best a config counts at most, and where it does not work.
_FAR = 2.0
#: The pairs of keys, at most, from which keys like them are made.
_PAIRS = 1000
#: What a config has to add to a list, of one key.
_NOTHING = 1e-9
#: The keys are split into this many parts at most; each is held out once.
_PARTS = 20


@dataclass(frozen=True)
class Measured:
    """One key, and the times of the configs that work there.

    `times` is in milliseconds, by digest; `weight` is the key's share of the recorded time, or 1.
    """

    key: KeyRecord
    times: Mapping[str, float]
    weight: float = 1.0

    @property
    def best(self) -> float:
        """The time of the fastest config."""
        return min(self.times.values())

    def winner(self) -> str:
        """Return the fastest config."""
        return min(self.times, key=self.times.__getitem__)

    def slowdown(self, kept: Iterable[str]) -> float:
        """Return how many times as long as the best the fastest of `kept` takes."""
        return min(self.times.get(config, math.inf) for config in kept) / self.best


@dataclass(frozen=True)
class Cost:
    """What a list costs on some keys, as ratios to the best config of each.

    `failed` keys have no config that works in the list; the ratios are those of the others.
    """

    keys: int
    failed: int
    mean: float  # geometric
    weighted: float  # by the keys' weights
    worst: float


@dataclass(frozen=True)
class Shortlist:
    """The configs that stay, by digest.

    `proven`: there is no shorter list, and none of this length has a smaller weighted cost.
    """

    kept: frozenset[str]
    proven: bool


def measured_keys(
    stored: Iterable[tuple[KeyRecord, Sequence[TrialRecord]]],
    weights: Mapping[str, float],
    among: Container[str],
) -> list[Measured]:
    """Return the keys with a config that works, of these configs, by their last trials.

    A time that was taken while the program used the device does not count. A key without a recorded
    time has the least weight that another has.
    """
    least = min(weights.values(), default=1.0)
    found = []
    for key, trials in stored:
        lasting = [trial for trial in trials if trial.outcome.verdict not in TRANSIENT]
        latest = {t.config_digest: t.outcome for t in sorted(lasting, key=lambda t: t.generation)}
        times = {
            config: outcome.timing.undisturbed_ms
            for config, outcome in latest.items()
            if config in among and outcome.ok and outcome.timing
            if not outcome.marked(Mark.CONTENDED)
        }
        if times:
            found.append(Measured(key, times, weights.get(key.digest, least)))
    return found


def shortest(keys: Sequence[Measured], within: float, keep: int = 0) -> Shortlist:
    """Return the shortest list with a config for each key that is `within` of its best.

    A larger `keep` adds configs, up to that number, for keys that were not measured.

    Raises:
        InvalidSetting: the shortest list has more than `keep` configs.
    """
    found = _shortest(keys, within)
    if 0 < keep < len(found.kept):
        searched = "" if found.proven else " that the search found within its time limit,"
        raise InvalidSetting(
            f"--keep {keep} is less than the {len(found.kept)} configs of the shortest list"
            f"{searched} with which no key is more than {within:.2%} slower: give "
            f"--keep {len(found.kept)} or more, or a larger --within"
        )
    return replace(found, kept=_filled(keys, found.kept, keep))


def _filled(keys: Sequence[Measured], kept: frozenset[str], keep: int) -> frozenset[str]:
    """Return a list with configs added, one by one, until there are `keep`.

    Each time the config is added that is most likely the fastest on keys like the measured ones:
    half way between two of them, or half as far beyond one of them, and `_LIKE` of the time apart.
    Two configs with exactly the same time on a key are the same machine code, as a rule: the second
    one adds nothing.
    """
    if len(kept) >= keep or len(keys) < 2:
        return kept
    import numpy  # comes with scipy

    configs = sorted({config for key in keys for config in key.times})
    others = len(keys) - 1  # a pair is a number: reading its keys takes no list of all pairs
    drawn = range(len(keys) * others)
    pairs = [divmod(n, others) for n in random.Random(0).sample(drawn, min(len(drawn), _PAIRS))]
    one, other = [n for n, _ in pairs], [m + (m >= n) for n, m in pairs]
    measured = numpy.log([[min(key.slowdown([c]), _FAR) for key in keys] for c in configs])
    apart = (measured[:, one] - measured[:, other]) / 2
    slower = numpy.hstack([measured, measured[:, one] - apart, measured[:, one] + apart])
    weights = numpy.array([key.weight for key in keys])
    weights = numpy.concatenate([weights, weights[one], weights[one]])
    near = numpy.exp((slower.min(axis=0) - slower) / _LIKE)
    have = numpy.zeros(len(weights))
    gains = numpy.full(len(configs), numpy.inf)
    added = [configs.index(config) for config in sorted(kept)]
    while len(kept) < keep:
        for config in added:
            have += near[config]
            near[slower == slower[config]] = 0.0
        found = -1
        while found != (best := int(gains.argmax())):  # gains only fall: an old one is a bound
            found, gains[best] = best, numpy.log1p(near[best] / have) @ weights
        if gains[best] < _NOTHING * weights.sum():
            break
        added = [best]
        kept |= {configs[best]}
    return kept


def _shortest(keys: Sequence[Measured], within: float, limit_s: float = _LIMIT_S) -> Shortlist:
    """Return the shortest list with a config for each key that is `within` of its best.

    This is a set cover, solved exactly as an integer program: with the tens of configs that a
    kernel declares that takes milliseconds, and a greedy cover may keep more than is needed. Of
    several shortest lists the one with the least weighted time is returned.
    """
    milp, sparse, constraint = _scipy()
    configs = sorted({config for key in keys for config in key.times})
    number = {config: i for i, config in enumerate(configs)}
    pairs = [
        (row, number[config], time / key.best - 1)
        for row, key in enumerate(keys)
        for config, time in key.times.items()
        if time <= key.best * (1 + within)
    ]
    weight = sum(key.weight for key in keys) * max(within, 1e-9)
    # All losses together count less than one config.
    losses = [0.5 * keys[row].weight * loss / weight for row, _, loss in pairs]
    count, edges = len(configs), range(len(pairs))
    # Variables: whether a config stays; then, for each pair, whether that key launches that config.
    launches = [count + edge for edge in edges]
    one_each = sparse(([1.0] * len(pairs), ([row for row, _, _ in pairs], launches)))
    of_kept = sparse(
        (
            [1.0] * len(pairs) + [-1.0] * len(pairs),
            ([*edges, *edges], [*launches, *(column for _, column, _ in pairs)]),
        )
    )
    solved = milp(
        [1.0] * count + losses,
        integrality=[1] * count + [0] * len(pairs),
        bounds=(0, 1),
        constraints=[constraint(one_each, 1, 1), constraint(of_kept, -math.inf, 0)],
        options={"time_limit": limit_s, "mip_rel_gap": 0},
    )
    if solved.x is None:
        return Shortlist(frozenset(configs), proven=False)
    kept = {config for config, stays in zip(configs, solved.x, strict=False) if stays > 0.5}
    return Shortlist(frozenset(kept), proven=solved.status == 0)


def cost(keys: Iterable[Measured], kept: Iterable[str]) -> Cost:
    """Return the cost of a list of these configs."""
    kept = list(kept)
    return _total([(key, key.slowdown(kept)) for key in keys])


def held_out(
    keys: Sequence[Measured],
    within: float,
    keeps: Iterable[int] = (0,),
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, Cost]:
    """Return what lists of some lengths cost on keys that they were not made from, by length.

    Each key is judged once, by the list made from all others, or from the keys of the other parts.
    At the time limit the keys of the parts that are left are not judged; without any that were, as
    with fewer than two keys, nothing is returned.
    """
    if len(keys) < 2:
        return {}
    mixed = sorted(keys, key=lambda key: key.key.digest)
    random.Random(0).shuffle(mixed)
    parts = [mixed[start::_PARTS] for start in range(min(_PARTS, len(mixed)))]
    judged: dict[int, list[tuple[Measured, float]]] = {keep: [] for keep in keeps}
    end = clock() + _LIMIT_S
    for part in parts:
        others = [key for key in mixed if key not in part]
        left_s = end - clock()
        if left_s <= 0 or not (found := _shortest(others, within, left_s)).proven:
            break
        for keep, of_length in judged.items():
            kept = _filled(others, found.kept, keep)
            of_length += [(key, key.slowdown(kept)) for key in part]
    return {keep: _total(of_length) for keep, of_length in judged.items() if of_length}


def wins(keys: Iterable[Measured]) -> Counter[str]:
    """Return for how many keys each config is the fastest."""
    return Counter(key.winner() for key in keys)


def _total(judged: Sequence[tuple[Measured, float]]) -> Cost:
    works = [(key.weight, ratio) for key, ratio in judged if ratio < math.inf]
    weight, ratios = sum(weight for weight, _ in works), [ratio for _, ratio in works]
    return Cost(
        keys=len(judged),
        failed=len(judged) - len(works),
        mean=statistics.geometric_mean(ratios) if ratios else 1.0,
        weighted=math.fsum(share * ratio for share, ratio in works) / weight if works else 1.0,
        worst=max(ratios, default=1.0),
    )


def _scipy() -> tuple[Any, Any, Any]:
    try:
        from scipy.optimize import LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise SafetuneError("prune needs scipy: pip install 'safetune[prune]'") from error
    return milp, csr_array, LinearConstraint


def of_newest(
    stored: Iterable[tuple[KeyRecord, Sequence[TrialRecord]]], name: str, digest: str = ""
) -> list[tuple[KeyRecord, Sequence[TrialRecord]]]:
    """Return the keys of one version of a kernel; without a digest, of the last one measured.

    Raises:
        TargetError: no trial of this version is stored.
    """
    found = [(key, trials) for key, trials in stored if trials]
    if not digest and found:
        last = max(found, key=lambda each: max(trial.created for trial in each[1]))
        digest = last[0].kernel_digest
    kept = [(key, trials) for key, trials in found if key.kernel_digest == digest]
    if not kept:
        others = f"; {len(found)} keys are of other versions of it" if found else ""
        raise TargetError(f"no trial of {name} as it is now is stored{others}: tune it first")
    return kept
