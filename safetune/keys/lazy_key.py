"""The key of one tuner, whose names are classified at first use and after relevant changes.

Triton reads the text of a kernel and resolves its callees when it compiles; it reads heuristics and
hooks at each launch. The program may have changed any of them since the classification.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CellType, FunctionType, ModuleType
from typing import Any

from safetune import forks
from safetune.errors import PhantomKey
from safetune.frozen import dataclass
from safetune.keys.identity import base_function, is_layer, is_own, layers
from safetune.keys.key_names import KeyReport, classes_of
from safetune.keys.source_text import is_foreign
from safetune.keys.text_facts import facts_of_function
from safetune.keys.written_key import WrittenKey, during, of_a_library, warn_at
from safetune.messages import logger
from safetune.settings import PhantomPolicy

#: Two threads that need the classes first would warn twice.
_one_at_a_time = forks.lock(threading.RLock)


#: (read, argument, value): `read(argument)` was `value`.
Fact = tuple[Callable[[Any], Any], Any, Any]

#: Equal values of these are the same value, such as two equal lengths.
_COMPARED = frozenset({int, bool, str, float})

#: Attributes of a jit function, and of an interpreted one.
_HOOKS = ("launch_metadata", "_repr", "kwargs")


class LazyKey:
    """A key as written, and the last report on its names; None before the first."""

    def __init__(self, written: WrittenKey, policy: PhantomPolicy) -> None:
        self.written = written
        self.last_report: KeyReport | None = None
        self._policy = policy
        self._basis: Basis | None = None
        self._holds = False
        self._of_a_library = of_a_library.get()  # where the tuner is made

    def __copy__(self) -> LazyKey:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """A tuner travels with a hook that launches it; the process there classifies again."""
        return {**self.__dict__, "_basis": None, "_holds": False}

    def write(self, written: WrittenKey) -> None:
        """Replace the key."""
        self.written = written
        self.forget()

    def forget(self) -> None:
        """Reclassify the names at the next use."""
        self._holds = False

    def report(self, tuner: Any) -> KeyReport:
        """Return the classes of the names; raises `PhantomKey`."""
        report, basis = self.last_report, self._basis
        if report is not None and self._holds and basis is not None and basis.holds():
            return report
        with _one_at_a_time:
            if self._basis is basis:
                self._classify(tuner)
            assert self.last_report is not None
            return self.last_report

    def basis(self, tuner: Any) -> Basis:
        """Return the objects that the classes depend on."""
        self.report(tuner)
        assert self._basis is not None
        return self._basis

    def _classify(self, tuner: Any) -> None:
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
        old_basis, old_report = self._basis, self.last_report
        if old_report is None or old_report.unread != report.unread:
            announce(tuner.fn, report, self._policy, self._of_a_library)
        self.last_report, self._basis, self._holds = report, basis, True
        if old_basis is not None and old_report is not None:
            tuner.key_changed(old_report.kept != report.kept or not old_basis.is_of(tuner.fn))


@dataclass(frozen=True)
class Basis:
    """The objects that were read."""

    kernel: Any  # below the tuner
    text: tuple[Fact, ...]  # of the kernel and its callees, with the names that resolve to them
    heuristics: tuple[Fact, ...]  # below the tuner, each with the layer below it
    hooks: tuple[Fact, ...]  # of the configs and of the kernel

    def holds(self) -> bool:
        """Whether none of them has changed."""
        return self.is_of(self.kernel) and hold(self.hooks)

    def is_of(self, kernel: Any) -> bool:
        """Whether this is the same kernel and nothing that affects its result has changed."""
        return kernel is self.kernel and hold(self.text) and hold(self.heuristics)


def hold(facts: tuple[Fact, ...]) -> bool:
    """Whether each read gives the value that it gave."""
    return all(
        (found := read(argument)) is value or _is_same(found, value)
        for read, argument, value in facts
    )


def _is_same(found: Any, value: Any) -> bool:
    while type(found).__name__ == type(value).__name__ == "constexpr":
        found, value = found.value, value.value
    return type(found) is type(value) and type(value) in _COMPARED and bool(found == value)


def basis_of(kernel: Any, configs: Sequence[Any]) -> Basis:
    """Return the objects that the classes of a kernel's key names depend on now."""
    jit, _ = base_function(kernel)
    hooks = (*(_attribute(jit, name) for name in _HOOKS), *_of_configs(configs))
    return Basis(kernel, names_of(kernel, only_callees=True), tuple(_of_heuristics(kernel)), hooks)


