"""The decorator and the tuner it makes: a launch is one dictionary lookup, a miss is `tuning`.

Safe from several threads: nothing about a call is kept on the tuner, and a key that several
threads miss is tuned once.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import triton.runtime.autotuner as triton_autotuner
from triton.runtime.autotuner import Config, Heuristics
from triton.runtime.interpreter import InterpretedFunction

from safetune import call_form, miss
from safetune.config import check_configs
from safetune.errors import InvalidSetting
from safetune.kernel_source import base_function
from safetune.phantom import KeyReport, classify
from safetune.settings import PhantomPolicy, Settings, parse_choice
from safetune.tuning.jobs import Hooks, Limits
from safetune.workload import DeclaredWorkload, WorkloadFunction

ISOLATIONS = ("worker", "config", "inline")


class Autotuner(triton_autotuner.Autotuner):  # type: ignore[misc]
    """`triton.runtime.autotuner.Autotuner`, with candidates run in subprocesses.

    Everything that torch, JAX and others read of Triton's tuner is here under the same name. Made
    by `safetune`; see there for the parameters.
    """

    def __init__(
        self,
        fn: Any,
        arg_names: list[str],
        configs: Iterable[Config] | None,
        key: Iterable[str] | str,
        reset_to_zero: Iterable[str] | None = None,
        restore_value: Iterable[str] | None = None,
        *,
        phantom: str | None = None,
        keep: Iterable[str] = (),
        isolation: str = "worker",
        compile_timeout_s: float = Limits.compile_timeout_s,
        run_timeout_s: float = Limits.run_timeout_s,
        **options: Any,
    ) -> None:
        name = _kernel_name(fn)
        configs = check_configs(name, configs, arg_names)
        for parameter, names in (
            ("reset_to_zero", reset_to_zero),
            ("restore_value", restore_value),
        ):
            _check_names(name, parameter, names, arg_names)
        self.limits = Limits(compile_timeout_s, run_timeout_s)
        _check_limits(name, self.limits)
        self.isolate(isolation)
        policy = phantom or Settings.current().phantom.value
        self.key_report: KeyReport = classify(
            fn,
            key,
            configs=configs,
            policy=parse_choice(PhantomPolicy, "phantom", policy),
            keep=keep,
            prune_configs_by=options.get("prune_configs_by"),
            pre_hook=options.get("pre_hook"),
            post_hook=options.get("post_hook"),
        )
        options["cache_results"] = False  # every choice is kept, in safetune's own store
        super().__init__(
            fn,
            arg_names,
            configs,
            list(self.key_report.kept),
            reset_to_zero,
            restore_value,
            **options,
        )
        self.cache_results = False
        self.workloads: list[DeclaredWorkload] = []
        self.hooks = Hooks(
            pre_hook=self.pre_hook if self.user_defined_pre_hook else None,
            post_hook=self.post_hook if self.user_defined_post_hook else None,
            reset_to_zero=tuple(self.reset_to_zero),
            restore_value=tuple(self.restore_value),
            do_bench=options.get("do_bench") if _interpreted(fn) else self._do_bench,
        )
        self._forms = call_form.Forms(self)
        self._options = {id(config): config.all_kwargs() for config in self.configs}
        self._key_locks: dict[Any, threading.Lock] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel with the chosen config, tuning first if there is none.

        Raises:
            NoWorkingConfig: every config failed.
            InvalidConfig: the call passes what the configs set.
        """
        form = self._forms.of(args, kwargs)
        if len(self.configs) == 1:
            config = self.configs[0]
        else:
            key = form.key(args, kwargs)
            config = self.cache.get(key)
            if config is None:
                config = self._miss(key, args, kwargs)
        self.best_config = config
        if config.pre_hook is not None:
            named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
            config.pre_hook({**named, **config.all_kwargs()})
        if form.pins:
            args, kwargs = form.pinned(args, kwargs)
        return self.fn.run(*args, **kwargs, **self._launch_options(config))

    def isolate(self, isolation: str) -> None:
        """Set `isolation` as the decorator would; raises `InvalidSetting`."""
        if isolation not in ISOLATIONS:
            raise InvalidSetting(
                f"isolation={isolation!r} is not known; use one of: {', '.join(ISOLATIONS)}"
            )
        self.isolation = isolation
        self.limits = replace(self.limits, fresh_process=isolation == "config")

    def explain_key(self) -> KeyReport:
        """Return what each name in `key` was classed as and why; prints readably."""
        return self.key_report

    def workload(
        self,
        function: WorkloadFunction | None = None,
        *,
        dtypes: Iterable[str] = (),
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
        if not self.perf_model or not isinstance(self.configs_top_k, float):
            return super().prune_configs(kwargs)
        # Triton 3.6 takes a fraction of all the configs, and rounds it down to nothing.
        early, ranked = copy.copy(self), copy.copy(self)
        early.perf_model, ranked.early_config_prune = None, None
        ranked.configs = early.prune_configs(kwargs)
        if ranked.configs_top_k <= 1.0:
            ranked.configs_top_k = max(1, int(len(ranked.configs) * ranked.configs_top_k))
        return triton_autotuner.Autotuner.prune_configs(ranked, kwargs)

    def pruned_for(self, named: Mapping[str, Any], kwargs: Mapping[str, Any]) -> list[Config]:
        """Prune for one call, without touching this tuner: Triton's code reads `self.nargs`."""
        view = copy.copy(self)
        view.nargs = dict(named)
        return view.prune_configs(dict(kwargs))

    def warmup(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Compile every config left by pruning in this process, as `triton.autotune` does."""
        form = self._forms.of(args, kwargs)
        view = copy.copy(self)
        view.nargs = dict(zip(self.arg_names, args, strict=False))
        pinned_args, pinned_kwargs = form.pinned(args, kwargs)
        return [
            self.fn.warmup(*pinned_args, **pinned_kwargs, **config.all_kwargs())
            for config in view.prune_configs(kwargs)
        ]

    def _miss(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Config:
        with self._key_locks.setdefault(key, threading.Lock()):
            config = self.cache.get(key)
            if config is None:
                config = miss.resolve(self, args, kwargs)
                if not kwargs.get("warmup"):
                    self.cache[key] = config
        self._key_locks.pop(key, None)
        return config

    def _launch_options(self, config: Config) -> dict[str, Any]:
        options = self._options.get(id(config))
        return config.all_kwargs() if options is None else options


def safetune(
    configs: Any = None,
    key: Iterable[str] | str = (),
    prune_configs_by: dict[str, Any] | None = None,
    reset_to_zero: Iterable[str] | None = None,
    restore_value: Iterable[str] | None = None,
    pre_hook: Callable[..., object] | None = None,
    post_hook: Callable[..., object] | None = None,
    warmup: int | None = None,
    rep: int | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,
    *,
    phantom: str | None = None,
    keep: Iterable[str] = (),
    isolation: str = "worker",
    compile_timeout_s: float = Limits.compile_timeout_s,
    run_timeout_s: float = Limits.run_timeout_s,
) -> Any:
    """Decorate a Triton kernel: a drop-in for `triton.autotune`, whose parameters come first.

    Used bare above `@triton.autotune(...)` it takes over that tuner's settings; bare above
    `@triton.jit` the kernel has Triton's default config.

    Args:
        configs: `triton.Config`s to choose from; none means Triton's default one.
        key: names of the arguments whose values make another choice, or `"auto"`: every argument
            that the kernel reads and no config sets.
        cache_results: accepted and ignored: every choice is kept.
        phantom: what to do with a name in `key` that nothing reads: `drop` it (the default, see
            SAFETUNE_PHANTOM), `keep` it, or raise an `error`.
        keep: names in `key` that are never dropped.
        isolation: `worker` (one measuring process until a config spoils it), `config` (a new one
            for every config), or `inline` (stock triton.autotune, in this process, stored nowhere).
        compile_timeout_s, run_timeout_s: seconds for one config.

    Raises:
        InvalidConfig, InvalidSetting: an argument that no launch could use; the message names it.
        PhantomKey: under `phantom="error"`.
    """
    settings = {
        "prune_configs_by": prune_configs_by,
        "pre_hook": pre_hook,
        "post_hook": post_hook,
        "warmup": warmup,
        "rep": rep,
        "use_cuda_graph": use_cuda_graph,
        "do_bench": do_bench,
        "phantom": phantom,
        "keep": keep,
        "isolation": isolation,
        "compile_timeout_s": compile_timeout_s,
        "run_timeout_s": run_timeout_s,
    }

    def decorate(fn: Any) -> Any:
        if hasattr(fn, "fn") and isinstance(_innermost_tuner(fn), triton_autotuner.Autotuner):
            raise InvalidSetting(
                f"{_kernel_name(fn)} has a tuner already: use @safetune without arguments above "
                "@triton.autotune(...), or replace that decorator"
            )
        _check_kernel(fn)
        return Autotuner(fn, fn.arg_names, configs, key, reset_to_zero, restore_value, **settings)

    if hasattr(configs, "fn"):
        return _take_over(configs)
    return decorate


autotune = safetune


def _take_over(kernel: Any) -> Any:
    """Bare `@safetune`: above `@triton.autotune`, above heuristics over that, or above jit."""
    if isinstance(kernel, Heuristics) and _innermost_tuner(kernel) is not None:
        return Heuristics(_take_over(kernel.fn), kernel.arg_names, kernel.values)
    if not isinstance(kernel, triton_autotuner.Autotuner):
        return Autotuner(kernel, kernel.arg_names, None, ())
    if isinstance(kernel, Autotuner):
        return kernel
    deprecated = kernel.use_cuda_graph or kernel.num_warmups or kernel.num_reps
    tuner = Autotuner(
        kernel.fn,
        kernel.arg_names,
        kernel.configs,
        kernel.keys,
        kernel.reset_to_zero,
        kernel.restore_value,
        pre_hook=kernel.pre_hook if kernel.user_defined_pre_hook else None,
        post_hook=kernel.post_hook if kernel.user_defined_post_hook else None,
        prune_configs_by={
            "perf_model": kernel.perf_model,
            "top_k": kernel.configs_top_k,
            "early_config_prune": kernel.early_config_prune,
        },
        do_bench=None if deprecated and _interpreted(kernel.fn) else kernel._do_bench,
    )
    # Given as parameters they would warn of their deprecation a second time.
    tuner.num_warmups, tuner.num_reps = kernel.num_warmups, kernel.num_reps
    tuner.use_cuda_graph = kernel.use_cuda_graph
    return tuner


def _innermost_tuner(kernel: Any) -> triton_autotuner.Autotuner | None:
    while kernel is not None and not isinstance(kernel, triton_autotuner.Autotuner):
        kernel = getattr(kernel, "fn", None)
    return kernel


def _check_kernel(fn: Any) -> None:
    if not hasattr(fn, "arg_names"):
        raise InvalidSetting(
            f"@safetune(...) is above {fn!r}, which is no Triton kernel: put @triton.jit below it"
        )


def _kernel_name(fn: Any) -> str:
    while hasattr(fn, "fn"):
        fn = fn.fn
    return str(getattr(fn, "__name__", fn))


def _interpreted(fn: Any) -> bool:
    """Whether `fn` runs in Triton's interpreter, where Triton's own benchmarks find no device."""
    return isinstance(base_function(fn)[0], InterpretedFunction)


def _check_names(
    kernel: str, parameter: str, names: Iterable[str] | None, arg_names: list[str]
) -> None:
    unknown = [name for name in names or () if name not in arg_names]
    if unknown:
        raise InvalidSetting(
            f"{parameter} of {kernel} contains names that are not kernel arguments: "
            f"{', '.join(unknown)}. Valid argument names are: {', '.join(arg_names)}."
        )


def _check_limits(kernel: str, limits: Limits) -> None:
    for name in ("compile_timeout_s", "run_timeout_s"):
        value = getattr(limits, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and 0 < value < float("inf")):
            raise InvalidSetting(f"{name}={value!r} of {kernel} must be a number of seconds over 0")
