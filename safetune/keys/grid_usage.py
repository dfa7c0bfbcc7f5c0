"""Which kernel arguments the launch grids of a kernel read.

A grid function reads the entries of its dict. A grid also reads an argument of its launch if both
are made of the same values.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Sequence

from safetune.keys.body_usage import Usage, bind
from safetune.keys.callback_usage import usage_of_dict
from safetune.keys.launches import Launch
from safetune.keys.name_values import FUNCTIONS, Scopes, bindings, texts_of

_GRIDS = (ast.Tuple, ast.List, ast.Lambda, ast.FunctionDef, ast.Constant, ast.BinOp)


def usage_in_grids(launches: Sequence[Launch], arg_names: Sequence[str]) -> Usage:
    """Return the arguments that the grids of some launches read."""
    found = Usage()
    for launch in launches:
        found.add(_usage_in_launch(f"the grid ({launch.file}:{{}})", launch, arg_names))
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
        parts |= texts_of(grid, scopes, whole=True)
    for name in arg_names:
        if ast.dump(ast.Name(name, ast.Load())) in parts:
            found.names.setdefault(name, label.format(line))
    for name, value in bind(launch.call, arg_names) if launch.call else ():
        if texts_of(value, launch.scopes, whole=False) & parts:
            found.names.setdefault(name, label.format(line))
    return found


def _definitions(grid: ast.AST | None, scopes: Scopes, depth: int = 8) -> list[ast.AST | None]:
    """Return the expressions that a grid may be: functions, or expressions of a tuple."""
    if grid is None or depth == 0:
        return [None]
    match grid:
        case ast.Name(id=name):
            values = bindings(name, scopes)
        case ast.IfExp():
            values = [grid.body, grid.orelse]
        case ast.Call(func=ast.Name(id="tuple" | "list"), args=[values_given]):
            values = [values_given]
        case ast.Call():
            makers = bindings(getattr(grid.func, "id", ""), scopes) or [None]
            return [grid, *itertools.chain.from_iterable(map(_functions_in, makers))]
        case _:
            return [grid if isinstance(grid, _GRIDS) else None]
    found = (_definitions(value, scopes, depth - 1) for value in values or [None])
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def _functions_in(maker: ast.AST | None) -> list[ast.AST | None]:
    """Return the functions in the text of a function that makes a grid."""
    if not isinstance(maker, ast.FunctionDef):
        return [None]
    return [n for n in ast.walk(maker) if isinstance(n, FUNCTIONS) and n is not maker]
