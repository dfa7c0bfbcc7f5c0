"""One call, rebuilt in a measuring child, on which configs are run and timed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from triton.runtime.autotuner import Config

from safetune import triton_compile, triton_launch
from safetune.child import failures, rebuild_call, stand_ins
from safetune.child.device import DeviceLaunches, DeviceTimer
from safetune.child.output_check import OutOfBounds, OutputCheck, WrongResult
from safetune.inputs import compile_spec
from safetune.inputs.call import Call, owners_of
from safetune.isolation import backend
from safetune.isolation.protocol import DONE, Answer, Budget, Measure, Prepare
from safetune.keys.kernel_digest import base_function, is_own, layers
from safetune.launch.timing import InvalidTime, Timer, from_do_bench, measure
from safetune.outcome import Outcome, OutputReport, Timing, Verdict
from safetune.triton_internals import is_watched

_VERDICTS: dict[type[Exception], Verdict] = {
    InvalidTime: Verdict.INVALID_TIME,
    OutOfBounds: Verdict.OUT_OF_BOUNDS,
    WrongResult: Verdict.WRONG_RESULT,
}


def _called(run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


class Session:
    """The child's copy of a call: same kernel, same argument bits, memory of its own."""

    def __init__(self, job: Prepare, arguments_fd: int, results_fd: int) -> None:
        found = backend.named(job.backend) if job.index >= 0 else None
        use_device = functools.partial(found.use, job.index) if found else str
        self._uuid = use_device()
        self._rebuilt = rebuild_call.rebuild(job.layout, job.packed, arguments_fd, use_device)
        stand_ins.asked.clear()
        self._arguments, self._configs = self._rebuilt.arguments, self._rebuilt.configs
        self._call = call = self._rebuilt.call
        self._grids = job.grids
        self._launches: dict[int, ConfigLaunch] = {}
        self._seen: set[int] = set()
        self._timer: Timer = Timer()
        self._launched: Callable[..., Any] = _called
        if found:
            if not self.has_torch:
                triton_launch.prepare_specializing()
            triton_compile.load_code_alone()
            where = found.bytes_of(job.index)
            self._timer, self._launched = DeviceTimer(where), DeviceLaunches(where)
        self._named = call.named()
        restored = {name: self._named.get(name) for name in call.hooks.restore_value}
        self._restored = {n: value.clone() for n, value in restored.items() if value is not None}
        names = owners_of(self._named, self._rebuilt.tensors)
        self._outputs = OutputCheck(
            *(self._arguments, names, call.hooks.scratch, job.effects, results_fd),
            relaunch=functools.partial(Session._relaunch, weakref.proxy(self)),
        )
        if call.hooks.reference is not None:
            self._outputs.expect(
                rebuild_call.values_of(call, "reference", self._named),
                rebuild_call.described(call, "reference"),
            )

    @property
    def has_torch(self) -> bool:
        """Whether the call has tensors of torch's."""
        return self._rebuilt.torch

    @property
    def needs_torch(self) -> bool:
        """Whether code of the user's has asked for torch, so that no answer counts without it."""
        return not self.has_torch and bool(stand_ins.asked)

    def spec_of(self, config: int) -> tuple[Answer, bytes]:
        """Return what a compiler needs for a config, after its heuristics and hooks have run."""
        launch = self._launch_of(config)
        jit, _ = base_function(self._call.kernel)
        try:
            with stand_ins.noting_torch():
                spec = launch.with_hooks(
                    lambda: compile_spec.capture_spec(jit, launch, self._call.index)
                )
            self._arguments.restore()
        except BaseException as error:  # sys.exit in a hook is a failed config like any other
            return Answer(failures.of_launch(error)), b""
        return DONE, spec

    def measure(self, job: Measure) -> Answer:
        """Run a config from the caller's bits, check what it wrote and, with a budget, time it."""
        launch = self._launch_of(job.config)
        report: OutputReport | None = None
        timing: Timing | None = None
        try:
            if job.groups is not None:
                report = self._outputs.examine(
                    lambda: self._finished(launch), job.groups, job.config
                )
                self._seen.add(job.config)
            self._arguments.restore()
            if job.config not in self._seen:  # its first launch loads it
                self._finished(launch)
            self._seen.add(job.config)
            if job.budget is not None:
                timing = self._time(launch, job.budget)
            self._timer.synchronize()
            self._outputs.check_guards()
        except tuple(_VERDICTS) as error:
            return Answer(Outcome(_VERDICTS[type(error)], message=str(error)))
        except BaseException as error:
            return Answer(failures.of_launch(error))
        return Answer(Outcome(Verdict.OK, timing=timing, gpu_uuid=self._uuid), report)

    def _relaunch(self, config: int) -> None:
        self._finished(self._launch_of(config))

    def _launch_of(self, config: int) -> ConfigLaunch:
        if config not in self._launches:
            options, grid = self._configs[config], self._grids[config]
            self._launches[config] = ConfigLaunch(
                self._call, options, grid, self._launched, self._restored
            )
        return self._launches[config]

    def _finished(self, launch: ConfigLaunch) -> None:
        def checked() -> None:
            self._outputs.after_hooks()
            launch()

        with stand_ins.noting_torch():
            launch.with_hooks(checked)
        self._timer.synchronize()

    def _time(self, launch: ConfigLaunch, budget: Budget) -> Timing:
        do_bench = self._call.hooks.do_bench
        if do_bench is not None:
            return from_do_bench(do_bench(launch.with_hooks, quantiles=(0.5, 0.2, 0.8)))
        again = launch.again() if self._repeatable() else launch
        around = launch.before, launch.after
        timing: Timing = self._launched(measure, again, *around, self._timer, budget)
        return timing

    def _repeatable(self) -> bool:
        """Whether all that runs between two launches of a config is Triton's own code.

        A hook of one config may change an argument for all: the blocks of a descriptor.
        """
        hooks, kernel = self._call.hooks, self._call.kernel
        given = [hooks.pre_hook, hooks.post_hook, *(each.pre_hook for each in self._configs)]
        own = all(map(is_own, layers(kernel))) and not is_watched(base_function(kernel)[0])
        return own and not any(given) and not self._call.interpreted


