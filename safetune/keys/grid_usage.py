"""Which kernel arguments the launch grids in a kernel's own module read.

Only the text of the module is searched. A grid function reads the entries of its dict. A grid also
reads an argument of its launch if both are made of the same values. The value of a name is followed
as far as the text shows it; `None` stands for a value that is not in the text: a parameter, an
import, a part of something unpacked.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetune.keys.body_usage import Usage, bind
from safetune.keys.callback_usage import usage_of_dict
from safetune.keys.kernel_digest import base_function
from safetune.keys.source_text import KEPT_TREES, body_of, last_name, module_text, parse

#: The functions around an expression and the module, innermost first.
Scopes = tuple[ast.AST, ...]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_GRIDS = (ast.Tuple, ast.List, ast.Lambda, ast.FunctionDef, ast.Constant, ast.BinOp)
_VALUES = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp)


@dataclass(frozen=True)
class Launch:
    """An expression that launches something on a grid; `call` has the kernel's arguments."""

    target: ast.AST
    grid: ast.expr
    call: ast.Call | None
    scopes: Scopes


def usage_in_grids(kernel: Any, arg_names: Sequence[str]) -> Usage:
    """Return the arguments that the grids read with which the kernel's module launches it."""
    _, function = base_function(kernel)
    module = module_text(function)
    found = Usage()
    if module is None:
        return found
    aliases = _aliases(module.text, function.__name__)
    label = f"the grid ({Path(function.__code__.co_filename).name}:{{}})"
    for launch in _launches(module.text):
        if _is_one_of(launch.target, aliases):
            found.add(_usage_in_launch(label, launch, arg_names))
    return found


def _usage_in_launch(label: str, launch: Launch, arg_names: Sequence[str]) -> Usage:
    found = Usage()
    parts: set[str] = set()
    line = launch.grid.lineno
    for grid in _definitions(launch.grid, launch.scopes):
        scopes = launch.scopes
        if grid is None:
            return Usage(everything=f"{label.format(line)}, which cannot be followed")
        if isinstance(grid, (ast.Lambda, ast.FunctionDef)):
            scopes = (grid, *scopes)
            for parameter in [*grid.args.posonlyargs, *grid.args.args][:1]:
                found.add(usage_of_dict(label, grid, parameter.arg))
        parts |= _texts(grid, scopes, whole=True)
    for name in arg_names:
        if ast.dump(ast.Name(name, ast.Load())) in parts:
            found.names.setdefault(name, label.format(line))
    for name, value in bind(launch.call, arg_names) if launch.call else ():
        if _texts(value, launch.scopes, whole=False) & parts:
            found.names.setdefault(name, label.format(line))
    return found


@functools.lru_cache(KEPT_TREES)
def _launches(text: str) -> tuple[Launch, ...]:
    """Every launch in a module: `k[grid](...)`, `k[grid]`, and calls with `grid=`."""
    module = parse(text)
    return tuple(_find_launches(module.tree, (module.tree,))) if module else ()


def _find_launches(node: ast.AST, scopes: Scopes) -> Iterator[Launch]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            if isinstance(child.func, ast.Subscript):
                yield Launch(child.func.value, child.func.slice, child, scopes)
            for keyword in child.keywords:
                if keyword.arg == "grid":
                    yield Launch(child, keyword.value, child, scopes)
        elif isinstance(child, ast.Subscript) and child is not getattr(node, "func", None):
            yield Launch(child.value, child.slice, None, scopes)
        inner = (child, *scopes) if isinstance(child, (ast.FunctionDef, ast.Lambda)) else scopes
        yield from _find_launches(child, inner)


def _is_one_of(node: ast.AST, names: Collection[str]) -> bool:
    """Whether a launch target, or one side of an assignment, is the kernel or is made of it."""
    parts: Sequence[ast.AST] = ()
    match node:
        case ast.Name() | ast.Attribute():
            return last_name(node) in names
        case ast.Call(func=function):
            owner = function.value if isinstance(function, ast.Attribute) else function
            parts = [owner, *node.args, *(keyword.value for keyword in node.keywords)]
        case ast.IfExp():
            parts = [node.body, node.orelse]
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            pass
        case ast.Dict(values=parts):
            pass
        case ast.Subscript():
            parts = [node.value]
    return any(_is_one_of(part, names) for part in parts)


