"""The decorator `@safetune`, with parameters or bare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import triton.runtime.autotuner as triton_autotuner
from triton.runtime.autotuner import Heuristics

from safetune.errors import InvalidSetting
from safetune.frontend.autotuner import Autotuner
from safetune.keys.kernel_digest import is_interpreted
from safetune.keys.written_key import Key, lenient
from safetune.tuning.requests import Limits

if TYPE_CHECKING:
    from safetune.tuning.search import Proposer


def safetune(
    configs: Any = None,
    key: Key = (),
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
    scratch: Iterable[str] = (),
    reference: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    inputs: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    capture_miss: str | None = None,
    budget: int | str | None = None,
    proposer: Proposer | None = None,
) -> Any:
    """Decorate a Triton kernel: a drop-in for `triton.autotune`, whose parameters come first.

    Bare `@safetune` above `@triton.autotune(...)` takes over the settings of that tuner; above
    `@triton.jit` the kernel has Triton's default config.

    Args:
        configs: `triton.Config`s to choose from; an empty list means Triton's default config.
        key: names of the arguments whose values need a choice of their own, or `"auto"`: every
            argument that the kernel reads and no config sets. Or a mapping: `{"n": f}` makes one
            choice for all `n` with the same `f(n)`, an int, bool, str, float or dtype, and
            `{"n": None}` is as `["n"]`.
        cache_results: accepted and ignored: safetune stores every choice.
        phantom: what to do with a name in `key` that nothing reads: `drop` it (the default, see
            SAFETUNE_PHANTOM), `keep` it, or raise an `error`.
        keep: names in `key` that are never dropped.
        isolation: `worker` (one measuring process until a config breaks it), `config` (a new
            process for every config), or `inline` (as triton.autotune: in this process, without
            the store).
        compile_timeout_s, run_timeout_s: seconds for one config.
        scratch: names of arguments that are not results, such as partial sums per program;
            configs may leave different values in them.
        reference: a function that returns the right values of the written arguments, by name. It
            is called in the measuring process with the arguments by name. A config with another
            result is `wrong_result`.
        inputs: a function that returns every tensor to tune on, by name. It is called in the
            measuring process with the arguments by name, each tensor as a meta tensor. The
            caller's tensors are then not copied.
        capture_miss: for a key without a choice under CUDA graph capture: launch the `fallback`
            (the default, see SAFETUNE_CAPTURE_MISS), or raise an `error`.
        budget: how many configs a key's tuning tries, e.g. `200`, or for how long, e.g. `"5m"`:
            the most promising ones. None, the default, tries all, and so does `inline`.
        proposer: who names the configs within a budget; by default a Gaussian process, from
            `safetune[search]`.

    Raises:
        InvalidConfig, InvalidSetting: no launch could use an argument; the message names it.
        PhantomKey: under `phantom="error"`.
    """
    settings = {n: v for n, v in locals().items() if n not in ("configs", "key")}

    def decorate(fn: Any) -> Any:
        _check_kernel(fn)
        return Autotuner(fn, fn.arg_names, configs, key, **settings)

    if hasattr(configs, "fn"):
        return take_over(configs)
    if callable(configs):  # used bare, above something that is not a kernel
        _check_kernel(configs)
    return decorate


autotune = safetune


@lenient()
def take_over(kernel: Any) -> Any:
    """Apply bare `@safetune` above `@triton.autotune`, heuristics over it, or `@triton.jit`.

    Raises what `safetune` raises for the tuner's settings.
    """
    if isinstance(kernel, Heuristics) and _innermost_tuner(kernel) is not None:
        return Heuristics(take_over(kernel.fn), kernel.arg_names, kernel.values)
    if not isinstance(kernel, triton_autotuner.Autotuner):
        return Autotuner(kernel, kernel.arg_names, None, ())
    if isinstance(kernel, Autotuner):
        return kernel
    _check_kernel(kernel.fn)
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
        do_bench=None if deprecated and is_interpreted(kernel.fn) else kernel._do_bench,
    )
    # As parameters they would give their deprecation warning a second time.
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
            f"@safetune(...) is above {fn!r}, which is not a Triton kernel: put @triton.jit "
            "below it"
        )
    if (tuner := _innermost_tuner(fn)) is not None:
        raise InvalidSetting(
            f"{tuner.base_fn.__name__} has a tuner already: use @safetune without arguments above "
            "@triton.autotune(...), or replace that decorator"
        )
