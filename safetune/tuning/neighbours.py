"""The neighbours of a key: their distance, their choices and their trials."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from triton.runtime.autotuner import Config

from safetune.outcome import TRANSIENT
from safetune.tuning.search import History, Neighbour, Trial

if TYPE_CHECKING:
    from safetune.store.local.store import Store
    from safetune.store.records import RelatedChoice
    from safetune.tuning.requests import TuningRequest

Value = TypeVar("Value")

#: The most neighbours that a search is told of, the nearest.
_MOST = 4


def history_of(request: TuningRequest, store: Store) -> History:
    """Return the known facts about a key before its search, except its own trials."""
    key, last = request.key, store.choice(request.key.digest)
    call = key.record()
    return History(
        kernel=key.kernel.name,
        values=dict(call["values"]),
        dtypes=dict(call["dtypes"]),
        device=key.device.record(),
        configs=request.configs,
        neighbours=tuple(_neighbours(request, store)),
        incumbent=None if last is None else request.by_digest.get(last.config_digest),
    )


def _neighbours(request: TuningRequest, store: Store) -> list[Neighbour]:
    """Return the nearest keys of the same kernel, device and toolchain."""
    key, configs = request.key, request.by_digest
    toolchain, values = key.toolchain.record(), key.record()["values"]
    found = []
    related = store.related(key.kernel.digest, key.device.digest)
    for config, source in comparable(configs, key.record(), related):
        theirs = source.call["values"]
        far = distance(values, theirs)
        if far and source.toolchain == toolchain:
            found.append((far, source.choice.key, config, dict(theirs)))
    nearest = sorted(found, key=lambda each: each[:2])[:_MOST]
    return [
        Neighbour(of_them, far, config, tuple(_trials(store, digest, configs)))
        for far, digest, config, of_them in nearest
    ]


def _trials(store: Store, key: str, configs: dict[str, Config]) -> Iterator[Trial]:
    stored = [trial for trial in store.trials(key) if trial.outcome.verdict not in TRANSIENT]
    for digest, outcome in {trial.config_digest: trial.outcome for trial in stored}.items():
        if digest in configs:
            timing = outcome.timing if outcome.ok else None
            yield Trial(configs[digest], None if timing is None else timing.median_ms)


def comparable(
    configs: Mapping[str, Value], call: Mapping[str, Any], related: Iterable[RelatedChoice]
) -> Iterator[tuple[Value, RelatedChoice]]:
    """Yield the choices that use one of these configs, by digest, with that config.

    Their calls differ from `call` only in the values.
    """
    call = {**call, "values": None}
    for source in related:
        digest = source.choice.config_digest
        if digest in configs and {**source.call, "values": None} == call:
            yield configs[digest], source


def distance(values: list[list[Any]], others: list[list[Any]]) -> float | None:
    """Return the distance between two keys' values: the sum of |log| of the numbers' ratios.

    None if a value other than a number differs: a flag, a dtype, a string.
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


def _logarithm(number: float) -> float:
    """Of a number that may be zero or negative, so that 0 and 1 are as far apart as 1 and 3."""
    size = math.log2(1 + abs(number))  # an int of any size has one; copysign would make it a float
    return -size if number < 0 else size
