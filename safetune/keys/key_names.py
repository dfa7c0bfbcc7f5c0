"""Which key names a kernel reads, and what becomes of those that it does not.

Decided once per kernel, from text: nothing is called, compiled or imported. A name that nothing
reads cannot change which config is best; each new value of it would only tune and compile again.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from safetune.errors import InvalidSetting, PhantomKey
from safetune.keys.body_usage import Reads, body_reads
from safetune.keys.callback_usage import reader_reads
from safetune.keys.grid_usage import grid_reads
from safetune.keys.kernel_digest import base_function, definition_line, inner_heuristics, option_of
from safetune.settings import PhantomPolicy

_log = logging.getLogger("safetune")

#: Names that say themselves that they are there to group values, as flash-attn and FBGEMM use them.
_BUCKET = re.compile(r"bucket|^cache_key_|^autotune_|_key$", re.IGNORECASE)


class PhantomKeyWarning(UserWarning):
    """A key names something that cannot matter, or that is not there."""


class NameKind(str, Enum):
    """What a key name is."""

    UNKNOWN = "unknown"
    READ = "read"
    BUCKET = "bucket"
    KEPT = "kept"
    PHANTOM = "phantom"


@dataclass(frozen=True)
class NameReport:
    """One key name: what it is, and why."""

    name: str
    kind: NameKind
    reason: str


@dataclass(frozen=True)
class KeyReport:
    """What became of a key. `str()` of it is what people read.

    Attributes:
        kernel: the kernel's name.
        location: where it is defined, as `file:line`.
        names: one report per key name, in the key's order.
        missing: constexprs that the body reads and that key, configs and heuristics leave out.
        kept_all: nothing reads any of the names, so all of them are kept.
        constexprs: the parameters that are compile-time constants.
    """

    kernel: str
    location: str
    names: tuple[NameReport, ...]
    missing: tuple[str, ...]
    kept_all: bool
    constexprs: frozenset[str]

    @property
    def kept(self) -> tuple[str, ...]:
        """The names that make up the key, in its order."""
        gone = (NameKind.UNKNOWN, NameKind.PHANTOM)
        return tuple(report.name for report in self.names if report.kind not in gone)

    @property
    def dropped(self) -> tuple[str, ...]:
        """The names that do not, phantom or unknown."""
        return tuple(report.name for report in self.names if report.name not in self.kept)

    @property
    def pinned(self) -> tuple[str, ...]:
        """The parameters of which any value compiles to the same kernel: every dropped phantom."""
        return self.of_kind(NameKind.PHANTOM)

    @property
    def pinned_constexprs(self) -> tuple[str, ...]:
        """Those of `pinned` that are compile-time constants."""
        return tuple(name for name in self.pinned if name in self.constexprs)

    def of_kind(self, kind: NameKind) -> tuple[str, ...]:
        """Return the names of one kind, in the key's order."""
        return tuple(report.name for report in self.names if report.kind is kind)

    def __str__(self) -> str:
        width = max((len(report.name) for report in self.names), default=0)
        lines = [f"{self.kernel} ({self.location})"]
        lines += [
            f"  {report.name:<{width}}  {report.kind.value:<7}  {report.reason}"
            for report in self.names
        ]
        if not self.names:
            lines.append("  the key is empty: every call shares one choice")
        if self.missing:
            lines.append(f"  read, and not in the key: {', '.join(self.missing)}")
            lines.append('  key="auto" would add them')
        return "\n".join(lines)


def classify(
    kernel: Any,
    key: Iterable[str] | str | None,
    *,
    configs: Iterable[Any],
    policy: PhantomPolicy = PhantomPolicy.DROP,
    keep: Iterable[str] = (),
    prune_configs_by: Mapping[str, Any] | None = None,
    pre_hook: Any = None,
    post_hook: Any = None,
) -> KeyReport:
    """Return what each name in `key` is, and warn about those that are dropped.

    Args:
        kernel: the jit function, or what decorates it below the tuner.
        key: the names, or "auto" for every one that is read and that nothing sets.
        configs: the configs; what they set needs no place in the key.
        policy: what becomes of a name that nothing reads.
        keep: names that stay although nothing reads them.
        prune_configs_by, pre_hook, post_hook: as in `triton.autotune`.

    Raises:
        InvalidSetting: `key` is a single name, `keep` has a name that `key` lacks, or `kernel` is
            not a Triton kernel.
        PhantomKey: nothing reads a name, under the policy `error`.
    """
    configs = list(configs)
    facts = _Kernel(kernel, configs)
    facts.readers = reader_reads(kernel, configs, prune_configs_by, pre_hook, post_hook)
    keep = _names("keep", keep)
    names = facts.automatic_key() if key == "auto" else _names("key", key)
    if stray := [name for name in keep if name not in names]:
        raise InvalidSetting(
            f"keep={keep} of {facts.name} has {', '.join(stray)}, which is not in key={names}"
        )
    judged = [facts.judge(name, keep, policy) for name in names]
    phantom = [report.name for report in judged if report.kind is NameKind.PHANTOM]
    reports = _never_empty(judged)
    report = KeyReport(
        kernel=facts.name,
        location=f"{facts.file}:{facts.line}",
        names=tuple(reports),
        missing=() if key == "auto" else facts.missing(names),
        kept_all=reports != judged,
        constexprs=frozenset(facts.constexprs),
    )
    _announce(report, phantom, facts, policy)
    return report


