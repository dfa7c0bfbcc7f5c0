"""The rules: mistakes in a tuner, and the lines of text that show them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from safetune.frozen import dataclass
from safetune.keys.key_names import KernelFacts, KeyReport, NameKind, NameReport, report_of
from safetune.keys.source_text import parameters, walk
from safetune.lint.names import arguments
from safetune.lint.passed import Passed
from safetune.lint.tuners import Tuner
from safetune.settings import PhantomPolicy

#: The rules: docs/lint.md explains them.
_OF_KEY_NAMES = ("phantom", "stand-in", "size", "bucket", "unseen", "unknown")
RULES = (*_OF_KEY_NAMES, "flag", "length", "twice")

#: What to do about a key name of each class.
_REMEDIES = {
    NameKind.PHANTOM: "remove it from the key",
    NameKind.KEPT: "put a name that the kernel reads in the key, or an empty key",
    NameKind.STAND_IN: "put that argument in the key instead",
    NameKind.SIZE: "put a bucket of that size in the key, under a name that the kernel reads",
    NameKind.BUCKET: "each value is tuned; remove it if one config is the best for all of them",
    NameKind.UNSEEN: "remove it, or put what it stands for in the key",
    NameKind.UNKNOWN: "give the name of a parameter",
}


@dataclass(frozen=True)
class Finding:
    """One finding, at a place in a file; lines and columns start at 1."""

    rule: str
    path: str
    line: int
    column: int
    kernel: str
    message: str
    ignored_at: tuple[int, ...] = ()  # the lines whose comment ignores it


def findings_of(tuner: Tuner, path: str) -> Iterator[Finding]:
    """Yield the findings of all rules for a tuner."""
    lines = (tuner.decorator.lineno, tuner.function.lineno)
    for rule, node, message in _found(tuner):
        line = getattr(node, "lineno", lines[0])
        column = getattr(node, "col_offset", 0) + 1
        yield Finding(rule, path, line, column, tuner.name, message, (line, *lines))


#: A rule's name, the place, and the message.
_Found = Iterator[tuple[str, ast.AST, str]]


def _found(tuner: Tuner) -> _Found:
    facts = tuner.facts()
    key = tuner.key()
    names = list(facts.parameters)
    in_key = [name for name in (key and key.names) or () if name in names]
    passed = Passed(facts.launches, names, in_key, tuner.function, tuner.scope.get)
    lengths = dict(_lengths(facts, passed))
    if key is not None:
        report = report_of(facts, key, PhantomPolicy.DROP)
        yield from _key_names(tuner, report, passed)
        for name in report.missing:
            if name not in lengths and not tuner.is_single:
                yield from _flag(tuner, name, in_key, passed)
    for name, message in lengths.items():
        yield "length", _parameter(tuner, name), message
    yield from _twice(tuner)


def _key_names(tuner: Tuner, report: KeyReport, passed: Passed) -> _Found:
    for name in report.names:
        if name.kind is NameKind.READ or name.reason.endswith("kept by keep="):
            continue
        if name.kind is NameKind.BUCKET and tuner.is_single:
            continue
        if _stands_for_a_tensor(tuner, name) or _is_dtype_of_descriptors(tuner, name.name, passed):
            continue
        rule = "phantom" if name.kind is NameKind.KEPT else name.kind.value
        reason = name.reason.removesuffix("; kept").removesuffix("; dropped")
        message = f"key name {name.name}: {reason}; {_REMEDIES[name.kind]}"
        yield rule, _in_key(tuner, name.name), message


def _stands_for_a_tensor(tuner: Tuner, report: NameReport) -> bool:
    """Whether the argument that is made of a key name is a tensor, which cannot be in a key."""
    made = re.search(r"(\w+), which the key lacks", report.reason)
    return report.kind is NameKind.STAND_IN and made is not None and made[1] in tuner.tensors


def _is_dtype_of_descriptors(tuner: Tuner, name: str, passed: Passed) -> bool:
    """Whether a name is the dtype of tensors in descriptors, whose dtypes Triton's key lacks."""
    accessed = {
        node.func.value.id
        for node in walk(tuner.function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr in ("load", "store") and isinstance(node.func.value, ast.Name)
    }
    return passed.is_dtype(name) and bool(accessed.intersection(parameters(tuner.function)))


def _in_key(tuner: Tuner, name: str) -> ast.AST:
    """Return where the decorator writes a key name; the decorator, where it does not."""
    for node in walk(tuner.option("key", 1) or ast.Pass()):
        if isinstance(node, ast.Constant) and node.value == name:
            return node
    return tuner.decorator


def _parameter(tuner: Tuner, name: str) -> ast.AST:
    return arguments(tuner.function).get(name, tuner.function)


def _flag(tuner: Tuner, name: str, key: list[str], passed: Passed) -> _Found:
    differing = passed.flag(name, key)
    if differing and not passed.is_told(name, tuner.tensors, key):
        message = (
            f"the kernel reads flag {name}, the key lacks it, and launches pass {differing}: calls "
            f"that differ in it share one config; add {name} to the key"
        )
        yield "flag", _parameter(tuner, name), message


def _lengths(facts: KernelFacts, passed: Passed) -> Iterator[tuple[str, str]]:
    """Yield each constexpr that is a length, and the message."""
    for name in facts.constexprs():
        if name in passed.names() and facts.body_reads(name) and (length := passed.length(name)):
            yield (
                name,
                f"constexpr {name} is a length, {length}: each new value compiles the kernel "
                "again; make it a run-time argument, with do_not_specialize",
            )


def _twice(tuner: Tuner) -> _Found:
    seen: set[Any] = set()
    for config in tuner.written if tuner.configs else ():
        if config.identity is not None and config.identity in seen:
            yield "twice", tuner.decorator, f"config {config} is listed twice"
        seen.add(config.identity)
