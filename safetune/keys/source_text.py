"""The text of Python functions, as trees, and the objects that their names stand for.

Everything is read from the text of the file (through `linecache`, so notebook cells work too),
never from module objects: at decoration time the kernel's module is still being imported.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, TypeAlias

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_PARSE_ATTEMPTS = 10

#: A module's kernels are decorated one after the other; trees kept for longer are what every
#: garbage collection walks through (measured with FLA's 142 kernels: 1.3 s when the process ends).
KEPT_TREES = 8

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

#: The value of a name that is not bound.
MISSING: Any = object()


@dataclass(frozen=True)
class ModuleText:
    """One file: its text and its tree."""

    text: str
    tree: ast.Module

    def segment(self, node: ast.AST) -> str:
        """Return the text of `node`, dedented, without its decorators."""
        lines = self.text.splitlines()[node.lineno - 1 : node.end_lineno]  # type: ignore[attr-defined]
        if isinstance(node, ast.Lambda):
            return ast.get_source_segment(self.text, node) or ""
        return textwrap.dedent("\n".join(lines))


def module_text(function: FunctionType) -> ModuleText | None:
    """Return the file that defines `function`, or None where there is none that parses."""
    lines = linecache.getlines(function.__code__.co_filename, function.__globals__)
    return parse("".join(lines)) if lines else None


@functools.lru_cache(KEPT_TREES)
def parse(text: str) -> ModuleText | None:
    """Return the tree of `text`, or None where it is not Python."""
    try:
        return ModuleText(text, tree_of(text))
    except (SyntaxError, ValueError):
        return None


def tree_of(text: str) -> ast.Module:
    """Return the tree of `text`, as `ast.parse` does; raises what that raises.

    Up to Python 3.12, threads that parse at the same time share one depth counter (CPython issue
    106905), so a parse may fail because of another thread's. It is tried again.
    """
    for _ in range(_PARSE_ATTEMPTS - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(text)
    return ast.parse(text)


def nodes_of(function: FunctionType) -> tuple[FunctionNode, ...]:
    """Return the tree of `function`, with the file's line numbers.

    More than one where lambdas on one line cannot be told apart; none where the source is missing.
    """
    module = module_text(function)
    if module is None:
        return ()
    code = function.__code__
    found = tuple(
        node
        for node in _functions_by_line(module.text).get(code.co_firstlineno, ())
        if getattr(node, "name", "<lambda>") == code.co_name
        and _parameter_names(node) == code.co_varnames[: _parameter_count(code)]
    )
    if len(found) > 1:
        return tuple(node for node in found if _compiles_to(node, code)) or found
    return found


@functools.lru_cache(KEPT_TREES)
def _functions_by_line(text: str) -> dict[int, list[FunctionNode]]:
    module = parse(text)
    found: dict[int, list[FunctionNode]] = {}
    for node in ast.walk(module.tree) if module else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            found.setdefault(first, []).append(node)
    return found


def _parameter_count(code: CodeType) -> int:
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_argcount + code.co_kwonlyargcount + stars


def _parameter_names(node: FunctionNode) -> tuple[str, ...]:
    """The parameters in the order of `co_varnames`: the stars come last."""
    args = node.args
    stars = [star for star in (args.vararg, args.kwarg) if star is not None]
    return tuple(arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, *stars])


def _compiles_to(node: FunctionNode, code: CodeType) -> bool:
    if not isinstance(node, ast.Lambda):
        return False
    expression = compile(ast.Expression(node), "", "eval")
    (alone,) = (const for const in expression.co_consts if isinstance(const, CodeType))
    return (alone.co_names, alone.co_consts, alone.co_code) == (
        code.co_names,
        code.co_consts,
        code.co_code,
    )


class Scope:
    """The values of a function's free names: from its closure first, then from its globals."""

    def __init__(self, function: FunctionType) -> None:
        self._globals: Mapping[str, Any] = function.__globals__
        self._closure: dict[str, Any] = {}
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                self._closure[name] = cell.cell_contents
            except ValueError:  # not bound yet
                continue

    def lookup(self, name: str) -> Any:
        """Return the value of `name`, or `MISSING`."""
        if name in self._closure:
            return self._closure[name]
        return self._globals.get(name, MISSING)

    def resolve(self, node: ast.AST) -> Any:
        """Return the value of a dotted name, or `MISSING` for any other expression."""
        if isinstance(node, ast.Name):
            return self.lookup(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            return MISSING if owner is MISSING else getattr(owner, node.attr, MISSING)
        return MISSING


def dotted(node: ast.AST) -> str | None:
    """Return a dotted name as text, such as `a.b.c`; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def last_name(node: ast.AST) -> str:
    """Return `c` for the expression `a.b.c`, "" for any expression but a name or attribute."""
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


def parameters(node: FunctionNode) -> set[str]:
    """Return the names of all parameters, stars included."""
    return set(_parameter_names(node))


@functools.lru_cache(KEPT_TREES)
def stored_names(node: ast.AST) -> frozenset[str]:
    """Return every name that is bound anywhere below `node`, except its own parameters."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return frozenset(_stores(node))
    return frozenset(name for statement in node.body for name in _stores(statement))


def local_names(body: Iterable[ast.AST]) -> set[str]:
    """Return the names that these statements bind in their own scope, nested scopes excluded."""
    found: set[str] = set()
    stack = list(body)
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif not isinstance(node, (ast.Lambda, *_COMPREHENSIONS)):
            stack.extend(ast.iter_child_nodes(node))
    return found


def _stores(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load):
            yield child.id
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child.name
        elif isinstance(child, ast.arg):
            yield child.arg
        elif isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in child.names)
        elif isinstance(child, (ast.MatchAs, ast.MatchStar, ast.ExceptHandler)) and child.name:
            yield child.name


def free_names(tree: ast.AST) -> list[ast.expr]:
    """Return the dotted names that `tree` reads and does not bind.

    As in Triton's own search, a name is free until the text has bound it.
    """
    visitor = _FreeNames()
    visitor.visit(tree)
    return visitor.free


class _FreeNames(ast.NodeVisitor):
    def __init__(self) -> None:
        self.free: list[ast.expr] = []
        self._bound: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._bound.add(node.id)
        elif node.id not in self._bound:
            self.free.append(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = dotted(node)
        if name is None:
            self.generic_visit(node)
        elif name.partition(".")[0] not in self._bound:
            self.free.append(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._visit_all([node.value, *node.targets])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and node.target.id not in self._bound:
            self.free.append(node.target)
        self._visit_all([node.value, node.target])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([node.value, node.target])

    def visit_For(self, node: ast.For) -> None:
        self._visit_all([node.iter, node.target, *node.body, *node.orelse])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_all([*node.args.defaults, *node.args.kw_defaults])
        self._bound.add(node.name)
        self._visit_inner(parameters(node), node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_all([*node.args.defaults, *node.args.kw_defaults])
        self._visit_inner(parameters(node), [node.body])

    def _comprehension(self, node: Any) -> None:
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        steps = [part for g in node.generators for part in (g.iter, g.target, *g.ifs)]
        self._visit_inner(set(), [*steps, *results])

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815

    def _visit_inner(self, bound: set[str], nodes: Iterable[ast.AST | None]) -> None:
        outer, self._bound = self._bound, self._bound | bound
        self._visit_all(nodes)
        self._bound = outer

    def _visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)
