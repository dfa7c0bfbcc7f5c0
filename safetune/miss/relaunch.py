"""A choice that cannot be launched in the caller: for which arguments, and what is used instead.

A choice is tuned for a key, and Triton compiles once more for each specialisation: constexpr
values, alignment, an integer that is 1. So a config that works for one call of a key may be out of
shared memory for the next.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime.autotuner import Config
from triton.runtime.errors import OutOfResources, PTXASError

from safetune import forks
from safetune.config import config_text
from safetune.keys.kernel_digest import inner_heuristics
from safetune.launch import scratch_memory
from safetune.launch.call_shape import CallForm, named_arguments, specialisation

if TYPE_CHECKING:
    from safetune.frontend.autotuner import Autotuner

#: What Triton raises before anything has run on the device.
CLEAN_FAILURES = (OutOfResources, CompilationError, CompileTimeAssertionFailure, PTXASError)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: Held while a key's choice and its rejections are noted together, and no longer: a call under
#: capture must not wait for a thread that tunes the key.
noting = threading.Lock()
forks.register(
    "launches",
    before=noting.acquire,
    after_in_parent=noting.release,
    after_in_child=noting.release,
)


class Rejections:
    """What cannot be launched, for one memory key of one tuner, by specialisation.

    Attributes:
        choice: what every other specialisation is launched with; None: that is not known here.
    """

    def __init__(self) -> None:
        self.choice: Config | None = None
        self._rejected: dict[Any, list[Config]] = {}
        self._instead: dict[Any, Config | Exception] = {}

    def allow(self, config: Config) -> bool:
        """Whether no specialisation has rejected `config`."""
        return not any(config in rejected for rejected in list(self._rejected.values()))

    def reject(self, specialisation: Any, config: Config) -> list[Config]:
        """Note a failure; return all that have failed for this specialisation."""
        rejected = self._rejected.setdefault(specialisation, [])
        if config not in rejected:
            rejected.append(config)
        return rejected

    def settle(self, specialisation: Any, instead: Config | Exception) -> None:
        """Note what a specialisation is launched with, or that nothing can be."""
        self._instead[specialisation] = instead

    def applied(self, config: Config, specialisation: Any) -> Config:
        """Return `config`, or what is used in its place; raises the error when nothing can be."""
        if config not in self._rejected.get(specialisation, ()):
            return config
        instead = self._instead.get(specialisation, config)
        if isinstance(instead, Exception):
            raise _without_frames(instead)
        return instead


def relaunch(
    tuner: Autotuner,
    key: Any,
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
    rejections = _reject(tuner, key, kind, config)
    reason = _text(error)
    for other in _candidates(tuner, args, kwargs):
        if other in rejections.reject(kind, config):
            continue
        named = named_arguments(tuner.arg_names, args, kwargs)
        if other.pre_hook is not None:
            other.pre_hook({**named, **other.all_kwargs()})
        try:
            result = _launch(tuner, form, other, args, kwargs)
        except CLEAN_FAILURES as next_error:
            if is_callers(next_error, tuner, kwargs):
                raise
            rejections.reject(kind, other)
            error = next_error
            continue
        rejections.settle(kind, other)
        warnings.warn(
            f"{tuner.base_fn.__name__}: {config_text(config)} cannot be launched with these "
            f"arguments ({reason}); {config_text(other)} is used for them instead",
            stacklevel=3,
        )
        return result
    rejections.settle(kind, _without_frames(error))
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


def _reject(tuner: Autotuner, key: Any, specialisation: Any, config: Config) -> Rejections:
    """Take a memory key off the fast path: some calls of it cannot launch `config`."""
    with noting:
        rejections = tuner.rejections.setdefault(key, Rejections())
        rejections.reject(specialisation, config)
        if tuner.cache.get(key) is config:
            rejections.choice = tuner.cache.pop(key)
    return rejections


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


def _without_frames(error: Exception) -> Exception:
    """A copy to keep: a traceback holds on to its frames, and they to the caller's tensors."""
    copied = type(error).__new__(type(error))
    copied.__dict__.update(error.__dict__)
    copied.args = error.args
    return copied
