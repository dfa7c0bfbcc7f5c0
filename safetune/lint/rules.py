"""The rules: what is wrong with a tuner, and where its text says so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from safetune.frozen import dataclass
from safetune.keys.key_names import KernelFacts, KeyReport, NameKind, NameReport, report_of
from safetune.keys.source_text import parameters, walk
from safetune.lint.absent import INTEGERS
from safetune.lint.frames import arguments
from safetune.lint.passed import Passed
from safetune.lint.repeats import same_again
from safetune.lint.tiles import SMALLEST, least_shared_memory, looped_tiles
from safetune.lint.tuners import Tuner
from safetune.lint.values import WrittenConfig
from safetune.settings import PhantomPolicy

#: What each rule finds, for people.
RULES = {
    "phantom": "a key name that nothing reads: each new value tunes and compiles again",
    "stand-in": "a key name that nothing reads; an argument that the key lacks is made of it",
    "size": "a key name that nothing reads, made of a size that may decide a tile",
    "bucket": "a key name that nothing reads, named as a group of values",
    "unseen": "a key name that nothing reads, where not every launch shows its value",
    "unknown": "a key name that is not a parameter of the kernel",
    "flag": "a flag that the body reads and the key lacks: the first call's value decides for all",
    "constexpr": "a constexpr that the body reads and the key lacks, and that launches pass",
    "length": "a length that is a constexpr: each new value compiles the kernel again",
    "in-place": "an argument that the kernel reads and overwrites, without restore_value",
    "twice": "a config that is listed twice",
    "too-large": "a list in which every config needs more shared memory than small GPUs have",
}

#: The rules that are asked for by default. Many kernels leave the number of heads out of their key.
DEFAULT = frozenset(RULES) - {"constexpr"}

#: What to do about a key name of each class.
_REMEDIES = {
    NameKind.PHANTOM: "remove it from the key",
    NameKind.KEPT: "put a name that the kernel reads in the key, or an empty key",
    NameKind.STAND_IN: "put that argument in the key instead",
    NameKind.SIZE: "put a bucket of that size in the key, under a name that the kernel reads",
    NameKind.BUCKET: "each of its values is tuned; remove it if they have one best config",
    NameKind.UNSEEN: "remove it, or put what it stands for in the key",
    NameKind.UNKNOWN: "give the name of a parameter",
}


@dataclass(frozen=True)
class Finding:
    """One finding, at a place in a file; lines and columns begin at 1."""

    rule: str
    path: str
    line: int
    column: int
    kernel: str
    message: str
    ignored_at: tuple[int, ...] = ()  # the lines whose comment ignores it


def findings_of(tuner: Tuner, path: str) -> Iterator[Finding]:
    """Yield what the rules find in a tuner."""
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
    passed = Passed(facts.launches, names, in_key, tuner.function, tuner.frame.get)
    lengths = dict(_lengths(facts, passed))
    if key is not None:
        report = report_of(facts, key, PhantomPolicy.DROP)
        yield from _key_names(tuner, report, passed)
        if key.names is not None and not tuner.is_single:
            missing = [name for name in report.missing if name not in lengths]
            yield from _missing(tuner, report, missing, passed)
    for name, message in lengths.items():
        yield "length", _parameter(tuner, name), message
    if not (tuner.is_safetunes or tuner.is_single):
        yield from _in_place(tuner, passed)
    yield from _twice(tuner)
    yield from _too_large(tuner)


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
    if report.kind is not NameKind.STAND_IN or made is None:
        return False
    return made[1] in tuner.accesses.loaded | tuner.accesses.stored


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
    given = [k.value for k in tuner.decorator.keywords if k.arg == "key"]
    for part in [*given, *tuner.decorator.args[1:2]]:
        for node in ast.walk(part):
            if isinstance(node, ast.Constant) and node.value == name:
                return node
    return tuner.decorator


def _parameter(tuner: Tuner, name: str) -> ast.AST:
    return arguments(tuner.function).get(name, tuner.function)


def _missing(tuner: Tuner, report: KeyReport, missing: Sequence[str], passed: Passed) -> _Found:
    key = [name.name for name in report.names if name.kind is not NameKind.UNKNOWN]
    found = {name: passed.difference(name, key) for name in missing}
    # Triton's key has the dtypes of the arguments that are given: they show whether an optional
    # tensor is there, and whether it is one of integers or of numbers.
    optional = {each.optional for each in found.values() if each and each.optional}
    integers = {name for name in optional if INTEGERS.search(name)}
    tensors = tuner.accesses.loaded | tuner.accesses.stored if any(found.values()) else ()
    for name, difference in found.items():
        if difference is None:
            continue
        alike = integers if difference.optional in integers else optional - integers
        if difference.optional and len(alike) < 2:
            continue
        rule = "flag" if difference.boolean else "constexpr"
        if rule == "flag" and not difference.optional and passed.is_told(name, tensors):
            continue
        message = (
            f"{rule} {name} is read and not in the key, and launches pass {difference.text}: calls "
            f"that differ in it share one config; add {name} to the key"
        )
        yield rule, _parameter(tuner, name), message


def _lengths(facts: KernelFacts, passed: Passed) -> Iterator[tuple[str, str]]:
    """Yield each constexpr that is a length, and the message."""
    for name in facts.constexprs():
        if name in passed.names() and facts.body_reads(name) and (length := passed.length(name)):
            yield (
                name,
                f"constexpr {name} is a length, {length}: each new value compiles the kernel "
                "again; make it a run-time argument, with do_not_specialize",
            )


def _in_place(tuner: Tuner, passed: Passed) -> _Found:
    restored, zeroed = tuner.names("restore_value"), tuner.names("reset_to_zero")
    if restored is None or zeroed is None or tuner.options.get("pre_hook") is not None:
        return
    if any(config.pre_hook is not None for config in tuner.written):
        return
    handled = {*restored, *zeroed}
    accesses = tuner.accesses
    found = {name: f"the kernel {how}" for name, how in accesses.updated.items()}
    same = [*passed.same(accesses.loaded, accesses.stored)]
    for stored, loaded, location in same if same and not same_again(tuner.function) else ():
        how = f"the kernel stores to it, and {location} passes the same tensor as {loaded}"
        found.setdefault(stored, how)
    for name, how in found.items():
        if name not in handled:
            remedy = f'restore_value=["{name}"]'
            message = f"argument {name}: {how}, so each timed launch changes it; add {remedy}"
            yield "in-place", _parameter(tuner, name), message


def _twice(tuner: Tuner) -> _Found:
    seen: set[Any] = set()
    for config in tuner.written if tuner.configs.complete else ():
        identity = config.identity
        if identity is not None and identity in seen:
            yield "twice", _config_place(tuner, config), f"config {config} is listed twice"
        seen.add(identity)


def _too_large(tuner: Tuner) -> _Found:
    if not tuner.configs.complete or len(tuner.written) < len(tuner.configs):
        return
    loops = looped_tiles(tuner.function)
    needed = [least_shared_memory(loops, config) for config in tuner.written]
    if min(needed, default=0) > SMALLEST:
        message = (
            f"every config needs at least {min(needed):,} bytes of shared memory with elements of "
            f"two bytes; an RTX 3090, 4090 or 5090 has {SMALLEST:,}, the least of the supported "
            "GPUs: add a smaller config"
        )
        yield "too-large", tuner.decorator, message


def _config_place(tuner: Tuner, config: WrittenConfig) -> ast.AST:
    """Return the config's call, where the decorator writes it; else the decorator."""
    inside = any(node is config.node for node in ast.walk(tuner.decorator))
    return config.node if inside else tuner.decorator
