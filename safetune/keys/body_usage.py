"""Which parameters of a kernel its body reads.

A parameter is read when its value can reach anything. It is not read when it is only passed to a
callee that ignores it, or assigned before it is used. Code that cannot be followed reads all of its
arguments. What is found is what the text shows: a value may decide something in other ways, as the
size that another argument was computed from does (see `launch_usage`).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from safetune.keys.kernel_digest import base_function, is_own
from safetune.keys.source_text import (
    MISSING,
    Scope,
    Use,
    definition_line,
    dotted,
    file_of,
    is_foreign,
    last_name,
    source_of,
    stores,
    tree_of,
    walk,
)
from safetune.keys.text_facts import facts_of

#: Functions that use the matrix units; those with `mma` in their name are Gluon's.
_MATRIX_PRODUCT = re.compile(r"dot|dot_scaled|\w*mma\w*")


class Usage:
    """The first reader of each name, as text with file and line, and one that may read any name."""

    def __init__(self, names: dict[str, str] | None = None, everything: str = "") -> None:
        self.names = names or {}
        self.everything = everything

    def reader_of(self, name: str) -> str:
        """Return what reads `name`, or "" where nothing does."""
        return self.names.get(name) or self.everything

    def add(self, other: Usage) -> None:
        """Add the readers in `other`; the first reader of a name stays."""
        self.names = {**other.names, **self.names}
        self.everything = self.everything or other.everything


def usage_in_body(kernel: Any) -> Usage:
    """Return the parameters that a kernel reads, through every jit function that it calls."""
    jit, function = base_function(kernel)
    lines = _jit_lines(jit, {})
    if lines is None:
        return Usage(everything="the body, whose source is missing")
    file = Path(file_of(function)).name
    offset = max(definition_line(jit) - 1, 0)
    return Usage({name: f"the body ({file}:{line + offset})" for name, line in lines.items()})


def calls_followed(kernel: Any) -> Iterator[tuple[FunctionType, str, Any]]:
    """Yield (caller, name, callee) for each callee that is asked whether it reads a parameter."""
    pending, seen = [base_function(kernel)[0]], set[FunctionType]()
    while pending:
        jit = pending.pop()
        if jit.fn in seen or not can_be_followed(jit):
            continue
        seen.add(jit.fn)
        scope = Scope(jit.fn)
        for name in {use.callee for use in _uses(jit) or () if use.callee}:
            callee = scope.value_of(name)
            if can_be_followed(callee):
                yield jit.fn, name, callee
                pending.append(callee)


def multiplies_matrices(kernel: Any) -> bool:
    """Whether a kernel, or anything that it may call, has a `tl.dot` or `tl.dot_scaled`."""
    pending, seen = [base_function(kernel)[0]], set()
    while pending:
        jit = pending.pop()
        if jit.fn in seen:
            continue
        seen.add(jit.fn)
        if not can_be_followed(jit):
            return True
        text = source_of(jit) or ""
        scope, tree = Scope(jit.fn), tree_of(text)
        names = {*facts_of(text).names} - {name for _, name in stores(tree)}
        values = {name: scope.value_of(name) for name in names - set(dir(builtins))}
        if MISSING in values.values() or _names_product(tree, values):
            return True
        pending += [v for v in values.values() if hasattr(v, "fn") and not is_foreign(v.fn)]
    return False


def _names_product(tree: ast.AST, values: Mapping[str, Any]) -> bool:
    """Whether a text names a function that multiplies matrices, given what its free names are.

    The body of a function that can be followed tells more than its name.
    """
    called = [node.func for node in walk(tree) if isinstance(node, ast.Call)]
    names = {last_name(each) for each in called if dotted(each) not in values}
    for name, value in values.items():
        if callable(value) and not can_be_followed(value):
            names |= {name.rpartition(".")[2], getattr(value, "__name__", "")}
    return any(map(_MATRIX_PRODUCT.fullmatch, names))


def can_be_followed(callee: Any) -> bool:
    """Whether a callee runs its text as it is written, so that the text tells what it reads."""
    return (
        is_own(callee)
        and inspect.isfunction(callee.fn)
        and not is_foreign(callee.fn)
        # Python shows the text of the function that is wrapped, and runs the wrapper.
        and not hasattr(callee.fn, "__wrapped__")
    )


def _uses(jit: Any) -> tuple[Use, ...] | None:
    try:
        return facts_of(source_of(jit) or "").uses
    except (SyntaxError, ValueError):
        return None


def _jit_lines(jit: Any, known: dict[Any, dict[str, int] | None]) -> dict[str, int] | None:
    """Return the first line that reads each parameter; None where anything may be read."""
    function = jit.fn
    if function in known:
        return known[function]
    known[function] = None  # a function that calls itself reads all of its arguments
    summary = _uses(jit) if can_be_followed(jit) else None
    if summary is None:
        return None
    scope, lines = Scope(function), dict[str, int]()
    for use in summary:
        if use.parameter not in lines and _reaches(use, scope, known):
            lines[use.parameter] = use.line
    known[function] = lines
    return lines


def _reaches(use: Use, scope: Scope, known: dict[Any, dict[str, int] | None]) -> bool:
    """Whether a use reads the parameter; it does not if the callee ignores what it is passed."""
    if not use.callee:
        return True
    owner, callee = scope.value_of(use.callee.rpartition(".")[0]), scope.value_of(use.callee)
    is_method = owner is not MISSING and not isinstance(owner, (type, ModuleType))
    if is_method or not can_be_followed(callee):
        return True
    lines, code = _jit_lines(callee, known), callee.fn.__code__
    accepted = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if isinstance(use.slot, int):
        name = "".join(accepted[: code.co_argcount][use.slot : use.slot + 1])
    else:
        name, accepted = use.slot, accepted[code.co_posonlyargcount :]
    return lines is None or name not in accepted or name in lines
