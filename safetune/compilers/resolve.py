"""A kernel with its chosen config, for a program that launches it without safetune, such as JAX.

Arguments may be torch tensors, numpy or JAX arrays, or any object with a shape and a dtype. All of
them give the same key, so JAX uses choices made through torch, and vice versa.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from triton.runtime.autotuner import Autotuner as TritonAutotuner
from triton.runtime.autotuner import Config, Heuristics
from triton.runtime.jit import MockTensor

from safetune import forks
from safetune.compilers import arrays
from safetune.errors import (
    InvalidSetting,
    MissingChoice,
    NoWorkingConfig,
    TracingError,
    TuningWarning,
)
from safetune.frozen import dataclass
from safetune.inputs.call import Call, checked_grid, grid_of, meta_arguments
from safetune.keys.identity import base_function, inner_heuristics
from safetune.keys.left_kernels import is_left
from safetune.keys.tuning_key import active_driver
from safetune.launch.call_shape import heuristic_values, named_arguments
from safetune.messages import warn_once
from safetune.miss import candidates, failures, record, reporting
from safetune.miss.resolve import Miss, stored, why_not_isolated
from safetune.settings import Mode, Settings
from safetune.store.lookup import Lookup, open_lookup
from safetune.tuning.requests import TuningRequest


@dataclass(frozen=True)
class Resolved:
    """A plain kernel, and everything that its launch needs.

    Attributes:
        fn: the `JITFunction` below all decorators.
        metaparams: constants by name: the config's, the heuristics' for it, and 1 for each dropped
            argument that would compile again.
        grid: up to three integers, for this config; empty if the call gives no grid.
        config: the object that the decorator declares.
        provenance: `written` into `kernel.cache`, `stored`, `tuned` (just now), `only` (there is
            one config), `off`, or `fallback`, in the modes that never tune and for a call with
            nothing to do.
    """

    fn: Any
    metaparams: Mapping[str, Any]
    num_warps: int
    num_stages: int
    num_ctas: int
    maxnreg: int | None
    grid: tuple[int, ...]
    config: Config
    kernel: str
    key: str
    key_digest: str
    device: str
    provenance: str
    _signature: Mapping[str, Any] = field(repr=False, compare=False)

    @forks.cached_property
    def scratch_bytes(self) -> int:
        """Global scratch memory per CTA, in bytes; compiles the kernel to find out.

        A launch needs this for each program of its grid, times `num_ctas`.

        Raises:
            NoDevice: Triton finds no GPU to compile for.
        """
        active_driver()
        compiled = self.fn.warmup(**self._signature, grid=self.grid or (1,), **self.options())
        return int(getattr(compiled.metadata, "global_scratch_size", 0) or 0)

    def options(self) -> dict[str, Any]:
        """Return the launch options by name, as arguments for a launch of `fn`."""
        return {n: v for n, v in self.config.all_kwargs().items() if n not in self.config.kwargs}

    def lost(self, carried: Iterable[str]) -> dict[str, Any]:
        """Return the settings that a launch with only these options would lose."""
        lost = {name: value for name, value in self.options().items() if name not in carried}
        return {**lost, "pre_hook": hook} if (hook := self.config.pre_hook) else lost

    def as_plain_kernel(self, num_warps: int = 4, num_stages: int = 3, num_ctas: int = 1) -> Any:
        """Return `fn`, for a caller that launches every plain kernel with these options.

        Raises:
            TracingError: the config has other options or a hook, which that caller would lose.
        """
        carried = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": num_ctas}
        if lost := self.lost([n for n, value in self.options().items() if carried.get(n) == value]):
            raise TracingError(
                f"the config chosen for {self.kernel} has {lost}, but the caller launches a plain "
                f"kernel with {carried}: use as_single_config_autotuner(), which keeps warps and "
                "stages"
            )
        return self.fn

    def as_single_config_autotuner(self) -> TritonAutotuner:
        """Return Triton's own tuner with only this config, so that it has nothing to choose.

        For TransformerEngine's `triton_call_lowering`, which reads warps and stages only from a
        tuner's configs. The config includes the metaparams, so it needs no heuristics.

        Raises:
            TracingError: the config has an option besides warps, stages and CTAs, or a hook.
        """
        if lost := self.lost(("num_warps", "num_stages", "num_ctas")):
            raise TracingError(
                f"the config chosen for {self.kernel} has {lost}, which TransformerEngine ignores: "
                "use configs without them, or launch the kernel through "
                "safetune.integrations.jax.triton_call"
            )
        config = Config(
            dict(self.metaparams),
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            num_ctas=self.num_ctas,
        )
        return TritonAutotuner(self.fn, self.fn.arg_names, [config], [], None, None)


def resolve(
    kernel: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    grid: Any = None,
    device: int | None = None,
) -> Resolved:
    """Return what a launch of `kernel` with these arguments would use, without launching it.

    Raises:
        MissingChoice: the key has no choice, and the call lacks data or a grid to tune with.
        NoWorkingConfig: the call was tuned now, and every config failed.
        InvalidSetting: `kernel` is not a kernel under @safetune, `grid` is not a grid, `device` is
            not an index, or an argument is passed twice.
    """
    values = {name: arrays.plain(value) for name, value in kwargs.items()}
    args = tuple(map(arrays.plain, args))
    if isinstance(kernel, Heuristics):
        named = named_arguments(kernel.arg_names, args, values)
        kernel, set_above = heuristic_values(kernel, named)
        values |= set_above
    if not hasattr(kernel, "key_report"):
        raise InvalidSetting(f"{kernel!r} cannot be resolved: put @safetune(...) above its kernel")
    if twice := values.keys() & {*kernel.arg_names[: len(args)]}:
        raise InvalidSetting(f"{kernel.base_fn.__name__} got {min(twice)} by position and by name")
    if grid is not None:
        grid = checked_grid(grid)
    if not (device is None or (type(device) is int and device >= 0)):
        raise InvalidSetting(f"device={device!r} is not the index of a GPU: give e.g. device=0")
    abstract = Miss(
        kernel, _each(arrays.meta, args), {**_each(arrays.meta, values), "grid": grid}, device
    )
    request = abstract.request()
    config, provenance = _chosen(abstract, request, args, values)
    return _resolved(abstract.call, request, config, provenance)


def _chosen(
    abstract: Miss, request: TuningRequest, args: Any, kwargs: dict[str, Any]
) -> tuple[Config, str]:
    settings = Settings.current()
    written = abstract.tuner.states.written(abstract.call.named())
    if written is not None and len(abstract.tuner.configs) > 1:
        return written, "written"
    if settings.mode is Mode.OFF or is_left(abstract.tuner.fn, settings):
        return request.configs[0], "off"
    if len(request.configs) == 1:
        return request.configs[0], "only"
    lookup = open_lookup(settings)
    plan = stored(abstract.tuner, request, lookup)
    if (choice := plan.config) is not None:
        if plan.fails(choice):
            choice = next(candidates.best_first(request, lookup.store, measured_first=True), choice)
        return choice, "stored"
    if not request.has_work:
        return request.configs[0], "fallback"
    if settings.mode is Mode.RECORD:
        record.remember(request, lookup.store)
    reporting.check_policy(abstract.tuner, request, settings)
    if not settings.tunes(abstract.tuner.on_miss):
        return candidates.best_known(request, lookup), "fallback"
    values = [*args, *kwargs.values()]
    given = [value for value in values if arrays.is_array(value)]
    factory = abstract.tuner.hooks.inputs is not None
    if not (factory or any(map(arrays.has_data, given))) or any(map(arrays.is_traced, given)):
        without_grid = "" if abstract.call.grid is not None else "it was resolved without a grid"
        record.remember(request, lookup.store, without_grid)
        raise MissingChoice(
            f"{request.key.kernel.name} has no choice for {request.key} on "
            f"{request.key.device.name}, and cannot be tuned on shapes without data. Before "
            f"tracing, call it once with real arrays, or resolve it with them"
            f"{_or_offline(abstract)}"
        )
    if abstract.call.grid is None:
        raise MissingChoice(
            f"{request.key.kernel.name} has no choice for {request.key}, and cannot be tuned "
            "without a grid: resolve it with grid=, as it is launched"
        )
    return _tuned(abstract, args, kwargs, lookup)


def _or_offline(abstract: Miss) -> str:
    """Return the shell commands that tune the recorded call; empty if its file is not known."""
    offline = reporting.offline_commands(abstract.tuner, recorded=True)
    first = "resolve it with its grid, and then " if abstract.call.grid is None else ""
    return f"; or {first}run {offline}" if offline else ""


def _tuned(abstract: Miss, args: Any, kwargs: dict[str, Any], lookup: Lookup) -> tuple[Config, str]:
    """Tune on the caller's data; an argument that has only a shape gets new memory."""
    from safetune.tuning.single_flight import WaitBudget
    from safetune.tuning.tuner import tune

    index = abstract.call.index
    if index >= 0:
        active_driver()  # which starts the driver: the data goes to the device
    on_device = functools.partial(arrays.tensor, index=index)
    grid = {"grid": abstract.call.grid}
    concrete = Miss(
        abstract.tuner, _each(on_device, args), {**_each(on_device, kwargs), **grid}, index
    )
    request = concrete.request()
    if reason := why_not_isolated(concrete.call):
        raise MissingChoice(
            f"{request.key.kernel.name} cannot be tuned for {request.key}: {reason}"
        )
    with reporting.observing(request, lookup.store, concrete.phases) as tally:
        budget = WaitBudget(tell=tally.wait_for)
        try:
            result = tune(request, lookup.store, tally, wait_budget=budget, phases=concrete.phases)
        except NoWorkingConfig as error:
            first = None if error.transient else failures.first_config(request, error)
            if first is None:
                raise
            warn_once(f"using the first config anyway: {error}", TuningWarning)
            return first, "fallback"
    reporting.tell_result(request, result)
    return result.choice, "tuned"


def _resolved(call: Call, request: TuningRequest, config: Config, provenance: str) -> Resolved:
    fn, _ = base_function(call.kernel)
    named = call.named()
    set_here = {*config.kwargs, *inner_heuristics(call.kernel)} - named.keys() | call.pins.keys()
    metaparams = {
        name: value
        for name, value in {**meta_arguments(call, config), **call.pins}.items()
        if name in set_here and name in fn.arg_names
    }
    return Resolved(
        fn=fn,
        metaparams=metaparams,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_ctas=config.num_ctas,
        maxnreg=config.maxnreg,
        grid=() if call.grid is None else grid_of(call, config)[0],
        config=config,
        kernel=request.key.kernel.name,
        key=str(request.key),
        key_digest=request.key.digest,
        device=request.key.device.name,
        provenance=provenance,
        _signature={
            name: MockTensor(value.dtype) if arrays.is_array(value) else value
            for name, value in {**named, **call.pins, **metaparams}.items()
        },
    )


def _each(function: Any, values: Any) -> Any:
    if isinstance(values, dict):
        return {name: function(value) for name, value in values.items()}
    return tuple(map(function, values))
