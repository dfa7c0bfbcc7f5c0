"""Offline tuning: the workloads that kernels declare, one after another."""

from __future__ import annotations

import inspect
import itertools
import reprlib
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

import torch
from triton.runtime.autotuner import Heuristics

from safetune.errors import (
    SafetuneError,
    TargetError,
    WorkerUnavailable,
    WorkloadError,
    from_signal_handler,
)
from safetune.frontend.autotuner import Autotuner
from safetune.frozen import dataclass
from safetune.inputs.workload import Workload
from safetune.integrations import install
from safetune.keys.kernel_digest import is_interpreted
from safetune.keys.tuning_key import INTERPRETER
from safetune.launch.call_shape import heuristic_values, named_arguments
from safetune.miss import reporting
from safetune.miss.resolve import Miss, why_not_isolated
from safetune.settings import Mode, Settings
from safetune.store.local import db_files
from safetune.store.local.store import Store
from safetune.store.lookup import GuardedStore, open_lookup
from safetune.store.shared.layer import SWEEP_WAIT_S, SharedLayer
from safetune.store.shared.opening import SWEEP_S, open_shared
from safetune.tuning import requests
from safetune.tuning.requests import Phases, TuningRequest, TuningResult
from safetune.tuning.shared_bench import HelpersBench, SharedBench
from safetune.tuning.single_flight import WaitBudget
from safetune.tuning.tuner import measure, recall, tune


@dataclass(frozen=True)
class OfflineKernel:
    """A kernel as found in a module: the tuner, and the heuristics above it."""

    name: str
    tuner: Autotuner
    outer: Any

    @property
    def interpreted(self) -> bool:
        """Whether it was decorated under TRITON_INTERPRET=1."""
        return is_interpreted(self.tuner.fn)

    @property
    def device(self) -> str:
        """The torch device to tune on by default."""
        return "cpu" if self.interpreted else "cuda"


@dataclass(frozen=True)
class Task:
    """One kernel at one workload and dtype."""

    kernel: OfflineKernel
    workload: Workload
    dtype: str
    marks: tuple[str, ...] = ()  # for every outcome, e.g. that its inputs were drawn at random
    ahead: deque[bytes] = field(default_factory=deque)  # see `TuningRequest`


def find_kernels(namespace: dict[str, Any]) -> list[OfflineKernel]:
    """Return the kernels under @safetune in a module, without duplicates, in their order.

    After `safetune.install()` also those under a library's own subclass of Triton's tuner.
    """
    found: dict[int, OfflineKernel] = {}
    for value in namespace.values():
        inner = value
        while isinstance(inner, Heuristics):
            inner = inner.fn
        if not isinstance(inner, Autotuner):
            inner = install.launched_in_place_of(inner)
        if isinstance(inner, Autotuner):
            found.setdefault(id(inner), OfflineKernel(inner.base_fn.__name__, inner, value))
    return list(found.values())


class Stream:
    """The tasks of one workload function and dtype, of which each can be made at any time.

    In their order they take one pass of the function; a task before the last one begins another.
    """

    def __init__(self, kernel: OfflineKernel, function: Any, device: str | None, name: str) -> None:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise TargetError(f"dtype {name!r} is not a torch dtype; try float16 or bfloat16")
        self._kernel, self._name = kernel, name
        self._yielded = (kernel, function, torch.device(device or kernel.device), dtype)
        self._rest, self._next = iter(self), 0

    def __iter__(self) -> Iterator[Task]:
        for workload in _yielded(*self._yielded):
            yield Task(self._kernel, workload, self._name)

    def task(self, number: int) -> Task:
        """Make the task with this number; raises `WorkloadError` if it is gone."""
        if number < self._next:
            self._rest, self._next = iter(self), 0
        skipped, self._next = number - self._next, number + 1
        found = next(itertools.islice(self._rest, skipped, None), None)
        if found is None:
            raise WorkloadError(
                f"a workload function of {self._kernel.name} yields fewer workloads than at first"
            )
        return found


