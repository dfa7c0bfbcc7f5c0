"""What happens when a tuner has no config for a call: look it up, else tune, else fall back."""

from __future__ import annotations

import copy
import functools
import os
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.runtime.autotuner import Config
from triton.runtime.interpreter import InterpretedFunction

from safetune import call_form, canonical, device
from safetune.config import check_conflicts, config_digest
from safetune.errors import KernelNotTransferable, WorkerUnavailable
from safetune.kernel_source import base_function, kernel_identity
from safetune.key import KernelIdentity, TuningKey
from safetune.settings import Mode, Settings
from safetune.store.lookup import open_lookup
from safetune.tuning.jobs import Call, TuningRequest

if TYPE_CHECKING:
    from safetune.autotuner import Autotuner
    from safetune.tuning.tuner import Progress, TuningResult

_LAUNCH_KEYWORDS = ("grid", "warmup")


class Miss:
    """One call that a tuner has no config for."""

    def __init__(self, tuner: Autotuner, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.tuner = tuner
        self._named = dict(zip(tuner.arg_names, args, strict=False))
        self._passed = {n: v for n, v in kwargs.items() if n not in _LAUNCH_KEYWORDS}
        self.call = self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        form = call_form.CallForm(self.tuner, len(args), tuple(kwargs))
        arguments = {**self._named, **self._passed}
        return Call(
            kernel=self.tuner.fn,
            arg_names=tuple(self.tuner.arg_names),
            args=args,
            kwargs=self._passed,
            grid=kwargs.get("grid"),
            pins={n: call_form.PIN for n in form.pins if form.pinnable(n, arguments[n])},
            hooks=self.tuner.hooks,
            index=self._device_index(),
        )

    def request(self, force: bool = False) -> TuningRequest:
        """Return what a tuning needs; raises `NoDevice`, and what a prune function raises."""
        tuner = self.tuner
        for config in tuner.configs:
            check_conflicts(tuner.base_fn.__name__, config, {**self._named, **self._passed})
        return TuningRequest(
            key=self.key(),
            call=self.call,
            configs=tuple(tuner.pruned_for(self._named, self._passed)),
            declared=_declared(tuner),
            limits=tuner.limits,
            force=force,
        )

    def key(self) -> TuningKey:
        """Return the tuning key of the call; raises `NoDevice`."""
        tuner = self.tuner
        arguments = {**self._named, **self._passed}
        found, toolchain = (
            device.interpreter() if self.call.interpreted else _detect(self.call.index)
        )
        return TuningKey(
            kernel=_identity(tuner),
            values=tuple(
                (name, canonical.encode(arguments[name]))
                for name in tuner.keys
                if name in arguments
            ),
            dtypes=tuple(
                (name, canonical.dtype_name(value.dtype))
                for name, value in arguments.items()
                if name in tuner.arg_names and hasattr(value, "dtype")
            ),
            options=tuple(
                (name, canonical.encode(value))
                for name, value in sorted(arguments.items())
                if name not in tuner.arg_names
            ),
            device=found,
            toolchain=toolchain,
        )

    def _device_index(self) -> int:
        jit, _ = base_function(self.tuner.fn)
        if isinstance(jit, InterpretedFunction):
            return -1
        index = call_form.device_index(tuple(self._named.values()), self._passed)
        return index if index >= 0 else int(device.active_driver().get_current_device())


def resolve(
    tuner: Autotuner, memory_key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Config:
    """Return the config to launch a call with: stored, or tuned now, or the fallback.

    Raises:
        NoWorkingConfig: every config failed.
        NoDevice: there is nothing to run the kernel on.
    """
    settings = Settings.current()
    if settings.mode is Mode.OFF or kwargs.get("warmup"):
        return tuner.configs[0]
    miss = Miss(tuner, args, kwargs)
    if tuner.isolation == "inline" or not _isolatable(miss.call):
        return _tune_inline(tuner, args, kwargs)
    request = miss.request()
    if len(request.configs) == 1:
        return request.configs[0]
    stored = _stored(request, settings)
    if stored is not None:
        return stored
    return _tune(tuner, request, settings, memory_key)


def _stored(request: TuningRequest, settings: Settings) -> Config | None:
    """The stored choice, if it was made from the list that the decorator declares now."""
    choice = open_lookup(settings).find(request.key.digest)
    if choice is None or choice.declared != request.declared:
        return None
    return next((c for c in request.configs if config_digest(c) == choice.config_digest), None)


def _tune(tuner: Autotuner, request: TuningRequest, settings: Settings, key: Any) -> Config:
    from safetune.tuning.tuner import tune

    observe = _print_config if knobs.autotuning.print else _silent
    try:
        result = tune(
            request,
            open_lookup(settings).store,
            observe,
            functools.partial(_warn_of_grid, tuner),
        )
    except (KernelNotTransferable, WorkerUnavailable) as error:
        warnings.warn(
            f"{request.key.kernel.name} is not tuned for {request.key} and runs with its first "
            f"config: {error}",
            stacklevel=2,
        )
        return request.configs[0]
    report(tuner, result, key)
    return result.choice


def _tune_inline(tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Config:
    """Do as triton.autotune does: in this process, on the caller's tensors, kept in memory only."""
    view = copy.copy(tuner)
    view.nargs = named = dict(zip(tuner.arg_names, args, strict=False))
    configs = view.prune_configs(kwargs)
    if len(configs) == 1:
        return configs[0]
    timings = {config: view._bench(*args, config=config, **kwargs) for config in configs}
    best = min(timings, key=lambda config: timings[config])
    view.pre_hook({**named, **kwargs, **best.all_kwargs()}, reset_only=True)
    tuner.configs_timings = timings
    return best


def _isolatable(call: Call) -> bool:
    """Whether candidates for this call can run in a child; warns once per process where not."""
    if not hasattr(os, "memfd_create"):
        return _warn_once(f"there is no isolation on {sys.platform} yet")
    if call.interpreted:
        return True
    backend = device.active_driver().get_current_target().backend
    return backend == "cuda" or _warn_once(f"there is no isolation for the {backend} back end yet")


@functools.cache
def _warn_once(reason: str) -> bool:
    warnings.warn(f"safetune: {reason}; kernels are tuned as triton.autotune does", stacklevel=2)
    return False


def report(tuner: Autotuner, result: TuningResult, key: Any) -> None:
    """Tell the world what Triton's tuner would: attributes, listener, TRITON_PRINT_AUTOTUNING."""
    timings = {
        config: [float("inf")] * 3
        if outcome.timing is None
        else [outcome.timing.median_ms, outcome.timing.p20_ms, outcome.timing.p80_ms]
        for config, outcome in result.outcomes
    }
    tuner.configs_timings = timings
    tuner.bench_time = result.seconds
    listener = getattr(knobs.autotuning, "listener", None)
    if listener is not None:
        listener(
            fn=base_function(tuner.fn)[0],
            key=key,
            best_config=result.choice,
            configs_timings=timings,
            duration=result.seconds if result.measured else None,
            cache_hit=not result.measured,
        )
    if knobs.autotuning.print and result.measured:
        sys.stdout.write(
            f"Triton autotuning for function {tuner.base_fn.__name__},\nwith key as {key},\n"
            f"finished after {result.seconds:.2f}s,\nbest config selected: {result.choice};\n"
        )


def _print_config(progress: Progress) -> None:
    if progress.outcome is None and progress.stage == "screen":
        sys.stdout.write(f"Autotuning kernel {progress.kernel} with config {progress.config}\n")
    elif progress.outcome is not None and not progress.outcome.ok:
        sys.stdout.write(
            f"Autotuning failed with {progress.outcome.label}: {progress.outcome.message}\n"
        )


def _silent(progress: Progress) -> None:
    pass


def _warn_of_grid(tuner: Autotuner, names: set[str]) -> None:
    warnings.warn(
        f"{tuner.base_fn.__name__}: the launch grid reads {', '.join(sorted(names))}, which was "
        "dropped from the key because nothing seemed to read it; one choice now serves every value. "
        f"Add it to keep={sorted(names)} to tune for each",
        stacklevel=2,
    )


@functools.lru_cache(maxsize=256)
def _detect(index: int) -> tuple[device.Device, device.Toolchain]:
    return device.detect(index)


def _identity(tuner: Autotuner) -> KernelIdentity:
    identity = tuner.__dict__.get("_identity")
    if identity is None:
        identity = tuner._identity = kernel_identity(tuner.fn)
    return identity


def _declared(tuner: Autotuner) -> str:
    return canonical.digest(sorted(config_digest(config) for config in tuner.configs))

