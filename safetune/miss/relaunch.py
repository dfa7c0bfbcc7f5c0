"""A launch by Triton's own path, and another config for a call that cannot launch the key's.

A choice is tuned for a key, and Triton compiles once more for each specialisation: constexpr
values, alignment, an integer that is 1. So a config that works for one call of a key may be out of
shared memory for the next.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime.autotuner import Config
from triton.runtime.errors import OutOfResources, PTXASError

from safetune import triton_internals, triton_launch
from safetune.config import config_text
from safetune.errors import TuningWarning
from safetune.frozen import dataclass
from safetune.keys.kernel_digest import inner_heuristics
from safetune.launch import scratch_memory
from safetune.launch.call_shape import (
    CallShape,
    named_arguments,
    own_heuristics,
    refuse_vmap,
    set_by,
    specialisation,
)
from safetune.launch.key_state import KeyState, without_frames
from safetune.messages import warn
from safetune.settings import Mode, Settings

if TYPE_CHECKING:
    from safetune.miss.tuner import Tuner

#: Exceptions that Triton raises before anything has run on the device.
_CLEAN_FAILURES = (OutOfResources, CompilationError, CompileTimeAssertionFailure, PTXASError)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class Launched:
    """A launch by Triton's own path."""

    result: Any  # what Triton returned
    config: Config | None  # None if the config took the place of another
    options: Kwargs  # what the config set for this launch, by name
    values: Kwargs  # what the heuristics set for this launch, by name


def launch(
    tuner: Tuner,
    key: Any,
    shape: CallShape,
    config: Config,
    args: Args,
    kwargs: Kwargs,
    values: Kwargs | None = None,
) -> Launched:
    """Launch a call with a config, or with the next-best config if Triton cannot launch it.

    Args:
        key: the memory key; None to raise the error of this config.
        values: what the heuristics have said for this launch; None to call them.
    """
    tuner.best_config = config
    options = config.all_kwargs()
    if config.pre_hook is not None:
        config.pre_hook({**named_arguments(tuner.arg_names, args, kwargs), **options})
    below, heuristics = own_heuristics(tuner.fn)
    if triton_internals.is_watched(below):  # by one who is to see the caller's values
        pinned, passed = args, kwargs
    else:
        pinned, passed = shape.pinned(args, kwargs)
    passed = dict(**passed, **options)  # TypeError if the call passes what the config sets
    named = named_arguments(tuner.arg_names, pinned, passed)
    if values is None:
        values = {}
        for each in heuristics:
            values = set_by(each, named, values)
    specialise = functools.partial(specialisation, tuner, {**named, **values})
    state = None if key is None else tuner.states.of(key)
    if state is not None and (other := state.allowed(config, specialise)) is not config:
        return replace(launch(tuner, None, shape, other, args, kwargs), config=None)
    passed |= values
    launched = functools.partial(Launched, options=options, values=values)
    try:
        if tuner.needs_scratch:
            return launched(scratch_memory.launch(below.run, *pinned, **passed), config)
        return launched(below.run(*pinned, **passed), config)
    except RuntimeError as error:
        if tuner.needs_scratch or not triton_launch.lacks_allocator(error):
            refuse_vmap(tuner.base_fn.__name__, args)
            raise
        tuner.needs_scratch = True
        return launched(scratch_memory.launch(below.run, *pinned, **passed), config)
    except _CLEAN_FAILURES as error:
        if state is None or Settings.current().mode is Mode.OFF:
            raise
        if _is_callers(error, tuner.fn, kwargs):
            raise
        result = _relaunch(tuner, state, specialise(), shape, config, error, args, kwargs)
        return launched(result, None)


def _relaunch(
    tuner: Tuner,
    state: KeyState,
    special: Any,
    shape: CallShape,
    config: Config,
    error: Exception,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Launch a call with the next-best config after `config` could not be launched.

    Where none can be, this raises the last error; one of the caller's grid or heuristic at once.
    """
    rejected = state.reject(special, config)
    reason = _text(error)
    for other in _candidates(tuner, args, kwargs):
        if other in rejected:
            continue
        try:
            result = launch(tuner, None, shape, other, args, kwargs).result
        except _CLEAN_FAILURES as next_error:
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
