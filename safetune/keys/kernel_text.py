"""The texts of a kernel and its callees: parameters read, meanings of names, matrix products.

A parameter counts as read if its value can have any effect. It is unread if it is only passed to a
callee that ignores it, or assigned before use. Code that cannot be followed reads all of its
arguments. A value may also matter in ways that the text does not show, such as a size from which
another argument was computed (see `launch_usage`).
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from safetune.frozen import dataclass
from safetune.keys.identity import base_function, is_own
from safetune.keys.source_text import (
    MISSING,
    UNREADABLE,
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
    """The first reader of each name, as text with file and line, and a reader of unknown names."""

    def __init__(self, names: dict[str, str] | None = None, everything: str = "") -> None:
        self.names = names or {}
        self.everything = everything

    def reader_of(self, name: str) -> str:
        """Return the reader of `name`, or "" without one."""
        return self.names.get(name) or self.everything

    def add(self, other: Usage) -> None:
        """Add the readers in `other`; the existing first reader of a name stays."""
        self.names = {**other.names, **self.names}
        self.everything = self.everything or other.everything


def usage_in_body(kernel: Any) -> Usage:
    """Return the parameters that a kernel reads, including through all jit functions that it
    calls.
    """
    jit, function = base_function(kernel)
    lines = _jit_lines(jit, {})
    if lines is None:
        return Usage(everything="the body, whose source is missing")
    file = Path(file_of(function)).name
    offset = max(definition_line(jit) - 1, 0)
    return Usage({name: f"the body ({file}:{line + offset})" for name, line in lines.items()})


def can_be_followed(callee: Any) -> bool:
    """Whether a callee runs its text as written, so that the text shows its reads."""
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


def _jit_lines(
    jit: Any, lines_by_function: dict[Any, dict[str, int] | None]
) -> dict[str, int] | None:
    """Return the first line that reads each parameter; None where anything may be read."""
    function = jit.fn
    if function in lines_by_function:
        return lines_by_function[function]
    lines_by_function[function] = None  # a function that calls itself reads all of its arguments
    summary = _uses(jit) if can_be_followed(jit) else None
    if summary is None:
        return None
    scope, lines = Scope(function), dict[str, int]()
    for use in summary:
        if use.parameter not in lines and _reaches(use, scope, lines_by_function):
            lines[use.parameter] = use.line
    lines_by_function[function] = lines
    return lines


def _reaches(use: Use, scope: Scope, lines_by_function: dict[Any, dict[str, int] | None]) -> bool:
    """Whether a use reads the parameter; it does not if the callee ignores its argument."""
    if not use.callee:
        return True
    owner, callee = scope.value_of(use.callee.rpartition(".")[0]), scope.value_of(use.callee)
    is_method = owner is not MISSING and not isinstance(owner, ModuleType)
    if is_method or not can_be_followed(callee):
        return True
    lines, code = _jit_lines(callee, lines_by_function), callee.fn.__code__
    accepted = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if isinstance(use.slot, int):
        name = "".join(accepted[: code.co_argcount][use.slot : use.slot + 1])
    else:
        name, accepted = use.slot, accepted[code.co_posonlyargcount :]
    return lines is None or name not in accepted or name in lines


@dataclass(frozen=True)
class KernelText:
    """One function below `@triton.jit`, as written."""

    node: ast.FunctionDef
    scope: Scope
    local: frozenset[str]  # the names that it binds

    def value(self, func: ast.expr) -> Any:
        """Return the value of a dotted name; `MISSING` if the function binds it."""
        name = dotted(func)
        return MISSING if name.partition(".")[0] in self.local else self.scope.value_of(name)

    def names(self, func: ast.expr) -> set[str]:
        """Return the names of a called function: as written at the call, and its own."""
        return {last_name(func), str(getattr(self.value(func), "__name__", ""))}

    def calls(self) -> Iterator[ast.Call]:
        """Yield every call in the text."""
        return (node for node in walk(self.node) if isinstance(node, ast.Call))

    def callee(self, func: ast.expr) -> Any:
        """Return the called jit function, unless it is Triton's own."""
        value = self.value(func)
        inner = getattr(value, "fn", None)
        return value if inspect.isfunction(inner) and not is_foreign(inner) else None


def kernel_texts(kernel: Any) -> dict[Any, KernelText | None]:
    """Return the texts of a kernel and of all that it calls, by function; None if the text is not
    what runs.
    """
    texts: dict[Any, KernelText | None] = {}
    pending = [base_function(kernel)[0]]
    while pending:
        jit = pending.pop(0)
        if jit.fn not in texts:
            text = texts[jit.fn] = _text_of(jit)
            callees = [text.callee(call.func) for call in text.calls()] if text else []
            pending += [callee for callee in callees if callee is not None]
    return texts


def multiplies_matrices(kernel: Any) -> bool:
    """Whether a kernel, or anything that it may call, has a `tl.dot` or `tl.dot_scaled`."""
    texts = kernel_texts(kernel).values()
    return any(
        text is None or any(_may_multiply(text, call.func) for call in text.calls())
        for text in texts
    )


def _may_multiply(text: KernelText, func: ast.expr) -> bool:
    """Whether a called function is unknown, or multiplies matrices by its name.

    A method of a computed value is recognised by its name.
    """
    if text.callee(func) is not None:
        return False  # its own text tells more than its name
    root = dotted(func).partition(".")[0]
    is_method = isinstance(func, ast.Attribute) and (root in text.local or not root)
    is_missing = text.value(func) is MISSING and not hasattr(builtins, root)
    return (is_missing and not is_method) or any(map(_MATRIX_PRODUCT.fullmatch, text.names(func)))


def _text_of(jit: Any) -> KernelText | None:
    try:
        text = source_of(jit) if can_be_followed(jit) else None
        node = tree_of(text).body[0] if text else None
    except (*UNREADABLE, OSError):
        return None
    if not isinstance(node, ast.FunctionDef):
        return None
    return KernelText(node, Scope(jit.fn), frozenset(name for _, name in stores(node)))
