"""Recorded calls as tasks for offline tuning: their kernels found again, their inputs rebuilt."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from safetune.config import config_digest
from safetune.errors import (
    NoDevice,
    NothingToMeasure,
    SafetuneError,
    StoreError,
    TargetError,
    WorkerUnavailable,
)
from safetune.frozen import dataclass
from safetune.inputs import call_description
from safetune.inputs.workload import Workload
from safetune.keys import written_key
from safetune.keys.identity import base_function
from safetune.keys.tuning_key import describe_call
from safetune.messages import one_line
from safetune.offline import imports, plan
from safetune.offline.plan import Planned
from safetune.offline.tasks import OfflineKernel, Task, find_kernels, place_of
from safetune.outcome import Mark
from safetune.store.records import RecordedCall


@dataclass(frozen=True)
class LeftOut:
    """A recorded call that is not tuned, and the reason."""

    call: RecordedCall
    reason: str  # on one line
    #: Whether a program of today makes no such call: its kernel was edited, refuses it, or is gone.
    changed: bool = False
    not_found: bool = False  # whether its kernel could not be looked for

    @property
    def failed(self) -> bool:
        """Whether the command fails although the call's key has a choice, which may no longer be
        valid.
        """
        return self.changed or self.not_found

    @property
    def words(self) -> str:
        """The call as text."""
        try:
            return f"{self.call.name} for {describe_call(self.call.arguments['call'])}"
        except (KeyError, TypeError, ValueError):
            return self.call.name


#: What is wrong with all calls.
_OF_ALL_CALLS = (NoDevice, StoreError, WorkerUnavailable)

#: A recorded call, and its kernel, which was found.
Rebuildable = tuple[RecordedCall, OfflineKernel]


def with_kernels(
    calls: Iterable[RecordedCall], kernels: Sequence[OfflineKernel], left_out: list[LeftOut]
) -> list[Rebuildable]:
    """Return the calls whose kernels are unchanged; add the others to `left_out`.

    Args:
        kernels: where to look for the calls' kernels; if empty, in their defining modules.
    """
    found: list[Rebuildable] = []
    modules = functools.cache(_kernels_in)
    for call in calls:
        with leaving_out(call, left_out, "its record cannot be read"):
            found.append((call, _kernel_of(call, kernels or _imported(call, modules))))
    return found


def keep_as_recorded(calls: Iterable[RecordedCall]) -> None:
    """Keep the recording process's key names, before a kernel of these calls is imported."""
    for call in calls:
        names = call.arguments.get("keep")
        if isinstance(names, list):
            written_key.keep_as_recorded(call.name, map(str, names))


def sketches(
    found: Iterable[Rebuildable], force: bool, left_out: list[LeftOut]
) -> Iterator[Planned]:
    """Yield the plan data of each call; the tensors of only one call are in memory at a time."""
    for call, kernel in found:
        make = functools.partial(task_of, call, kernel, kernel.device)
        with leaving_out(call, left_out, "it cannot be tuned"):
            yield plan.sketch(make(), make, force)


def shapes(found: Iterable[Rebuildable], left_out: list[LeftOut]) -> list[Task]:
    """Return the tasks of calls, with tensors that have no memory."""
    tasks = []
    for call, kernel in found:
        with leaving_out(call, left_out, ""):
            tasks.append(task_of(call, kernel, "meta"))
    return tasks


@contextlib.contextmanager
def leaving_out(call: RecordedCall, left_out: list[LeftOut], problem: str) -> Iterator[None]:
    """Leave a call out if the body raises an error in the call or its kernel: another version, or
    another program, may have written the record.
    """
    reason, changed, not_found = "", False, False
    try:
        yield
    except _OF_ALL_CALLS:
        raise
    except torch.OutOfMemoryError as error:
        reason = f"there is not enough memory for its tensors: {error}"
    except SafetuneError as error:  # for example a config that sets a name that the call passes
        reason, not_found = str(error), isinstance(error, _NotFound)
        changed = not isinstance(error, (_NotFound, NotComparable, NothingToMeasure))
    except Exception as error:
        reason = f"{problem} ({type(error).__name__}: {error}{place_of(error)})"
    if reason:
        left_out.append(LeftOut(call, one_line(reason), changed, not_found))


