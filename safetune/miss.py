"""What happens when a tuner has no config for a call: look it up, else tune, else fall back."""

from __future__ import annotations

import copy
import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.runtime.autotuner import Config
from triton.runtime.interpreter import InterpretedFunction

from safetune import announce, call_form, canonical, device
from safetune.config import check_conflicts, config_digest, config_text
from safetune.errors import KernelNotTransferable, WorkerUnavailable
from safetune.kernel_source import base_function, kernel_identity
from safetune.key import KernelIdentity, TuningKey
from safetune.outcome import TRANSIENT, Outcome
from safetune.settings import Mode, Settings
from safetune.store.lookup import Lookup, open_lookup
from safetune.store.sqlite import Store
from safetune.tuning.jobs import Call, TuningRequest

if TYPE_CHECKING:
    from safetune.autotuner import Autotuner

_LAUNCH_KEYWORDS = ("grid", "warmup")


class Miss:
    """One call that a tuner has no config for."""

    def __init__(self, tuner: Autotuner, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.tuner = tuner
        self._named = dict(zip(tuner.arg_names, args, strict=False))
        self._passed = {n: v for n, v in kwargs.items() if n not in _LAUNCH_KEYWORDS}
        self._kwargs = kwargs
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
        configs = tuple(tuner.pruned_for(self._named, self._kwargs))
        for config in configs:
            check_conflicts(tuner.base_fn.__name__, config, {**self._named, **self._passed})
        return TuningRequest(
            key=self.key(),
            call=self.call,
            configs=configs,
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


def resolve(tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Config:
    """Return the config to launch a call with: stored, or tuned now, or the fallback.

    Raises:
        NoWorkingConfig: every config failed.
        NoDevice: there is nothing to run the kernel on.
    """
    settings = Settings.current()
    if settings.mode is Mode.OFF or kwargs.get("warmup"):
        return tuner.configs[0]
    if tuner.isolation == "inline":
        return _tune_inline(tuner, args, kwargs)
    miss = Miss(tuner, args, kwargs)
    if not _isolatable(miss.call):
        return _tune_inline(tuner, args, kwargs)
    request = miss.request()
    if len(request.configs) == 1:
        return request.configs[0]
    return _stored(miss, request, settings) or _tune(miss, request, settings)


def _stored(miss: Miss, request: TuningRequest, settings: Settings) -> Config | None:
    """The stored choice, if it was made from the list that the decorator declares now."""
    lookup = open_lookup(settings)
    choice = lookup.find(request.key.digest)
    configs = {config_digest(config): config for config in request.configs}
    if choice is None or choice.declared != request.declared or choice.config_digest not in configs:
        return None
    config = configs[choice.config_digest]
    known = known_outcomes(request, lookup.store)
    announce.report(miss.tuner, miss.call.named(), config, announce.timings_of(known))
    return config


def _tune(miss: Miss, request: TuningRequest, settings: Settings) -> Config:
    from safetune.tuning.tuner import tune

    observe = announce.print_config if knobs.autotuning.print else announce.silent
    try:
        result = tune(
            request,
            open_lookup(settings).store,
            observe,
            functools.partial(announce.warn_of_grid, miss.tuner),
        )
    except (KernelNotTransferable, WorkerUnavailable) as error:
        config = _fallback(request, open_lookup(settings))
        place = "its first config" if config is request.configs[0] else "the best left"
        warnings.warn(
            f"{request.key.kernel.name} is not tuned for {request.key} and runs with {place} "
            f"({config_text(config)}): {error}",
            stacklevel=2,
        )
        return config
    seconds = result.seconds if result.measured else None
    announce.report(
        miss.tuner, miss.call.named(), result.choice, announce.timings_of(result.outcomes), seconds
    )
    return result.choice


def _fallback(request: TuningRequest, lookup: Lookup) -> Config:
    """The best config known to work, else the first not known to fail, else the first."""
    outcomes = known_outcomes(request, lookup.store)
    times = {c: o.timing.median_ms for c, o in outcomes if o.ok and o.timing is not None}
    if times:
        return min(times, key=lambda config: times[config])
    failed = [config for config, outcome in outcomes if not outcome.ok]
    return next((c for c in request.configs if c not in failed), request.configs[0])


def known_outcomes(request: TuningRequest, store: Store) -> list[tuple[Config, Outcome]]:
    """Return what the store knows of a request's configs, the latest of each."""
    configs = {config_digest(config): config for config in request.configs}
    key = request.key.digest
    found = {
        trial.config_digest: trial.outcome
        for generation in range(1, store.generation(key) + 1)
        for trial in store.trials(key, generation)
        if trial.config_digest in configs and trial.outcome.verdict not in TRANSIENT
    }
    return [(configs[digest], outcome) for digest, outcome in found.items()]


def _tune_inline(tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Config:
    """Do as triton.autotune does: in this process, on the caller's tensors, kept in memory only."""
    view = copy.copy(tuner)
    view.nargs = named = dict(zip(tuner.arg_names, args, strict=False))
    configs = view.prune_configs(kwargs)
    if len(configs) == 1:
        return configs[0]
    if tuner.hooks.do_bench is None and isinstance(base_function(tuner.fn)[0], InterpretedFunction):
        view.do_bench = _wall_clock
    start = time.perf_counter()
    timings = {config: view._bench(*args, config=config, **kwargs) for config in configs}
    best = min(timings, key=lambda config: timings[config])
    view.pre_hook({**named, **kwargs, **best.all_kwargs()}, reset_only=True)
    announce.report(tuner, {**named, **kwargs}, best, timings, time.perf_counter() - start)
    return best


def _wall_clock(launch: Callable[[], object], quantiles: object) -> list[float]:
    """What stands in for Triton's `do_bench` in its interpreter, where that finds no device."""
    from safetune.tuning.measure import Budget, Timer, measure

    timing = measure(launch, lambda: None, lambda: None, Timer(), Budget())
    return [timing.median_ms, timing.p20_ms, timing.p80_ms]


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


@functools.lru_cache(maxsize=256)
def _detect(index: int) -> tuple[device.Device, device.Toolchain]:
    return device.detect(index)


def _identity(tuner: Autotuner) -> KernelIdentity:
    identity = tuner.__dict__.get("_identity")
    if identity is None:
        hooks = tuner.hooks
        around = (
            hooks.pre_hook,
            hooks.post_hook,
            hooks.do_bench,
            hooks.reset_to_zero,
            hooks.restore_value,
            hooks.scratch,
            hooks.reference,
            hooks.inputs,
        )
        identity = tuner._identity = kernel_identity(tuner.fn, around)
    return identity


def _declared(tuner: Autotuner) -> str:
    return canonical.digest(sorted(config_digest(config) for config in tuner.configs))