def streams(
    kernel: OfflineKernel, device: str | None, dtypes: Sequence[str] = ()
) -> Iterator[Stream]:
    """Yield the tasks of a kernel's workloads, by function and dtype, of some dtypes if given."""
    default = "float32" if kernel.interpreted else "bfloat16"
    for declared in kernel.tuner.workloads:
        for name in dtypes or declared.dtypes or (default,):
            yield Stream(kernel, declared.function, device, name)


def tasks(kernel: OfflineKernel, device: str | None, dtypes: Sequence[str]) -> Iterator[Task]:
    """Yield the tasks of a kernel's workloads, with the tensors of one at a time in memory."""
    return itertools.chain.from_iterable(streams(kernel, device, dtypes))


def request_for(task: Task, force: bool = False) -> TuningRequest:
    """Return the tuning of a task; raises `NoDevice`, `InvalidConfig` and `WorkerUnavailable`."""
    kwargs = {**task.workload.kwargs, "grid": task.workload.grid}
    outer = task.kernel.outer
    named = named_arguments(outer.arg_names, task.workload.args, kwargs)
    kwargs |= heuristic_values(outer, named)[1]
    miss = Miss(task.kernel.tuner, task.workload.args, kwargs)
    if reason := why_not_isolated(miss.call):
        raise WorkerUnavailable(f"{task.kernel.name} cannot be tuned offline: {reason}")
    request = miss.request(force)
    return replace(request, marks=task.marks, ahead=task.ahead, goes_on=True)


def open_tuning_store(read_only: bool = False) -> GuardedStore:
    """Return the store for tuning, or to plan one, whatever the value of SAFETUNE_MODE."""
    mode = Mode.FROZEN if read_only else Mode.TUNE
    return open_lookup(replace(Settings.current(), mode=mode)).store


def open_shared_store() -> GuardedStore:
    """Return the store for a tuning that several processes share, which may wait for its answers.

    Its shared store gives leases, where it can.
    """
    settings = replace(Settings.current(), mode=Mode.TUNE)
    store = open_lookup(settings).store
    if store.shared is not None:
        url = db_files.locate(settings).shared(settings)
        shared = open_shared(url, sweep=True, node=store.path)
        store.shared = SharedLayer(shared, store.connection, budget_s=SWEEP_S, wait_s=SWEEP_WAIT_S)
    return store


def tune_task(
    task: Task,
    watch: Callable[[reporting.Tally], None],
    force: bool = False,
    key_budget: WaitBudget | None = None,
    shared: bool = False,
) -> TuningResult:
    """Tune one task into the local store; configs with a stored outcome are not measured again.

    Args:
        watch: gets what knows how far the tuning is, and may show it.
        key_budget: how long to wait for another process that tunes the key; without end if None.
        shared: other processes of this node may `help_with_task`, or do it if this card fails.

    Raises:
        NoWorkingConfig: every config failed.
        Busy: another process tunes the key.
        WorkloadError: a function of the kernel, as one that prunes, raised for this workload.
    """
    phases = Phases("lookup")
    try:
        request = request_for(task, force)
    except SafetuneError:
        raise
    except Exception as error:
        if from_signal_handler(error):
            raise
        raise WorkloadError(
            f"preparing {task.kernel.name} for {task.workload.name} raised "
            f"{type(error).__name__}: {error}{place_of(error)}"
        ) from error
    store = open_tuning_store()
    if shared:
        request = replace(request, bench=partial(SharedBench, store))
    with reporting.observing(request, store, phases, quiet=True) as tally:
        watch(tally)
        budget = WaitBudget(tell=tally.wait_for)
        result = tune(request, store, tally, None, budget, phases, key_budget)
    reporting.tell_result(request, result, shown=True)
    return result


#: Two outcomes that are further apart are not of one sweep: it was interrupted in between.
_MOST_GAP_S = 300.0


def seconds_per_config(store: Store, kernel: str) -> float | None:
    """Return how long the stored sweeps of a kernel took for a config; None without any."""
    gaps = []
    for _, trials in store.trials_of(kernel):
        times = sorted(trial.created for trial in trials)
        gaps += [after - before for before, after in itertools.pairwise(times)]
    gaps = [gap for gap in gaps if gap <= _MOST_GAP_S]
    return sum(gaps) / len(gaps) if gaps else None


