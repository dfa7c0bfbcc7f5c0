"""The values that the names in a function's text may have, as far as the text shows.

`None` among them stands for a value that is not in the text: a parameter, an import, a part of
something unpacked.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator

#: The functions around an expression and the module, innermost first.
Scopes = tuple[ast.AST, ...]

_Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_PLAIN = (ast.Tuple, ast.List, ast.Lambda, ast.FunctionDef, ast.Constant, ast.BinOp)


def definitions(grid: ast.AST | None, scopes: Scopes, depth: int = 8) -> list[ast.AST | None]:
    """Return the expressions that a grid may be: functions, or expressions of a tuple."""
    if grid is None or depth == 0:
        return [None]
    if isinstance(grid, ast.Name):
        bound = bindings(grid.id, scopes)
    elif isinstance(grid, ast.IfExp):
        bound = [grid.body, grid.orelse]
    elif isinstance(grid, ast.Call):
        return _made_by(grid, scopes, depth)
    else:
        return [grid if isinstance(grid, _PLAIN) else None]
    found = (definitions(value, scopes, depth - 1) for value in bound or [None])
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def _made_by(call: ast.Call, scopes: Scopes, depth: int) -> list[ast.AST | None]:
    """Return the arguments of a call that makes a grid, and the functions in its function."""
    name = getattr(call.func, "id", "")
    if name in ("tuple", "list") and len(call.args) == 1:
        return definitions(call.args[0], scopes, depth - 1)
    found: list[ast.AST | None] = [call]
    for maker in bindings(name, scopes) or [None]:
        if isinstance(maker, ast.FunctionDef):
            found += [n for n in ast.walk(maker) if isinstance(n, _Function) and n is not maker]
        else:
            found.append(None)
    return found


def parts_of(expression: ast.AST, scopes: Scopes) -> set[str]:
    """Return the text of every value that an expression is made of, through local names."""
    found: set[str] = set()
    stack: list[ast.AST] = [expression]
    inner = (expression, *scopes) if isinstance(expression, _Function) else scopes
    while stack:
        for node in ast.walk(stack.pop()):
            if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp)):
                continue
            text = ast.dump(node)
            if text in found:
                continue
            found.add(text)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                stack += [v for v in bindings(node.id, inner) if isinstance(v, ast.expr)]
    return found


def values_of(expression: ast.expr, scopes: Scopes) -> set[str]:
    """Return the text of the expressions that equal `expression`; empty for a constant."""
    found: set[str] = set()
    stack: list[ast.AST] = [expression]
    while stack:
        node = stack.pop()
        text = ast.dump(node)
        if text in found or isinstance(node, ast.Constant):
            continue
        found.add(text)
        if isinstance(node, ast.Name):
            stack += [value for value in bindings(node.id, scopes) if isinstance(value, ast.expr)]
    return found


def bindings(name: str, scopes: Scopes) -> list[ast.AST | None]:
    """Return the values that the innermost scope with `name` binds it to; [] without one."""
    for scope in scopes:
        found = _bindings(scope).get(name)
        if found:
            return found
    return []


@functools.lru_cache(maxsize=1024)
def _bindings(scope: ast.AST) -> dict[str, list[ast.AST | None]]:
    found: dict[str, list[ast.AST | None]] = {}
    for name, value in _bound_in(scope):
        found.setdefault(name, []).append(value)
    return found


def _bound_in(scope: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    if isinstance(scope, _Function):
        for node in ast.walk(scope.args):
            if isinstance(node, ast.arg):
                yield node.arg, None
    body = getattr(scope, "body", [])
    stack: list[ast.AST] = list(body) if isinstance(body, list) else [body]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node
        elif not isinstance(node, (ast.Lambda, ast.ClassDef)):
            yield from _bound_by(node)
            stack.extend(ast.iter_child_nodes(node))


def _bound_by(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _unpacked(target, node.value)
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        yield from _unpacked(node.target, node.value)
    elif isinstance(node, (ast.For, ast.comprehension)):
        yield from _unpacked(node.target, None)
    elif isinstance(node, ast.AugAssign):
        yield from _unpacked(node.target, node.value)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name, None) for alias in node.names)


def _unpacked(target: ast.AST, value: ast.AST | None) -> Iterator[tuple[str, ast.AST | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
        values = value.elts if same else [None] * len(target.elts)  # type: ignore[union-attr]
        for part, item in zip(target.elts, values, strict=True):
            yield from _unpacked(part, item)
