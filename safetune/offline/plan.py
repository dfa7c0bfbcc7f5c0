"""The plan of a sweep, before anything is tuned: each kernel and key, and what is left to do."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

from safetune.config import config_digest
from safetune.errors import NothingToMeasure, from_signal_handler
from safetune.frozen import dataclass
from safetune.inputs import compile_spec
from safetune.keys.kernel_digest import base_function
from safetune.launch.call_shape import heuristic_values, named_arguments, specialisation
from safetune.offline.shares import shares_of_time
from safetune.offline.tasks import Stream, Task, request_for, seconds_per_config
from safetune.store.local.store import Store
from safetune.tuning import requests, single_flight
from safetune.tuning.requests import SearchBudget, TuningRequest

#: The first two keys of a kernel and dtype lack two measured neighbours, with which a third of the
#: configs is enough: each gets three times the time of a later key.
_COLD_KEYS, _COLD_PARTS = 2, 3.0


@dataclass(frozen=True)
class Sketch:
    """One tuning that is asked for: all that a plan needs of it, without its tensors."""

    kernel: str
    shape: str
    dtype: str
    request: TuningRequest  # without the call
    #: What decides the binary of each config, by its digest; empty in the interpreter.
    binaries: dict[str, Hashable]
    make: Callable[[], Task]  # makes the tensors

    @property
    def words(self) -> str:
        """The tuning as text."""
        return f"{self.kernel} {self.shape} {self.dtype}"


@dataclass(frozen=True)
class Planned:
    """One tuning of a plan."""

    sketch: Sketch
    #: The configs to measure, by their digests: neither stored nor an earlier tuning's of this key.
    new: tuple[str, ...]
    #: How many configs have a stored outcome that is not measured again.
    stored: int
    #: How long that may take; None where no trial of the kernel is stored.
    estimate_s: float | None
    #: Of the time of all recorded calls that of its key; None where its calls are not recorded.
    share: float | None

    @property
    def key(self) -> str:
        """The digest of its key."""
        return self.sketch.request.key.digest

    @property
    def configs(self) -> int:
        """How many configs pruning leaves, at most those of the budget."""
        request = self.sketch.request
        most = None if request.budget is None else request.budget.configs
        return min(len(request.configs), most or sys.maxsize)

    @property
    def binaries(self) -> set[Hashable]:
        """What the configs to measure compile to."""
        known = self.sketch.binaries
        return {known[digest] for digest in self.new if digest in known}


@dataclass(frozen=True)
class Plan:
    """The tunings of a sweep, in their order."""

    tunings: tuple[Planned, ...] = field(default=())
    most_s: float = math.inf  # what the command line allows for all together

    @property
    def configs(self) -> int:
        """The configs of all keys."""
        return sum(planned.configs for planned in self.tunings)

    @property
    def new(self) -> int:
        """How many of them are to be measured."""
        return sum(len(planned.new) for planned in self.tunings)

    @property
    def stored(self) -> int:
        """How many of them have a stored outcome that is not measured again."""
        return sum(planned.stored for planned in self.tunings)

    @property
    def compilations(self) -> int:
        """How many compilations these need at most: keys of one kernel share them."""
        return len(set[Hashable]().union(*(planned.binaries for planned in self.tunings)))

    @property
    def estimate_s(self) -> float | None:
        """How long the tunings that have an estimate may take together; None without any."""
        known = [each.estimate_s for each in self.tunings if each.estimate_s is not None]
        return min(sum(known), self.most_s) if known else None

    @property
    def is_estimated(self) -> bool:
        """Whether all that is to be measured has an estimate."""
        return all(planned.estimate_s is not None for planned in self.tunings if planned.new)


class Sweep:
    """What the tunings of a plan share: compilers, and the time that all have together.

    Each gets its part of the time that is left when it begins.
    """

    def __init__(
        self,
        tunings: Sequence[Planned],
        most_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ahead = compile_ahead(tunings)
        self._clock, self._end = clock, clock() + most_s
        self._parts: dict[str, float] = {}
        begun = Counter[tuple[str, str]]()
        for planned in tunings:
            if planned.new:
                kind = planned.sketch.kernel, planned.sketch.dtype
                cold = planned.estimate_s is None and begun[kind] < _COLD_KEYS
                self._parts[planned.key] = _COLD_PARTS if cold else 1.0
                begun[kind] += 1

    def task(self, planned: Planned) -> Task:
        """Make the task of a tuning that begins now."""
        ahead = self._ahead.get(planned.sketch.request.key.kernel.digest, deque())
        task = replace(planned.sketch.make(), ahead=ahead)
        if self._end < math.inf:
            task.kernel.tuner.budget = SearchBudget(seconds=self._seconds(planned))
        return task

    def _seconds(self, planned: Planned) -> float:
        part = self._parts.pop(planned.key, 1.0)
        left_s = max(self._end - self._clock(), 0.0)
        return left_s * part / (part + sum(self._parts.values()))


def sketches(stream: Stream, wanted: Callable[[str], bool], force: bool) -> Iterator[Sketch]:
    """Yield what a plan needs of the workloads with a wanted name, making each once."""
    for number, task in enumerate(stream):
        if wanted(task.workload.name):
            yield sketch(task, partial(stream.task, number), force)


def sketch(task: Task, make: Callable[[], Task], force: bool) -> Sketch:
    """Return what a plan needs of a task; raises as `request_for`, and `NothingToMeasure`."""
    request = request_for(task, force)
    if not request.has_work:
        raise NothingToMeasure(request.key.kernel.name, str(request.key))
    without_call: Any = {"call": None}  # it has the tensors
    return Sketch(
        kernel=task.kernel.name,
        shape=task.workload.name,
        dtype=task.dtype,
        request=replace(request, **without_call),
        binaries={} if request.call.interpreted else binaries(task, request),
        make=make,
    )


def plan(sketched: Iterable[Sketch], store: Store, most_s: float = math.inf) -> Plan:
    """Look up what is stored of each tuning that is asked for, which may take `most_s` together.

    Keys with recorded calls come first, those that take the most time before the others.
    """
    shares = shares_of_time(store.calls())
    claimed: dict[str, set[str]] = {}
    rates: dict[str, float | None] = {}
    tunings = []
    for each in sorted(sketched, key=lambda each: -shares.get(each.request.key.digest, 0.0)):
        if each.kernel not in rates:
            rates[each.kernel] = seconds_per_config(store, each.kernel)
        earlier = claimed.setdefault(each.request.key.digest, set())
        stored, unmeasured = _outcomes(each.request, store)
        new = tuple(digest for digest in unmeasured if digest not in earlier)
        earlier.update(new)
        rate, budget = rates[each.kernel], each.request.budget
        of_key_s = math.inf if budget is None else budget.seconds
        estimate_s = None if rate is None else min(rate * len(new), of_key_s)
        share = shares.get(each.request.key.digest)
        tunings.append(Planned(each, new, stored, estimate_s, share))
    return Plan(tuple(tunings), most_s)


def compile_ahead(tunings: Iterable[Planned]) -> dict[str, deque[bytes]]:
    """Return for each kernel, by its digest, what its tunings after the first have to compile.

    That is done while cores are free in an earlier tuning. Makes the arguments of those tunings
    that compile something new once more, one after the other. A search says later what it compiles.
    """
    ahead: dict[str, deque[bytes]] = defaultdict(deque)
    known: dict[str, set[Hashable]] = {}
    for planned in tunings:
        request = planned.sketch.request
        kernel = request.key.kernel.digest
        new = kernel in known and not planned.binaries <= known[kernel]
        if new and request.budget is None:
            try:
                ahead[kernel].extend(_specs(planned, known[kernel]))
            except Exception as error:  # the tuning reports it
                if from_signal_handler(error):
                    raise
        known.setdefault(kernel, set()).update(planned.binaries)
    return ahead


def _specs(planned: Planned, seen: set[Hashable]) -> Iterator[bytes]:
    """Yield what a tuning gives to compilers, but for what an earlier one does."""
    request = request_for(planned.sketch.make())
    specs = compile_spec.CallerSpecs(request.call, most_shared=request.most_shared)
    for digest in planned.new:
        if planned.sketch.binaries[digest] not in seen:
            spec = specs.spec_of(request.by_digest[digest])
            if isinstance(spec, bytes):  # else it is compiled, or only a child can tell
                yield spec


def _outcomes(request: TuningRequest, store: Store) -> tuple[int, list[str]]:
    """Return how many configs have an outcome, and the digests of those to measure now."""
    if store.shared is not None:
        from safetune.store.shared.protocol import space_of

        store.shared.refresh(space_of(request.key))
    lasting = {} if request.force else requests.lasting_outcomes(request, store)
    known = {config_digest(request.configs[index]) for index in lasting}
    most = None if request.budget is None else request.budget.configs
    stored = min(len(known), most or sys.maxsize)
    if single_flight.final_choice(request, store) is not None:
        return stored, []
    new = [digest for digest in request.by_digest if digest not in known]
    return stored, new if most is None else new[: max(most - len(known), 0)]  # not yet which ones


def binaries(task: Task, request: TuningRequest) -> dict[str, Hashable]:
    """Return what decides the binary of each config: keys that agree in it compile it once."""
    tuner, call = task.kernel.tuner, request.call
    args, kwargs = call.pinned()
    named = named_arguments(call.arg_names, args, kwargs)
    parameters = getattr(base_function(call.kernel)[0], "params", ())
    for name in (each.name for each in parameters if each.do_not_specialize):
        if type(named.get(name)) is int:  # only its size is left to tell apart
            named[name] = 3 if abs(named[name]) < 1 << 31 else (1 << 40) + 3
    common = (request.key.kernel.digest, specialisation(tuner, named))
    found: dict[str, Hashable] = {}
    for digest, config in request.by_digest.items():
        try:
            _, values = heuristic_values(call.kernel, {**named, **config.all_kwargs()})
        except Exception as error:  # the tuning reports it
            if from_signal_handler(error):
                raise
            values = {}
        found[digest] = (common, digest, specialisation(tuner, values))
    return found
