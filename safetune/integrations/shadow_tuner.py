"""Tuners that `install` could not replace: a shadow tuner of safetune launches in their place.

A library's subclass of Triton's tuner, or a decorator that was applied before `install`, makes a
tuner that safetune did not make. Its launches still come to `run` of Triton's class, if need be by
`super().run(...)`. From there its shadow tuner launches, made with the same settings.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune import triton_internals
from safetune.keys.tuning_key import triton_key
from safetune.launch.call_shape import named_arguments

if TYPE_CHECKING:
    from safetune.frontend.autotuner import Autotuner
    from safetune.integrations.install_report import Installation

#: The attribute of a tuner of Triton's that has its shadow.
_ATTRIBUTE = "_safetune_shadow"

_functions = operator.attrgetter(
    *("fn", "early_config_prune", "perf_model", "pre_hook", "post_hook")
)

#: Methods that a shadow tuner would not call, if a library has written its own.
_TUNING = ("_bench", "prune_configs", "check_disk_cache", "do_bench")


class Shadow:
    """The shadow of one tuner of Triton's.

    Attributes:
        tuner: safetune's tuner; None where the kernel is left to Triton.
    """

    def __init__(self, kernel: Any, tuner: Autotuner | None) -> None:
        self.tuner = tuner
        self._made_from = _settings(kernel)
        #: Choices of the shadow tuner in the kernel's own cache, by Triton's key.
        self._settled: dict[Any, Config] = {}

    def __reduce__(self) -> Any:
        return _none, ()  # a tuner that was pickled gets another

    def is_of(self, kernel: Any) -> bool:
        """Whether the kernel's settings are still those that this was made from."""
        return self._made_from == _settings(kernel)

    def launch(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch, tuning first if need be, and leave on `kernel` what Triton's `run` leaves."""
        tuner = self.tuner
        assert tuner is not None
        launched = tuner.run(*args, **kwargs)
        kernel.best_config = tuner.best_config
        return launched

    def has_its_own(self, kernel: Any, key: Any) -> bool:
        """Whether the kernel's cache has a config for Triton's key that the library put there."""
        known = kernel.cache.get(key)
        return known is not None and known is not self._settled.get(key)

    def settle(self, kernel: Any, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put the key's choice into the kernel's cache, as Triton would; not a fallback."""
        tuner = self.tuner
        assert tuner is not None
        choice = tuner.cache.get(tuner.forms.of(args, kwargs).key(args, kwargs))
        if choice is None:
            return
        self._settled[key] = kernel.cache[key] = choice
        for name in ("configs_timings", "bench_time"):
            if hasattr(tuner, name):
                setattr(kernel, name, getattr(tuner, name))


def _settings(kernel: Any) -> tuple[Any, ...]:
    return (*_functions(kernel), *kernel.keys, *kernel.configs)


def _none() -> None:
    return None


def reach(installation: Installation, stock: type[Any], ours: type[Any]) -> None:
    """Have every launch that comes to Triton's own `run` go to a shadow tuner."""
    from safetune.frontend.autotuner import kernel_name

    run, bench = stock.run, stock._bench

    @functools.wraps(run)
    def reached_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        shadow = None if isinstance(self, ours) else _shadow(installation, self, stock)
        if shadow is None or shadow.tuner is None:
            return run(self, *args, **kwargs)
        if len(self.configs) == 1:
            return shadow.launch(self, args, kwargs)
        named = named_arguments(self.arg_names, args, kwargs)
        key = triton_key(self.keys, self.arg_names, named)
        if shadow.has_its_own(self, key):
            installation.count_given(kernel_name(self))
            return run(self, *args, **kwargs)
        launched = shadow.launch(self, args, kwargs)
        if self.cache.get(key) is not self.best_config:  # the first choice, or one by `sync`
            shadow.settle(self, key, args, kwargs)
        return launched

    @functools.wraps(bench)
    def noted_bench(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, ours):
            why = f"tuned in this process by {type(self).__name__}"
            installation.refused.setdefault(kernel_name(self), why)
        return bench(self, *args, **kwargs)

    triton_internals.replace_tuner_methods(reached_run, noted_bench)


def leave(kernel: Any) -> Any:
    """Leave a tuner to Triton, whatever it launches; return it."""
    kernel.__dict__[_ATTRIBUTE] = False
    return kernel


def _shadow(installation: Installation, kernel: Any, stock: type[Any]) -> Shadow | None:
    """Return a tuner's shadow, made at its first launch; None for a tuner left to Triton."""
    shadow = kernel.__dict__.get(_ATTRIBUTE)
    if shadow is False:
        return None
    if shadow is not None:
        if shadow.is_of(kernel):
            return shadow  # type: ignore[no-any-return]
        kernel.__dict__.pop(_ATTRIBUTE, None)
    made = Shadow(kernel, _take_over(installation, kernel, stock))
    kept: Shadow = kernel.__dict__.setdefault(_ATTRIBUTE, made)
    if kept is made and made.tuner is not None:  # and no other thread was faster
        installation.tuners.append(made.tuner)
    return kept


def _take_over(installation: Installation, kernel: Any, stock: type[Any]) -> Autotuner | None:
    """Return a tuner of safetune with a kernel's settings; None, with the reason in the report."""
    from safetune.errors import SafetuneError
    from safetune.frontend.autotuner import kernel_name
    from safetune.frontend.decorator import take_over
    from safetune.keys.key_names import logged

    name = kernel_name(kernel)
    for part in _TUNING:
        own = part != "do_bench" and part in vars(kernel)
        if own or getattr(type(kernel), part) is not getattr(stock, part):
            installation.refused[name] = f"{type(kernel).__name__} has a {part} of its own"
            return None
    try:
        with logged():
            tuner: Autotuner = take_over(kernel)
    except (SafetuneError, TypeError, AttributeError, Warning) as error:
        installation.refused[name] = str(error).partition("\n")[0]
        return None
    return tuner
