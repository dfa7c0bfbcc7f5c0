"""A choice that cannot be launched in the caller: for which arguments, and what is used instead.

A choice is tuned for a key, and Triton compiles once more for each specialisation: constexpr
values, alignment, an integer that is 1. So a config that works for one call of a key may be out of
shared memory for the next.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime.autotuner import Config
from triton.runtime.errors import OutOfResources, PTXASError

from safetune.config import config_text
from safetune.keys.kernel_digest import inner_heuristics
from safetune.launch import scratch_memory
from safetune.launch.call_shape import CallForm, named_arguments, specialisation
from safetune.launch.key_state import KeyState, without_frames

if TYPE_CHECKING:
    from safetune.frontend.autotuner import Autotuner

#: What Triton raises before anything has run on the device.
CLEAN_FAILURES = (OutOfResources, CompilationError, CompileTimeAssertionFailure, PTXASError)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def relaunch(
    tuner: Autotuner,
    state: KeyState,
    form: CallForm,
    config: Config,
    error: Exception,
    call: Arguments,
) -> Any:
    """Launch a call with the next-best config that can be, after `config` could not.

    Raises:
        Exception: the last error, when none can be launched; `error`, when the caller's own code
            raised it.
    """
    args, kwargs = call
    kind = specialisation(tuner, form, config, args, kwargs)
    rejected = state.reject(kind, config)
    reason = _text(error)
    for other in _candidates(tuner, args, kwargs):
        if other in rejected:
            continue
        named = named_arguments(tuner.arg_names, args, kwargs)
        if other.pre_hook is not None:
            other.pre_hook({**named, **other.all_kwargs()})
        try:
            result = _launch(tuner, form, other, args, kwargs)
        except CLEAN_FAILURES as next_error:
            if is_callers(next_error, tuner, kwargs):
                raise
            state.reject(kind, other)
            error = next_error
            continue
        state.substitute(kind, other)
        warnings.warn(
            f"{tuner.base_fn.__name__}: {config_text(config)} cannot be launched with these "
            f"arguments ({reason}); {config_text(other)} is used for them instead",
            stacklevel=3,
        )
        return result
    state.substitute(kind, without_frames(error))
    raise error


def is_callers(error: Exception, tuner: Autotuner, kwargs: Mapping[str, Any]) -> bool:
    """Whether the caller's grid or a heuristic raised `error`, or something that they called."""
    functions = [kwargs.get("grid"), *inner_heuristics(tuner.fn).values()]
    codes = {code for function in functions for code in _codes(function)}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _candidates(
    tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Config]:
    """What else there is to launch with, best first; from the store only when it is needed."""
    from safetune.miss.candidates import next_best
    from safetune.miss.inline import why_not_isolated
    from safetune.miss.resolve import Miss
    from safetune.settings import Settings
    from safetune.store.lookup import open_lookup

    miss = Miss(tuner, args, kwargs)
    if tuner.isolation == "inline" or why_not_isolated(miss.call):
        yield from miss.configs()
        return
    yield from next_best(miss.request(), open_lookup(Settings.current()).store)


def _launch(
    tuner: Autotuner, form: CallForm, config: Config, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    tuner.best_config = config
    args, kwargs = form.pinned(args, kwargs)
    return scratch_memory.launch(tuner.fn.run, *args, **kwargs, **config.all_kwargs())


def _codes(function: Any) -> Iterator[Any]:
    while isinstance(function, functools.partial):
        function = function.func
    for candidate in (function, vars(type(function)).get("__call__")):
        code = getattr(candidate, "__code__", None)
        if code is not None:
            yield code


def _text(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