def _aliases(text: str, name: str) -> set[str]:
    """Return `name` and every name that the module assigns it to, decorated or not."""
    names = {name}
    for _ in range(3):
        for value, targets in _names_assigned(text):
            if _is_one_of(value, names):
                names.update(targets)
    return names


@functools.lru_cache(KEPT_TREES)
def _names_assigned(text: str) -> list[tuple[ast.expr, list[str]]]:
    """Return the values that a module assigns to names, except for results of a launch."""
    module = parse(text)
    found = []
    for node in ast.walk(module.tree) if module else ():
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                targets = [target]
            case ast.NamedExpr(target=target, value=value):
                targets = [target]
            case _:
                continue
        if not any(map(_is_launch, ast.walk(value))):
            found.append((value, [name for target in targets for name in _target_names(target)]))
    return found


def _is_launch(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and (
        isinstance(node.func, ast.Subscript) or any(k.arg == "grid" for k in node.keywords)
    )


def _target_names(target: ast.AST) -> Iterator[str]:
    match target:
        case ast.Name() | ast.Attribute():
            yield last_name(target)
        case ast.Subscript():
            yield from _target_names(target.value)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            for item in items:
                yield from _target_names(item)


def _definitions(grid: ast.AST | None, scopes: Scopes, depth: int = 8) -> list[ast.AST | None]:
    """Return the expressions that a grid may be: functions, or expressions of a tuple."""
    if grid is None or depth == 0:
        return [None]
    match grid:
        case ast.Name(id=name):
            values = _bindings(name, scopes)
        case ast.IfExp():
            values = [grid.body, grid.orelse]
        case ast.Call(func=ast.Name(id="tuple" | "list"), args=[values_given]):
            values = [values_given]
        case ast.Call():
            makers = _bindings(getattr(grid.func, "id", ""), scopes) or [None]
            return [grid, *itertools.chain.from_iterable(map(_functions_in, makers))]
        case _:
            return [grid if isinstance(grid, _GRIDS) else None]
    found = (_definitions(value, scopes, depth - 1) for value in values or [None])
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def _functions_in(maker: ast.AST | None) -> list[ast.AST | None]:
    """Return the functions in the text of a function that makes a grid."""
    if not isinstance(maker, ast.FunctionDef):
        return [None]
    return [n for n in ast.walk(maker) if isinstance(n, _FUNCTIONS) and n is not maker]


def _texts(expression: ast.AST, scopes: Scopes, whole: bool) -> set[str]:
    """Return the text of the values that equal `expression`; if `whole`, of its parts too."""
    found: set[str] = set()
    stack = [expression]
    while stack:
        value = stack.pop()
        for node in ast.walk(value) if whole else [value]:
            if not isinstance(node, _VALUES) or (text := ast.dump(node)) in found:
                continue
            found.add(text)
            if isinstance(node, ast.Name):
                stack += [v for v in _bindings(node.id, scopes) if isinstance(v, ast.expr)]
    return found


def _bindings(name: str, scopes: Scopes) -> list[ast.AST | None]:
    """Return the values that the innermost scope with `name` binds it to; [] without one."""
    return next((found[name] for scope in scopes if name in (found := _bound_in(scope))), [])


@functools.lru_cache(maxsize=1024)
def _bound_in(scope: ast.AST) -> dict[str, list[ast.AST | None]]:
    found: dict[str, list[ast.AST | None]] = {}
    stack: list[ast.AST] = []
    if isinstance(scope, _FUNCTIONS):
        found = {node.arg: [None] for node in ast.walk(scope.args) if isinstance(node, ast.arg)}
        stack = body_of(scope)
    elif isinstance(scope, ast.Module):
        stack = [*scope.body]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.setdefault(node.name, []).append(node)
        elif not isinstance(node, (ast.Lambda, ast.ClassDef)):
            for name, value in _bound_by(node):
                found.setdefault(name, []).append(value)
            stack.extend(ast.iter_child_nodes(node))
    return found


def _bound_by(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _unpacked(target, value)
        case ast.AnnAssign() | ast.NamedExpr() | ast.AugAssign():
            yield from _unpacked(node.target, node.value)
        case ast.For() | ast.comprehension():
            yield from _unpacked(node.target, None)
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from ((alias.asname or alias.name, None) for alias in names)


def _unpacked(target: ast.AST, value: ast.AST | None) -> Iterator[tuple[str, ast.AST | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
        values = value.elts if same else [None] * len(target.elts)  # type: ignore[union-attr]
        for part, item in zip(target.elts, values, strict=True):
            yield from _unpacked(part, item)
