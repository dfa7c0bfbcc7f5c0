"""One call rebuilt in a measuring child, and its configs run on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from triton.runtime.autotuner import Config

from safetune.child import compilation, failures, rebuild_call
from safetune.child.output_check import OutOfBounds, Witness, WrongResult
from safetune.child.timing import Budget, DeviceTimer, InvalidTime, Timer, from_do_bench, measure
from safetune.isolation.answers import outcome_reply
from safetune.keys.kernel_digest import base_function
from safetune.launch import scratch_memory
from safetune.outcome import Outcome, Timing, Verdict
from safetune.tuning.evidence import group_of
from safetune.tuning.requests import Call, owners_of


class Session:
    """The child's copy of a call: same kernel, same argument bits, memory of its own."""

    def __init__(
        self, job: dict[str, Any], blob: bytes, arguments_fd: int, witness_fd: int
    ) -> None:
        self._uuid = ""
        if job["index"] >= 0:
            self._uuid = _use_device(job["index"])
            scratch_memory.serve_profiles()
        rebuilt = rebuild_call.rebuild(job["arguments"], blob, arguments_fd)
        self._arguments = rebuilt.arguments
        self._call = call = rebuilt.call
        self._configs: list[Config] = rebuilt.configs
        self._kept = rebuilt.kept
        self._grids: list[Any] = job["grids"]
        self._named = call.named()
        self._restored = self._copies(call.hooks.restore_value)
        self._timer: Timer = Timer() if call.interpreted else DeviceTimer()
        names = owners_of(self._named, self._arguments.tensors)
        self._witness = Witness(
            self._arguments, names, call.hooks.scratch, job["atomics"], witness_fd
        )
        if call.hooks.reference is not None:
            self._witness.expect(call.hooks.reference(dict(self._named)))

    def resolve(self, index: int) -> tuple[dict[str, Any], bytes]:
        """Return what a compiler needs for one config, after its heuristics and hooks have run."""
        launch = _Launch(self._call, self._configs[index], self._grids[index])
        jit, _ = base_function(self._call.kernel)
        try:
            spec = launch.with_hooks(
                lambda: compilation.capture_spec(jit, launch, self._call.index)
            )
            self._arguments.restore()
        except BaseException as error:  # sys.exit in a hook is a failed config like any other
            return outcome_reply(failures.of_launch(error)), b""
        return outcome_reply(Outcome(Verdict.OK)), spec

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run one config from the caller's bits and time it; the verdict is the answer.

        With `groups` in the job its result is compared, too, and `evidence` is in the answer.
        """
        index = job["config"]
        launch = _Launch(self._call, self._configs[index], self._grids[index], self._restored)
        evidence = None
        try:
            if job["groups"] is not None:
                groups = [group_of(group) for group in job["groups"]]
                evidence = self._witness.examine(lambda: self._finished(launch), groups)
            self._arguments.restore()
            if evidence is None:
                self._finished(launch)
            timing = self._time(launch, Budget(**job["budget"]))
            self._timer.synchronize()
            self._witness.check_guards()
        except InvalidTime as error:
            return outcome_reply(Outcome(Verdict.INVALID_TIME, message=str(error)))
        except OutOfBounds as error:
            return outcome_reply(Outcome(Verdict.OUT_OF_BOUNDS, message=str(error)))
        except WrongResult as error:
            return outcome_reply(Outcome(Verdict.WRONG_RESULT, message=str(error)))
        except BaseException as error:
            return outcome_reply(failures.of_launch(error))
        reply = outcome_reply(Outcome(Verdict.OK, timing=timing, gpu_uuid=self._uuid))
        return reply if evidence is None else {**reply, "evidence": asdict(evidence)}

    def _finished(self, launch: _Launch) -> None:
        launch.with_hooks()
        self._timer.synchronize()

    def _time(self, launch: _Launch, budget: Budget) -> Timing:
        do_bench = self._call.hooks.do_bench
        if do_bench is not None:
            return from_do_bench(do_bench(launch.with_hooks, quantiles=(0.5, 0.2, 0.8)))
        return measure(launch, launch.before, launch.after, self._timer, budget)

    def _copies(self, names: tuple[str, ...]) -> dict[str, Any]:
        tensors = {name: self._named.get(name) for name in names}
        return {name: value.clone() for name, value in tensors.items() if value is not None}


class _Launch:
    """One config's launch: the hooks around it see the caller's values, the kernel the pins."""

    def __init__(
        self, call: Call, config: Config, grid: Any, restored: dict[str, Any] | None = None
    ) -> None:
        options = config.all_kwargs()
        named = {**call.named(), **options}
        self._run: Callable[..., object] = call.kernel.run
        self._args, pinned_kwargs = call.pinned()
        self._kwargs = {**pinned_kwargs, **options, "grid": tuple(grid), "warmup": False}
        self._named = named
        self._hooks = call.hooks
        self._config = config
        self._restored = restored or {}

    def __call__(self) -> None:
        scratch_memory.launch(self._run, *self._args, **self._kwargs)

    def before(self) -> None:
        """What triton.autotune runs before each launch: the config's hook, then the tuner's."""
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
        """What triton.autotune runs after each launch."""
        if self._hooks.post_hook is not None:
            self._hooks.post_hook(self._named, exception=exception)

    def with_hooks(self, launch: Callable[[], Any] | None = None) -> Any:
        """Launch, or do something else, as a user's do_bench sees it: between the hooks."""
        self.before()
        try:
            result = (launch or self)()
        except Exception as error:
            self.after(error)
            raise
        self.after()
        return result


def _use_device(index: int) -> str:
    """Make `index` the current device and return its UUID."""
    import torch

    torch.cuda.set_device(index)
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
