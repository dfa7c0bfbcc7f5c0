"""Which parameters of a kernel its body reads.

A parameter is read when its value can reach anything. It is not read when it is only passed to a
callee that ignores it, or assigned before it is used. Code that cannot be followed reads all of its
arguments, so a mistake keeps a name that could be dropped, and never drops one that matters.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetune.keys.kernel_digest import base_function, definition_line, is_foreign, source_of
from safetune.keys.source_text import (
    FunctionNode,
    RunOrder,
    Scope,
    body_of,
    dotted,
    parameters,
    parse,
    stored_names,
)

#: For one call: the arguments (by `id` of their node) that the callee ignores.
Ignored = Callable[[ast.Call], set[int]]

#: Builtins that see every local variable.
FRAME_READERS = frozenset({"locals", "vars", "eval", "exec", "dir"})


@dataclass
class Usage:
    """The first reader of each name, as text with file and line, and one that may read any name."""

    names: dict[str, str] = field(default_factory=dict)
    everything: str = ""

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
    file = Path(function.__code__.co_filename).name
    offset = max(definition_line(jit) - 1, 0)
    return Usage({name: f"the body ({file}:{line + offset})" for name, line in lines.items()})


def _jit_lines(jit: Any, known: dict[Any, dict[str, int] | None]) -> dict[str, int] | None:
    """Return the first line that reads each parameter; None where anything may be read."""
    function = jit.fn
    if function in known:
        return known[function]
    known[function] = None  # a function that calls itself reads all of its arguments
    module = parse(source_of(jit) or "")
    node = module.tree.body[0] if module and module.tree.body else None
    if not isinstance(node, ast.FunctionDef):
        return None
    scope, local = Scope(function), stored_names(node)

    def ignored(call: ast.Call) -> set[int]:
        name = dotted(call.func)
        if name is None or name.partition(".")[0] in local:
            return set()
        callee = scope.value_of(call.func)
        inner = getattr(callee, "fn", None)
        if not inspect.isfunction(inner) or is_foreign(inner.__module__):
            return set()
        lines = _jit_lines(callee, known)
        if lines is None:
            return set()
        accepted = inspect.getfullargspec(inner)
        named = bind(call, [*accepted.args, *accepted.kwonlyargs])
        return {id(value) for parameter, value in named if parameter not in lines}

    known[function] = parameter_lines(node, ignored)
    return known[function]


def bind(call: ast.Call, names: Sequence[str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield (parameter, argument) of a call, as far as its text shows which is which."""
    for name, argument in zip(names, call.args, strict=False):
        if isinstance(argument, ast.Starred):
            break
        yield name, argument
    yield from ((k.arg, k.value) for k in call.keywords if k.arg is not None and k.arg in names)


def parameter_lines(node: FunctionNode, ignored: Ignored = lambda call: set()) -> dict[str, int]:
    """Return the first line that reads each parameter of `node`."""
    visitor = _ParameterUse(parameters(node), ignored)
    visitor.visit_all(body_of(node))
    return visitor.lines


class _ParameterUse(RunOrder):
    """Follows one function; `lines` is the first line that reads each parameter."""

    def __init__(self, tracked: Iterable[str], ignored: Ignored) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}
        self._tracked = frozenset(tracked)
        self._ignored = ignored

    def _read(self, names: Iterable[str], line: int) -> None:
        for name in self._tracked.intersection(names) - self.bound:
            self.lines.setdefault(name, line)

    def read(self, name: ast.Name) -> None:
        self._read(self._tracked if name.id in FRAME_READERS else [name.id], name.lineno)

    def visit(self, node: ast.AST) -> None:
        match node:
            case ast.Call():
                ignored = self._ignored(node)
                values = [*node.args, *(keyword.value for keyword in node.keywords)]
                followed = [v for v in values if not (isinstance(v, ast.Name) and id(v) in ignored)]
                self.visit_all([node.func, *followed])
            case ast.AnnAssign(value=None):
                pass
            case ast.If():
                self._visit_branches(node)
            case ast.For() | ast.While() | ast.Try() | ast.Match() | ast.With() | ast.ClassDef():
                self._visit_uncertain(node)
            case ast.NamedExpr():
                self._visit_uncertain(node)
            case ast.Nonlocal() | ast.Global():
                self._read(node.names, node.lineno)
            case ast.FunctionDef():
                self.visit_all(node.decorator_list)
                super().visit(node)
            case _:
                super().visit(node)

    def _visit_branches(self, node: ast.If) -> None:
        self.visit(node.test)
        before = self.bound
        self.visit_all(node.body)
        in_body, self.bound = self.bound, before
        self.visit_all(node.orelse)
        in_else, self.bound = self.bound, before
        # Where one branch keeps the old value, the compiler merges it with the new one.
        self._read(in_body ^ in_else, node.lineno)
        self.bound = in_body & in_else

    def _visit_uncertain(self, node: ast.stmt | ast.expr) -> None:
        """A loop carries what it assigns; so may anything else that may run never or twice."""
        self._read(stored_names(node), node.lineno)
        before = self.bound
        self.generic_visit(node)
        self.bound = before
