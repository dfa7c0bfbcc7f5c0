"""The tuner that `@safetune` makes: a launch is one dictionary lookup, a miss goes to `miss`.

Safe from several threads: the tuner keeps nothing of a call, and a key that several threads miss is
tuned once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import triton.runtime.autotuner as triton_autotuner
from triton.runtime.autotuner import Config

from safetune.collection import no_collection
from safetune.compilers import torch_compile
from safetune.config import check_configs, check_functions, check_names, check_seconds
from safetune.errors import InvalidSetting
from safetune.frontend import observers
from safetune.inputs.call import Hooks
from safetune.isolation import backend
from safetune.keys.buckets import KeyNames, buckets_of
from safetune.keys.kernel_digest import is_interpreted, kernel_identity
from safetune.keys.key_names import Key, KeyReport, classify
from safetune.keys.tuning_key import readable_key
from safetune.launch import call_shape, fast_path, scratch_memory
from safetune.launch.key_state import KeyStates
from safetune.miss import relaunch
from safetune.settings import (
    CaptureMissPolicy,
    PhantomPolicy,
    Settings,
    parse_choice,
    parse_optional,
)
from safetune.tuning.requests import Limits
from safetune.workload import DeclaredWorkload

if TYPE_CHECKING:
    from safetune.compilers.resolve import Resolved
    from safetune.keys.tuning_key import KernelIdentity
    from safetune.workload import WorkloadFunction

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

ISOLATIONS = ("worker", "config", "inline")

#: Attributes that report the last launch or tuning. No launch depends on them.
_REPORTED = frozenset({"best_config", "configs_timings", "bench_time", "tuning_phases"})


class Autotuner(triton_autotuner.Autotuner):  # type: ignore[misc]
    """`triton.runtime.autotuner.Autotuner`, with candidates run in subprocesses.

    Everything that torch, JAX and others read of Triton's tuner is here under the same name. Made
    by `safetune`; see there for the parameters.
    """

    needs_scratch = False  # until a launch needs it

    def __init__(
        self,
        fn: Any,
        arg_names: list[str],
        configs: Iterable[Config] | None,
        key: Key,
        reset_to_zero: Iterable[str] | None = None,
        restore_value: Iterable[str] | None = None,
        *,
        phantom: str | None = None,
        keep: Iterable[str] = (),
        isolation: str = "worker",
        compile_timeout_s: float = Limits.compile_timeout_s,
        run_timeout_s: float = Limits.run_timeout_s,
        scratch: Iterable[str] = (),
        reference: Callable[..., Any] | None = None,
        inputs: Callable[..., Any] | None = None,
        capture_miss: str | None = None,
        **options: Any,
    ) -> None:
        name = kernel_name(fn)
        configs = check_configs(name, configs, arg_names)
        around = {"reset_to_zero": _once(reset_to_zero), "restore_value": _once(restore_value)}
        scratch = _once(scratch)
        check_names(name, arg_names, {**around, "scratch": scratch})
        check_functions(name, {"reference": reference, "inputs": inputs})
        self.limits = Limits(compile_timeout_s, run_timeout_s)
        check_seconds(name, self.limits, "compile_timeout_s", "run_timeout_s")
        self.isolate(isolation)
        self.capture_miss = parse_optional(CaptureMissPolicy, "capture_miss", capture_miss)
        policy = parse_choice(PhantomPolicy, "phantom", phantom or Settings.current().phantom.value)
        callbacks = {n: options.get(n) for n in ("prune_configs_by", "pre_hook", "post_hook")}
        self.key_report: KeyReport = classify(
            fn, key, configs=configs, policy=policy, keep=keep, **callbacks
        )
        self.states = KeyStates(self)
        super().__init__(fn, arg_names, configs, list(self.key_report.kept), **around, **options)
        self.keys: list[str] = KeyNames(self.keys, buckets_of(name, key))
        self.cache_results = False  # every choice is kept, in safetune's own store
        self.workloads: list[DeclaredWorkload] = []
        #: Where the time of the last tuning went, in seconds (see `LaunchBench.phases`).
        self.tuning_phases: dict[str, float] = {}
        hooks = self._hooks(options.get("do_bench") if is_interpreted(fn) else self._do_bench)
        self.hooks = replace(hooks, scratch=tuple(scratch), reference=reference, inputs=inputs)
        self.shapes = call_shape.CallShapes(self)
        self._topics: set[str] = set()
        self._take_pruning()

    def __copy__(self) -> Autotuner:
        """Return a tuner that shares the choices, and whose launches all go by Triton's path."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, _launches={})
        return made

    @property
    def cache(self) -> dict[Any, Config]:
        """The choice of each key, never a fallback. What is written here is launched."""
        return self.states.choices

    @cache.setter
    def cache(self, choices: Mapping[Any, Config]) -> None:
        self.states.replace_choices(choices)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return what launches on this grid: `kernel[grid](...)`."""
        if observers.active or "run" in self.__dict__ or self.__class__.run is not _run:
            return super().__getitem__(grid)  # type: ignore[no-any-return]
        return partial(self._call, grid)

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel with the chosen config, tuning first if the key has no choice.

        Raises:
            NoWorkingConfig: every config failed.
            InvalidConfig: the call passes what the configs set.
        """
        if observers.active:
            return observers.observed(self._launch, self, args, kwargs)
        return self._launch(*args, **kwargs)

    def _launch(self, /, *args: Any, **kwargs: Any) -> Any:
        if "grid" not in kwargs or kwargs.get("warmup", True):
            return self._by_triton(args, kwargs).result
        grid = kwargs.pop("grid")
        del kwargs["warmup"]
        return self._call(grid, *args, **kwargs)

    def _call(self, grid: Any, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kind = (*map(type, args), *kwargs, *map(type, kwargs.values()))
        else:
            kind = tuple(map(type, args))
        known = self._launches.get(kind)
        if known is not None:
            kernel = known(grid, args, kwargs)
            if kernel is not None:
                return kernel
        return self._first(kind, grid, args, kwargs)

    def _first(self, kind: fast_path.Kind, grid: Any, args: Args, kwargs: Kwargs) -> Any:
        """Launch as Triton does, and remember the launch for calls that are the same to Triton."""
        launches = self._launches  # replaced once anything that a launch depends on is changed
        complete = dict(**kwargs, grid=grid, warmup=False)  # TypeError if kwargs has one of them
        launch = launches.get(kind)
        if kind not in launches or (launch and launch.fast_path.outdated()):
            made = None if is_interpreted(self.fn) else fast_path.make(self, args, kwargs)
            launch = launches[kind] = made and made.launch
        # Before the launch: a grid function may change the current device, or a tensor.
        key = launch and launch.fast_path.key(args, kwargs)
        launched = self._by_triton(args, complete)
        if key:
            launch.fast_path.remember(key, launched)
        return launched.result

    def _by_triton(self, args: Args, kwargs: Kwargs) -> relaunch.Launched:
        """Launch with the key's config, tuning first if the key has no choice."""
        shape = self.shapes.of(args, kwargs)
        with _no_collection_under_capture():  # Triton may compile, even for a known choice
            if len(self.configs) == 1:
                return relaunch.launch(self, None, shape, self.configs[0], args, kwargs)
            key = shape.key(args, kwargs)
            config = self.states.hits.get(key) or self._miss(key, shape, args, kwargs)
            return relaunch.launch(self, key, shape, config, args, kwargs)

    def launch_with(
        self, config: Config, values: Kwargs, grid: Any, args: Args, kwargs: Kwargs
    ) -> relaunch.Launched:
        """Launch with a config by Triton's path, with what the heuristics have said already."""
        complete = {**kwargs, "grid": grid, "warmup": False}
        shape = self.shapes.of(args, complete)
        with _no_collection_under_capture():
            key = None if len(self.configs) == 1 else shape.key(args, complete)
            return relaunch.launch(self, key, shape, config, args, complete, values)

    def __setattr__(self, name: str, value: Any) -> None:
        """Forget every launch when anything is changed that one may depend on."""
        object.__setattr__(self, name, value)
        if name not in _REPORTED:
            self.forget_launches()
        if name in ("fn", "hooks", "keys"):
            self.__dict__.pop("identity", None)
        elif name == "configs":
            self._show_one_config()

    def forget_launches(self) -> None:
        """Have every call go by Triton's path again, which reads everything anew."""
        # Another dictionary, as a thread may be about to add what it knows from before.
        self.__dict__["_launches"] = {}

    def resolve(
        self, /, *args: Any, grid: Any = None, device: int | None = None, **kwargs: Any
    ) -> Resolved:
        """Return the plain kernel and what to launch it with: see `compilers.resolve`."""
        from safetune.compilers import resolve as compilers_resolve

        return compilers_resolve.resolve(self, args, kwargs, grid, device)

    def isolate(self, isolation: str) -> None:
        """Set `isolation` as the decorator would; raises `InvalidSetting`."""
        if isolation not in ISOLATIONS:
            raise InvalidSetting(
                f"isolation={isolation!r} is not known; use one of: {', '.join(ISOLATIONS)}"
            )
        self.isolation = isolation
        self.limits = replace(self.limits, fresh_process=isolation == "config")

    @functools.cached_property
    def identity(self) -> KernelIdentity:
        """The kernel's identity, with what runs around it; looked up once."""
        buckets = getattr(self.keys, "buckets", {})
        functions = {name: bucket.function for name, bucket in buckets.items()}
        around = self.hooks.identity_parts()
        return kernel_identity(self.fn, (*around, functions) if functions else around)

    def explain_key(self) -> KeyReport:
        """Return what each name in `key` was classed as and why; prints readably."""
        return self.key_report

    def workload(
        self, function: WorkloadFunction | None = None, *, dtypes: Iterable[str] = ()
    ) -> Any:
        """Declare what `safetune tune` runs for this kernel; a decorator.

        The function is called with a torch device and a torch dtype and yields `Workload`s.

        Args:
            dtypes: names of the torch dtypes to tune for, e.g. `("float16", "float32")`. Default:
                float32 in the interpreter, bfloat16 on a GPU.
        """

        def register(declared: WorkloadFunction) -> WorkloadFunction:
            self.workloads.append(DeclaredWorkload(declared, tuple(dtypes)))
            return declared

        return register if function is None else register(function)

    def prune_configs(self, kwargs: dict[str, Any]) -> list[Config]:
        """Return the configs that `prune_configs_by` leaves, for the arguments in `self.nargs`."""
        stock = triton_autotuner.Autotuner.prune_configs
        if self.early_config_prune is not self.shown:  # replaced, as jax-triton does
            return stock(self, kwargs)  # type: ignore[no-any-return]
        early, ranked = copy.copy(self), copy.copy(self)
        early.early_config_prune, ranked.perf_model = self.pruning
        early.perf_model, ranked.early_config_prune = None, None
        ranked.configs = stock(early, kwargs)
        # Triton 3.6 takes a fraction of all the configs, and rounds it down to zero.
        if isinstance(ranked.configs_top_k, float) and ranked.configs_top_k <= 1.0:
            ranked.configs_top_k = max(1, int(len(ranked.configs) * ranked.configs_top_k))
        return stock(ranked, kwargs)  # type: ignore[no-any-return]

    def _take_pruning(self) -> None:
        """Keep the user's functions for `prune_configs`: torch traces those that it finds here."""
        self.pruning: tuple[Any, Any] = (self.early_config_prune, self.perf_model)
        self.shown: Any = None
        self.early_config_prune: Any = None
        self.perf_model: Any = None
        self._show_one_config()

    def _show_one_config(self) -> None:
        """Have torch find a prune function that leaves one config, if there are several."""
        if vars(self).get("shown", self) is not None or self.early_config_prune is not None:
            return
        if len(self.configs) > 1 or any(map(torch_compile.lost_options, self.configs)):
            self.shown = torch_compile.one_config(self, self.pruning[0])
            self.early_config_prune = self.shown

    def pruned_for(self, named: Mapping[str, Any], kwargs: Mapping[str, Any]) -> list[Config]:
        """Return the configs that are left for one call; this tuner stays as it is."""
        return call_shape.pruned_configs(self, named, kwargs)

    def warmup(self, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Compile every config left by pruning in this process, as `triton.autotune` does."""
        shape = self.shapes.of(args, kwargs)
        named = call_shape.named_arguments(self.arg_names, args)
        pinned_args, pinned_kwargs = shape.pinned(args, kwargs)
        return [
            self.fn.warmup(*pinned_args, **pinned_kwargs, **config.all_kwargs())
            for config in self.pruned_for(named, kwargs)
        ]

    def tune_inline(self, args: Args, kwargs: Kwargs) -> Config:
        """Return the fastest config, measured as `triton.autotune` does; nothing is stored."""
        from safetune.miss import reporting  # not before the first miss

        view = copy.copy(self)
        view.nargs = named = call_shape.named_arguments(self.arg_names, args)
        configs = view.prune_configs(kwargs)
        if len(configs) == 1:
            return configs[0]
        if self.hooks.do_bench is None and is_interpreted(self.fn):
            view.do_bench = _wall_clock
        start = time.perf_counter()
        reporting.count_tuning()
        with scratch_memory.scratch_allocator():
            timings = {config: view._bench(*args, config=config, **kwargs) for config in configs}
        best = min(timings, key=lambda config: timings[config])
        view.pre_hook({**named, **kwargs, **best.all_kwargs()}, reset_only=True)
        key = readable_key(self.keys, self.arg_names, {**named, **kwargs})
        reporting.report(self, key, best, timings, time.perf_counter() - start)
        return best

    def first_time(self, topic: str) -> bool:
        """Whether this is the first call with this topic; for warnings that are given once."""
        known = topic in self._topics
        self._topics.add(topic)
        return not known

    def _hooks(self, do_bench: Callable[..., Any] | None) -> Hooks:
        """What the user put around a launch; Triton's own stand-ins for it stay here."""
        return Hooks(
            pre_hook=self.pre_hook if self.user_defined_pre_hook else None,
            post_hook=self.post_hook if self.user_defined_post_hook else None,
            reset_to_zero=tuple(self.reset_to_zero),
            restore_value=tuple(self.restore_value),
            do_bench=do_bench,
        )

    def _miss(
        self, key: Any, shape: call_shape.CallShape, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Config:
        from safetune.miss import resolve as miss_resolve  # imports the store and the tuning

        for observer in observers.active:
            observer.miss(self)
        call_shape.refuse_vmap(kernel_name(self.fn), args)
        state = self.states.of(key)
        if (running := backend.capture_under_way()) and not kwargs.get("warmup"):
            from safetune.miss import under_capture

            return under_capture.resolve(self, state, args, kwargs, running)
        with state.lock:  # of threads that miss the same key, the others find what the first found
            known = self.states.hits.get(key)
            return known or miss_resolve.resolve(self, state, args, kwargs)


_run = Autotuner.run


def _once(names: Iterable[str] | None) -> Any:
    """Return names that can be read more than once; None and a single string as they are."""
    return names if names is None or isinstance(names, str) else tuple(names)


def _no_collection_under_capture() -> contextlib.AbstractContextManager[None]:
    if not backend.capture_under_way():
        return contextlib.nullcontext()
    return no_collection()


def _wall_clock(launch: Callable[[], object], quantiles: object) -> list[float]:
    """Take the place of Triton's `do_bench` in its interpreter, where that finds no device."""
    from safetune.isolation.protocol import Budget
    from safetune.launch.timing import Timer, measure

    timing = measure(launch, lambda: None, lambda: None, Timer(), Budget())
    return [timing.median_ms, timing.p20_ms, timing.p80_ms]


def kernel_name(fn: Any) -> str:
    """Return the name of the function below all decorators."""
    while hasattr(fn, "fn"):
        fn = fn.fn
    return str(getattr(fn, "__name__", fn))
