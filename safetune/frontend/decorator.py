"""The decorator `@safetune`, with parameters or bare."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import triton.runtime.autotuner as triton_autotuner
from triton.runtime.autotuner import Heuristics

from safetune.errors import InvalidSetting, with_nearest
from safetune.frontend.autotuner import Autotuner
from safetune.frontend.options import Options
from safetune.keys.written_key import lenient

Parameters = ParamSpec("Parameters")

_PARAMETERS = inspect.signature(Options).parameters


def _with_parameters_of(
    options: Callable[Parameters, Any],
) -> Callable[[Callable[..., Any]], Callable[Parameters, Any]]:
    def decorate(function: Any) -> Any:
        signature = inspect.signature(options)
        function.__signature__ = signature.replace(return_annotation="Any")
        return function

    return decorate


@_with_parameters_of(Options)
def safetune(*args: Any, **kwargs: Any) -> Any:
    """Decorate a Triton kernel: a drop-in for `triton.autotune`, whose parameters come first.

    Bare `@safetune` above `@triton.autotune(...)` takes over the settings of that tuner; above
    `@triton.jit` the kernel has Triton's default config.

    Args:
        configs: `triton.Config`s to choose from; an empty list means Triton's default config.
        key: names of the arguments whose values need a choice of their own. Or a mapping:
            `{"n": f}` makes one choice for all `n` with the same `f(n)`, an int, bool, str, float
            or dtype, and `{"n": None}` is as `["n"]`.
        cache_results: accepted and ignored: safetune stores every choice.
        phantom: what to do with a name in `key` that nothing reads: `drop` it (the default, see
            SAFETUNE_PHANTOM), `keep` it, or raise an `error`.
        keep: names in `key` that are never dropped.
        isolation: `worker` (one measuring process until a config breaks it), `config` (a new
            process for every config), or `inline` (in this process and without the store, like
            triton.autotune).
        compile_timeout_s, run_timeout_s: seconds for one config. A launch that tunes may give up
            a compile earlier, if most take far less.
        scratch: names of arguments that are not results, such as partial sums per program;
            configs may leave different values in them.
        reference: a function that returns the right values of the written arguments, by name. It
            is called in the measuring process with the arguments by name. A config with another
            result is `wrong_result`.
        inputs: a function that returns every tensor to tune on, by name. It is called in the
            measuring process with the arguments by name, each tensor as a meta tensor. The
            caller's tensors are then not copied.
        on_miss: for a key without a choice: launch the `fallback` and never tune, `warn` and
            follow the mode, or raise an `error`. None, the default: see SAFETUNE_ON_MISS.
        measure: times the final of kernels below 50 us in replays of a CUDA `graph`, `hot`, in a
            graph on the same arguments, or between `events`. Each value that is given has choices
            of its own. None, the default: see SAFETUNE_MEASURE; without it, `graph`.
        same_bits: choose among the configs whose result has the bits of the first declared config
            that works. It identifies the choice. None, the default: see SAFETUNE_SAME_BITS.
        budget: the number of configs to try for a key, e.g. `200`, or a time, e.g. `"5m"`. None,
            the default, tries all, and so does `inline`.
        proposer: proposes the configs within a budget; by default a Gaussian process, from
            `safetune[search]`.

    Raises:
        InvalidConfig, InvalidSetting: an argument is invalid; the message names it.
        PhantomKey: under `phantom="error"`.
    """
    if unknown := kwargs.keys() - _PARAMETERS.keys():
        raise TypeError(
            "safetune() got an unexpected keyword argument "
            f"{with_nearest(sorted(unknown), _PARAMETERS)}"
        )
    options = Options(*args, **kwargs)

    def decorate(fn: Any) -> Any:
        _check_kernel(fn)
        return Autotuner(fn, options)

    if hasattr(options.configs, "fn"):
        if len(args) + len(kwargs) > 1:
            raise InvalidSetting(
                f"configs={options.configs!r} is a kernel; "
                "write safetune(configs=[...], ...)(kernel)"
            )
        return take_over(options.configs)
    if callable(options.configs):  # used bare, above something that is not a kernel
        _check_kernel(options.configs)
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
        return Autotuner(kernel, Options())
    if isinstance(kernel, Autotuner):
        return kernel
    _check_kernel(kernel.fn)
    tuner = Autotuner(kernel.fn, Options.of(kernel))
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
