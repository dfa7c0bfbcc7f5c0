"""The kernels and tuners in a file, from the decorators in its text."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeAlias

from safetune.keys.source_text import last_name
from safetune.keys.written_kernel import WrittenFunction, WrittenHeuristics, WrittenLayer
from safetune.lint.frames import Frame, function_of
from safetune.lint.values import UNKNOWN

#: Evaluates an expression in a frame.
Value: TypeAlias = Callable[[ast.expr, Frame], Any]

_JIT_OPTIONS = ("do_not_specialize", "launch_metadata", "repr")

#: Decorators that leave what a function does as it is written.
_TRANSPARENT = frozenset({"cache", "lru_cache", "staticmethod"})


def decorated(
    node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame, value: Value, below: int = 0
) -> Any:
    """Return what a function's name stands for, below its first `below` decorators."""
    function = function_of(node, frame)
    if function is None:
        return UNKNOWN
    found: Any = function
    for decorator in reversed(node.decorator_list[below:]):
        found = _above(found, decorator, node, frame, value)
    return found


def applied(found: Any, decorator: ast.expr, frame: Frame, value: Value) -> Any:
    """Return what a decorator makes of a value that it is called with."""
    function = base_of(found)
    return UNKNOWN if function is None else _above(found, decorator, function, frame, value)


def base_of(found: Any) -> Any:
    """Return the text of the function that a value of the tree is, or decorates; else None."""
    while not isinstance(found, FunctionType):
        if (found := getattr(found, "fn", None)) is None:
            return None
    return found.text[0] if hasattr(found, "text") else None


def _above(found: Any, decorator: ast.expr, node: Any, frame: Frame, value: Value) -> Any:
    call = decorator if isinstance(decorator, ast.Call) else None
    name = last_name(call.func if call else decorator)
    if isinstance(found, FunctionType):
        if name.endswith("jit") or name == "constexpr_function":
            return _jit(found, call, node, frame, value)
        return found if name in _TRANSPARENT else UNKNOWN
    if name == "heuristics" and call and found is not UNKNOWN:
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        values = value(given[0], frame) if given else {}
        if isinstance(values, Mapping):
            return WrittenHeuristics(found, values)
    return found if found is UNKNOWN else WrittenLayer(found)


def _jit(
    function: FunctionType, call: ast.Call | None, node: Any, frame: Frame, value: Value
) -> WrittenFunction:
    given = {k.arg: value(k.value, frame) for k in (call.keywords if call else ()) if k.arg}
    options = [given.get(name) for name in _JIT_OPTIONS]
    first = function.__code__.co_firstlineno
    lines = tuple(frame.file.lines[first - 1 : node.end_lineno])
    return WrittenFunction(function, lines, first, *options)