#: A process that helps takes a second to begin, and what it measures is launched once more: on two
#: H100s that took 2.2 s of both (3.7 s for 288 configs that one measures in 3.0 s). Help with more
#: than twice that gains; by what is stored of the kernel, else from this many configs on.
_LEAST_S, _MANY, _MANY_INTERPRETED = 5.0, 500, 16


def is_worth_help(left: int, seconds: float | None, interpreted: bool) -> bool:
    """Whether it gains time that a second process measures a part of the configs that are left.

    Args:
        seconds: for one of them; None if that is not known.
    """
    if interpreted:
        return left >= _MANY_INTERPRETED
    return left >= _MANY if seconds is None else left * seconds >= _LEAST_S


def help_with_task(
    planned: TuningRequest, make: Callable[[], Task], watch: Callable[[reporting.Tally], None]
) -> None:
    """Measure configs of a key that another process of this node tunes; that one chooses.

    Args:
        planned: the request without its call.
        make: makes the task.
    """
    store = open_tuning_store()
    left = len(planned.configs) - len(requests.lasting_outcomes(planned, store))
    seconds = seconds_per_config(store, planned.key.kernel.name)
    interpreted = planned.key.device.name == INTERPRETER
    if planned.budget is not None or not is_worth_help(left, seconds, interpreted):
        return
    phases = Phases("lookup")
    request = replace(request_for(make()), bench=partial(HelpersBench, store))
    with reporting.observing(request, store, phases, quiet=True) as tally:
        watch(tally)
        tuning = recall(request, store, tally, phases)
        if tuning.new:
            measure(tuning, None, WaitBudget(0.0))


#: The characters of a wrong workload that a message shows: it may be a tensor.
_MOST_SHOWN = 40


def _yielded(
    kernel: OfflineKernel, function: Any, device: torch.device, dtype: torch.dtype
) -> Iterator[Workload]:
    code = inspect.unwrap(function).__code__
    location = f"{code.co_filename}:{code.co_firstlineno}"
    name = f"the workload {function.__name__} of {kernel.name}"
    names: set[str] = set()
    try:
        inspect.signature(function).bind(device, dtype)
    except TypeError as error:
        raise WorkloadError(
            f"{name} cannot be called with a torch device and a torch dtype: {error} ({location})"
        ) from None
    try:
        workloads = function(device, dtype)
        if not isinstance(workloads, Iterable):
            workloads = [workloads]
        for workload in workloads:
            if not isinstance(workload, Workload):
                raise WorkloadError(
                    f"{name} gave {reprlib.repr(workload)[:_MOST_SHOWN]}; it must yield "
                    f"safetune.Workload(name, grid, args, kwargs) ({location})"
                )
            if mistake := _mistake(workload):
                raise WorkloadError(
                    f"{name} yielded the workload {workload.name!r:.{_MOST_SHOWN}}, of which "
                    f"{mistake} ({location})"
                )
            if workload.name in names:
                raise WorkloadError(
                    f"{name} yielded two workloads named {workload.name!r}; give each a name of "
                    f"its own ({location})"
                )
            names.add(workload.name)
            yield workload
    except WorkloadError:
        raise
    except (Exception, SystemExit) as error:
        raise WorkloadError(
            f"{name} raised {type(error).__name__}: {error}{place_of(error)}"
        ) from error


def place_of(error: BaseException) -> str:
    """Return where an error was raised, after what it says."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({last.filename}:{last.lineno})"


def _mistake(workload: Workload) -> str:
    """Return what a workload cannot have; empty if nothing is wrong with it."""
    if not (isinstance(workload.name, str) and workload.name.isprintable()):
        return "the name must be text on one line"
    if not isinstance(workload.args, (tuple, list)):
        return f"args must be a tuple, and not a {type(workload.args).__name__}"
    if not isinstance(workload.kwargs, Mapping):
        return f"kwargs must be a dict, and not a {type(workload.kwargs).__name__}"
    return ""
