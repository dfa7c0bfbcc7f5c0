"""Offline tuning: the workloads that kernels declare, one after another."""

from __future__ import annotations

import inspect
import itertools
import reprlib
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from triton.runtime.autotuner import Heuristics

from safetune.errors import (
    SafetuneError,
    TargetError,
    WorkerUnavailable,
    WorkloadError,
)
from safetune.frontend.autotuner import Autotuner
from safetune.frozen import dataclass
from safetune.inputs.workload import Workload
from safetune.integrations import install
from safetune.keys.identity import is_interpreted
from safetune.launch.call_shape import heuristic_values, named_arguments
from safetune.miss import reporting
from safetune.miss.resolve import Miss, why_not_isolated
from safetune.settings import Mode, Settings
from safetune.store.lookup import GuardedStore, open_lookup
from safetune.tuning.requests import Phases, TuningRequest, TuningResult
from safetune.tuning.single_flight import WaitBudget
from safetune.tuning.tuner import tune


@dataclass(frozen=True)
class OfflineKernel:
    """A kernel found in a module: the tuner, and the heuristics above it."""

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


def find_kernels(namespace: dict[str, Any], under_triton: bool = False) -> list[OfflineKernel]:
    """Return the kernels under @safetune in a module, without duplicates, in order.

    Args:
        under_triton: also return those under `triton.autotune` or a library's own subclass of its
            tuner; after `safetune.install()` they are always included.
    """
    found: dict[int, OfflineKernel] = {}
    for value in namespace.values():
        inner = value
        while isinstance(inner, Heuristics):
            inner = inner.fn
        if not isinstance(inner, Autotuner):
            inner = install.launched_in_place_of(inner, under_triton)
        if isinstance(inner, Autotuner):
            found.setdefault(id(inner), OfflineKernel(inner.base_fn.__name__, inner, value))
    return list(found.values())


class Stream:
    """The tasks of one workload function and dtype; each can be created at any time.

    In order, they take one pass of the function; going back begins another pass.
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
        """Create the task with this number; raises `WorkloadError` if it is gone."""
        if number < self._next:
            self._rest, self._next = iter(self), 0
        skipped, self._next = number - self._next, number + 1
        found = next(itertools.islice(self._rest, skipped, None), None)
        if found is None:
            raise WorkloadError(
                f"a workload function of {self._kernel.name} yielded fewer workloads than before"
            )
        return found


def streams(
    kernel: OfflineKernel, device: str | None, dtypes: Sequence[str] = ()
) -> Iterator[Stream]:
    """Yield the task streams of a kernel's workloads, by function and dtype; all dtypes if none are
    given.
    """
    default = "float32" if kernel.interpreted else "bfloat16"
    for declared in kernel.tuner.workloads:
        for name in dtypes or declared.dtypes or (default,):
            yield Stream(kernel, declared.function, device, name)


def tasks(kernel: OfflineKernel, device: str | None, dtypes: Sequence[str]) -> Iterator[Task]:
    """Yield the tasks of a kernel's workloads; the tensors of only one are in memory at a time."""
    return itertools.chain.from_iterable(streams(kernel, device, dtypes))


def miss_of(task: Task) -> Miss:
    """Return a task's call, with the values of the heuristics above the tuner."""
    workload, outer = task.workload, task.kernel.outer
    kwargs = {**workload.kwargs, "grid": workload.grid}
    named = named_arguments(outer.arg_names, workload.args, kwargs)
    return Miss(task.kernel.tuner, workload.args, kwargs | heuristic_values(outer, named)[1])


def request_for(task: Task, force: bool = False) -> TuningRequest:
    """Return the tuning request of a task; raises `NoDevice`, `InvalidConfig` and
    `WorkerUnavailable`.
    """
    miss = miss_of(task)
    if reason := why_not_isolated(miss.call):
        raise WorkerUnavailable(f"{task.kernel.name} cannot be tuned offline: {reason}")
    return replace(miss.request(force), marks=task.marks, goes_on=True)


def open_tuning_store(read_only: bool = False) -> GuardedStore:
    """Return the store for tuning or planning, whatever the value of SAFETUNE_MODE."""
    mode = Mode.FROZEN if read_only else Mode.TUNE
    return open_lookup(replace(Settings.current(), mode=mode)).store


def tune_task(
    task: Task,
    watch: Callable[[reporting.Tally], None],
    force: bool = False,
    key_budget: WaitBudget | None = None,
) -> TuningResult:
    """Tune one task into the local store; configs with a stored outcome are not measured again.

    Args:
        watch: gets the tally of the tuning's progress, and may show it.
        key_budget: how long to wait for another process that tunes the key; forever if None.

    Raises:
        NoWorkingConfig: every config failed.
        Busy: another process is tuning the key.
        WorkloadError: a function of the kernel, such as its prune function, raised for this
            workload.
    """
    phases = Phases("lookup")
    try:
        request = request_for(task, force)
    except SafetuneError:
        raise
    except Exception as error:
        raise WorkloadError(
            f"preparing {task.kernel.name} for {task.workload.name} raised "
            f"{type(error).__name__}: {error}{place_of(error)}"
        ) from error
    store = open_tuning_store()
    with reporting.observing(request, store, phases, quiet=True) as tally:
        watch(tally)
        budget = WaitBudget(tell=tally.wait_for)
        result = tune(request, store, tally, None, budget, phases, key_budget)
    reporting.tell_result(request, result, shown=True)
    return result


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
    except NameError:  # Python 3.14 evaluates annotations here, also those for type checkers alone
        pass
    try:
        workloads = function(device, dtype)
        if not isinstance(workloads, Iterable):
            workloads = [workloads]
        for workload in workloads:
            if mistake := _mistake(workload, names):
                raise WorkloadError(f"{name} {mistake} ({location})")
            names.add(workload.name)
            yield workload
    except WorkloadError:
        raise
    except (Exception, SystemExit) as error:
        raise WorkloadError(
            f"{name} raised {type(error).__name__}: {error}{place_of(error)}"
        ) from error


def place_of(error: BaseException) -> str:
    """Return the source line that raised an error, as a suffix for its message."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f" ({last.filename}:{last.lineno})"


def _mistake(workload: object, names: Container[str]) -> str:
    """Return the problem of a yielded workload; empty if there is none."""
    if not isinstance(workload, Workload):
        shown = reprlib.repr(workload)[:_MOST_SHOWN]
        return f"gave {shown}; it must yield safetune.Workload(name, grid, args, kwargs)"
    args, kwargs, problem = workload.args, workload.kwargs, ""
    if not (isinstance(workload.name, str) and workload.name.isprintable()):
        problem = "its name must be text on one line"
    elif not isinstance(args, (tuple, list)):
        problem = f"its args must be a tuple, not a {type(args).__name__}"
    elif not isinstance(kwargs, Mapping):
        problem = f"its kwargs must be a dict, not a {type(kwargs).__name__}"
    elif workload.name in names:
        return f"yielded two workloads named {workload.name!r}; give each a name of its own"
    shown = f"yielded the workload {workload.name!r:.{_MOST_SHOWN}}, but "
    return problem and shown + problem
