"""The tuner that `@safetune` makes: a launch is one dictionary lookup, a miss goes to `miss`.

Safe from several threads: the tuner keeps nothing of a call, and a key that several threads miss is
tuned once.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import triton.runtime.autotuner as triton_autotuner
from triton.runtime.autotuner import Config

from safetune import forks, triton_internals
from safetune.compilers import torch_compile
from safetune.config import check_configs, check_functions, check_names, check_seconds, tupled
from safetune.frontend import observers
from safetune.inputs.call import Hooks, of_the_user
from safetune.inputs.workload import DeclaredWorkload
from safetune.isolation import backend
from safetune.keys.kernel_digest import base_function, is_interpreted, kernel_identity
from safetune.keys.key_names import KeyReport
from safetune.keys.lazy_key import Basis, LazyKey
from safetune.keys.tuning_key import KeyNames
from safetune.keys.written_key import Key, written_key
from safetune.launch import call_shape, fast_path
from safetune.launch.key_state import KeyStates
from safetune.miss import relaunch
from safetune.settings import (
    CaptureMissPolicy,
    Isolation,
    Mode,
    PhantomPolicy,
    Settings,
    parse_choice,
)
from safetune.tuning.requests import Limits, SearchBudget

if TYPE_CHECKING:
    from safetune.compilers.resolve import Resolved
    from safetune.inputs.workload import WorkloadFunction
    from safetune.keys.tuning_key import KernelIdentity
    from safetune.tuning.search import Proposer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

triton_internals.warn_if_newer()  # here, where the first tuner of a process is made

#: Attributes that report the last launch or tuning. No launch depends on them.
_REPORTED = frozenset({"best_config", "configs_timings", "bench_time", "tuning_phases"})

#: Attributes that decide which names in the key are read.
_CLASSIFIED = frozenset(
    {"fn", "configs", "pre_hook", "post_hook", "early_config_prune", "perf_model"}
)


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
        budget: int | str | None = None,
        proposer: Proposer | None = None,
        **options: Any,
    ) -> None:
        name = base_function(fn)[1].__name__
        configs = check_configs(name, configs, arg_names)
        around = {"reset_to_zero": tupled(reset_to_zero), "restore_value": tupled(restore_value)}
        check_names(name, arg_names, {**around, "scratch": (scratch := tupled(scratch))})
        check_functions(name, {"reference": reference, "inputs": inputs, "proposer": proposer})
        self.budget, self.proposer = SearchBudget.parse(name, budget), proposer
        self.limits = Limits(compile_timeout_s, run_timeout_s)
        check_seconds(name, self.limits, "compile_timeout_s", "run_timeout_s")
        self.isolate(isolation)
        self.capture_miss: CaptureMissPolicy | None = None
        if capture_miss is not None:
            self.capture_miss = parse_choice(CaptureMissPolicy, "capture_miss", capture_miss)
        settings = Settings.current()
        policy = parse_choice(PhantomPolicy, "phantom", phantom or settings.phantom.value)
        written = written_key(fn, key, keep, options.get("prune_configs_by"), settings)
        self.states = KeyStates(self)
        super().__init__(fn, arg_names, configs, (), **around, **options)
        self.cache_results = False  # every choice is kept, in safetune's own store
        self.workloads: list[DeclaredWorkload] = []
        self.tuning_phases: dict[str, float] = {}
        do_bench = options.get("do_bench") if is_interpreted(fn) else self._do_bench
        own: Kwargs = {"scratch": tuple(scratch), "reference": reference, "inputs": inputs}
        self._around = Hooks(do_bench=do_bench, **own)
        self._topics = set[str]()
        self._take_pruning()
        self.lazy_key = LazyKey(written, policy)
        if self.lazy_key.may_be_an_error:
            self.lazy_key.report(self)

    def __repr__(self) -> str:
        """Return the kernel's name, its key as written, its configs, and what is known of keys."""
        return f"<safetune kernel {self.base_fn.__name__}, {self.lazy_key.written}, {self.states}>"

    def __copy__(self) -> Autotuner:
        """Return a tuner that shares the choices, and whose launches all go by Triton's path."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, _launches={}, lazy_key=copy.copy(self.lazy_key))
        made.__dict__.pop("shapes", None)
        return made

    @forks.cached_property
    def shapes(self) -> call_shape.CallShapes:
        """The shapes of its calls, which refer to it: no copy has them before it is launched, as
        one is made for each prune and keeps the arguments of the call.
        """
        return call_shape.CallShapes(self)

    @property
    def key_report(self) -> KeyReport:
        """The class of each name in `key`, and the reason; decided when it is first needed."""
        return self.lazy_key.report(self)

    @property
    def keys(self) -> KeyNames:
        """The names that make up the key. All of another list that is set here are looked at."""
        if "lazy_key" not in self.__dict__:  # Triton's constructor needs no classes
            return KeyNames((), {})
        return KeyNames(self.key_report.kept, self.lazy_key.written.buckets)

    @keys.setter
    def keys(self, names: Key) -> None:
        if "lazy_key" in self.__dict__:
            self.lazy_key.write(written_key(self.fn, names))

    @property
    def basis(self) -> Basis:
        """What the key's classes rest on."""
        return self.lazy_key.basis(self)

    def key_changed(self, choices: bool) -> None:
        """Forget every launch, and the choices if they are of another kernel or key."""
        self.__dict__.pop("_identity", None)
        if choices:
            self.states.clear()
        self.forget_launches()

    @property
    def cache(self) -> dict[Any, Config]:
        """The choice of each key, never a fallback. What is written here is launched."""
        return self.states.choices

    @cache.setter
    def cache(self, choices: Mapping[Any, Config]) -> None:
        self.states.replace_choices(choices)

    def __call__(self, *_: Any, **__: Any) -> None:
        """Raise, as a launch needs a grid."""
        raise TypeError(f"write {self.base_fn.__name__}[grid](...): a launch needs a grid")

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return what launches on this grid: `kernel[grid](...)`."""
        if observers.active or "run" in self.__dict__ or self.__class__.run is not _run:
            return super().__getitem__(grid)  # type: ignore[no-any-return]
        return partial(self._call, grid)

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel with the chosen config, tuning first if the key has no choice.

        Raises `NoWorkingConfig` if every config failed, and `InvalidConfig` for a call that passes
        what the configs set.
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
        self.lazy_key.report(self)  # first, as it forgets all launches if the kernel has changed
        launches = self._launches  # replaced once anything that a launch depends on is changed
        complete = dict(**kwargs, grid=grid, warmup=False)  # TypeError if kwargs has one of them
        launch = launches.get(kind)
        unknown = kind not in launches or (launch and launch.fast_path.outdated())
        if unknown and not (is_interpreted(self.fn) or triton_internals.first_driver.begin()):
            launch = launches[kind] = fast_path.make(self, args, kwargs)
        # Before the launch: a grid function may change the current device, or a tensor.
        key = launch and launch.fast_path.key(args, kwargs)
        launched = self._by_triton(args, complete)
        if key:
            launch.fast_path.remember(key, launched)
        return launched.result

    def _by_triton(
        self, args: Args, kwargs: Kwargs, config: Config | None = None, values: Kwargs | None = None
    ) -> call_shape.Launched:
        """Launch with a config, by default the key's, tuning first if the key has no choice."""
        shape = self.shapes.of(args, kwargs)
        # Triton may compile, even for a known choice.
        with backend.no_collection() if backend.capture_under_way() else contextlib.nullcontext():
            key = None if len(self.configs) == 1 else shape.key(args, kwargs)
            if key is None:
                return shape.launch(config or self.configs[0], args, kwargs, values)
            config = config or self.states.hits.get(key) or self._miss(key, args, kwargs)
            state = self.states.of(key)
            other = partial(relaunch.next_best, self, state, args, kwargs)
            return shape.launch(config, args, kwargs, values, state, other)

    def launch_with(
        self, config: Config, values: Kwargs | None, grid: Any, args: Args, kwargs: Kwargs
    ) -> call_shape.Launched:
        """Launch by Triton's path, or compile alone (`warmup`), with what heuristics have said."""
        return self._by_triton(args, {"warmup": False, **kwargs, "grid": grid}, config, values)

    def __setattr__(self, name: str, value: Any) -> None:
        """Forget every launch when anything is changed that one may depend on."""
        object.__setattr__(self, name, value)
        if name not in _REPORTED:
            self.forget_launches()
        if name in _CLASSIFIED and "lazy_key" in self.__dict__:
            self.lazy_key.forget()
        if name == "configs":
            self.show_one_config()

    def forget_launches(self) -> None:
        """Have every call go by Triton's path again, which reads everything anew."""
        # Another dictionary, as a thread may be about to add what it knows from before.
        self.__dict__["_launches"] = {}

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

    def resolve(
        self, /, *args: Any, grid: Any = None, device: int | None = None, **kwargs: Any
    ) -> Resolved:
        """Return the plain kernel and what to launch it with: see `compilers.resolve`."""
        from safetune.compilers import resolve as compilers_resolve

        return compilers_resolve.resolve(self, args, kwargs, grid, device)

    def prune_configs(self, kwargs: dict[str, Any]) -> list[Config]:
        """Return the configs that `prune_configs_by` leaves, for the arguments in `self.nargs`."""
        stock = triton_autotuner.Autotuner.prune_configs
        early, ranked = copy.copy(self), copy.copy(self)
        early.early_config_prune, ranked.perf_model = self.prune_functions
        early.perf_model, ranked.early_config_prune = None, None
        ranked.configs = stock(early, kwargs)
        # Triton 3.6 takes a fraction of all the configs, and rounds it down to zero.
        if isinstance(ranked.configs_top_k, float) and ranked.configs_top_k <= 1.0:
            ranked.configs_top_k = max(1, int(len(ranked.configs) * ranked.configs_top_k))
        return stock(ranked, kwargs)  # type: ignore[no-any-return]

    @property
    def prune_functions(self) -> tuple[Any, Any]:
        """The user's own, or those that were set instead later, as jax-triton does."""
        early, model = self.pruning
        replaced = self.early_config_prune is not self.shown
        return self.early_config_prune if replaced else early, self.perf_model or model

    def _take_pruning(self) -> None:
        """Keep the user's functions for `prune_configs`: torch traces those that it finds here."""
        self.pruning: tuple[Any, Any] = (self.early_config_prune, self.perf_model)
        self.shown: Any = None
        self.early_config_prune: Any = None
        self.perf_model: Any = None
        self.show_one_config()

    def show_one_config(self) -> None:
        """Have torch find a prune function that leaves one config, if there are several."""
        if vars(self).get("shown", self) is not None or self.early_config_prune is not None:
            return
        if len(self.configs) > 1 or any(map(torch_compile.lost_options, self.configs)):
            self.shown = torch_compile.one_config(self, self.pruning[0])
            self.early_config_prune = self.shown

    def isolate(self, isolation: str) -> None:
        """Set `isolation` as the decorator would; raises `InvalidSetting`."""
        self.isolation = parse_choice(Isolation, "isolation", isolation)
        self.limits = replace(self.limits, fresh_process=self.isolation is Isolation.CONFIG)

    @property
    def identity(self) -> KernelIdentity:
        """The kernel's identity, with what runs around it; computed again once that changes."""
        buckets = {name: bucket.function for name, bucket in self.keys.buckets.items()}
        around = self.hooks.identity_parts()
        around = (*around, buckets) if buckets else around
        known: tuple[Any, KernelIdentity] | None = self.__dict__.get("_identity")
        if known is None or known[0] != around:
            known = around, kernel_identity(self.fn, around)
            self.__dict__["_identity"] = known
        return known[1]

    def explain_key(self) -> KeyReport:
        """Return what each name in `key` was classed as and why; prints readably."""
        return self.key_report

    def workload(
        self, function: WorkloadFunction | None = None, *, dtypes: Iterable[str] = ()
    ) -> Any:
        """Declare what `safetune tune` runs for this kernel; a decorator.

        The function yields `Workload`s for a torch device and a torch dtype, each of `dtypes` by
        name, e.g. `("float16", "float32")`; by default float32 in the interpreter, bfloat16 on a
        GPU.
        """

        def register(declared: WorkloadFunction) -> WorkloadFunction:
            self.workloads.append(DeclaredWorkload(declared, tuple(dtypes)))
            return declared

        return register if function is None else register(function)

    def first_time(self, topic: str) -> bool:
        """Whether this is the first call with this topic; for warnings that are given once."""
        known = topic in self._topics
        self._topics.add(topic)
        return not known

    @property
    def hooks(self) -> Hooks:
        """What the user has put around a launch; Triton's own stand-ins for it stay here."""
        return replace(
            self._around,
            pre_hook=of_the_user(self.pre_hook),
            post_hook=of_the_user(self.post_hook),
            reset_to_zero=tuple(self.reset_to_zero),
            restore_value=tuple(self.restore_value),
        )

    def _miss(self, key: Any, args: Args, kwargs: Kwargs) -> Config:
        from safetune.miss import resolve as miss_resolve  # imports the store and the tuning

        for observer in observers.active:
            observer.miss(self)
        call_shape.refuse_vmap(self.base_fn.__name__, args)
        state = self.states.of(key)
        if Settings.current().mode is Mode.RECORD:
            from safetune.frontend import call_counts

            call_counts.begin(state)
        if (running := backend.capture_under_way()) and not kwargs.get("warmup"):
            return miss_resolve.resolve(self, state, args, kwargs, running)
        with state.lock:  # of threads that miss the same key, the others find what the first found
            known = self.states.hits.get(key)
            return known or miss_resolve.resolve(self, state, args, kwargs)


_run = Autotuner.run
