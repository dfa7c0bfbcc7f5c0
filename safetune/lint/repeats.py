"""Whether a kernel that overwrites its input gives the same result when it runs again."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from safetune.keys.launch_usage import bindings
from safetune.keys.source_text import last_name, walk

#: Functions that return their own results unchanged: `abs(abs(x))` is `abs(x)`.
_ONCE = frozenset({"abs", "ceil", "fabs", "floor"})


def same_again(function: ast.FunctionDef) -> bool:
    """Whether each stored value is loaded from there, and a second change would not change it.

    Such as `tl.store(y + n, tl.where(rows <= columns, tl.load(x + n), 0))` where x is y.
    """
    stores = [call for call in _calls(function) if last_name(call.func) == "store"]
    return bool(stores) and all(
        len(store.args) > 1 and _is_stable(store.args[1], _offset(store), function)
        for store in stores
    )


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in walk(tree) if isinstance(node, ast.Call))


def _offset(access: ast.Call) -> str:
    """Return what is added to a pointer, as text."""
    pointer = access.args[0] if access.args else None
    return ast.dump(pointer.right) if isinstance(pointer, ast.BinOp) else ""


def _is_stable(value: ast.expr, offset: str, function: ast.FunctionDef) -> bool:
    value = _followed(value, function)
    match value:
        case ast.Call(func=called, args=[inner]) if last_name(called) in _ONCE:
            return _is_loaded(inner, offset, function)
        case ast.Call(func=called, args=[_, one, other]) if last_name(called) == "where":
            sides = [one, other]
        case ast.Call(func=called, args=sides) if last_name(called) in ("maximum", "minimum"):
            pass
        case _:
            return False
    constants = [side for side in sides if isinstance(side, ast.Constant)]
    loaded = [side for side in sides if _is_loaded(side, offset, function)]
    return len(constants) == len(loaded) == 1


def _is_loaded(value: ast.expr, offset: str, function: ast.FunctionDef) -> bool:
    value = _followed(value, function)
    return (
        isinstance(value, ast.Call)
        and last_name(value.func) == "load"
        and bool(offset)
        and _offset(value) == offset
    )


def _followed(value: ast.expr, function: ast.FunctionDef) -> ast.expr:
    """Return the one expression that a name stands for, without casts."""
    for _ in range(8):
        match value:
            case ast.Name(id=name):
                match bindings(name, (function,)):
                    case [ast.expr() as value]:
                        continue
            case ast.Call(func=ast.Attribute(value=owner, attr="to")):
                value = owner
                continue
        break
    return value
