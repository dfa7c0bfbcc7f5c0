"""The compile pool and the measuring child of one tuning, and the copies that they use."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from triton.runtime.autotuner import Config
from triton.runtime.errors import OutOfResources

from safetune import forks, triton_internals
from safetune.both.protocol import DONE, Budget, Prepare
from safetune.config import config_text
from safetune.errors import NoWorkingConfig
from safetune.inputs import caller_view, compile_spec, kernel_pickle
from safetune.inputs.call import Call
from safetune.inputs.snapshot import copy_inputs
from safetune.isolation import child_handle, measuring_child
from safetune.isolation.compile_pool import Compiled, CompilePool
from safetune.isolation.fork_server import start_servers
from safetune.isolation.measuring_child import MeasuringChild, TorchNeeded
from safetune.keys.effects import effects_of
from safetune.keys.identity import base_function, inner_heuristics
from safetune.launch.call_shape import own_heuristics
from safetune.outcome import Group, Mark, Outcome, OutputReport, Verdict
from safetune.tuning.requests import Phases, TuningRequest

if TYPE_CHECKING:
    from typing_extensions import Self

Result = TypeVar("Result")

#: The winner is launched again for this share of the time that its tuning has taken.
_REPEATS_SHARE = 0.02

#: The name of torch, or of a module of it, as a pickle has it: unpickling would import it.
_NAMES_TORCH = re.compile(rb"\x8c.torch(\.[\w.]+)?\x94", re.DOTALL)

_device_locks: dict[int, threading.RLock] = {}


def device_lock(index: int) -> threading.RLock:
    """Return the lock of one device; simultaneous tunings would disturb each other's times.

    It is reentrant, because a grid or a heuristic may launch, and so tune, another kernel within a
    tuning.
    """
    return _device_locks.setdefault(index, threading.RLock())


forks.register("tuning", after_in_child=_device_locks.clear)


class Ready(NamedTuple):
    """A config that can be launched, or the outcome of one that cannot or need not be.

    `same` is an earlier config whose launch has bitwise the same effect.
    """

    config: int
    failure: Outcome | None = None
    same: int | None = None


class LaunchBench:
    """The compile pool and the measuring child of one tuning.

    Attributes:
        phases: of the tuning.
        grids: the launch grid of each config.
        effects: the kernel's writes according to its text.
    """

    #: Whether the tuning waits for its turn without the caller's arguments, and goes on beside the
    #: program's work.
    _queued = False

    def __init__(self, request: TuningRequest, phases: Phases | None = None) -> None:
        self.interpreted = request.call.interpreted
        child_handle.check_device(request.call.index)
        self.phases = phases or Phases("wait")
        self._request = request
        self._fresh = request.limits.fresh_process
        self.grids, self._failures = request.grids.sizes, request.grids.failures
        if len(self._failures) == len(self.grids):
            outcomes = [(config_text(c), self._failures[i]) for i, c in enumerate(request.configs)]
            kernel, key = request.key.kernel.name, str(request.key)
            raise NoWorkingConfig(kernel, key, outcomes, measured=len(outcomes))
        # Other inputs are drawn with torch.
        self._with_torch = request.same_bits or _asks_for_torch(request.call)
        if not self._queued:  # else it needs no process yet
            start_servers(not self.interpreted, self._with_torch)
        with self.phases("transfer"), contextlib.ExitStack() as opened:
            self._child = self._packed(request, opened)
            self._exit = opened.pop_all()

    def _packed(self, request: TuningRequest, opened: contextlib.ExitStack) -> MeasuringChild:
        """Return the child of a call, not started yet, with its files added to `opened`."""
        call, tensors = request.call, kernel_pickle.TensorTable()
        packed = pack_call(request, tensors)
        self.effects = effects = effects_of(call.kernel)
        inputs = copy_inputs(
            call,
            tensors.tensors,
            measuring_child.drop_idle,
            on_devices=not self._queued,  # a queued call holds no memory of a device
            outputs=effects.only_stored,
        )
        opened.callback(inputs.close)
        drawn = ", ".join(inputs.regenerated)
        self._marks = (*([Mark.REGENERATED.of(drawn)] if drawn else ()), *request.marks)
        prepare = Prepare(
            packed=packed,
            layout=inputs.layout,
            index=call.index,
            grids=list(self.grids),
            effects=effects,
            backend="" if self.interpreted else triton_internals.target_name() or "",
            view=caller_view.packed(tensors.tensors) if request.has_hooks else b"",
        )

        return MeasuringChild(
            prepare,
            (inputs.fd, *inputs.shared_fds),
            request.limits.run_timeout_s,
            fresh=self._fresh,
            with_torch=self._with_torch or bool(_NAMES_TORCH.search(packed)),
        )

    def __enter__(self) -> Self:
        """Start the servers and the measuring child; wait for neither."""
        with contextlib.ExitStack() as on_error:
            on_error.push(self.__exit__)
            start_servers(not self.interpreted, self._child.with_torch)
            self._child.begin()
            on_error.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._child.release()
        else:
            self._child.replace()
        self._exit.close()

    def compiled(
        self,
        configs: Sequence[int],
        timeout_s: float,
        may_give_up: Callable[[int], bool] = lambda config: False,
    ) -> Iterator[Ready]:
        """Yield each config once it can be launched, or is known to fail.

        Configs that `CompilePool` gives up are left out.
        """
        firsts: dict[Any, int] = {}
        for result in self._results(configs, timeout_s, may_give_up):
            failure = self._failure(result)
            launch = None if failure else self._launch_of(result)
            first = result.config if launch is None else firsts.setdefault(launch, result.config)
            same = None if first == result.config else first
            yield Ready(result.config, failure and failure.with_marks(self._marks), same)

    def _results(
        self, configs: Sequence[int], timeout_s: float, may_give_up: Callable[[int], bool]
    ) -> Iterator[Compiled]:
        """Yield each config with what came of compiling it, if it was to be compiled."""
        for index in configs:
            if index in self._failures:
                yield Compiled(index, self._failures[index])
        alive = [index for index in configs if index not in self._failures]
        if self.interpreted:
            for index in alive:
                yield Compiled(index, DONE.outcome)
            return
        memory_bytes = self._request.limits.compile_memory_bytes
        jit, _ = base_function(self._request.call.kernel)
        kernel = functools.cache(functools.partial(compile_spec.pack_for_compiler, jit))
        limits = (timeout_s, None, memory_bytes, self._request.most_shared)
        pool = CompilePool(kernel, *limits, may_give_up)
        self._exit.push(pool)
        # Those take longest, so that none of them is to begin when the others have ended.
        largest_first = sorted(alive, key=lambda i: _tile(self._request.configs[i]), reverse=True)
        yield from self._resolved(largest_first, pool)
        results = pool.results()
        while True:
            with self.phases("compile"):
                result = next(results, None)
            if result is None:
                return
            yield result

    def _resolved(self, configs: Sequence[int], pool: CompilePool) -> Iterator[Compiled]:
        """Give the pool each config that is to be compiled; yield the others."""
        unknown, cached = [], []
        with self.phases("resolve"):
            in_caller = compile_spec.CallerSpecs(
                self._request.call, not self._queued, self._request.most_shared
            )
            for index in configs:
                values = self._request.grids.sent[index]
                spec = in_caller.spec_of(self._request.configs[index], values)
                if spec is None:
                    unknown.append(index)
                elif isinstance(spec, bytes):
                    pool.add(index, spec)
                else:
                    cached.append(Compiled(index, DONE.outcome, spec))
        for found in cached:
            pool.work()
            yield found
        for index in unknown:
            outcome, blob = self._asked("resolve", functools.partial(self._child.spec_of, index))
            if outcome.ok:
                pool.add(index, blob)
            if not outcome.ok:
                yield Compiled(index, outcome)

    def _failure(self, result: Compiled) -> Outcome | None:
        """Return why a config cannot be launched: it did not compile, or needs too much memory."""
        if not result.outcome.ok:
            return result.outcome
        limit, binary = self._request.most_shared, result.binary
        if binary is None or not limit or binary.shared_bytes <= limit:
            return None
        error = OutOfResources(binary.shared_bytes, limit, "shared memory")
        return Outcome(
            Verdict.OUT_OF_RESOURCES, detail=type(error).__name__, message=str(error).strip()
        )

    def _launch_of(self, result: Compiled) -> Any:
        """Return what decides all that the launch of a config does; None where hooks, or values
        that the config passes to the kernel, decide it too.
        """
        call, config = self._request.call, self._request.configs[result.config]
        hooks, binary = call.hooks, result.binary
        if binary is None or not binary.digest:
            return None
        if any((hooks.pre_hook, hooks.post_hook, hooks.do_bench, config.pre_hook)):
            return None
        jit, _ = base_function(call.kernel)
        passed = {parameter.name for parameter in jit.params if not parameter.is_constexpr}
        own = {*config.all_kwargs(), *inner_heuristics(call.kernel)}
        return None if passed & own else (binary.digest, self.grids[result.config])

    def measure(
        self,
        index: int,
        budget: Budget | None,
        groups: Sequence[Group] | None = None,
        limit_s: float | None = None,
    ) -> tuple[Outcome, OutputReport | None]:
        """Run a config in the measuring child; see `MeasuringChild.measure`."""
        outcome, report = self._asked(
            "finals" if groups is None else "measure",
            lambda: self._child.measure(index, budget, groups, limit_s),
        )
        if self._fresh:
            self._child.replace()
        return outcome.with_marks(self._marks), report

    def in_turn(self, budgets: Mapping[int, Budget]) -> dict[int, Outcome]:
        """Time configs one after another. After a failure, that config and the following ones run
        again separately, so that each is judged by its own behaviour.
        """
        found = {}
        if not self._fresh:
            found = self._asked("finals", lambda: self._child.in_turn(budgets))
        marked = {config: outcome.with_marks(self._marks) for config, outcome in found.items()}
        missing = {config: budgets[config] for config in budgets if config not in found}
        return marked | {c: self.measure(c, budget)[0] for c, budget in missing.items()}

    def repeat(self, index: int) -> tuple[Outcome, Sequence[tuple[int, int, str]]]:
        """Launch a config a few more times; return the outcome, and the tensors whose bits have
        varied between launches of configs: see `protocol.Answer.varied`.
        """
        if not self.effects.repeats:
            return DONE.outcome, ()
        time_ms = 1e3 * _REPEATS_SHARE * sum(self.phases.seconds().values())
        answer = self._asked("finals", lambda: self._child.repeat(index, time_ms))
        return answer.outcome, answer.varied

    def bits(self, index: int) -> tuple[int, ...]:
        """Return the bits that a config leaves on the caller's inputs and on others; empty if a
        launch fails.
        """
        found = self._asked("finals", lambda: self._child.bits(index))
        if self._fresh:
            self._child.replace()
        return found

    def replace(self) -> None:
        """Measure with a fresh child from now on."""
        self._child.replace()

    def wait(self) -> None:
        """Wait until the measuring child is ready; raises `WorkerUnavailable`."""
        with self.phases("torch" if self._child.with_torch else "start"):
            self._child.wait()

    def _asked(self, phase: str, ask: Callable[[], Result]) -> Result:
        """Return an answer of the measuring child, in a phase."""
        self.wait()
        with contextlib.suppress(TorchNeeded), self.phases(phase):
            return ask()
        return self._asked(phase, ask)


def _tile(config: Config) -> int:
    """Return how large the tile of a config is: the product of its integers above 1."""
    return math.prod(n for n in config.kwargs.values() if isinstance(n, int) and n > 1)


def pack_call(request: TuningRequest, tensors: kernel_pickle.TensorTable | None = None) -> bytes:
    """Return a call and its configs in the form that a child unpacks, without tensor contents.

    Raises:
        KernelNotTransferable: a part of it cannot be rebuilt in another process.
    """
    return kernel_pickle.pack(
        (_sent(request), list(request.configs)),
        f"the call of {request.key.kernel.name}",
        kernel_pickle.TensorTable() if tensors is None else tensors,
        by_value=_functions_of(request),
    )


def _sent(request: TuningRequest) -> Call:
    """Return a request's call as a child gets it: without heuristics that it need not run."""
    call, grids = request.call, request.grids
    kernel = call.kernel if None in grids.sent else own_heuristics(call.kernel)[0]
    return replace(call, kernel=kernel, grid=None, heuristics=grids.sent)


def _asks_for_torch(call: Call) -> bool:
    """Whether a call is certain to need torch in its measuring child, or Triton's driver may be."""
    hooks = call.hooks
    asking = any(hook is not None for hook in (hooks.do_bench, hooks.inputs, hooks.reference))
    known = triton_internals.version() <= triton_internals.NEWEST
    return call.interpreted or asking or not known


def _functions_of(request: TuningRequest) -> Iterator[Any]:
    """Yield the kernel's function and all functions that run around its launch."""
    call = request.call
    yield base_function(call.kernel)[1]
    yield from inner_heuristics(call.kernel).values()
    hooks = call.hooks
    yield from (hooks.pre_hook, hooks.post_hook, hooks.do_bench, hooks.reference, hooks.inputs)
    yield from (config.pre_hook for config in request.configs)
