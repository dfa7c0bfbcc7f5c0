"""The plan of a sweep, before anything is tuned: kernels, keys, and the remaining work."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field, replace
from functools import partial

import torch

from safetune.config import config_digest
from safetune.errors import NothingToMeasure
from safetune.frozen import dataclass
from safetune.offline.shares import shares_of_time
from safetune.offline.tasks import Stream, Task, request_for
from safetune.settings import SearchBudget
from safetune.store.local.store import Store
from safetune.store.records import space_of
from safetune.tuning import requests
from safetune.tuning.requests import TuningRequest

#: The first two keys of a kernel and dtype lack two measured neighbours, with which a third of the
#: configs is enough: each gets three times the time of a later key.
_COLD_KEYS, _COLD_PARTS = 2, 3.0


@dataclass(frozen=True)
class Planned:
    """One requested tuning, without its tensors, and its state in the store."""

    kernel: str
    shape: str
    dtype: str
    request: TuningRequest  # without the call
    bytes: int  # of its tensors
    make: Callable[[], Task]  # makes them
    #: The configs to measure, by their digests: neither stored nor an earlier tuning's of this key.
    new: tuple[str, ...] = ()
    #: How many configs have a stored outcome that is not measured again.
    stored: int = 0
    #: Its key's share of the time of all recorded calls; None if its calls are not recorded.
    share: float | None = None

    @property
    def words(self) -> str:
        """The tuning as text."""
        return f"{self.kernel} {self.shape} {self.dtype}"

    @property
    def key(self) -> str:
        """The digest of its key."""
        return self.request.key.digest

    @property
    def configs(self) -> int:
        """The number of configs left by pruning, at most the budget's."""
        request = self.request
        most = None if request.budget is None else request.budget.configs
        return min(len(request.configs), most or sys.maxsize)


@dataclass(frozen=True)
class Plan:
    """The tunings of a sweep, in order."""

    tunings: tuple[Planned, ...] = field(default=())
    most_s: float = math.inf  # the time limit of the command line for all together

    @property
    def configs(self) -> int:
        """The number of configs of all keys."""
        return sum(planned.configs for planned in self.tunings)

    @property
    def new(self) -> int:
        """How many of them need measuring."""
        return sum(len(planned.new) for planned in self.tunings)

    @property
    def stored(self) -> int:
        """How many of them have a stored outcome and need no measuring."""
        return sum(planned.stored for planned in self.tunings)


class SharedTime:
    """The time that the tunings of a plan share.

    Each gets its part of the remaining time when it begins.
    """

    def __init__(
        self,
        tunings: Sequence[Planned],
        most_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._end = clock, clock() + most_s
        self._parts: dict[str, float] = {}
        begun = Counter[tuple[str, str]]()
        for planned in tunings:
            if planned.new:
                kind = planned.kernel, planned.dtype
                self._parts[planned.key] = _COLD_PARTS if begun[kind] < _COLD_KEYS else 1.0
                begun[kind] += 1

    def task(self, planned: Planned) -> Task:
        """Create the task of a tuning that begins now."""
        task = planned.make()
        if self._end < math.inf:
            task.kernel.tuner.budget = SearchBudget(seconds=self._seconds(planned))
        return task

    def _seconds(self, planned: Planned) -> float:
        part = self._parts.pop(planned.key, 1.0)
        left_s = max(self._end - self._clock(), 0.0)
        return left_s * part / (part + sum(self._parts.values()))


def sketches(stream: Stream, wanted: Callable[[str], bool], force: bool) -> Iterator[Planned]:
    """Yield the plan data of the workloads with a wanted name, creating each once."""
    for number, task in enumerate(stream):
        if wanted(task.workload.name):
            yield sketch(task, partial(stream.task, number), force)


def sketch(task: Task, make: Callable[[], Task], force: bool) -> Planned:
    """Return the plan data of a task; raises like `request_for`, and `NothingToMeasure`."""
    request = request_for(task, force)
    if not request.has_work:
        raise NothingToMeasure(request.key.kernel.name, str(request.key))
    return Planned(
        kernel=task.kernel.name,
        shape=task.workload.name,
        dtype=task.dtype,
        request=request.without_arguments,
        bytes=_bytes(task),
        make=make,
    )


def _bytes(task: Task) -> int:
    values = [*task.workload.args, *task.workload.kwargs.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def plan(asked: Iterable[Planned], store: Store, most_s: float = math.inf) -> Plan:
    """Look up the stored state of each requested tuning; together they may take `most_s`.

    Keys with recorded calls come first, by decreasing recorded time.
    """
    shares = shares_of_time(store.calls())
    claimed = defaultdict[str, set[str]](set)
    tunings = []
    for planned in sorted(asked, key=lambda planned: -shares.get(planned.key, 0.0)):
        stored, unmeasured = _outcomes(planned.request, store)
        new = tuple(digest for digest in unmeasured if digest not in claimed[planned.key])
        claimed[planned.key].update(new)
        share = shares.get(planned.key)
        tunings.append(replace(planned, new=new, stored=stored, share=share))
    return Plan(tuple(tunings), most_s)


def longest_first(tunings: Iterable[Planned]) -> list[Planned]:
    """Return the tunings, longest first, for several processes that take one at a time.

    Those with the most recorded time come first of all, because a sweep may end early.
    """

    def length(planned: Planned) -> tuple[float, int, int]:
        return planned.share or 0.0, len(planned.new), planned.bytes

    return sorted(tunings, key=length, reverse=True)


def _outcomes(request: TuningRequest, store: Store) -> tuple[int, list[str]]:
    """Return how many configs have an outcome, and the digests of those to measure now."""
    if store.shared is not None:
        store.shared.refresh(space_of(request.key))
    of_key = requests.Plan.read(request, store)
    known = {config_digest(request.configs[index]) for index in of_key.outcomes}
    most = None if request.budget is None else request.budget.configs
    stored = min(len(known), most or sys.maxsize)
    if of_key.final is not None:
        return stored, []
    new = [digest for digest in request.by_digest if digest not in known]
    return stored, new if most is None else new[: max(most - len(known), 0)]  # not yet which ones
