"""Which kernel arguments the launch grids in a kernel's own module read.

Only the text of the module is searched. A grid function reads the entries of its dict. A grid also
reads an argument of its launch if both are made of the same values.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetune.keys.body_usage import Usage
from safetune.keys.callback_usage import usage_of_dict
from safetune.keys.kernel_digest import base_function
from safetune.keys.name_bindings import definitions, parts_of, values_of
from safetune.keys.source_text import KEPT_TREES, last_name, module_text, parse


@dataclass(frozen=True)
class Launch:
    """One expression that launches something on a grid.

    Attributes:
        target: the kernel, as an expression.
        grid: the grid expression.
        call: the call with the kernel's arguments, where there is one.
        scopes: the functions around it and the module, innermost first.
    """

    target: ast.AST
    grid: ast.expr
    call: ast.Call | None
    scopes: tuple[ast.AST, ...]


def usage_in_grids(kernel: Any, arg_names: Sequence[str]) -> Usage:
    """Return the arguments that the grids read with which the kernel's module launches it.

    Raises:
        InvalidSetting: `kernel` is not a Triton kernel.
    """
    _, function = base_function(kernel)
    module = module_text(function)
    found = Usage()
    if module is None:
        return found
    aliases = _aliases(module.text, function.__name__)
    file = Path(function.__code__.co_filename).name
    for launch in _launches(module.text):
        if _is_one_of(launch.target, aliases):
            label = f"the grid ({file}:{{}})"
            found.add(_usage_in_launch(label, launch, arg_names))
    return found


@functools.lru_cache(KEPT_TREES)
def _launches(text: str) -> tuple[Launch, ...]:
    """Every launch in a module: `k[grid](...)`, `k[grid]`, and calls with `grid=`."""
    module = parse(text)
    return tuple(_find_launches(module.tree, (module.tree,))) if module else ()


def _find_launches(node: ast.AST, scopes: tuple[ast.AST, ...]) -> Iterator[Launch]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            if isinstance(child.func, ast.Subscript):
                yield Launch(child.func.value, child.func.slice, child, scopes)
            for keyword in child.keywords:
                if keyword.arg == "grid":
                    yield Launch(child, keyword.value, child, scopes)
        elif isinstance(child, ast.Subscript) and not _is_called(node, child):
            yield Launch(child.value, child.slice, None, scopes)
        inner = (child, *scopes) if isinstance(child, (ast.FunctionDef, ast.Lambda)) else scopes
        yield from _find_launches(child, inner)


def _is_called(parent: ast.AST, child: ast.AST) -> bool:
    return isinstance(parent, ast.Call) and parent.func is child


def _is_one_of(node: ast.AST, names: Collection[str]) -> bool:
    """Whether a launch target, or one side of an assignment, is the kernel or is made of it."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return last_name(node) in names
    if isinstance(node, ast.Call):
        owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        values = [owner, *node.args, *(keyword.value for keyword in node.keywords)]
        return any(_is_one_of(value, names) for value in values)
    if isinstance(node, ast.IfExp):
        return _is_one_of(node.body, names) or _is_one_of(node.orelse, names)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(_is_one_of(item, names) for item in node.elts)
    if isinstance(node, ast.Dict):
        return any(_is_one_of(item, names) for item in node.values)
    return isinstance(node, ast.Subscript) and _is_one_of(node.value, names)


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
    return [
        (value, [name for target in targets for name in _target_names(target)])
        for value, targets in _assignments(module.tree if module else ast.Module([], []))
        if not _contains_launch(value)
    ]


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, list[ast.expr]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield node.value, node.targets
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            yield node.value, [node.target]


def _contains_launch(value: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call)
        and (isinstance(node.func, ast.Subscript) or any(k.arg == "grid" for k in node.keywords))
        for node in ast.walk(value)
    )


def _target_names(target: ast.AST) -> Iterator[str]:
    if isinstance(target, (ast.Name, ast.Attribute)):
        yield last_name(target)
    elif isinstance(target, ast.Subscript):
        yield from _target_names(target.value)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for item in target.elts:
            yield from _target_names(item)


def _usage_in_launch(label: str, launch: Launch, arg_names: Sequence[str]) -> Usage:
    found = Usage()
    parts: set[str] = set()
    for grid in definitions(launch.grid, launch.scopes):
        if grid is None:
            line = launch.grid.lineno
            return Usage(everything=f"{label.format(line)}, which cannot be followed")
        if isinstance(grid, (ast.Lambda, ast.FunctionDef)):
            for parameter in [*grid.args.posonlyargs, *grid.args.args][:1]:
                found.add(usage_of_dict(label, grid, parameter.arg))
        parts |= parts_of(grid, launch.scopes)
    for name in _shared(launch, parts, arg_names):
        found.names.setdefault(name, label.format(launch.grid.lineno))
    return found


def _shared(launch: Launch, parts: set[str], arg_names: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of a launch whose value is among the parts of its grid."""
    yield from (name for name in arg_names if ast.dump(ast.Name(name, ast.Load())) in parts)
    call = launch.call
    pairs: list[tuple[str | None, ast.expr]] = []
    for parameter, argument in zip(arg_names, call.args if call else (), strict=False):
        if isinstance(argument, ast.Starred):
            break
        pairs.append((parameter, argument))
    pairs += [(keyword.arg, keyword.value) for keyword in (call.keywords if call else ())]
    for name, value in pairs:
        if name is not None and name in arg_names and values_of(value, launch.scopes) & parts:
            yield name
