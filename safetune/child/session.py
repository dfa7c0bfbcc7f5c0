"""One call, rebuilt in a measuring child, which runs and times configs of it."""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from triton.runtime.autotuner import Config

from safetune import triton_compile, triton_launch
from safetune.both import backend, protocol
from safetune.both.protocol import DONE, Answer, Budget
from safetune.both.timing import InvalidTime, Timer, from_do_bench, measure
from safetune.child import failures, rebuild_call, stand_ins
from safetune.child.device import DeviceTimer, Scratch
from safetune.child.output_check import Launch, OutOfBounds, OutputCheck, WrongResult
from safetune.child.replays import NotReplayable, Replays
from safetune.inputs import compile_spec
from safetune.inputs.call import Call, owners_of, tensors_in
from safetune.keys.identity import base_function, is_own, layers
from safetune.launch.call_shape import own_heuristics
from safetune.outcome import BUSY, Outcome, OutputReport, Timing, Verdict
from safetune.triton_internals import is_watched

_VERDICTS: dict[type[BaseException], Verdict] = {
    InvalidTime: Verdict.INVALID_TIME,
    OutOfBounds: Verdict.OUT_OF_BOUNDS,
    WrongResult: Verdict.WRONG_RESULT,
}


def _without_grad() -> AbstractContextManager[None]:
    """Change tensors that require gradients, which torch refuses outside of this."""
    torch = sys.modules.get("torch")
    return torch.no_grad() if torch else contextlib.nullcontext()


