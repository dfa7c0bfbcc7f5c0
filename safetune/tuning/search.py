"""Selects the configs to measure if a budget does not allow all of them.

A `Proposer` names the next configs. This module has what every search shares: the incumbent and the
choices of neighbouring keys come first; the last part of the budget polishes the best config found
(all configs one step from it, repeated while that finds a better one); and a search does not end
before some config works.
"""

from __future__ import annotations

import math
import random
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from triton.runtime.autotuner import Config

from safetune import forks
from safetune.errors import InvalidSetting
from safetune.frozen import dataclass
from safetune.outcome import TRANSIENT

if TYPE_CHECKING:
    from safetune.keys.tuning_key import TuningKey
    from safetune.store.local.store import Store
    from safetune.store.records import RelatedChoice

Value = TypeVar("Value")

#: At most this many configs are compiled and measured before a proposer is asked again.
BATCH = 12
#: The share of a budget that polishes, and the most steps' worth of it.
_POLISH_SHARE, _POLISH_STEPS = 0.3, 2
#: The most neighbours that a search is told of, the nearest.
_MOST_NEIGHBOURS = 4


@dataclass(frozen=True)
class Trial:
    """A tried config. `time_ms` is None if it failed."""

    config: Config
    time_ms: float | None


@dataclass(frozen=True)
class Neighbour:
    """Another key of the same kernel on the same device.

    Attributes:
        values: of the names in `key`.
        distance: the sum of `|log2(ratio)|` over the numbers of both keys.
        choice: its config.
        trials: its measurements; empty if only its choice is known.
    """

    values: Mapping[str, Any]
    distance: float
    choice: Config
    trials: tuple[Trial, ...] = ()


@dataclass(frozen=True)
class History:
    """The state of a search, as a proposer sees it.

    Attributes:
        kernel: its name.
        values, dtypes: of the call's key, by name.
        device: the properties of the device, such as its name.
        configs: every config that may be proposed.
        trials: the measurements for this key, in no particular order.
        neighbours: keys that were tuned, the nearest first.
        incumbent: the config chosen last for this key.
    """

    kernel: str
    values: Mapping[str, Any]
    dtypes: Mapping[str, str]
    device: Mapping[str, Any]
    configs: tuple[Config, ...]
    trials: tuple[Trial, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    incumbent: Config | None = None


class Proposer(Protocol):
    """Names the configs to measure next. A vendor's heuristic or a model can be one."""

    def propose(self, history: History, remaining: int) -> Sequence[Config]:
        """Return the next configs, the most promising first, at most `remaining`.

        It is called again once they are measured. Configs that are not in `history.configs` or were
        tried already are ignored; an answer without a new config ends the search.
        """


class RandomProposer:
    """Draws configs at random, the same ones in each process."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def propose(self, history: History, remaining: int) -> Sequence[Config]:
        """Return untried configs."""
        tried = {id(trial.config) for trial in history.trials}
        left = [config for config in history.configs if id(config) not in tried]
        draw = random.Random(self._seed + len(tried))
        return draw.sample(left, min(len(left), remaining, BATCH))


@dataclass(frozen=True)
class Search:
    """The search for one key: the initial facts, and the proposer."""

    start: History
    proposer: Proposer

    def ask(self, times: Mapping[int, float | None], remaining: int) -> list[int]:
        """Return the indexes of the configs to measure next, at most `remaining`; empty at the end.

        Args:
            times: of each tried config, by index; None if it failed.
        """
        configs = self.start.configs
        known = [self.start.incumbent, *(each.choice for each in self.start.neighbours)]
        if seeds := self._untried([config for config in known if config is not None], times):
            return seeds[:remaining]
        reserve = self._reserve(len(times) + remaining)
        polish = self._one_step_from_best(times)[:BATCH]
        if polish and remaining <= reserve:
            return polish[:remaining]
        most = remaining - reserve if remaining > reserve else remaining
        trials = tuple(Trial(configs[index], time_ms) for index, time_ms in times.items())
        answer = self.proposer.propose(replace(self.start, trials=trials), most)
        proposed = [*answer] if isinstance(answer, Iterable) else [answer]
        if answer is None or not all(isinstance(config, Config) for config in proposed):
            raise InvalidSetting(
                f"the proposer of {self.start.kernel} returned {reprlib.repr(answer)}, not a list "
                "of configs: take them from `history.configs`"
            )
        return self._untried(proposed, times)[:most] or polish[:remaining]

    def _untried(self, proposed: Iterable[Config], times: Mapping[int, float | None]) -> list[int]:
        """Return the indexes of those configs that are in the list and were not tried."""
        configs = self.start.configs
        indexes = {id(config): index for index, config in enumerate(configs)}
        found = []
        for config in proposed:
            if id(config) in indexes:
                found.append(indexes[id(config)])
            elif config in configs:  # one that is equal
                found.append(configs.index(config))
        return [index for index in dict.fromkeys(found) if index not in times]

    def _reserve(self, budget: int) -> int:
        """Return how many configs of a budget are kept for polishing."""
        steps = max(map(len, self._near.values()), default=0)
        return min(int(budget * _POLISH_SHARE), _POLISH_STEPS * steps)

    def _one_step_from_best(self, times: Mapping[int, float | None]) -> list[int]:
        """Return the configs one step from the best one that were not tried."""
        works = {index: time_ms for index, time_ms in times.items() if time_ms is not None}
        near = self._near[min(works, key=works.__getitem__)] if works else []
        return [index for index in near if index not in times]

    @forks.cached_property
    def _near(self) -> dict[int, list[int]]:
        """For each config those one step from it."""
        return one_step(self.start.configs)


def one_step(configs: Sequence[Config]) -> dict[int, list[int]]:
    """Return, for each config, the indexes of those that differ by one step in one parameter.

    A step of a number leads to the next higher or lower number in the list; for any other value, to
    every other value.
    """
    found: dict[int, list[int]] = {index: [] for index in range(len(configs))}
    values = [config.all_kwargs() for config in configs]
    for name in dict.fromkeys(name for each in values for name in each):
        lines: dict[str, list[int]] = {}
        for index, each in enumerate(values):
            rest = repr([(other, value) for other, value in each.items() if other != name])
            lines.setdefault(rest, []).append(index)
        for line in lines.values():
            here = {index: values[index].get(name) for index in line}
            numbers = all(type(value) in (int, float) for value in here.values())
            ordered = sorted(line, key=here.__getitem__) if numbers else line
            for place, index in enumerate(ordered):
                others = ordered[max(place - 1, 0) : place + 2] if numbers else ordered
                found[index] += [other for other in others if other != index]
    return found


def neighbours_of(key: TuningKey, configs: dict[str, Config], store: Store) -> list[Neighbour]:
    """Return the nearest keys of the same kernel, device and toolchain."""
    toolchain, values = key.toolchain.record(), key.record()["values"]
    found = []
    related = store.related(key.kernel.digest, key.device.digest)
    for config, source in comparable(configs, key.record(), related):
        theirs = source.call["values"]
        far = distance(values, theirs)
        if far and source.toolchain == toolchain:
            found.append((far, source.choice.key, config, dict(theirs)))
    nearest = sorted(found, key=lambda each: each[:2])[:_MOST_NEIGHBOURS]
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
