"""Recorded calls as tasks for offline tuning: their kernels found again, their inputs rebuilt."""

from __future__ import annotations

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
    from_signal_handler,
)
from safetune.frozen import dataclass
from safetune.inputs import call_description
from safetune.inputs.workload import Workload
from safetune.keys.tuning_key import describe_call
from safetune.messages import one_line
from safetune.offline import imports, plan
from safetune.offline.plan import Sketch
from safetune.offline.tasks import OfflineKernel, Task, find_kernels, place_of
from safetune.outcome import Mark
from safetune.store.records import RecordedCall


@dataclass(frozen=True)
class LeftOut:
    """A recorded call that is not tuned, and why."""

    call: RecordedCall
    reason: str  # on one line
    failed: bool = False  # whether its kernel refuses it as it is declared now

    @classmethod
    def because(cls, call: RecordedCall, reason: object, failed: bool = False) -> LeftOut:
        """Leave a call out."""
        return cls(call, one_line(str(reason)), failed)

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


def sort_out(
    calls: Iterable[RecordedCall],
    kernels: Sequence[OfflineKernel],
    zeros: bool,
    left_out: list[LeftOut],
) -> list[Rebuildable]:
    """Return the calls that can be tuned, with their kernels; add the others to `left_out`.

    Args:
        kernels: where to look for the calls' kernels; if empty, in the modules that defined them.
        zeros: also tune calls with integers of which nothing is recorded, filled with zeros.
    """
    found: list[Rebuildable] = []
    modules = functools.cache(_kernels_in)
    for call in calls:
        try:
            kernel = _kernel_of(call, kernels or _imported(call, modules))
            _check(call, kernel, zeros)
            found.append((call, kernel))
        except _NotHere as error:
            left_out.append(LeftOut.because(call, error))
        except _OF_ALL_CALLS:
            raise
        except SafetuneError as error:
            left_out.append(LeftOut.because(call, error, failed=True))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            left_out.append(LeftOut.because(call, f"its record cannot be read: {error!r}"))
    return found


def sketches(
    found: Iterable[Rebuildable], device: str | None, force: bool, left_out: list[LeftOut]
) -> Iterator[Sketch]:
    """Yield what a plan needs of each call, with the tensors of one at a time in memory."""
    for call, kernel in found:
        make = functools.partial(_task, call, kernel, device or kernel.device)
        try:
            yield plan.sketch(make(), make, force)
        except torch.OutOfMemoryError as error:
            reason = f"there is not enough memory for its tensors: {error}"
            left_out.append(LeftOut.because(call, reason))
        except (_NotHere, NothingToMeasure) as error:
            left_out.append(LeftOut.because(call, error))
        except _OF_ALL_CALLS:
            raise
        except SafetuneError as error:  # as a config that sets what the call passes
            left_out.append(LeftOut.because(call, error, failed=True))
        except Exception as error:
            if from_signal_handler(error):
                raise
            reason = f"it cannot be tuned ({type(error).__name__}: {error}{place_of(error)})"
            left_out.append(LeftOut.because(call, reason))


def shapes(found: Iterable[Rebuildable], left_out: list[LeftOut]) -> list[Task]:
    """Return the tasks of calls, with tensors that have no memory."""
    tasks = []
    for call, kernel in found:
        try:
            tasks.append(_task(call, kernel, "meta"))
        except _NotHere as error:
            left_out.append(LeftOut.because(call, error))
    return tasks


def _task(call: RecordedCall, kernel: OfflineKernel, device: str) -> Task:
    """Make a call's tensors on a device and return the task to tune; raises `_NotHere`."""
    try:
        return _rebuilt(call, kernel, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # another version, or another program, may have written the record
        if from_signal_handler(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise _NotHere(f"it cannot be made again from its record ({reason})") from error


def _rebuilt(call: RecordedCall, kernel: OfflineKernel, device: str) -> Task:
    data, tuner = call.arguments, kernel.tuner
    made = tuner.hooks.inputs is not None
    args, kwargs = call_description.rebuild(data, device, filled=not made)
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


class _NotHere(TargetError):
    """Why a call is left out."""


def _imported(
    call: RecordedCall, modules: Callable[[str], list[OfflineKernel] | str]
) -> list[OfflineKernel]:
    module = call.place.partition(":")[0]
    if module == "__main__":
        raise _NotHere("its kernel is defined in a script: name the script as TARGET")
    found = modules(module)
    if isinstance(found, str):
        raise _NotHere(f"{module} cannot be imported ({found}): name its file as TARGET")
    return found


def _kernels_in(module: str) -> list[OfflineKernel] | str:
    """Return the kernels of a module, or why it cannot be imported."""
    try:
        return find_kernels(vars(imports.import_named(module)))
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
        raise _NotHere(f"{call.place} has changed since it was recorded: record it again")
    raise _NotHere(f"{call.place} is not an attribute of its module: name a TARGET that has it")


def _check(call: RecordedCall, kernel: OfflineKernel, zeros: bool) -> None:
    data, tuner = call.arguments, kernel.tuner
    if problem := data.get("problem"):
        raise _NotHere(str(problem))
    names = call_description.unknown(data, tuner.arg_names)
    if names and not zeros and tuner.hooks.inputs is None:
        raise _NotHere(
            f"the integers in {', '.join(names)} are not recorded: record them with "
            "SAFETUNE_RECORD_VALUES=1, give the kernel `inputs=`, which makes its tensors, or use "
            "zeros with --zeros"
        )


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