def names_of(kernel: Any, only_callees: bool = False) -> tuple[Fact, ...]:
    """Return the steps by which a kernel and its callees resolve their names, or those of callees.

    While they `hold`, all names mean what they did. Else other code is compiled for a new key, so
    its trials belong to another identity; a known key launches what is compiled.
    """
    facts: dict[Any, Fact] = {}
    pending, seen = [base_function(kernel)[0]], set[FunctionType]()
    while pending:
        jit = pending.pop()
        if jit.fn in seen:
            continue
        seen.add(jit.fn)
        facts[id(jit)] = _attribute(jit, "_src")
        text_facts = facts_of_function(jit, jit.fn)
        for name in text_facts.names if text_facts else ():
            steps = list(_lookups(jit.fn, name))
            value = steps[-1][2]
            if is_layer(value) and inspect.isfunction(value.fn) and not is_foreign(value.fn):
                pending.append(value)
            elif only_callees:
                continue
            for read, argument, found in steps:
                owner = id(getattr(read, "__self__", argument))  # a dictionary or a cell
                step = argument if isinstance(argument, str) else ""
                facts[owner, step] = read, argument, found
    return tuple(facts.values())


def _of_heuristics(kernel: Any) -> Iterator[Fact]:
    for layer in layers(kernel)[:-1]:
        if not is_own(layer):  # it may read anything, so nothing rests on it
            return
        yield from (_attribute(layer, name) for name in ("fn", "values"))
        yield len, layer.values, len(layer.values)
        yield from ((layer.values.get, name, function) for name, function in layer.values.items())


def _of_configs(configs: Sequence[Any]) -> Iterator[Fact]:
    yield len, configs, len(configs)
    for number, config in enumerate(configs):
        yield configs.__getitem__, number, config
        yield _attribute(config, "pre_hook")


def _attribute(owner: Any, name: str) -> Fact:
    return vars(owner).get, name, vars(owner).get(name)


def _lookups(caller: FunctionType, name: str) -> Iterator[Fact]:
    """Yield the steps by which a function resolves a dotted name, as far as they lead through the
    user's modules: an attribute of an object may be another one each time.
    """
    first, *attributes = name.split(".")
    if first in caller.__code__.co_freevars:
        cell = (caller.__closure__ or ())[caller.__code__.co_freevars.index(first)]
        value = _contents(cell)
        yield _contents, cell, value
    else:
        value = caller.__globals__.get(first)
        yield caller.__globals__.get, first, value
    for attribute in attributes:
        if not isinstance(value, ModuleType) or is_foreign(value):
            return
        fact = _attribute(value, attribute)
        yield fact
        value = fact[2]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def announce(kernel: Any, report: KeyReport, policy: PhantomPolicy, is_logged: bool) -> None:
    """Warn of the dropped names, or log them; raise `PhantomKey` under the policy `error`."""
    text = _phantom_text(report) if report.unread else ""
    if text and policy is PhantomPolicy.ERROR and not report.kept_all:
        raise PhantomKey(f"{report.location}: {text}")
    if text and is_logged:
        logger.info("%s: %s", report.location, text)
    elif text:
        warn_at(kernel, text)


def _phantom_text(report: KeyReport) -> str:
    phantom = report.unread
    them, are = ("it", "is") if len(phantom) == 1 else ("them", "are")
    action = (
        f". safetune keeps {them}, because no other name would be left"
        if report.kept_all
        else f", so safetune ignores {them}: every new value would be tuned and compiled again. "
        f"Pass keep={list(phantom)} to keep {them}"
    )
    return f"{str(phantom)[1:-1].rstrip(',')} in key= of {report.kernel} {are} never read{action}"


#: Logs instead of warning.
logged = functools.partial(during, of_a_library)
