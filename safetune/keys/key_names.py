"""Classifies key names: the kernel reads them, or they are dropped because nothing reads them.

Names are classified once per kernel, from the text of the kernel's package: no code is called,
compiled or imported. Each new value of an unread name would tune and compile again. An unread name
can still stand for another value; it is kept as far as launches show that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from safetune import forks
from safetune.both import backend
from safetune.frozen import dataclass
from safetune.keys.identity import base_function, inner_heuristics
from safetune.keys.kernel_text import Usage, usage_in_body
from safetune.keys.source_text import definition_line, file_of
from safetune.keys.written_key import WrittenKey
from safetune.settings import PhantomPolicy
from safetune.triton_internals import COMPILE_OPTIONS, CONFIG_OPTIONS

if TYPE_CHECKING:
    from safetune.keys.launch_usage import LaunchArguments
    from safetune.keys.launches import Launch


#: Names for groups of values, as flash-attn and FBGEMM use them.
_BUCKET = re.compile(r"bucket|^cache_key_|^autotune_|_key$", re.IGNORECASE)


class NameKind(str, Enum):
    """The class of a key name."""

    UNKNOWN = "unknown"
    READ = "read"
    BUCKET = "bucket"
    STAND_IN = "stand-in"
    SIZE = "size"
    UNSEEN = "unseen"
    KEPT = "kept"
    PHANTOM = "phantom"


_DROPPED = (NameKind.UNKNOWN, NameKind.PHANTOM)


@dataclass(frozen=True)
class NameReport:
    """The class of one key name, and the reason."""

    name: str
    kind: NameKind
    reason: str


@dataclass(frozen=True)
class KeyReport:
    """The class of every name in a key. `str()` of it prints readably."""

    kernel: str  # the kernel's name
    location: str  # the kernel's definition, as `file:line`
    names: tuple[NameReport, ...]  # one report per key name, in the key's order
    #: Constexprs that the body reads and that key, configs and heuristics leave out.
    missing: tuple[str, ...]
    unread: tuple[str, ...]  # the phantom names, also where all names are kept
    #: The dropped parameters that the compiled kernel gets as a constant: new values of them do not
    #: compile again.
    pinned: tuple[str, ...]
    kept_all: bool  # nothing reads any of the names, so all of them are kept

    @property
    def kept(self) -> tuple[str, ...]:
        """The names that make up the key, in order."""
        return tuple(report.name for report in self.names if report.kind not in _DROPPED)

    @property
    def dropped(self) -> tuple[str, ...]:
        """The names that are not part of the key: phantom or unknown."""
        return tuple(report.name for report in self.names if report.kind in _DROPPED)

    def __str__(self) -> str:
        lines = [f"{self.kernel} ({self.location})"]
        width = max((len(report.name) for report in self.names), default=0)
        kinds = max((len(report.kind.value) for report in self.names), default=0)
        lines += [
            f"  {report.name:<{width}}  {report.kind.value:<{kinds}}  {report.reason}"
            for report in self.names
        ]
        if not self.names:
            lines.append("  the key is empty: every call shares one choice")
        if self.missing:
            lines.append(f"  read, and not in the key: {', '.join(self.missing)}")
        return "\n".join(lines)


def classes_of(
    kernel: Any,
    key: WrittenKey,
    configs: Sequence[Any],
    policy: PhantomPolicy,
    **callbacks: Any,
) -> KeyReport:
    """Return the class of each name in a checked key, without warnings.

    `callbacks` are `prune_configs_by`, `pre_hook` and `post_hook`, as in `triton.autotune`.
    """
    with backend.no_collection():
        return report_of(KernelFacts(kernel, configs, callbacks), key, policy)


def report_of(facts: KernelFacts, key: WrittenKey, policy: PhantomPolicy) -> KeyReport:
    """Return the class of each name in a key, from what is known of its kernel."""
    reports = facts.classify(key.names, [*key.keep, *key.kept], policy)
    reports = [_by_bucket(each) if each.name in key.buckets else each for each in reports]
    phantom = [report.name for report in reports if report.kind is NameKind.PHANTOM]
    # One choice for all calls is worse than tuning too often.
    kept_all = len(phantom) > 0 and all(report.kind in _DROPPED for report in reports)
    if kept_all:
        reason = "nothing reads it; kept because no other name would be left"
        reports = [
            NameReport(report.name, NameKind.KEPT, reason) if report.name in phantom else report
            for report in reports
        ]
    return KeyReport(
        kernel=facts.name,
        location=f"{facts.file}:{facts.line}",
        names=tuple(reports),
        missing=facts.missing(key.names),
        unread=tuple(phantom),
        pinned=() if kept_all or facts.options_by_launch else tuple(phantom),
        kept_all=kept_all,
    )


def _by_bucket(report: NameReport) -> NameReport:
    kind = NameKind.READ if report.kind is NameKind.READ else NameKind.BUCKET
    reason = report.reason.partition("; ")[0]
    return NameReport(report.name, kind, f"{reason}; its bucket is in the key")


class KernelFacts:
    """A kernel's parameters and the code that reads each, as far as its key depends on them."""

    def __init__(self, kernel: Any, configs: Sequence[Any], callbacks: Mapping[str, Any]) -> None:
        jit, function = base_function(kernel)
        self.kernel = kernel
        self.name = function.__name__
        self.file = file_of(function)
        self.line = definition_line(jit) or function.__code__.co_firstlineno
        self.parameters = inspect.signature(function).parameters
        in_configs = [config.kwargs for config in configs]
        self._set_below = set(inner_heuristics(kernel)).union(*in_configs)
        self._body = usage_in_body(kernel)
        self._configs, self._callbacks = configs, callbacks

    @forks.cached_property
    def _set(self) -> set[str]:
        from safetune.keys.callback_usage import set_above

        return self._set_below.union(set_above(self.kernel))

    @forks.cached_property
    def _around(self) -> Usage:
        from safetune.keys.callback_usage import usage_in_callbacks

        return usage_in_callbacks(self.kernel, self._configs, **self._callbacks)

    @forks.cached_property
    def launches(self) -> list[Launch]:
        """The launches in the text of the kernel's package."""
        from safetune.keys.launches import launches_of

        return launches_of(self.kernel)

    @forks.cached_property
    def _grids(self) -> Usage:
        from safetune.keys.launch_usage import usage_in_grids

        return usage_in_grids(self.launches, list(self.parameters))

    def reader_of(self, name: str) -> str:
        """Return the reader of a parameter, or "". Searches the package for grids last."""
        return (
            self._body.reader_of(name)
            or self._around.reader_of(name)
            or ("Triton, as a launch option" if name in COMPILE_OPTIONS else "")
            or self._grids.reader_of(name)
        )

    def classify(
        self, names: Sequence[str], keep: Sequence[str], policy: PhantomPolicy
    ) -> list[NameReport]:
        """Return the class of each key name."""
        reports = {name: self._by_name(name, keep, policy) for name in names}
        unread = [name for name, report in reports.items() if report is None]
        if unread:
            reports.update((report.name, report) for report in self._by_launch(names, unread))
        return [report for report in reports.values() if report is not None]

    def _by_name(self, name: str, keep: Sequence[str], policy: PhantomPolicy) -> NameReport | None:
        """Return the class of a name; None where nothing reads it, or asks to keep it."""
        if name not in self.parameters:
            return NameReport(name, NameKind.UNKNOWN, "not a parameter of the kernel; dropped")
        reader = self.reader_of(name)
        if reader:
            return NameReport(name, NameKind.READ, f"read by {reader}")
        if name in keep:
            return NameReport(name, NameKind.KEPT, "nothing reads it; kept by keep=")
        if _BUCKET.search(name):
            return NameReport(name, NameKind.BUCKET, "nothing reads it; named like a bucket")
        if policy is PhantomPolicy.KEEP:
            return NameReport(name, NameKind.KEPT, 'nothing reads it; kept by phantom="keep"')
        return None

    def _by_launch(self, names: Sequence[str], unread: Sequence[str]) -> Iterator[NameReport]:
        """Yield the classes of the names that nothing reads, by the values that launches pass."""
        from safetune.keys.launch_usage import LaunchArguments

        arguments = LaunchArguments(self.launches, list(self.parameters))
        missing = self.missing(names)
        known = self._set.union(names, missing)
        read = [name for name in self.parameters if name not in known and self.reader_of(name)]
        others = [*missing, *read]
        stand_ins = {name: arguments.made_of(name, others) for name in unread}
        given = [name for name in names if stand_ins.get(name, "read")]
        for name in unread:
            kind, why = NameKind.STAND_IN, stand_ins[name]
            if not why:
                kind, why = self._by_size(name, arguments, given, missing)
            action = "dropped" if kind is NameKind.PHANTOM else "kept"
            yield NameReport(name, kind, "; ".join(filter(None, ["nothing reads it", why, action])))

    def _by_size(
        self, name: str, arguments: LaunchArguments, given: Sequence[str], missing: Sequence[str]
    ) -> tuple[NameKind, str]:
        """Return the class of an unread name that is not a stand-in, and why.

        `given` are the key names whose values are in the key, `missing` constexprs that it lacks.
        """
        from safetune.keys.launches import may_be_launched_unseen

        hidden = not arguments.shown or may_be_launched_unseen(self.kernel)
        if hidden and (missing or self._multiplies_matrices):
            some = ", ".join(missing[:3]) + (", and others" if missing[3:] else "")
            lacks = f"the key lacks {some}" if missing else "the kernel has tl.dot"
            return NameKind.UNSEEN, f"some launches hide its value, and {lacks}"
        sizes = arguments.sizes_of(name, given)
        if not sizes:
            return NameKind.PHANTOM, ""
        if self._multiplies_matrices:
            return NameKind.SIZE, f"made of {sizes}, which may decide a tile of tl.dot"
        return NameKind.PHANTOM, f"made of {sizes}, but the kernel has no tl.dot"

    @forks.cached_property
    def _multiplies_matrices(self) -> bool:
        from safetune.keys.kernel_text import multiplies_matrices

        return multiplies_matrices(self.kernel)

    def missing(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the constexprs that the body reads but neither key nor config sets."""
        read = [n for n in self.constexprs() if n not in names and self._body.reader_of(n)]
        return tuple(name for name in read if name not in self._set) if read else ()

    def constexprs(self) -> list[str]:
        """Return the constexprs that no config and no heuristic below the tuner sets."""
        return [name for name in self._constants if name not in self._set_below]

    @property
    def _constants(self) -> list[str]:
        annotations = {name: str(each.annotation) for name, each in self.parameters.items()}
        return [name for name, annotation in annotations.items() if "constexpr" in annotation]

    @property
    def options_by_launch(self) -> bool:
        """Whether Triton takes a compile option from one launch, but looks the binary up without
        it.

        A parameter named like an option causes this if it may be passed by position, left to its
        default, or not be a constant. Then the launch that compiles must be the same as without
        safetune.
        """
        always_constant = CONFIG_OPTIONS.union(self._set_below).intersection(self._constants)
        return not COMPILE_OPTIONS.isdisjoint(self.parameters.keys() - always_constant)

    def body_reads(self, name: str) -> bool:
        """Whether the kernel's body reads a parameter."""
        return bool(self._body.reader_of(name))
