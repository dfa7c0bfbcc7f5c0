"""Which parameters of a kernel its body reads.

A parameter is read when its value can reach anything. It is not read when it is only passed to a
callee that ignores it, or assigned before it is used. Code that cannot be followed reads all of its
arguments, so a mistake keeps a name that could be dropped, and never drops one that matters.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetune.keys.kernel_digest import base_function, definition_line, is_foreign, source_of
from safetune.keys.source_text import (
    FunctionNode,
    Scope,
    dotted,
    local_names,
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
    """The code that reads each name, as text with file and line.

    Attributes:
        names: the first reader of each name.
        everything: the reader that may read any name, or "".
    """

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
    """Return the parameters that the body of `kernel` reads, through every jit function it calls.

    Raises:
        InvalidSetting: `kernel` is not a Triton kernel.
    """
    jit, function = base_function(kernel)
    lines = _JitBodies().lines(jit)
    if lines is None:
        return Usage(everything="the body, whose source is missing")
    file = Path(function.__code__.co_filename).name
    offset = max(definition_line(jit) - 1, 0)
    return Usage({name: f"the body ({file}:{line + offset})" for name, line in lines.items()})


class _JitBodies:
    """The parameters that jit functions read; each is parsed once."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, int] | None] = {}

    def lines(self, jit: Any) -> dict[str, int] | None:
        """Return the first line that reads each parameter; None where anything may be read."""
        function = jit.fn
        if id(function) not in self._known:
            # A function that calls itself reads all of its arguments.
            self._known[id(function)] = None
            self._known[id(function)] = self._analyse(jit)
        return self._known[id(function)]

    def _analyse(self, jit: Any) -> dict[str, int] | None:
        text = source_of(jit)
        if text is None:
            return None
        module = parse(text)
        node = module.tree.body[0] if module else None
        if not isinstance(node, ast.FunctionDef):
            return None
        scope, local = Scope(jit.fn), parameters(node) | stored_names(node)
        return parameter_lines(node, lambda call: self._ignored(call, scope, local))

    def _ignored(self, call: ast.Call, scope: Scope, local: set[str]) -> set[int]:
        name = dotted(call.func)
        if name is None or name.partition(".")[0] in local:
            return set()
        callee = scope.resolve(call.func)
        function = getattr(callee, "fn", None)
        if not inspect.isfunction(function) or is_foreign(function.__module__):
            return set()
        lines = self.lines(callee)
        if lines is None:
            return set()
        return {id(value) for parameter, value in bind(call, function) if parameter not in lines}


def bind(call: ast.Call, function: Callable[..., Any]) -> Iterator[tuple[str, ast.expr]]:
    """Yield (parameter, argument) of a call, as far as its text shows which is which."""
    known = inspect.signature(function).parameters
    positional = [
        parameter.name
        for parameter in known.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    for name, argument in zip(positional, call.args, strict=False):
        if isinstance(argument, ast.Starred):
            break
        yield name, argument
    yield from ((k.arg, k.value) for k in call.keywords if k.arg is not None and k.arg in known)


def parameter_lines(node: FunctionNode, ignored: Ignored = lambda call: set()) -> dict[str, int]:
    """Return the first line that reads each parameter of `node`."""
    body = node.body if isinstance(node.body, list) else [node.body]
    visitor = _ParameterUse(parameters(node), ignored)
    visitor.carried = parameters(node) & stored_names(node)
    visitor.visit_body(body)
    return visitor.lines


class _ParameterUse(ast.NodeVisitor):
    """Follows one function in the order in which it runs.

    Attributes:
        lines: the first line that reads each parameter.
        carried: the parameters that the function assigns at all.
    """

    def __init__(self, tracked: set[str], ignored: Ignored) -> None:
        self.carried: set[str] = set()
        self.lines: dict[str, int] = {}
        self._tracked = tracked
        self._rebound: set[str] = set()
        self._ignored = ignored

    def visit_body(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def _read(self, names: Iterable[str], line: int) -> None:
        for name in (set(names) & self._tracked) - self._rebound:
            self.lines.setdefault(name, line)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._read([node.id], node.lineno)
            if node.id in FRAME_READERS:
                self._read(self._tracked, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        ignored = self._ignored(node)
        self.visit(node.func)
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            if not (isinstance(value, ast.Name) and id(value) in ignored):
                self.visit(value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit_body([node.value, *node.targets])
        self._rebind(node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit_body([node.value, node.target])
            self._rebind([node.target])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._read([node.target.id], node.lineno)
        self.visit_body([node.target, node.value])

    def _rebind(self, targets: Iterable[ast.AST]) -> None:
        for target in targets:
            if isinstance(target, ast.Name):
                self._rebound = self._rebound | {target.id}
            elif isinstance(target, (ast.Tuple, ast.List)):
                self._rebind(target.elts)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        before = self._rebound
        self.visit_body(node.body)
        in_body, self._rebound = self._rebound, before
        self.visit_body(node.orelse)
        in_else, self._rebound = self._rebound, before
        # Where one branch keeps the old value, the compiler merges it with the new one.
        self._read(in_body ^ in_else, node.lineno)
        self._rebound = in_body & in_else

    def _uncertain(self, node: Any) -> None:
        """A loop carries what it assigns; so may anything else that may run never or twice."""
        if self.carried:
            self._read(stored_names(node), node.lineno)
        before = self._rebound
        self.generic_visit(node)
        self._rebound = before

    visit_For = visit_While = visit_Try = visit_Match = visit_With = _uncertain  # noqa: N815
    visit_NamedExpr = visit_ClassDef = _uncertain  # noqa: N815

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit_body(node.decorator_list)
        self._read(_outer_names(node), node.lineno)
        self._inner(node, local_names(node.body) - _outer_names(node), node.body)
        self._rebound = self._rebound | {node.name}

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._inner(node, set(), [node.body])

    def _inner(self, node: FunctionNode, bound: set[str], body: list[Any]) -> None:
        self.visit_body([*node.args.defaults, *node.args.kw_defaults])
        self._hiding(parameters(node) | bound, body)

    def _comprehension(self, node: Any) -> None:
        first = node.generators[0]
        self.visit(first.iter)
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        later = [
            part for g in node.generators for part in (g.iter, *g.ifs) if part is not first.iter
        ]
        hidden = {name for g in node.generators for name in stored_names(g.target)}
        self._hiding(hidden, [*later, *results])

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815

    def _hiding(self, names: set[str], body: Iterable[ast.AST]) -> None:
        outer, self._tracked = self._tracked, self._tracked - names
        before = self._rebound
        self.visit_body(body)
        self._tracked, self._rebound = outer, before


def _outer_names(node: ast.AST) -> set[str]:
    declared = [n for n in ast.walk(node) if isinstance(n, (ast.Nonlocal, ast.Global))]
    return {name for statement in declared for name in statement.names}