class ConfigLaunch:
    """One config's launch: its hooks see the caller's values, the kernel sees the pinned ones."""

    def __init__(
        self,
        call: Call,
        config: Config,
        grid: Any,
        launched: Callable[..., Any] = _called,
        restored: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        options = config.all_kwargs()
        self._launched = launched
        self._run: Callable[..., object] = call.kernel.run
        self._compiled: Any = None
        self._again: Callable[[], object] | None = None
        self._args, pinned = call.pinned()
        self._kwargs = {**pinned, **options, "grid": grid, "warmup": False}
        self._named = {**call.named(), **options}
        self._hooks = call.hooks
        self._config = config
        self._restored = restored

    def __call__(self) -> None:
        """Launch the kernel, without hooks."""
        self._compiled = self._launched(self._run, *self._args, **self._kwargs)

    def again(self) -> Callable[[], object]:
        """Return what launches the kernel as the last launch did, with Triton's work before done.

        Beside a small kernel, that work decides how long a tuning takes.
        """
        if self._compiled is None:  # as where a cache hook of Triton's keeps it from compiling
            return self
        if self._again is None:
            run = functools.partial(self._run, *self._args, **self._kwargs)
            self._again = triton_launch.repeated(run, self._compiled) or self
        return self._again

    def before(self) -> None:
        """Run what triton.autotune runs before each launch: the config's hook, then the tuner's."""
        if self._config.pre_hook is not None:
            self._config.pre_hook(self._named)
        if self._hooks.pre_hook is not None:
            self._hooks.pre_hook(self._named)
            return
        for name in self._hooks.reset_to_zero:
            if self._named.get(name) is not None:
                self._named[name].zero_()
        for name, value in self._restored.items():
            self._named[name].copy_(value)

    def after(self, exception: Exception | None = None) -> None:
        """Run what triton.autotune runs after each launch."""
        if self._hooks.post_hook is not None:
            self._hooks.post_hook(self._named, exception=exception)

    def with_hooks(self, launch: Callable[[], Any] | None = None) -> Any:
        """Run the hooks and, between them, the launch or another function."""
        self.before()
        try:
            result = (launch or self)()
        except Exception as error:
            self.after(error)
            raise
        self.after()
        return result
