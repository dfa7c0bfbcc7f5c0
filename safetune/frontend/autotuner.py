"""The tuner that `@safetune` makes: a launch is one dictionary lookup, a miss goes to `miss`.

Safe from several threads: the tuner keeps nothing of a call, and a key that several threads miss is
tuned once.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import triton.runtime.autotuner as triton_autotuner
from triton import knobs
from triton.runtime.autotuner import Config

from safetune import forks, triton_internals
from safetune.both import backend
from safetune.compilers import torch_compile
from safetune.config import check_configs, check_functions, check_names, check_seconds, tupled
from safetune.errors import InvalidSetting, NoWorkingConfig, SafetuneWarning
from safetune.frontend import observers
from safetune.frontend.options import Options
from safetune.inputs.call import Hooks, of_the_user
from safetune.inputs.workload import DeclaredWorkload
from safetune.keys.identity import base_function, is_interpreted, kernel_identity
from safetune.keys.key_names import KeyReport
from safetune.keys.lazy_key import Basis, LazyKey, hold, names_of
from safetune.keys.tuning_key import KeyNames
from safetune.keys.written_key import Key, WrittenKey, written_key
from safetune.launch import call_shape, fast_path
from safetune.launch.key_state import KeyStates, without_frames
from safetune.messages import warn_once
from safetune.miss import failures
from safetune.settings import (
    Isolation,
    MeasurePolicy,
    MissPolicy,
    Mode,
    PhantomPolicy,
    SearchBudget,
    Settings,
    checked_policies,
    parse_choice,
)
from safetune.tuning.requests import Limits

if TYPE_CHECKING:
    from safetune.compilers.resolve import Resolved
    from safetune.inputs.workload import WorkloadFunction
    from safetune.keys.identity import KernelIdentity
    from safetune.launch.key_state import KeyState

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

triton_internals.warn_if_newer()  # here, where the first tuner of a process is made

#: Attributes that report the last launch or tuning. No launch depends on them.
_REPORTED = frozenset({"best_config", "configs_timings", "bench_time", "tuning_phases"})

#: The functions among the parameters of `triton.autotune`, where any false value means none.
_FUNCTIONS = ("pre_hook", "post_hook", "do_bench", "early_config_prune", "perf_model")

#: Attributes that hold only in this process, or only for this object.
_NOT_SENT = frozenset({"_identity", "_keys", "_launches", "shapes"})

#: Attributes that decide which names in the key are read.
_CLASSIFIED = frozenset(
    {"fn", "configs", "pre_hook", "post_hook", "early_config_prune", "perf_model"}
)


class Autotuner(triton_autotuner.Autotuner):  # type: ignore[misc]
    """`triton.runtime.autotuner.Autotuner`, with candidates run in subprocesses.

    It has every attribute of Triton's tuner that torch, JAX and others read. The decorator
    `safetune` creates it and documents the parameters.
    """

    on_miss: MissPolicy | None
    measure: MeasurePolicy | None
    same_bits: bool | None
    needs_scratch = False  # until a launch needs it
    #: Triton's tuner has the arguments here for the time of a launch, and None after it.
    nargs: dict[str, Any] | None = None

    def __init__(self, fn: Any, options: Options) -> None:
        name, settings = base_function(fn)[1].__name__, Settings.current()
        configs = check_configs(name, options.configs, fn.arg_names)
        names = {
            n: tupled(getattr(options, n)) for n in ("reset_to_zero", "restore_value", "scratch")
        }
        check_names(name, fn.arg_names, names)
        own: Kwargs = {"reference": options.reference, "inputs": options.inputs}
        check_functions(name, {**own, "proposer": options.proposer})
        self.budget = SearchBudget.parse(name, options.budget)
        self.proposer = options.proposer
        seconds = {n: getattr(options, n) for n in ("compile_timeout_s", "run_timeout_s")}
        check_seconds(name, **seconds)
        self.isolation = parse_choice(Isolation, "isolation", options.isolation)
        self.limits = Limits(**seconds, fresh_process=self.isolation is Isolation.CONFIG)
        policies = {n: getattr(options, n) for n in ("on_miss", "measure", "same_bits")}
        self.__dict__.update({**policies, **checked_policies(**policies)})
        policy = parse_choice(PhantomPolicy, "phantom", options.phantom or settings.phantom.value)
        written = written_key(fn, options.key, options.keep, options.prune_configs_by)
        functions = {**vars(options), **(options.prune_configs_by or {})}
        check_functions(name, {n: functions.get(n) or None for n in _FUNCTIONS})
        self.states = KeyStates(self)
        scratch = names.pop("scratch")
        super().__init__(fn, fn.arg_names, configs, (), **{**options.of_triton(), **names})
        self.cache_results = False  # every choice is kept, in safetune's own store
        self.workloads: list[DeclaredWorkload] = []
        self.tuning_phases: dict[str, float] = {}
        do_bench = options.do_bench if is_interpreted(fn) else self._do_bench
        self._around = Hooks(do_bench=do_bench, scratch=tuple(scratch), **own)
        self._topics = set[str]()
        self._take_pruning()
        self.lazy_key = LazyKey(written, policy)
        if policy is PhantomPolicy.ERROR:
            self.lazy_key.report(self)
        self._honour_policies()

    def __repr__(self) -> str:
        """Return the kernel's name, its key as written, its configs, and the known keys."""
        return f"<safetune kernel {self.base_fn.__name__}, {self.lazy_key.written}, {self.states}>"

    def show(self, everything: bool = False) -> None:
        """Print the stored choices of this kernel, as `safetune show` does; in a notebook, as a
        table.

        Args:
            everything: show every config of every key, not one row per key.
        """
        from safetune.show import kernel  # imports rich

        kernel.show(self, everything)

    def _repr_html_(self) -> str:
        """Return the table of `show`, for a notebook."""
        from safetune.show import kernel

        return kernel.as_html(self)

    def __copy__(self) -> Autotuner:
        """Return a tuner that shares the choices, and whose launches all go by Triton's path."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, _launches={}, lazy_key=copy.copy(self.lazy_key))
        made.__dict__.pop("shapes", None)
        made.__dict__.pop("_keys", None)
        if not call_shape.is_pruning():  # torch sees no copy that only prunes
            made._show_itself()
        return made

    def __getstate__(self) -> Kwargs:
        """Leave out the launches: they refer to every class of argument that this process has
        seen, and another process may read another text.
        """
        state = dict(self.__dict__)  # first, as another thread may launch
        return {name: value for name, value in state.items() if name not in _NOT_SENT}

    def __setstate__(self, state: Kwargs) -> None:
        self.__dict__.update(state, _launches={})  # what they refer to may be half made
        self._show_itself()

    @forks.cached_property
    def shapes(self) -> call_shape.CallShapes:
        """The shapes of its calls, which refer to this tuner. A copy makes its own at its first
        launch: every prune makes a copy that keeps the call's arguments.
        """
        return call_shape.CallShapes(self)

    @property
    def key_report(self) -> KeyReport:
        """The class of each name in `key`, and the reason; decided at first use."""
        return self.lazy_key.report(self)

    @property
    def keys(self) -> list[str]:
        """The names in `key=`, including dropped ones. In-place changes count."""
        if "lazy_key" not in self.__dict__:  # Triton's constructor needs no classes
            return []
        known = self.__dict__.get("_keys")
        if not (isinstance(known, WrittenNames) and known.tuner is self):  # a copy has a list
            names = self.lazy_key.written.names
            known = self.__dict__["_keys"] = WrittenNames(names, self)
        return known

    @keys.setter
    def keys(self, names: Key) -> None:
        if "lazy_key" in self.__dict__ and names is not self.__dict__.get("_keys"):  # not after +=
            self._write_key(written_key(self.fn, names))
            self.__dict__.pop("_keys", None)

    def change_names(self, names: Iterable[str]) -> None:
        """Replace the names in `key=`; names that stay keep their `keep` and buckets."""
        names, before = list(names), self.lazy_key.written
        functions = {name: bucket.function for name, bucket in before.buckets.items()}
        keep = [name for name in before.keep if name in names]
        key = {name: functions.get(name) for name in names} if functions else names
        self._write_key(written_key(self.fn, key, keep))

    def _write_key(self, written: WrittenKey) -> None:
        if written.buckets != self.lazy_key.written.buckets:
            self.states.clear(written=False)
        self.lazy_key.write(written)
        self.forget_launches()

    @property
    def key_names(self) -> KeyNames:
        """The names whose values have separate choices, with their buckets."""
        return KeyNames(self.key_report.kept, self.lazy_key.written.buckets)

    @property
    def basis(self) -> Basis:
        """The inputs from which the names in the key were classified."""
        return self.lazy_key.basis(self)

    def key_changed(self, choices: bool) -> None:
        """Forget every launch, and also the choices if the kernel or the key has changed. Entries
        that the program has written into `cache` stay.
        """
        self.__dict__.pop("_identity", None)
        if choices:
            self.states.clear(written=False)
        self.forget_launches()

    @property
    def cache(self) -> dict[Any, Config]:
        """The choice of each key, never a fallback, under Triton's key. Launches use configs that
        the program writes here.
        """
        return self.states.choices

    @cache.setter
    def cache(self, choices: Mapping[Any, Config]) -> None:
        if self.states.tuner is not self:  # a shallow copy's
            self.states = KeyStates(self)
        self.states.replace_choices(choices)

    def __call__(self, *_: Any, **__: Any) -> None:
        """Raise: a launch needs a grid."""
        raise TypeError(f"write {self.base_fn.__name__}[grid](...): a launch needs a grid")

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return the launcher on this grid: `kernel[grid](...)`."""
        if observers.active or "run" in self.__dict__ or self.__class__.run is not _run:
            return super().__getitem__(grid)  # type: ignore[no-any-return]
        return partial(self._call, grid)

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel with the chosen config, tuning first if the key has no choice.

        Raises `NoWorkingConfig` if every config failed, and `InvalidConfig` for a call that passes
        a name that configs set.
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
        """Launch as Triton does, and remember the launch for calls that Triton treats alike."""
        if self._honour_policies():
            return self._launch(*args, **kwargs, grid=grid, warmup=False)
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
            state = self.states.of(key)
            failed: NoWorkingConfig | None = None
            try:
                config = config or state.hit or self._miss(key, args, kwargs)
            except NoWorkingConfig as error:
                if error.first is None:
                    raise
                config = error.first
                failed = without_frames(error)
            if failed is not None:  # outside the handler, so that it is no error's context
                with failures.first_for_all(self, failed):
                    launched = shape.launch(config, args, kwargs, values)
                return replace(launched, config=None)
            other = None
            if state.written is None:
                other = partial(self._next_best, state, args, kwargs)
            return shape.launch(config, args, kwargs, values, state, other)

    def launch_with(
        self, config: Config, values: Kwargs | None, grid: Any, args: Args, kwargs: Kwargs
    ) -> call_shape.Launched:
        """Launch, or with `warmup` only compile, by Triton's path, with these heuristics'
        values.
        """
        return self._by_triton(args, {"warmup": False, **kwargs, "grid": grid}, config, values)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; forget every launch if launches may depend on it."""
        object.__setattr__(self, name, value)
        if name not in _REPORTED:
            self.forget_launches()
        if name in _CLASSIFIED and "lazy_key" in self.__dict__:
            self.lazy_key.forget()
        if name == "configs":
            self.show_one_config()

    def forget_launches(self) -> None:
        """Send every call through Triton's path again, which rereads everything."""
        # Another dictionary, because a thread may be about to add an old launch.
        self.__dict__["_launches"] = {}

    def pruned_for(self, named: Mapping[str, Any], kwargs: Mapping[str, Any]) -> list[Config]:
        """Return the configs that pruning leaves for one call, without changing this tuner."""
        return call_shape.pruned_configs(self, named, kwargs)

    def resolve(
        self, /, *args: Any, grid: Any = None, device: int | None = None, **kwargs: Any
    ) -> Resolved:
        """Return the plain kernel and its launch options: see `compilers.resolve`."""
        from safetune.compilers import resolve as compilers_resolve

        return compilers_resolve.resolve(self, args, kwargs, grid, device)

    def prune_configs(self, kwargs: dict[str, Any]) -> list[Config]:
        """Return the configs that `prune_configs_by` leaves, for the arguments in `self.nargs`."""
        stock = triton_autotuner.Autotuner.prune_configs
        early, ranked = copy.copy(self), copy.copy(self)
        prune, ranked.perf_model = self.prune_functions
        early.early_config_prune = prune and partial(_listed, prune)
        if "prune_configs" in triton_internals.replaced_methods():
            early.perf_model = ranked.perf_model
            return list(stock(early, kwargs))
        early.perf_model, ranked.early_config_prune = None, None
        ranked.configs = list(stock(early, kwargs))
        # Triton 3.6 takes a fraction of all the configs, and rounds it down to zero.
        if isinstance(ranked.configs_top_k, float) and ranked.configs_top_k <= 1.0:
            ranked.configs_top_k = max(1, int(len(ranked.configs) * ranked.configs_top_k))
        if not (left := stock(ranked, kwargs)):
            raise InvalidSetting(
                f"top_k={ranked.configs_top_k!r} in prune_configs_by of {self.base_fn.__name__} "
                f"leaves none of {len(ranked.configs)} configs; give the number to keep, e.g. 4, "
                "or a share of them, e.g. 0.5"
            )
        return left  # type: ignore[no-any-return]

    @property
    def prune_functions(self) -> tuple[Any, Any]:
        """The user's prune function, or a replacement set later, for example by jax-triton."""
        early, model = self.pruning
        replaced = self.early_config_prune is not self.shown
        return self.early_config_prune if replaced else early, self.perf_model or model

    def _take_pruning(self) -> None:
        """Keep the user's functions for `prune_configs`, because torch traces this attribute."""
        self.pruning: tuple[Any, Any] = (self.early_config_prune, self.perf_model)
        self.shown: Any = None
        self.early_config_prune: Any = None
        self.perf_model: Any = None
        self.show_one_config()

    def show_one_config(self) -> None:
        """Give torch a prune function that leaves one config, if there are several."""
        if vars(self).get("shown", self) is not None or self.early_config_prune is not None:
            return
        if len(self.configs) > 1 or any(map(torch_compile.lost_options, self.configs)):
            self.shown = torch_compile.one_config(self, self.pruning[0])
            self.early_config_prune = self.shown

    def _show_itself(self) -> None:
        """Give torch this tuner, not the one that it is a copy of."""
        if (shown := self.shown) is not None:
            own = torch_compile.one_config(self, self.pruning[0])
            names = [n for n in ("shown", "early_config_prune") if vars(self)[n] is shown]
            self.__dict__.update(dict.fromkeys(names, own))

    @property
    def identity(self) -> KernelIdentity:
        """The identity of the kernel and the functions around it; recomputed after changes."""
        buckets = {name: bucket.function for name, bucket in self.key_names.buckets.items()}
        around = self.hooks.identity_parts()
        around = (*around, buckets) if buckets else around
        known: tuple[Any, Any, KernelIdentity] | None = self.__dict__.get("_identity")
        if known is None or known[0] != around or not hold(known[1]):
            names = names_of(self.fn)  # first, to notice a change meanwhile
            known = around, names, kernel_identity(self.fn, around)
            self.__dict__["_identity"] = known
        return known[2]

    def explain_key(self) -> KeyReport:
        """Return the class of each name in `key` with the reason; prints readably."""
        return self.key_report

    def workload(
        self, function: WorkloadFunction | None = None, *, dtypes: Iterable[str] = ()
    ) -> Any:
        """Declare the launches that `safetune tune` tunes for this kernel; a decorator.

        The function yields `Workload`s for a torch device and a torch dtype, each of `dtypes` by
        name, e.g. `("float16", "float32")`; by default float32 in the interpreter, bfloat16 on a
        GPU.
        """

        def register(declared: WorkloadFunction) -> WorkloadFunction:
            self.workloads.append(DeclaredWorkload(declared, tuple(dtypes)))
            return declared

        return register if function is None else register(function)

    def report(
        self,
        key: tuple[Any, ...],
        choice: Config,
        timings: dict[Config, list[float]],
        phases: Mapping[str, float] | None = None,
    ) -> None:
        """Report a choice as Triton's tuner does: attributes, listener, TRITON_PRINT_AUTOTUNING.

        Args:
            key: Triton's.
            phases: the seconds of the tuning; None if the choice was known.
        """
        seconds = sum(phases.values()) if phases is not None else None
        self.configs_timings, self.bench_time = timings, seconds or 0.0
        if (listener := getattr(knobs.autotuning, "listener", None)) is not None:
            listener(
                fn=base_function(self.fn)[0],
                key=key,
                best_config=choice,
                configs_timings=timings,
                duration=seconds,
                cache_hit=seconds is None,
            )
        if knobs.autotuning.print and phases is not None:
            spent = ", ".join(f"{name} {part:.2f}s" for name, part in phases.items())
            sys.stdout.write(
                f"Triton autotuning for function {self.base_fn.__name__},\nwith key as {key},\n"
                f"finished after {seconds:.2f}s,\nof which {spent},\n"
                f"best config selected: {choice};\n"
            )

    def first_time(self, topic: str) -> bool:
        """Whether this is the first call with this topic, for warnings that appear once."""
        known = topic in self._topics
        self._topics.add(topic)
        return not known

    @property
    def hooks(self) -> Hooks:
        """The user's functions around a launch, without Triton's placeholders."""
        return replace(
            self._around,
            pre_hook=of_the_user(self.pre_hook),
            post_hook=of_the_user(self.post_hook),
            reset_to_zero=tuple(self.reset_to_zero),
            restore_value=tuple(self.restore_value),
        )

    def _honour_policies(self) -> bool:
        """Whether the class is now `UnderPolicy`, as a framework has replaced methods of Triton's
        tuner class to choose configs itself. Not asked at a known launch.
        """
        replaced = triton_internals.replaced_methods()
        if useless := {"check_disk_cache", "do_bench"} & replaced.keys():
            warn_once(
                f"a library has replaced {min(useless)} of triton.runtime.autotuner.Autotuner, "
                "which safetune never calls, because it times configs in other processes",
                SafetuneWarning,
            )
        if type(self) is not Autotuner or not _policies(replaced):
            return False
        self.__class__ = UnderPolicy
        return True

    def _next_best(self, state: KeyState, /, *call_and_failure: Any) -> Any:
        from safetune.miss import resolve as miss_resolve

        return miss_resolve.next_best(self, state, *call_and_failure)

    def _miss(self, key: Any, args: Args, kwargs: Kwargs) -> Config:
        named = call_shape.named_arguments(self.arg_names, args, kwargs)
        state = self.states.missed(key, named)
        if state.written is not None:
            return state.written
        from safetune.miss import resolve as miss_resolve  # imports the store and the tuning

        for observer in observers.active:
            observer.miss(self)
        call_shape.refuse_vmap(self.base_fn.__name__, args)
        if (running := backend.capture_under_way()) and not kwargs.get("warmup"):
            config = miss_resolve.resolve(self, state, args, kwargs, running)
        else:
            with state.lock:  # of threads that miss a key, the others get the first one's config
                config = state.hit or miss_resolve.resolve(self, state, args, kwargs)
        if Settings.current().mode is Mode.RECORD:
            from safetune.frontend import call_counts

            call_counts.begin(state)
        return config


