"""What one tuning runs its configs on: a compile pool, a measuring child, and what they are fed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from safetune.kernel_source import base_function, inner_heuristics
from safetune.outcome import Outcome, Verdict
from safetune.tuning import kernel_ref
from safetune.tuning.compile_pool import CompilePool
from safetune.tuning.evidence import Evidence, Group
from safetune.tuning.inputs import Inputs
from safetune.tuning.jobs import TuningRequest
from safetune.tuning.launch_grid import grid_of
from safetune.tuning.measure import Budget
from safetune.tuning.session import kernel_base
from safetune.tuning.worker import MeasuringChild

_device_locks: dict[int, threading.Lock] = {}


def device_lock(index: int) -> threading.Lock:
    """Return the lock of one device: two tunings at once would time each other."""
    return _device_locks.setdefault(index, threading.Lock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_device_locks.clear)


class LaunchBench:
    """The compile pool and the measuring child of one tuning, and what they are fed."""

    def __init__(self, request: TuningRequest, on_grid_read: Callable[[set[str]], None]) -> None:
        call = request.call
        self.interpreted = call.interpreted
        self._fresh = request.limits.fresh_process
        name = request.key.kernel.name
        self._failures: dict[int, Outcome] = {}
        grids = [self._grid(request, index, on_grid_read) for index in range(len(request.configs))]
        tensors = kernel_ref.TensorTable()
        blob = kernel_ref.pack(
            (replace(call, grid=None), list(request.configs)),
            f"the call of {name}",
            tensors,
            by_value=_functions_of(request),
        )
        self._kernel = b""
        if not self.interpreted:
            function = base_function(call.kernel)[1]
            self._kernel = kernel_ref.pack(kernel_base(call.kernel), name, by_value=[function])
        self._inputs = Inputs(call, tensors.tensors)
        self.marks = self._inputs.marks
        self.grids = grids
        self.phases: dict[str, float] = {}
        self._witness = os.memfd_create("safetune-results", os.MFD_CLOEXEC)
        header = {
            "index": call.index,
            "grids": grids,
            "arguments": self._inputs.header,
            "atomics": request.key.kernel.atomics,
        }
        limits = request.limits
        fds = (self._inputs.fd, self._witness)
        self._child = MeasuringChild(
            header, blob, fds, limits.run_timeout_s, fresh=limits.fresh_process
        )

    def __enter__(self) -> LaunchBench:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._child.release()
        else:
            self._child.replace()
        self._inputs.close()
        os.close(self._witness)

    def compiled(
        self, configs: Sequence[int], timeout_s: float
    ) -> Iterator[tuple[int, Outcome | None]]:
        """Yield each config once it can be launched, or with the outcome that says why not."""
        for index in configs:
            if index in self._failures:
                yield index, self._failures[index]
        alive = [index for index in configs if index not in self._failures]
        if self.interpreted:
            for index in alive:
                yield index, None
            return
        specs = {}
        for index in alive:
            outcome, spec = self._child.resolve(index)
            if outcome.ok:
                specs[index] = spec
            else:
                yield index, outcome
        for result in CompilePool(self._kernel, timeout_s).compile(specs):
            yield result.config, None if result.outcome.ok else result.outcome

    def measure(
        self, index: int, budget: Budget, groups: Sequence[Group] | None = None
    ) -> tuple[Outcome, Evidence | None]:
        """Run one config in the measuring child; see `MeasuringChild.measure`."""
        answer = self._child.measure(index, asdict(budget), groups)
        if self._fresh:
            self._child.replace()
        return answer

    def replace(self) -> None:
        """Measure with a fresh child from here on."""
        self._child.replace()

    def _grid(
        self, request: TuningRequest, index: int, on_read: Callable[[set[str]], None]
    ) -> tuple[int, ...]:
        try:
            return grid_of(request.call, request.configs[index], on_read)
        except Exception as error:
            self._failures[index] = Outcome(
                Verdict.LAUNCH_ERROR,
                detail=type(error).__name__,
                message=f"the grid cannot be computed: {type(error).__name__}: {error}",
            )
            return ()


def _functions_of(request: TuningRequest) -> Iterator[Any]:
    """The kernel's function and all that runs around its launch."""
    call = request.call
    yield base_function(call.kernel)[1]
    yield from inner_heuristics(call.kernel).values()
    hooks = call.hooks
    yield from (hooks.pre_hook, hooks.post_hook, hooks.do_bench, hooks.reference, hooks.inputs)
    yield from (config.pre_hook for config in request.configs)