def _called(run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


class Session:
    """The child's copy of a call: same kernel, same argument bits, its own memory."""

    def __init__(self, job: protocol.Prepare, arguments_fd: int) -> None:
        found = backend.named(job.backend) if job.index >= 0 else None
        use_device = functools.partial(found.use, job.index) if found else str
        self._uuid = use_device()
        self._rebuilt = rebuild_call.rebuild(
            job.layout, job.packed, arguments_fd, use_device, job.view
        )
        stand_ins.asked.clear()
        self._arguments, self._configs = self._rebuilt.arguments, self._rebuilt.configs
        self._call = call = self._rebuilt.call
        self._grids = job.grids
        self._launches: dict[int, ConfigLaunch] = {}
        self._seen: set[int] = set()
        self._timer: Timer = Timer()
        self._replays: Replays | None = None
        self._launched: Callable[..., Any] = _called
        if found:
            if not self.has_torch:
                triton_launch.prepare_specializing()
            triton_compile.load_code_alone()
            where = found.bytes_of(job.index)
            timer, scratch = DeviceTimer(where), Scratch(where)
            self._timer, self._launched = timer, scratch.launch
            of_call = self._arguments, self._rebuilt.tensors
            self._replays = Replays(*of_call, where, timer, scratch)
        self._named = call.named()
        restored = self._named_tensors(call.hooks.restore_value)
        with _without_grad():
            self._restored = [(tensor, tensor.clone()) for tensor in restored]
        self._zeroed = self._named_tensors(call.hooks.reset_to_zero)
        names = owners_of(self._named, self._rebuilt.tensors)
        launch_of = functools.partial(Session._finishing, weakref.proxy(self))
        self._outputs = OutputCheck(
            self._arguments, names, call.hooks.scratch, job.effects, launch_of
        )
        if call.hooks.reference is not None:
            self._outputs.expect(
                rebuild_call.values_of(call, "reference", self._named),
                rebuild_call.described(call, "reference"),
            )

    @property
    def has_torch(self) -> bool:
        """Whether the call has torch tensors."""
        return self._rebuilt.torch

    def answer(self, job: protocol.OfCall) -> tuple[Answer, bytes]:
        """Return the answer to a job, and its bytes. If user code has asked for torch, any answer
        given without it is invalid: then say that only a child with torch can do the job.
        """
        found = self._answered(job)
        return (replace(DONE, torch=True), b"") if stand_ins.asked and not self.has_torch else found

    def _answered(self, job: protocol.OfCall) -> tuple[Answer, bytes]:
        try:
            with stand_ins.noting_torch():
                match job:
                    case protocol.Specify():
                        return DONE, self._spec_of(job.config)
                    case protocol.Measure():
                        return self._measured(job), b""
                    case protocol.Repeat():
                        return self._repeated(job), b""
                    case protocol.Bits():
                        return replace(DONE, bits=self._outputs.bits(job.config)), b""
        except BaseException as error:  # sys.exit in a hook is a failed config like any other
            verdict = _VERDICTS.get(type(error))
            failed = Outcome(verdict, message=str(error)) if verdict else failures.of_launch(error)
            return Answer(failed), b""

    def _spec_of(self, config: int) -> bytes:
        """Return the compiler's input for a config, after its heuristics and hooks have run."""
        launch = self._launch_of(config)
        jit, _ = base_function(self._call.kernel)
        self._outputs.left = None  # hooks change it
        spec: bytes = launch.with_hooks(
            lambda: compile_spec.capture_spec(jit, launch, self._call.index)
        )
        self._arguments.restore()
        return spec

    def _measured(self, job: protocol.Measure) -> Answer:
        """Run a config from the caller's bits, check what it wrote and, with a budget, time it."""
        report: OutputReport | None = None
        timing: Timing | None = None
        marks: tuple[str, ...] = ()
        self._why_events = ""
        launch = self._launch_of(job.config)
        if job.groups is not None:
            report = self._outputs.examine(job.groups, job.config)
            self._seen.add(job.config)
        self._outputs.restore()
        before = launch.count
        if job.config not in self._seen:  # its first launch loads it
            self._finished(launch)
        self._seen.add(job.config)
        if job.budget is not None:
            marks = (BUSY,) if job.budget.watch and self._timer.is_busy() else ()
            timing = self._time(job.config, launch, job.budget)
        self._timer.synchronize()
        launches = launch.count - before
        if launches and job.budget is not None and job.budget.way == "events":
            self._outputs.left = job.config, launches
        self._outputs.check_guards()
        outcome = Outcome(
            *(Verdict.OK, timing), message=self._why_events, gpu_uuid=self._uuid, marks=marks
        )
        return Answer(outcome, report)

    def _repeated(self, job: protocol.Repeat) -> Answer:
        """Launch a config repeatedly, and report the configs whose bits have varied.

        The interpreter runs programs in sequence, so it shows little.
        """
        least = 2 if self._call.interpreted else 4
        self._outputs.repeat(job.config, least, job.time_ms / 1e3, self._timer.disturb)
        return replace(DONE, varied=tuple(sorted(self._outputs.varied)))

    def _finishing(self, config: int) -> Launch:
        return functools.partial(self._finished, self._launch_of(config))

    def _launch_of(self, config: int) -> ConfigLaunch:
        if config not in self._launches:
            values = self._call.heuristics[config] if self._call.heuristics else None
            of_config = self._configs[config], self._grids[config], values
            around = self._launched, self._zeroed, self._restored
            view = self._rebuilt.view or contextlib.nullcontext
            self._launches[config] = ConfigLaunch(self._call, *of_config, *around, view)
        return self._launches[config]

    def _named_tensors(self, names: Iterable[str]) -> list[Any]:
        """Return the tensors of some arguments: also those in a tuple or a descriptor."""
        return [leaf for name in names for leaf in tensors_in(self._named.get(name))]

    def _finished(self, launch: ConfigLaunch, ready: Callable[[], object] = lambda: None) -> None:
        def run() -> None:
            ready()
            launch()

        launch.with_hooks(run)
        self._timer.synchronize()

    def _time(self, config: int, launch: ConfigLaunch, budget: Budget) -> Timing:
        do_bench = self._call.hooks.do_bench
        if do_bench is not None:
            return from_do_bench(do_bench(launch.with_hooks, quantiles=(0.5, 0.2, 0.8)))
        if budget.way != "events":
            try:
                return self._replayed(config, launch, budget)
            except Exception as error:  # what a launch has done wrong, events will find, too
                self._why_events = f"{type(error).__name__}: {error}"
                self._arguments.restore()
        again = launch.again if self._repeatable() else launch
        around = launch.before, launch.after
        timing: Timing = self._launched(measure, again, *around, self._timer, budget)
        return timing

    def _replayed(self, config: int, launch: ConfigLaunch, budget: Budget) -> Timing:
        """Time a config as replays of a graph; raises where only events can time it."""
        if self._replays is None or not self._is_own():
            raise NotReplayable("the caller's own code runs around the kernel")
        if self._zeroed or self._restored or self._call.hooks.post_hook is not None:
            raise NotReplayable("each launch needs a reset, or a hook after it")

        def launch_now() -> functools.partial[Any]:
            if self._writes_before(launch):
                raise NotReplayable("a hook writes to the arguments before each launch")
            if (found := launch.now()) is None:
                raise NotReplayable("the call is not one launch of one kernel")
            return found

        timing: Timing = self._launched(self._replays.time, config, launch_now, budget)
        return timing

    def _writes_before(self, launch: ConfigLaunch) -> bool:
        """Run the hooks of a launch as for the next one; return whether they write to arguments."""
        if not launch.has_pre_hook:
            return False
        self._finished(launch)
        self._arguments.find_written()
        sums = self._arguments.sums
        launch.before()
        self._arguments.find_written()
        return self._arguments.sums != sums

    def _is_own(self) -> bool:
        """Whether a launch, apart from its hooks, is Triton's own code alone."""
        kernel = self._call.kernel
        own = all(map(is_own, layers(kernel))) and not is_watched(base_function(kernel)[0])
        return own and not self._call.interpreted

    def _repeatable(self) -> bool:
        """Whether all that runs between two launches of a config is Triton's own code.

        A hook of one config may change an argument for all: the blocks of a descriptor.
        """
        hooks = self._call.hooks
        given = [hooks.pre_hook, hooks.post_hook, *(each.pre_hook for each in self._configs)]
        return self._is_own() and not any(given)


@dataclass(eq=False)
class ConfigLaunch:
    """One config's launch: its hooks see the caller's values, the kernel the pinned ones."""

    call: Call
    config: Config
    grid: Any
    values: Mapping[str, Any] | None = None
    launched: Callable[..., Any] = _called
    zeroed: Sequence[Any] = ()
    restored: Sequence[tuple[Any, Any]] = ()
    view: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    count: int = 0  # of its launches, as the hooks around them count

    def __post_init__(self) -> None:
        call, options = self.call, self.config.all_kwargs()
        kernel = call.kernel if self.values is None else own_heuristics(call.kernel)[0]
        self._run: Callable[..., object] = kernel.run
        self._compiled: Any = None
        self._args, pinned = call.pinned()
        self._kwargs = {**pinned, **options, **(self.values or {})}
        self._kwargs |= {"grid": self.grid, "warmup": False}
        self._named = {**call.named(), **options}

    def __call__(self) -> None:
        """Launch the kernel, without hooks."""
        self._compiled = self.launched(self._run, *self._args, **self._kwargs)

    @functools.cached_property
    def again(self) -> Callable[[], object]:
        """A function that repeats the kernel's launch without Triton's preparation, which dominates
        the time of a small kernel.
        """
        return self.now() or self

    def now(self) -> functools.partial[Any] | None:
        """Return the launch that Triton would make now; None unless it is a single launch."""
        if self._compiled is None:  # as where a cache hook of Triton's keeps it from compiling
            return None
        run = functools.partial(self._run, *self._args, **self._kwargs)
        return triton_launch.repeated(run, self._compiled)

    @property
    def has_pre_hook(self) -> bool:
        """Whether user code runs before each launch."""
        return self.config.pre_hook is not None or self.call.hooks.pre_hook is not None

    def before(self) -> None:
        """Run what triton.autotune runs before a launch: the config's hook, then the tuner's."""
        self.count += 1
        for hook in (self.config.pre_hook, self.call.hooks.pre_hook):
            if hook is not None:
                with self.view():
                    hook(self._named)
        if self.call.hooks.pre_hook is None and (self.restored or self.zeroed):
            with _without_grad():
                for tensor in self.zeroed:
                    tensor.zero_()
                for tensor, value in self.restored:
                    tensor.copy_(value)

    def after(self, exception: Exception | None = None) -> None:
        """Run what triton.autotune runs after a launch."""
        if self.call.hooks.post_hook is not None:
            with self.view():
                self.call.hooks.post_hook(self._named, exception=exception)

    def with_hooks(self, launch: Callable[[], Any] | None = None) -> Any:
        """Run the hooks around the launch or another function."""
        self.before()
        try:
            result = (launch or self)()
        except Exception as error:
            self.after(error)
            raise
        self.after()
        return result
