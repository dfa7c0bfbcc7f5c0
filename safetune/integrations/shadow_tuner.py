"""Tuners that `install` could not replace: a safetune shadow tuner launches in their place.

A library's subclass of Triton's tuner, or a decorator applied before `install`, makes a tuner that
safetune did not make. Its launches still reach `run` of Triton's class, if only by
`super().run(...)`. There its shadow tuner takes over, with the same settings.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Autotuner as TritonAutotuner

from safetune import triton_internals
from safetune.errors import SafetuneError
from safetune.frontend.autotuner import Autotuner
from safetune.frontend.decorator import take_over
from safetune.integrations.install_report import LEFT, kernel_name
from safetune.keys.lazy_key import logged
from safetune.keys.left_kernels import is_left
from safetune.settings import Settings

if TYPE_CHECKING:
    from safetune.integrations.install_report import Installation

#: The attribute of a tuner of Triton's that has its shadow; False for one that is left to Triton.
_ATTRIBUTE = "_safetune_shadow"

_functions = operator.attrgetter(
    *("fn", "early_config_prune", "perf_model", "pre_hook", "post_hook")
)

#: Methods that a shadow tuner would not call, if a library has written its own.
_TUNING = ("_bench", "prune_configs", "check_disk_cache", "do_bench")


class Shadow:
    """The shadow of one Triton tuner."""

    def __init__(self, kernel: Any, tuner: Any) -> None:
        self.tuner = tuner  # None where the kernel is left to Triton with these settings
        self.made_from = _settings(kernel)
        if tuner is not None:
            tuner.cache.update(kernel.cache)
            kernel.cache = tuner.cache

    def __reduce__(self) -> Any:
        return tuple, ()  # a tuner that was copied or pickled gets another

    def launch(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch, tuning first if necessary, and leave on `kernel` what Triton's `run` leaves."""
        if kernel.cache is not self.tuner.cache:  # the library has assigned another one
            self.tuner.cache = kernel.cache
            kernel.cache = self.tuner.cache
        launched = self.tuner.run(*args, **kwargs)
        for name in ("best_config", "configs_timings", "bench_time"):
            if name in vars(self.tuner):
                setattr(kernel, name, getattr(self.tuner, name))
        return launched


def _settings(kernel: Any) -> tuple[Any, ...]:
    return (*_functions(kernel), *kernel.keys, *kernel.configs)


def reach(installation: Installation) -> None:
    """Send every launch that reaches Triton's own `run` to a shadow tuner."""
    run, bench = TritonAutotuner.run, TritonAutotuner._bench
    policies = {"run", "_bench"} & triton_internals.replaced_methods().keys()

    @functools.wraps(run)
    def reached_run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        shadow = None if isinstance(self, Autotuner) else shadow_of(installation, self)
        if shadow is None:
            return run(self, *args, **kwargs)
        if policies:
            installation.launch(shadow.tuner)
            return run(self, *args, **kwargs)
        return shadow.launch(self, args, kwargs)

    @functools.wraps(bench)
    def noted_bench(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Autotuner):
            if policies and (shadow := shadow_of(installation, self)) is not None:
                return shadow.tuner._bench(*args, **kwargs)
            why = f"tuned in this process by {type(self).__name__}"
            installation.refused.setdefault(kernel_name(self), why)
        return bench(self, *args, **kwargs)

    triton_internals.replace_tuner_methods(reached_run, noted_bench)


def leave(kernel: Any) -> Any:
    """Leave a tuner to Triton, whatever it launches; return the tuner."""
    kernel.__dict__[_ATTRIBUTE] = False
    return kernel


def shadow_of(installation: Installation, kernel: Any) -> Shadow | None:
    """Return a tuner's shadow, made at its first launch; None for a tuner left to Triton."""
    shadow = kernel.__dict__.get(_ATTRIBUTE)
    if shadow is False:
        return None
    if shadow is not None and getattr(shadow, "made_from", None) != _settings(kernel):
        kernel.__dict__.pop(_ATTRIBUTE, None)
        shadow = None
    if shadow is None:
        made = Shadow(kernel, _take_over(installation, kernel))
        shadow = kernel.__dict__.setdefault(_ATTRIBUTE, made)
        if shadow is made and made.tuner is not None:  # and no other thread was faster
            installation.tuners.append(made.tuner)
    return shadow if shadow.tuner is not None else None


def _take_over(installation: Installation, kernel: Any) -> Any:
    """Return a tuner of safetune with a kernel's settings; None, with the reason in the report."""
    if is_left(kernel.fn, Settings.current()):
        installation.refuse(kernel, LEFT)
        return None
    for part in _TUNING:
        own = part != "do_bench" and part in vars(kernel)
        if own or getattr(type(kernel), part) is not getattr(TritonAutotuner, part):
            reason = f"{type(kernel).__name__} has a {part} of its own"
            break
    else:
        try:
            with logged():
                return take_over(kernel)
        except (SafetuneError, TypeError, AttributeError, Warning) as error:
            reason = str(error)
    installation.refuse(kernel, reason)
    return None
