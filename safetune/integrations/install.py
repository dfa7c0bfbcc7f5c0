"""Installs safetune under unmodified libraries: it replaces `triton.autotune`.

Tuners that do not come from the replaced decorator are intercepted at their launch (see
`shadow_tuner`).

Three ways: `safetune.install()`; `SAFETUNE_INSTALL=1`, which acts when safetune is imported; and
`safetune run script.py`, which makes every Python that the program starts import safetune. At exit
a report on stderr says what was tuned.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from safetune import forks, triton_internals
from safetune.errors import SafetuneError
from safetune.frontend import observers
from safetune.integrations.install_report import Installation
from safetune.settings import Settings, parse_keep

_one_at_a_time = forks.lock()


_installation: Installation | None = None


def install(keep: Iterable[str] = ()) -> Installation:
    """Replace `triton.autotune` by safetune's decorator; a second call may only add to `keep`.

    Tuners of Triton's own class, or of a library's subclass, are intercepted at their launch.

    Args:
        keep: `kernel:name` for each key name of a library's kernel that is not to be dropped; the
            kernel's name alone, or with its module in front. As SAFETUNE_KEEP.

    Raises:
        InvalidSetting: a SAFETUNE_* variable or `keep` has an invalid value.
    """
    global _installation
    # Importing Triton may install, after `when_triton_is_imported`.
    from safetune.integrations import shadow_tuner
    from safetune.keys import written_key

    names = [keep] if isinstance(keep, str) else keep
    written_key.keep(parse_keep("keep", ",".join(names)))
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


def launched_in_place_of(kernel: Any) -> Any:
    """Return the tuner of safetune that launches in place of one of Triton's; None without one."""
    from triton.runtime.autotuner import Autotuner

    from safetune.integrations import shadow_tuner

    if _installation is None or not isinstance(kernel, Autotuner):
        return None
    shadow = shadow_tuner.shadow_of(_installation, kernel)
    return shadow and shadow.tuner


def _replacement(installation: Installation, stock: Callable[..., Any]) -> Callable[..., Any]:
    from safetune.frontend.decorator import safetune
    from safetune.integrations import shadow_tuner
    from safetune.keys.lazy_key import logged
    from safetune.keys.written_key import lenient

    @functools.wraps(stock)
    def autotune(*args: Any, **kwargs: Any) -> Any:
        if str(sys._getframe(1).f_globals.get("__name__", "")).startswith("torch."):
            make = stock(*args, **kwargs)  # Dynamo rebuilds tuners that it has pruned
            return lambda fn: shadow_tuner.leave(make(fn))

        def decorate(fn: Any) -> Any:
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
    """Install at once if Triton is imported, else right after its import."""
    if "triton" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, _Waiting())


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it makes Triton's own loader call `install` at its end.

    A search need not end in an import: torch only checks whether Triton can be found.
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "triton" or vars(self._thread).get("searching"):
            return None
        self._thread.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._thread.searching = False
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