class WrittenNames(list[str]):
    """`kernel.keys`, the names in `key=`; in-place changes count, as on Triton's tuner."""

    def __init__(self, names: Iterable[str], tuner: Any) -> None:
        super().__init__(names)
        self.tuner = tuner

    def __reduce__(self) -> Any:
        return list, (list(self),)  # a copy belongs to no tuner


def _telling(name: str) -> Callable[..., Any]:
    def change(self: WrittenNames, /, *args: Any, **kwargs: Any) -> Any:
        names = list(self)
        result = getattr(names, name)(*args, **kwargs)
        self.tuner.change_names(names)  # first, as it rejects unknown parameters
        list.__setitem__(self, slice(None), names)
        return self if result is names else result

    return change


for _name in (
    *("append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"),
    *("__delitem__", "__iadd__", "__imul__", "__setitem__"),
):
    setattr(WrittenNames, _name, _telling(_name))


def _listed(prune: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return the configs that a prune function leaves, as a list even from a generator."""
    left = prune(*args, **kwargs)
    return list(left) if isinstance(left, Iterator) else left


_run = Autotuner.run


def _policies(replaced: Mapping[str, Any]) -> bool:
    """Whether a library has replaced a method that chooses a config, on Triton's class or ours."""
    return bool({"run", "_bench"} & replaced.keys()) or "_bench" in vars(Autotuner)


class UnderPolicy(Autotuner):
    """A tuner whose configs a framework chooses by replacing methods of Triton's class.

    Megatron-LM does so to launch one config on all ranks. Every launch calls the framework's
    policy. If the policy leaves the choice to Triton's own `run`, which asks `_bench` for the time
    of each config, safetune answers without timing.
    """

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """Launch through the current `run` of Triton's tuner class."""
        return super().run(*args, **kwargs)

    def _launch(self, /, *args: Any, **kwargs: Any) -> Any:
        if _policies(triton_internals.replaced_methods()):
            return triton_autotuner.Autotuner.run(self, *args, **kwargs)
        self.__class__ = Autotuner  # type: ignore[assignment]
        return self._launch(*args, **kwargs)

    def _bench(self, /, *args: Any, config: Config, **meta: Any) -> list[float]:
        """Return 0 for safetune's choice, infinity for the others, or the policy's answer."""
        view: Any = copy.copy(self)
        view.nargs = call_shape.named_arguments(self.arg_names, args)
        view.do_bench = lambda launch, quantiles=None: (
            [0.0 if config == self._chosen(args, meta) else float("inf")] * 3
        )
        bench = Autotuner._bench
        return bench(view, *args, config=config, **meta)  # type: ignore[no-any-return]

    def _chosen(self, args: Args, kwargs: Kwargs) -> Config:
        if len(self.configs) == 1:
            return self.configs[0]
        key = self.shapes.of(args, kwargs).key(args, kwargs)
        return self.states.of(key).hit or self._miss(key, args, kwargs)
