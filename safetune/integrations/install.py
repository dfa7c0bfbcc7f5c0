"""Libraries as they are: every `triton.autotune` that is applied from here on is safetune's.

Tuners that are made by other means are reached where they launch (see `companion`).

Three ways: `safetune.install()`; `SAFETUNE_INSTALL=1`, which acts when safetune is imported; and
`safetune run script.py`, which has every Python that the program starts import it. At exit a report
says on stderr what came of it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from safetune import forks, triton_internals

#: Made when `install` runs; what is counted, for the report.
_installation: Installation | None = None
_one_at_a_time = threading.Lock()


class Installation:
    """What has gone through the replaced `triton.autotune` in this process.

    Attributes:
        tuners: every tuner made, ours; those of kernels that Triton's class or a library's own
            holds come with their first launch.
        refused: kernels left to Triton, with the reason.
        given: how often a kernel was launched with a config that was in its tuner's own cache.
        launches, misses: of all tuners.
    """

    def __init__(self) -> None:
        self.tuners: list[Any] = []
        self.refused: dict[str, str] = {}
        self.given: dict[str, int] = {}
        self.begin(forked=False)

    def begin(self, forked: bool = True) -> None:
        """Count from nothing: this process is new, or has just been forked off."""
        from safetune.miss import reporting

        self.given.clear()
        self.launches = 0
        self.misses = 0
        self._tunings_before = reporting.tunings_begun()
        self._forked, self._reported = forked, False

    def count_given(self, kernel: str) -> None:
        """Count a launch with a config that is not of safetune's choice."""
        self.given[kernel] = self.given.get(kernel, 0) + 1

    def dropped(self) -> dict[str, tuple[str, ...]]:
        """Return the key names that were dropped, by kernel."""
        reports = [tuner.key_report for tuner in self.tuners]
        return {report.kernel: report.dropped for report in reports if report.dropped}

    def tunings(self) -> int:
        """Return how many tunings this process has begun."""
        from safetune.miss import reporting

        return reporting.tunings_begun() - self._tunings_before

    def report(self) -> None:
        """Say on stderr, once, what came of it, if this process met a kernel."""
        worked = self.launches or self.given
        met = self.tuners or self.given or self.refused
        if met and (worked or not self._forked) and not self._reported:
            self._reported = True
            with contextlib.suppress(AttributeError, ValueError):  # the program has closed it
                sys.stderr.write(f"{self}\n")

    def __str__(self) -> str:
        stored = max(0, self.misses - self.tunings())
        kernels = {tuner.base_fn for tuner in self.tuners}
        lines = [
            f"safetune: {len(kernels)} kernels, {self.launches} launches: {self.tunings()} "
            f"tunings, {stored} keys looked up, {self.launches - self.misses} hits"
        ]
        dropped = self.dropped()
        if dropped:
            lines.append(f"safetune: key names dropped, as nothing reads them: {_listed(dropped)}")
        if self.given:
            lines.append(f"safetune: launched with configs of its own cache: {_listed(self.given)}")
        if self.refused:
            lines.append(f"safetune: left to triton.autotune: {_listed(self.refused)}")
        return "\n".join(lines)


def install() -> Installation:
    """Have `triton.autotune` be safetune's from now on; a second call changes nothing.

    A tuner of Triton's own class, or of a library's on top of it, is reached where it launches.

    Raises:
        InvalidSetting: a SAFETUNE_* variable means nothing, so that no kernel could be taken over.
    """
    global _installation
    # Importing Triton may install, after `when_triton_is_imported`.
    import triton.runtime.autotuner as triton_autotuner

    from safetune.frontend import observers
    from safetune.frontend.autotuner import Autotuner
    from safetune.integrations import shadow_tuner
    from safetune.settings import Settings

    with _one_at_a_time:
        if _installation is not None:
            return _installation
        Settings.current()
        installation = _installation = Installation()
        triton_internals.replace_autotune(functools.partial(_replacement, installation))
        observers.add(_counter(installation))
        shadow_tuner.reach(installation, triton_autotuner.Autotuner, Autotuner)
        _report_at_exit(installation)
    return installation


def _report_at_exit(installation: Installation) -> None:
    """Have this process, and each process forked from it, report its own launches."""
    forks.register("report", after_in_child=installation.begin, at_exit=installation.report)
    forks.register_worker_exit(installation, installation.report)


def _replacement(installation: Installation, stock: Callable[..., Any]) -> Callable[..., Any]:
    from safetune.errors import SafetuneError
    from safetune.frontend.autotuner import kernel_name
    from safetune.frontend.decorator import safetune
    from safetune.integrations import shadow_tuner
    from safetune.keys.key_names import logged

    @functools.wraps(stock)
    def autotune(*args: Any, **kwargs: Any) -> Any:
        if str(sys._getframe(1).f_globals.get("__name__", "")).startswith("torch."):
            make = stock(*args, **kwargs)  # Dynamo rebuilds tuners that it has pruned
            return lambda fn: shadow_tuner.leave(make(fn))

        def decorate(fn: Any) -> Any:
            try:
                with logged():
                    tuner = safetune(*args, **kwargs)(fn)
            except (SafetuneError, TypeError, Warning) as error:  # warnings may be made errors
                installation.refused[kernel_name(fn)] = str(error).partition("\n")[0]
                return shadow_tuner.leave(stock(*args, **kwargs)(fn))
            installation.tuners.append(tuner)
            return tuner

        return decorate

    return autotune


def _counter(installation: Installation) -> Any:
    """Return an observer that counts launches and misses: a program without `install` has none."""
    from safetune.frontend import observers

    class Counter(observers.Observer):
        def launch(self, *_: Any) -> None:
            installation.launches += 1

        def miss(self, *_: Any) -> None:
            installation.misses += 1

    return Counter()


def _listed(items: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} ({', '.join(what) if isinstance(what, tuple) else what})"
        for name, what in items.items()
    )


def when_triton_is_imported() -> None:
    """Install at once if Triton is there, else right after its import, whoever does that."""
    if "triton" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, _Waiting())


class _Waiting(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it has Triton's own loader call `install` once it is done.

    A search need not end in an import: torch asks whether there is a Triton and leaves it at that.
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
                install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
