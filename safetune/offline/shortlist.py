"""A short list of configs that keeps every measured key about as fast as its best config.

In: the stored trials of one kernel. Out: the configs to keep, and their cost, also on keys that
were not used to find them.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from safetune.errors import InvalidSetting, TargetError
from safetune.frozen import dataclass
from safetune.outcome import TRANSIENT, Mark
from safetune.store.records import KeyRecord, TrialRecord

#: How many times as slow as the best a config counts at most, and where it does not work.
_FAR = 2.0
#: The maximum number of pairs of keys from which similar keys are made.
_PAIRS = 250
#: The keys are split into this many parts at most; each is held out once.
_PARTS = 20


@dataclass(frozen=True)
class Measured:
    """One key, and the times of the configs that work for it, in milliseconds by digest."""

    key: KeyRecord
    times: Mapping[str, float]

    @property
    def best(self) -> float:
        """The time of the fastest config."""
        return min(self.times.values())

    def slowdown(self, kept: Iterable[str]) -> float:
        """Return the time of the fastest config of `kept`, relative to the best."""
        return min(self.times.get(config, math.inf) for config in kept) / self.best


@dataclass(frozen=True)
class Cost:
    """The cost of a list on some keys, as ratios to each key's best config.

    `failed` keys have no working config in the list; the ratios exclude them.
    """

    keys: int
    failed: int
    mean: float  # geometric
    worst: float


def measured_keys(
    stored: Iterable[tuple[KeyRecord, Sequence[TrialRecord]]], among: Container[str]
) -> list[Measured]:
    """Return the keys with a working config among these configs, by their last trials.

    Times taken while the program used the device do not count.
    """
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
            found.append(Measured(key, times))
    return found


def shortest(keys: Sequence[Measured], within: float, keep: int = 0) -> frozenset[str]:
    """Return a short list with a config for each key that is `within` of its best.

    A larger `keep` adds configs, up to that number, for keys that were not measured.

    Raises:
        InvalidSetting: the short list has more than `keep` configs.
    """
    kept = _cover(keys, within)
    if 0 < keep < len(kept):
        raise InvalidSetting(
            f"--keep {keep} is too few: {len(kept)} configs are needed so that no key is more than "
            f"{within:.2%} slower. Give --keep {len(kept)} or more, or a larger --within"
        )
    return _longer([*keys, *_alike(keys)], within, kept, keep)


def _cover(keys: Sequence[Measured], within: float) -> frozenset[str]:
    """Return configs so that each key has one that is `within` of its best, none of them needless.

    See `_longer` for their choice; then those that the others make needless go.
    """
    kept = list(_longer(keys, within))
    for config in sorted(kept):
        others = [other for other in kept if other != config]
        if others and all(key.slowdown(others) <= 1 + within for key in keys):
            kept = others
    return frozenset(kept)


def _longer(
    keys: Sequence[Measured],
    within: float,
    kept: frozenset[str] = frozenset(),
    most: int | None = None,
) -> frozenset[str]:
    """Return a list with configs added by a greedy set cover, until there are `most`; if that is
    None, until each key has one that is `within` of its best.

    Each time the config is added that is fast enough on the most keys of those which have the
    fewest such configs, of several the one with the least time over all keys. Configs with
    the same times are the same machine code: one of them is enough.
    """
    configs = sorted({config for key in keys for config in key.times})
    rows = [_slowdowns(key, configs) for key in keys]
    slower = dict(zip(configs, zip(*rows, strict=True), strict=True))
    distinct = {slower[config]: config for config in (*configs, *sorted(kept))}.values()
    fast = {
        c: {n for n, slowdown in enumerate(slower[c]) if slowdown <= 1 + within} for c in slower
    }
    counts = Counter(n for config in kept for n in fast[config])
    best = [min((slower[c][n] for c in kept), default=_FAR) for n in range(len(keys))]

    def total(config: str) -> float:
        return math.fsum(map(min, best, slower[config]))

    while most is None or len(kept) < most:
        others = sorted(set(distinct) - kept)
        open_keys = set[int]().union(*map(fast.__getitem__, others))
        least = min((counts[n] for n in open_keys), default=1)
        if not open_keys or (most is None and least):
            break
        left = {n for n in open_keys if counts[n] == least}
        covered = max(len(fast[config] & left) for config in others)
        added = min((c for c in others if len(fast[c] & left) == covered), key=total)
        kept |= {added}
        counts.update(fast[added])
        best = [*map(min, best, slower[added])]
    return kept


def _alike(keys: Sequence[Measured]) -> list[Measured]:
    """Return keys as they may come: half way between two measured ones, and half as far beyond."""
    configs = sorted({config for key in keys for config in key.times})
    logs = [[math.log(slowdown) for slowdown in _slowdowns(key, configs)] for key in keys]
    pairs = list(itertools.permutations(range(len(keys)), 2))
    pairs = random.Random(0).sample(pairs, min(len(pairs), _PAIRS))
    alike = []
    for n, m in pairs:
        for way in (-1, 1):
            between = [
                log + way * (log - other) / 2 for log, other in zip(logs[n], logs[m], strict=True)
            ]
            times = dict(zip(configs, map(math.exp, between), strict=True))
            alike.append(Measured(keys[n].key, times))
    return alike


def _slowdowns(key: Measured, configs: Iterable[str]) -> list[float]:
    """Return how many times as long as the best each config takes, at most `_FAR`."""
    best = key.best
    return [min(key.times.get(config, math.inf) / best, _FAR) for config in configs]


def cost(keys: Iterable[Measured], kept: Iterable[str]) -> Cost:
    """Return the cost of a list of these configs."""
    kept = list(kept)
    return _total([key.slowdown(kept) for key in keys])


def held_out(keys: Sequence[Measured], within: float, keep: int = 0) -> Cost | None:
    """Return the cost of a list on keys that were not used to make it.

    Each key is judged once, by the list made from all other keys, or from the other parts' keys.
    None with fewer than two keys.
    """
    if len(keys) < 2:
        return None
    mixed = sorted(keys, key=lambda key: key.key.digest)
    random.Random(0).shuffle(mixed)
    judged: list[float] = []
    for start in range(min(_PARTS, len(mixed))):
        part = mixed[start::_PARTS]
        others = [key for key in mixed if key not in part]
        kept = _longer([*others, *_alike(others)], within, _cover(others, within), keep)
        judged += [key.slowdown(kept) for key in part]
    return _total(judged)


def _total(judged: Sequence[float]) -> Cost:
    ratios = [ratio for ratio in judged if ratio < math.inf]
    return Cost(
        keys=len(judged),
        failed=len(judged) - len(ratios),
        mean=statistics.geometric_mean(ratios) if ratios else 1.0,
        worst=max(ratios, default=1.0),
    )


def of_newest(
    stored: Iterable[tuple[KeyRecord, Sequence[TrialRecord]]], name: str, digest: str
) -> list[tuple[KeyRecord, Sequence[TrialRecord]]]:
    """Return the keys of one version of a kernel.

    Raises:
        TargetError: no trial of this version is stored.
    """
    found = [(key, trials) for key, trials in stored if trials]
    kept = [(key, trials) for key, trials in found if key.kernel_digest == digest]
    if not kept:
        others = f"; {len(found)} keys are of other versions" if found else ""
        raise TargetError(f"no trial of the current {name} is stored{others}: tune it first")
    return kept
