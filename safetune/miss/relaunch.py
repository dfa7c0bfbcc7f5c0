"""Another config for a call that cannot launch its key's.

A choice is tuned for a key, and Triton compiles once more for each specialisation: constexpr
values, alignment, an integer that is 1. So a config that works for one call of a key may be out of
shared memory for the next.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune.config import config_text
from safetune.errors import TuningWarning
from safetune.keys.kernel_digest import inner_heuristics
from safetune.launch.call_shape import CLEAN_FAILURES
from safetune.launch.key_state import without_frames
from safetune.messages import warn
from safetune.settings import Mode, Settings

if TYPE_CHECKING:
    from safetune.launch.key_state import KeyState
    from safetune.miss.tuner import Tuner

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def next_best(
    tuner: Tuner,
    state: KeyState,
    args: Args,
    kwargs: Kwargs,
    special: Any,
    config: Config,
    error: Exception,
) -> Any:
    """Launch a call with the next-best config after `config` could not be launched.

    Where none can be, this raises the last error; one of the caller's grid or heuristic at once.

    Args:
        special: what decides which binary the call needs: see `call_shape.specialisation`.
    """
    if Settings.current().mode is Mode.OFF or _is_callers(error, tuner.fn, kwargs):
        raise error
    rejected = state.reject(special, config)
    reason = _text(error)
    for other in _candidates(tuner, args, kwargs):
        if other in rejected:
            continue
        try:
            result = tuner.shapes.of(args, kwargs).launch(other, args, kwargs).result
        except CLEAN_FAILURES as next_error:
            if _is_callers(next_error, tuner.fn, kwargs):
                raise
            state.reject(special, other)
            error = next_error
            continue
        state.substitute(special, other)
        warn(
            f"{tuner.base_fn.__name__}: {config_text(config)} cannot be launched with these "
            f"arguments ({reason}); {config_text(other)} is used for them instead",
            TuningWarning,
        )
        return result
    state.substitute(special, without_frames(error))
    raise error


def _is_callers(error: Exception, kernel: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the caller's grid or a heuristic raised `error`, or a function that they called."""
    functions = [kwargs.get("grid"), *inner_heuristics(kernel).values()]
    codes = {code for function in functions for code in _codes(function)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _candidates(tuner: Tuner, args: Args, kwargs: Kwargs) -> Iterator[Config]:
    """Return the configs to try instead, best first."""
    from safetune.miss.candidates import best_first
    from safetune.miss.resolve import Miss, why_not_isolated
    from safetune.store.lookup import open_lookup

    miss = Miss(tuner, args, kwargs)
    if tuner.isolation == "inline" or why_not_isolated(miss.call):
        return iter(miss.configs())
    store = open_lookup(Settings.current()).store
    return best_first(miss.request(), store, measured_first=True)


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
