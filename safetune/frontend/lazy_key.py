"""The key of one tuner, whose names are classified when something first needs them, and again when
what their classes rest on has changed.
"""

from __future__ import annotations

import contextvars
import threading
from typing import TYPE_CHECKING, Any, Protocol

from safetune.keys.basis import Basis, basis_of
from safetune.keys.key_names import KeyReport, announce, classes_of
from safetune.keys.written_key import WrittenKey
from safetune.settings import PhantomPolicy

if TYPE_CHECKING:
    from triton.runtime.autotuner import Config

    from safetune.inputs.call import Hooks

#: Two threads that need the classes first would warn twice.
_one_at_a_time = threading.RLock()


class Tuner(Protocol):
    """What the classes are made from, as it is now, and what has to follow them."""

    fn: Any
    configs: list[Config]
    hooks: Hooks
    prune_functions: tuple[Any, Any]

    def key_changed(self, choices: bool) -> None:
        """Forget every launch, and the choices if they are of another kernel or key."""


class LazyKey:
    """A key as it was written, and its report.

    Attributes:
        written: the names before any is dropped.
        known: the last report; None before the first.
    """

    def __init__(self, written: WrittenKey, policy: PhantomPolicy) -> None:
        self.written = written
        self.known: KeyReport | None = None
        self._policy = policy
        self._basis: Basis | None = None
        self._holds = False
        # Whether warnings are logged is decided where the tuner is made.
        self._context = contextvars.copy_context()

    @property
    def may_be_an_error(self) -> bool:
        """Whether only the classes show a mistake in the decorator, which is raised there."""
        written = self.written
        return self._policy is PhantomPolicy.ERROR or (written.names is None and written.keep != ())

    def __copy__(self) -> LazyKey:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A tuner travels with a hook that launches it; the process there classifies again."""
        return {**self.__dict__, "_basis": None, "_holds": False, "_context": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _context=contextvars.copy_context())

    def write(self, written: WrittenKey) -> None:
        """Have another key from here on."""
        self.written = written
        self.forget()

    def forget(self) -> None:
        """Have the names classified again."""
        self._holds = False

    def report(self, tuner: Tuner) -> KeyReport:
        """Return the classes of the names.

        Raises:
            PhantomKey: nothing reads a name, under the policy `error`.
        """
        known, basis = self.known, self._basis
        if known is not None and self._holds and basis is not None and basis.holds():
            return known
        with _one_at_a_time:
            if self._basis is basis:
                self._classify(tuner)
            assert self.known is not None
            return self.known

    def basis(self, tuner: Tuner) -> Basis:
        """Return what the classes rest on."""
        self.report(tuner)
        assert self._basis is not None
        return self._basis

    def _classify(self, tuner: Tuner) -> None:
        basis = basis_of(tuner.fn, tuner.configs)  # first, so that a change meanwhile is noticed
        hooks, (early, model) = tuner.hooks, tuner.prune_functions
        report = classes_of(
            tuner.fn,
            self.written,
            tuner.configs,
            self._policy,
            prune_configs_by={"early_config_prune": early, "perf_model": model},
            pre_hook=hooks.pre_hook,
            post_hook=hooks.post_hook,
        )
        before, known = self._basis, self.known
        if known is None or known.unread != report.unread:
            self._context.copy().run(announce, tuner.fn, report, self._policy)
        self.known, self._basis, self._holds = report, basis, True
        if before is not None and known is not None:
            tuner.key_changed(known.kept != report.kept or not before.is_of(tuner.fn))
