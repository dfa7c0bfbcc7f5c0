"""The run order of a function's text: names read before they are bound, and uses of parameters.

A process imports this module for hooks, names that no kernel reads, and kernels that no earlier
process has read (`text_facts`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from safetune.keys.source_text import (
    FRAME_READERS,
    FunctionNode,
    Use,
    arguments_of,
    body_of,
    children,
    dotted,
    parameters,
    stores,
)


class RunOrder:
    """Visits the names of a function in the order of their reads and bindings."""

    def __init__(self) -> None:
        self.bound: frozenset[str] = frozenset()  # the names that the text has bound so far

    def read(self, name: ast.Name) -> None:
        """Called for each name that is read."""
        raise NotImplementedError

    def visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        """Visit nodes in this order."""
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit(self, node: ast.AST) -> None:
        """Visit a node and the nodes below it."""
        match node:
            case ast.Name(ctx=ast.Load()):
                self.read(node)
            case ast.Name():
                self.bound |= {node.id}
            case ast.Assign():
                self.visit_all([node.value, *node.targets])
            case ast.AugAssign():
                if isinstance(node.target, ast.Name):
                    self.read(node.target)
                self.visit_all([node.value, node.target])
            case ast.AnnAssign():
                self.visit_all([node.value, node.target])
            case ast.FunctionDef() | ast.Lambda():
                self.visit_all([*node.args.defaults, *node.args.kw_defaults])
                self.bound |= {getattr(node, "name", "")}
                self._visit_inner(parameters(node), body_of(node))
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                steps = [part for g in node.generators for part in (g.iter, g.target, *g.ifs)]
                self._visit_inner((), [*steps, *results])
            case _:
                self.visit_all(children(node))

    def _visit_inner(self, bound: Iterable[str], nodes: Iterable[ast.AST]) -> None:
        outer, self.bound = self.bound, self.bound.union(bound)
        self.visit_all(nodes)
        self.bound = outer


def free_names(tree: ast.AST) -> list[ast.expr]:
    """Return the dotted names that `tree` reads and does not bind.

    As in Triton's own search, a name is free until the text has bound it.
    """
    visitor = _FreeNames()
    visitor.visit(tree)
    return visitor.free


class _FreeNames(RunOrder):
    def __init__(self) -> None:
        super().__init__()
        self.free: list[ast.expr] = []

    def read(self, name: ast.Name) -> None:
        if name.id not in self.bound:
            self.free.append(name)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            if name.partition(".")[0] not in self.bound:
                self.free.append(node)
        elif isinstance(node, ast.For):
            self.visit_all([node.iter, node.target, *node.body, *node.orelse])
        elif isinstance(node, ast.arguments):  # a type that a parameter is compiled as
            self.visit_all(arg.annotation for arg in ast.walk(node) if isinstance(arg, ast.arg))
        elif isinstance(node, ast.FunctionDef):
            self.visit(node.args)
            super().visit(node)
        else:
            super().visit(node)


def bind(call: ast.Call, names: Sequence[str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield (parameter, argument) of a call, as far as the text shows the assignment."""
    for slot, value in _slots(call):
        if isinstance(slot, str) and slot in names:
            yield slot, value
        elif isinstance(slot, int) and slot < len(names):
            yield names[slot], value


def _slots(call: ast.Call) -> Iterator[tuple[int | str, ast.expr]]:
    """Yield (position or keyword, argument) of a call, up to a starred argument."""
    for position, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            break
        yield position, argument
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)


def parameter_lines(node: FunctionNode) -> dict[str, int]:
    """Return the first line that reads each parameter of `node`."""
    return {use.parameter: use.line for use in reversed(uses_of(node))}


def uses_of(node: FunctionNode) -> list[Use]:
    """Return a function's uses of its parameters, in text order."""
    visitor = _ParameterUse(node)
    visitor.visit_all(body_of(node))
    return visitor.uses


#: What may run never, or more than once.
_UNCERTAIN = (
    *(ast.ClassDef, ast.For, ast.Match, ast.NamedExpr, ast.Try, ast.While, ast.With),
    *filter(None, [getattr(ast, "TryStar", None)]),
)


class _ParameterUse(RunOrder):
    """Follows one function, and notes how it uses its parameters."""

    def __init__(self, function: FunctionNode) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self._tracked = frozenset(parameters(function))
        self._stores = stores(function)
        #: What these names call is not known.
        self._local = frozenset(name for _, name in self._stores)

    def _read(self, names: Iterable[str], line: int) -> None:
        self.uses += [Use(name, line) for name in self._tracked.intersection(names) - self.bound]

    def read(self, name: ast.Name) -> None:
        self._read(self._tracked if name.id in FRAME_READERS else [name.id], name.lineno)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _UNCERTAIN):
            self._visit_uncertain(node)
            return
        match node:
            case ast.Call():
                self._visit_call(node)
            case ast.AnnAssign(value=None):
                pass
            case ast.If():
                self._visit_branches(node)
            case ast.Nonlocal() | ast.Global():
                self._read(node.names, node.lineno)
            case ast.FunctionDef():
                self.visit_all(node.decorator_list)
                super().visit(node)
            case _:
                super().visit(node)

    def _visit_call(self, node: ast.Call) -> None:
        self.visit(node.func)
        callee = dotted(node.func)
        if callee.partition(".")[0] in self._local:
            callee = ""
        slots = {id(value): slot for slot, value in _slots(node)}
        for value in arguments_of(node):
            if (
                isinstance(value, ast.Name)
                and value.id in self._tracked - self.bound - FRAME_READERS
                and id(value) in slots
            ):
                self.uses.append(Use(value.id, value.lineno, callee, slots[id(value)]))
            else:
                self.visit(value)

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

    def _visit_uncertain(self, node: Any) -> None:
        """A loop carries its assignments; so may anything else that may run never or twice."""
        last = node.end_lineno or node.lineno
        self._read((name for n, name in self._stores if node.lineno <= n <= last), node.lineno)
        before = self.bound
        self.visit_all(children(node))
        self.bound = before
