"""Installs safetune under unmodified libraries: it replaces `triton.autotune`.

Tuners that do not come from the replaced decorator are intercepted at their launch (see
`shadow_tuner`).

Two ways: `safetune.install()` in a program that imports safetune, and `safetune run script.py`,
which makes every Python that the program starts import safetune, with SAFETUNE_INSTALL=1. At exit a
report on stderr lists the tunings.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from safetune import forks, triton_internals
from safetune.errors import SafetuneError
from safetune.frontend import observers
from safetune.integrations.install_report import LEFT, Installation
from safetune.settings import Settings, kept_by_run, parse_keep

_one_at_a_time = forks.lock()


_installation: Installation | None = None


def install(keep: Iterable[str] = (), leave: Iterable[str] = ()) -> Installation:
    """Replace `triton.autotune` by safetune's decorator.

    Tuners of Triton's own class, or of a library's subclass, are intercepted when they launch. A
    second call can only add names. `safetune.configure` sets the policies of all kernels.

    Args:
        keep: `kernel:name` or `module.kernel:name` for each key name that must not be dropped.
        leave: kernels that Triton tunes and launches, by name or `module.kernel`, with `*` for any
            text; applies to kernels decorated later. Like SAFETUNE_LEAVE.

    Raises:
        InvalidSetting: a SAFETUNE_* variable or an argument has an invalid value.
    """
    global _installation
    # Importing Triton may install, after `when_triton_is_imported`.
    from safetune.integrations import shadow_tuner
    from safetune.keys import left_kernels, written_key

    names = [keep] if isinstance(keep, str) else keep
    written_key.keep(parse_keep("keep", ",".join(names)) | kept_by_run())
    left_kernels.leave([leave] if isinstance(leave, str) else leave)
    with _one_at_a_time:
        if _installation is not None:
            return _installation
        Settings.current()
        installation = _installation = Installation()
        triton_internals.replace_autotune(functools.partial(_replacement, installation))
        observers.add(installation)
        shadow_tuner.reach(installation)
        # This process, and each process forked from it, reports its own launches.
        forks.register("report", after_in_child=installation.begin, at_exit=installation.report)
        forks.register_worker_exit(installation, installation.report)
    return installation


def launched_in_place_of(kernel: Any, also_if_not_installed: bool = False) -> Any:
    """Return the safetune tuner that launches in place of a Triton tuner; None without one."""
    from triton.runtime.autotuner import Autotuner

    from safetune.integrations import shadow_tuner

    installation = _installation or (Installation() if also_if_not_installed else None)
    if installation is None or not isinstance(kernel, Autotuner):
        return None
    shadow = shadow_tuner.shadow_of(installation, kernel)
    return shadow and shadow.tuner


def _replacement(installation: Installation, stock: Callable[..., Any]) -> Callable[..., Any]:
    from safetune.frontend.decorator import safetune
    from safetune.integrations import shadow_tuner
    from safetune.keys.lazy_key import logged
    from safetune.keys.left_kernels import is_left
    from safetune.keys.written_key import lenient

    @functools.wraps(stock)
    def autotune(*args: Any, **kwargs: Any) -> Any:
        if str(sys._getframe(1).f_globals.get("__name__", "")).startswith("torch."):
            make = stock(*args, **kwargs)  # Dynamo rebuilds tuners that it has pruned
            return lambda fn: shadow_tuner.leave(make(fn))

        def decorate(fn: Any) -> Any:
            if is_left(fn, Settings.current()):
                installation.refuse(fn, LEFT)
                return shadow_tuner.leave(stock(*args, **kwargs)(fn))
            try:
                with logged(), lenient():
                    tuner = safetune(*args, **kwargs)(fn)
            except (SafetuneError, TypeError, Warning) as error:  # warnings may be made errors
                installation.refuse(fn, error)
                return shadow_tuner.leave(stock(*args, **kwargs)(fn))
            installation.tuners.append(tuner)
            return tuner

        return decorate

    return autotune


def when_triton_is_imported() -> None:
    """Install at once if Triton is imported, otherwise right after its import."""
    if "triton" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, _Waiting())


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it makes Triton's own loader call `install` at its end.

    A search need not end in an import: torch only checks whether Triton can be found.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "triton":
            return None
        others = [each for each in sys.meta_path if not isinstance(each, _Waiting)]
        finds = [each.find_spec for each in others if hasattr(each, "find_spec")]
        found = (find(name, path, target) for find in finds)
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                with contextlib.suppress(ValueError):  # another thread's import has done it
                    sys.meta_path.remove(self)
                if _is_being_imported():
                    triton_internals.before_first_tuner(install)
                else:
                    install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _is_being_imported() -> bool:
    """Whether a module of safetune is half imported: `install` could not import what needs it."""
    modules = [module for name, module in [*sys.modules.items()] if name.startswith("safetune.")]
    specs = [getattr(module, "__spec__", None) for module in modules]  # a module may be None there
    return any(getattr(spec, "_initializing", False) for spec in specs)