def task_of(call: RecordedCall, kernel: OfflineKernel, device: str) -> Task:
    """Create a call's tensors on a device and return the task to tune; raises `NotComparable`."""
    try:
        return _rebuilt(call, kernel, device)
    except (NotComparable, torch.OutOfMemoryError):
        raise
    except Exception as error:  # another version, or another program, may have written the record
        reason = f"{type(error).__name__}: {error}"
        raise NotComparable(f"it cannot be rebuilt from its record ({reason})") from error


def _rebuilt(call: RecordedCall, kernel: OfflineKernel, device: str) -> Task:
    data, tuner = call.arguments, kernel.tuner
    made = tuner.hooks.inputs is not None
    if problem := data.get("problem"):
        raise NotComparable(str(problem))
    names = call_description.unknown(data, tuner.arg_names)
    if names and not made and device != "meta":
        raise NotComparable(
            f"no range is recorded for the integers in {', '.join(names)}, as under CUDA graph "
            "capture: record a call without capture, or give the kernel `inputs=` to make its "
            "tensors"
        )
    main = base_function(tuner.fn)[1].__globals__
    args, kwargs = call_description.rebuild(data, device, not made, main)
    grids = [
        (config.all_kwargs(), tuple(data["grids"][digest]))
        for config in tuner.configs
        if (digest := config_digest(config)) in data["grids"]
    ]
    drawn = "" if made else ", ".join(call_description.drawn(data, tuner.arg_names))
    values, _, dtypes = describe_call(data["call"]).partition(" (")
    return Task(
        # The tuner itself: values of heuristics above it are among the recorded arguments.
        kernel=replace(kernel, outer=tuner),
        workload=Workload(values, _grid_function(grids), args, kwargs),
        dtype=dtypes.removesuffix(")"),
        marks=(Mark.REGENERATED.of(drawn),) if drawn else (),
    )


class NotComparable(TargetError):
    """The reason to leave out a call that its kernel may still make."""


class _NotFound(TargetError):
    """Why a call's kernel could not be looked for."""


class _Changed(TargetError):
    """Why no program of today makes a call."""


def _imported(
    call: RecordedCall, modules: Callable[[str], list[OfflineKernel] | str]
) -> list[OfflineKernel]:
    module = call.place.partition(":")[0]
    if module == "__main__":
        raise _NotFound("its kernel is defined in a script: name the script as TARGET")
    found = modules(module)
    if isinstance(found, str):
        raise _NotFound(f"{module} cannot be imported ({found}): name its file as TARGET")
    for other in call_description.modules(call.arguments):  # of its arguments' classes
        if isinstance(problem := modules(other), str):
            raise _NotFound(f"{other} cannot be imported ({problem}): an argument needs it")
    return found


def _kernels_in(module: str) -> list[OfflineKernel] | str:
    """Return the kernels of a module, or why it cannot be imported."""
    try:
        return find_kernels(vars(imports.import_named(module)), under_triton=True)
    except (Exception, SystemExit) as error:
        cause: BaseException = error
        # A library's own message may leave the cause out. An error can be its own cause.
        while (inner := cause.__cause__) is not None and inner is not cause:
            cause = inner
        return f"{type(cause).__name__}: {cause}"


def _kernel_of(call: RecordedCall, kernels: Sequence[OfflineKernel]) -> OfflineKernel:
    named = [kernel for kernel in kernels if kernel.name == call.name]
    for kernel in named:
        if kernel.tuner.identity.digest == call.arguments.get("kernel"):
            return kernel
    if named:
        raise _Changed(f"{call.place} has changed since it was recorded: record it again")
    problem = f"{call.place} is not an attribute of its module"
    if "<locals>" in call.place:
        raise NotComparable(f"{problem}: name a TARGET that has it")
    raise _Changed(f"{problem}: record it again, or name a TARGET that has it")


def _grid_function(
    grids: Sequence[tuple[dict[str, Any], tuple[int, ...]]],
) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """Return a grid function that gives each config its recorded grid."""

    def grid(arguments: Mapping[str, Any]) -> tuple[int, ...]:
        for options, numbers in grids:
            if all(arguments.get(name) == value for name, value in options.items()):
                return numbers
        raise LookupError("this config was not declared when the call was recorded")

    return grid
