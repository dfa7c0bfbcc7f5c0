"""What a call is launched with while its key has no choice, and when tuning is tried again."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune.config import config_digest, config_text
from safetune.outcome import TRANSIENT, Outcome
from safetune.settings import Settings
from safetune.store.local.store import Store
from safetune.tuning.requests import TuningRequest

if TYPE_CHECKING:
    from safetune.frontend.autotuner import Autotuner
    from safetune.store.records import KinChoice

#: Seconds before a tuning that could not be done now is tried again; twice as many after each
#: time, up to the second.
RETRY_S = 10.0
MAX_RETRY_S = 600.0

#: Seconds of a clock that only goes forward.
clock = time.monotonic

_syncs = 0


def fallback(request: TuningRequest, store: Store) -> Config:
    """Return the config to launch with for now.

    The choice of the nearest stored key; else the fastest config known to work; else the first not
    known to fail; else the first.
    """
    outcomes = known_outcomes(request, store)
    near = _nearest_stored(request, store, outcomes)
    return near or next(iter(working(outcomes) + untried(request, outcomes)), request.configs[0])


def next_best(request: TuningRequest, store: Store) -> Iterator[Config]:
    """Yield what to launch with in place of a choice that cannot be, best first.

    Those known to work for the key, fastest first; the choice of the nearest key; the others that
    are not known to fail.
    """
    outcomes = known_outcomes(request, store)
    yield from working(outcomes)
    near = _nearest_stored(request, store, outcomes)
    if near is not None:
        yield near
    yield from untried(request, outcomes)


def known_outcomes(request: TuningRequest, store: Store) -> list[tuple[Config, Outcome]]:
    """Return what the store knows of a request's configs, the latest of each."""
    configs = {config_digest(config): config for config in request.configs}
    key = request.key.digest
    found = {
        trial.config_digest: trial.outcome
        for trial in store.trials(key)
        if trial.config_digest in configs and trial.outcome.verdict not in TRANSIENT
    }
    return [(configs[digest], outcome) for digest, outcome in found.items()]


def nearest(
    request: TuningRequest, kin: Iterable[KinChoice], without: list[Config]
) -> tuple[Config, KinChoice] | None:
    """Return the choice of the nearest key that has one of the request's configs for choice.

    Of the same dtypes and options; near is by `distance`.
    """
    record = request.key.record()
    configs = {config_digest(c): c for c in request.configs if c not in without}
    best: tuple[float, Config, KinChoice] | None = None
    for each in kin:
        config = configs.get(each.choice.config_digest)
        same = (each.call.get("dtypes"), each.call.get("options"))
        if config is None or same != (record["dtypes"], record["options"]):
            continue
        apart = distance(record["values"], pairs_of(each.call.get("values")))
        if apart is not None and (best is None or apart < best[0]):
            best = apart, config, each
    return None if best is None else best[1:]


def _nearest_stored(
    request: TuningRequest, store: Store, outcomes: list[tuple[Config, Outcome]]
) -> Config | None:
    key = request.key
    toolchain = key.toolchain.record()
    kin = store.kin(key.kernel.digest, key.device.digest)
    near = nearest(request, [k for k in kin if k.toolchain == toolchain], failed(outcomes))
    return None if near is None else near[0]


def distance(values: list[list[Any]], others: list[list[Any]]) -> float | None:
    """Return how far apart two keys' values are: the sum of |log| of the numbers' ratios.

    None where something differs that is no number: a flag, a dtype, a string.
    """
    if [name for name, _ in values] != [name for name, _ in others]:
        return None
    total = 0.0
    for (_, value), (_, other) in zip(values, others, strict=True):
        if type(value) is type(other) and type(value) in (int, float):
            total += abs(_logarithm(value) - _logarithm(other))
        elif type(value) is not type(other) or value != other:
            return None
    return total


def pairs_of(values: Any) -> list[list[Any]]:
    """Return the values of a stored key; what no key has, where a row makes no sense."""
    sound = isinstance(values, list) and all(
        isinstance(pair, list) and len(pair) == 2 for pair in values
    )
    return values if sound else [["", None]]


def _logarithm(number: float) -> float:
    """Of a number that may be zero or negative, so that 0 and 1 are as far apart as 1 and 3."""
    size = math.log2(1 + abs(number))  # an int of any size has one; copysign would make it a float
    return -size if number < 0 else size


def failed(outcomes: list[tuple[Config, Outcome]]) -> list[Config]:
    """Return the configs that do not work."""
    return [config for config, outcome in outcomes if not outcome.ok]


def working(outcomes: list[tuple[Config, Outcome]]) -> list[Config]:
    """Return the configs that work, the fastest first."""
    times = {c: o.timing.median_ms for c, o in outcomes if o.ok and o.timing is not None}
    return sorted(times, key=lambda config: times[config])


def untried(request: TuningRequest, outcomes: list[tuple[Config, Outcome]]) -> list[Config]:
    """Return the configs without an outcome, in their order."""
    tried = [config for config, _ in outcomes]
    return [config for config in request.configs if config not in tried]


@dataclass
class Postponed:
    """A key that could not be tuned for a reason that passes, such as a lack of memory.

    Attributes:
        config: what is launched meanwhile.
        needed_bytes: on the device with this `index`, before another try has a point; 0: unknown.
    """

    config: Config
    index: int
    needed_bytes: int = 0
    delay_s: float = RETRY_S

    def __post_init__(self) -> None:
        self._from_s = clock() + self.delay_s
        self._syncs = _syncs

    def due(self, settings: Settings) -> bool:
        """Whether tuning should be tried again now."""
        if clock() < self._from_s or (settings.world_size > 1 and self._syncs == _syncs):
            return False
        if self.needed_bytes and self.index >= 0:
            from safetune.inputs import memory_budget  # imports torch

            if memory_budget.device_free(self.index) < self.needed_bytes:
                self._from_s = clock() + self.delay_s
                return False
        return True

    def again(self, config: Config, needed_bytes: int) -> Postponed:
        """Return what follows when another try has failed, too."""
        return Postponed(config, self.index, needed_bytes, min(2 * self.delay_s, MAX_RETRY_S))


def untuned(request: TuningRequest, store: Store, error: Exception) -> Config:
    """Return the fallback for a key that cannot be tuned at all, with a warning that says why."""
    config = fallback(request, store)
    _warn(request, config, error)
    return config


def postpone(
    tuner: Autotuner, key: Any, request: TuningRequest, config: Config, error: Exception
) -> None:
    """Launch `config` until tuning can be tried again; warns at the first time for a key."""
    needed_bytes = getattr(error, "needed_bytes", 0)
    earlier = tuner.postponed.get(key)
    if earlier is not None:
        tuner.postpone(key, earlier.again(config, needed_bytes))
        return
    tuner.postpone(key, Postponed(config, request.call.index, needed_bytes))
    _warn(request, config, error, "; it is tried again later")


def _warn(request: TuningRequest, config: Config, error: Exception, outlook: str = "") -> None:
    place = "its first config" if config is request.configs[0] else "the best left"
    warnings.warn(
        f"{request.key.kernel.name} is not tuned for {request.key} and runs with {place} "
        f"({config_text(config)}){outlook}: {error}",
        stacklevel=3,
    )


def count_sync() -> None:
    """Let what was postponed before now be tried again in a world of several processes."""
    global _syncs
    _syncs += 1