def _never_empty(reports: list[NameReport]) -> list[NameReport]:
    """Keep all phantoms where no other name would be left: one choice for all calls is worse."""
    if any(report.kind not in (NameKind.PHANTOM, NameKind.UNKNOWN) for report in reports):
        return reports
    reason = "nothing reads it; kept because no other name would be left"
    return [
        replace(report, kind=NameKind.KEPT, reason=reason)
        if report.kind is NameKind.PHANTOM
        else report
        for report in reports
    ]


class _Kernel:
    """What is to be known of a kernel to judge its key."""

    readers: Reads

    def __init__(self, kernel: Any, configs: Sequence[Any]) -> None:
        jit, function = base_function(kernel)
        self._kernel = kernel
        self.name = function.__name__
        self.file = function.__code__.co_filename
        self.line = definition_line(jit) or function.__code__.co_firstlineno
        self.parameters = inspect.signature(function).parameters
        self.constexprs = [
            name for name, p in self.parameters.items() if "constexpr" in str(p.annotation)
        ]
        skipped = option_of(jit, "do_not_specialize") or ()
        ordered = list(self.parameters)
        self._unspecialized = {ordered[n] if isinstance(n, int) else n for n in skipped}
        self._set = set(inner_heuristics(kernel)).union(*(config.kwargs for config in configs))
        self._body = body_reads(kernel)
        self._grids: Reads | None = None

    def reader_of(self, name: str) -> str:
        """Return who reads a parameter, or "". The module is searched for grids last."""
        found = self._body.find(name) or self.readers.find(name)
        if found:
            return found
        if self._grids is None:
            self._grids = grid_reads(self._kernel, list(self.parameters))
        return self._grids.find(name)

    def judge(self, name: str, keep: Sequence[str], policy: PhantomPolicy) -> NameReport:
        """Return what one key name is."""
        if name not in self.parameters:
            return NameReport(name, NameKind.UNKNOWN, "no parameter of the kernel")
        reader = self.reader_of(name)
        if reader:
            return NameReport(name, NameKind.READ, f"read by {reader}")
        if name in keep:
            return NameReport(name, NameKind.KEPT, "nothing reads it; kept by keep=")
        if _BUCKET.search(name):
            return NameReport(name, NameKind.BUCKET, "nothing reads it; named as a bucket")
        if policy is PhantomPolicy.KEEP:
            return NameReport(name, NameKind.KEPT, 'nothing reads it; kept by phantom="keep"')
        return NameReport(name, NameKind.PHANTOM, "nothing reads it; dropped")

    def automatic_key(self) -> list[str]:
        """Return every parameter that is read and that neither config nor heuristic sets."""
        return [
            name
            for name in self.parameters
            if name not in self._set and name not in self._unspecialized and self.reader_of(name)
        ]

    def missing(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the constexprs that the body reads and that nothing accounts for."""
        accounted = self._set.union(names)
        return tuple(n for n in self.constexprs if n not in accounted and self._body.find(n))


def _names(what: str, names: Iterable[str] | str | None) -> list[str]:
    if isinstance(names, str):
        raise InvalidSetting(f'{what}={names!r} is one string; write {what}=["{names}"]')
    found = list(dict.fromkeys(names or ()))
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise InvalidSetting(
            f"{what} has {wrong[0]!r}, of type {type(wrong[0]).__name__}; give names of arguments"
        )
    return found


def _announce(
    report: KeyReport, phantom: Sequence[str], facts: _Kernel, policy: PhantomPolicy
) -> None:
    unknown = report.of_kind(NameKind.UNKNOWN)
    if unknown:
        _warn(
            facts,
            f"the key of {report.kernel} names {', '.join(unknown)}, no parameter of the kernel; "
            f"ignored. Its parameters: {', '.join(facts.parameters)}",
        )
    if phantom and policy is PhantomPolicy.ERROR and not report.kept_all:
        raise PhantomKey(_phantom_text(report, phantom))
    if phantom:
        _warn(facts, _phantom_text(report, phantom))
    if report.missing:
        text = '%s: %s reads %s, which neither its key nor its configs set; key="auto" would tell '
        missing = ", ".join(report.missing)
        _log.info(text + "their values apart", report.location, report.kernel, missing)


def _phantom_text(report: KeyReport, phantom: Sequence[str]) -> str:
    names = ", ".join(phantom)
    what = (
        "kept, because no other name would be left"
        if report.kept_all
        else f"dropped. To keep: keep={list(phantom)}"
    )
    return (
        f"{report.location}: the key of {report.kernel} names {names}, which nothing reads: "
        f"each new value would tune and compile again. {what[0].upper()}{what[1:]}."
    )


_logged: ContextVar[bool] = ContextVar("safetune_keys_are_logged", default=False)


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Log what would be warned of: whoever runs a library as it is cannot change its keys."""
    token = _logged.set(True)
    try:
        yield
    finally:
        _logged.reset(token)


def _warn(facts: _Kernel, message: str) -> None:
    if _logged.get():
        _log.info("%s", message)
    else:  # at the kernel's own line: the decorator's caller may be any number of frames away
        warnings.warn_explicit(message, PhantomKeyWarning, facts.file, facts.line)
