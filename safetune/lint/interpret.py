"""Runs the text of a module as far as it tells its values: lists of configs, numbers, functions.

Where a condition is not known, both branches run, and a list that either changes is not complete.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from safetune.keys.source_text import MISSING, FunctionNode, last_name, parameters
from safetune.keys.written_kernel import WrittenFunction, WrittenHeuristics, WrittenLayer
from safetune.lint.frames import Deferred, Frame, defaults, function_of
from safetune.lint.operations import (
    all_or_any,
    either,
    entry,
    extend,
    items_of,
    known_call,
    method,
    operate,
    truth,
)
from safetune.lint.values import UNKNOWN, Items, written_config

#: The statements that are run for one file, and the calls inside each other.
_STEPS, _DEPTH = 100_000, 8


_JIT_OPTIONS = ("do_not_specialize", "launch_metadata", "repr")

#: Decorators that leave what a function does as it is written.
_TRANSPARENT = frozenset({"cache", "lru_cache", "staticmethod"})


class _Exhausted(Exception):
    """A text runs for too long."""


class _Returned(Exception):
    """A call is over."""


#: Whatever ends a run; the names that were bound until then stay.
_STOPPED = contextlib.suppress(_Exhausted, _Returned, RecursionError)


def run_module(frame: Frame, tree: ast.Module) -> None:
    """Bind the names of a module."""
    with _STOPPED:
        _run(tree.body, frame)


def run_around(function: FunctionNode, frame: Frame) -> Frame:
    """Return the names inside a function whose arguments are not known."""
    inner = Frame(frame.file, frame, parameters(function))
    body = function.body if isinstance(function.body, list) else []
    with _STOPPED:
        _run(body, inner)
    return inner


def _run(statements: Sequence[ast.stmt], frame: Frame) -> None:
    for statement in statements:
        _count(frame)
        _statement(statement, frame)


def _count(frame: Frame) -> None:
    frame.file.steps += 1
    if frame.file.steps > _STEPS:
        raise _Exhausted


def _statement(node: ast.stmt, frame: Frame) -> None:
    match node:
        case ast.Assign(targets=targets, value=value):
            found = value_of(value, frame)
            for target in targets:
                _assign(target, found, frame)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            _assign(target, value_of(value, frame), frame)
        case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
            whole = ast.BinOp(ast.Name(name, ast.Load()), op, value)
            _assign(target, value_of(whole, frame), frame)
        case ast.Expr(value=ast.Call() as call):
            value_of(call, frame)
        case ast.If():
            _branch(node, frame)
        case ast.For():
            _loop(node, frame)
        case ast.While():
            _maybe(node.body, frame)
        case ast.With() | ast.AsyncWith():
            _run(node.body, frame)
        case ast.Try():
            _run([*node.body, *node.orelse], frame)
            for handler in node.handlers:
                _maybe(handler.body, frame)
            _run(node.finalbody, frame)
        case ast.Return():
            frame.returned.append(value_of(node.value, frame) if node.value else None)
            if not frame.unsure:
                raise _Returned
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if not (frame.unsure and node.name in frame.values):
                frame.values[node.name] = Deferred(lambda: decorated(node, frame))
        case ast.ClassDef():
            frame.values[node.name] = UNKNOWN
        case ast.Import() | ast.ImportFrom():
            frame.bind(node)


def _maybe(statements: Sequence[ast.stmt], frame: Frame) -> None:
    """Run statements that may run never, or more than once."""
    frame.unsure += 1
    _run(statements, frame)
    frame.unsure -= 1


def _branch(node: ast.If, frame: Frame) -> None:
    test = value_of(node.test, frame)
    if test is UNKNOWN:
        _maybe(node.body, frame)
        _maybe(node.orelse, frame)
    else:
        _run(node.body if truth(test) else node.orelse, frame)


def _loop(node: ast.For, frame: Frame) -> None:
    items = items_of(value_of(node.iter, frame))
    if not items.complete:
        frame.unsure += 1
    for item in items or ([] if items.complete else [UNKNOWN]):
        _assign(node.target, item, frame)
        _run(node.body, frame)
    if not items.complete:
        frame.unsure -= 1


def _assign(target: ast.expr, value: Any, frame: Frame) -> None:
    match target:
        case ast.Name(id=name):
            old = frame.values.get(name, MISSING) if frame.unsure else MISSING
            frame.values[name] = value if old is MISSING else either([old, value])
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            known = isinstance(value, Items) and len(value) == len(parts)
            items = value if known else itertools.repeat(UNKNOWN)
            for part, item in zip(parts, items, strict=False):
                _assign(part, item, frame)
        case ast.Subscript():
            owner, key = value_of(target.value, frame), value_of(target.slice, frame)
            if isinstance(owner, dict) and isinstance(key, str):
                owner[key] = UNKNOWN if frame.unsure else value
            elif isinstance(owner, Items):
                owner.complete = False


def value_of(node: ast.expr, frame: Frame) -> Any:
    """Return what an expression stands for, or `UNKNOWN`."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            found = frame.get(name)
            return UNKNOWN if found is MISSING else found
        case ast.Attribute(value=owner, attr=name):
            module = value_of(owner, frame)
            found = getattr(module, name, MISSING) if isinstance(module, ModuleType) else MISSING
            return UNKNOWN if found is MISSING else found
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return _sequence(parts, frame)
        case ast.Dict():
            return _dict(node, frame)
        case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
            return _comprehension(node, frame)
        case ast.BinOp(left=left, right=right):
            return operate(node.op, value_of(left, frame), value_of(right, frame))
        case ast.UnaryOp(operand=operand):
            return operate(node.op, value_of(operand, frame))
        case ast.BoolOp(values=values):
            return all_or_any(node.op, [value_of(value, frame) for value in values])
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [value_of(side, frame) for side in [left, *others]]
            pairs = zip(ops, sides, sides[1:], strict=False)
            return all_or_any(ast.And(), [operate(op, a, b) for op, a, b in pairs])
        case ast.IfExp():
            test = value_of(node.test, frame)
            if test is UNKNOWN:
                return either([value_of(node.body, frame), value_of(node.orelse, frame)])
            return value_of(node.body if truth(test) else node.orelse, frame)
        case ast.Subscript():
            return entry(value_of(node.value, frame), value_of(node.slice, frame))
        case ast.Lambda():
            return function_of(node, frame) or UNKNOWN
        case ast.Starred():
            return value_of(node.value, frame)
        case ast.NamedExpr(target=target, value=value):
            found = value_of(value, frame)
            _assign(target, found, frame)
            return found
        case ast.Call():
            return _call(node, frame)
    return UNKNOWN


def _sequence(parts: Sequence[ast.expr], frame: Frame) -> Items:
    found = Items()
    for part in parts:
        value = value_of(part, frame)
        if isinstance(part, ast.Starred):
            extend(found, items_of(value))
        else:
            found.append(value)
    return found


def _dict(node: ast.Dict, frame: Frame) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        item = value_of(value, frame)
        if key is None:
            found.update(item if isinstance(item, Mapping) else {})
        elif isinstance(name := value_of(key, frame), (str, int, bool)):
            found[name] = item
    return found


def _comprehension(node: ast.ListComp | ast.GeneratorExp | ast.SetComp, frame: Frame) -> Items:
    found = Items()
    inner = Frame(frame.file, frame)

    def fill(generators: Sequence[ast.comprehension]) -> None:
        if not generators:
            _count(frame)
            found.append(value_of(node.elt, inner))
            return
        items = items_of(value_of(generators[0].iter, inner))
        found.complete = found.complete and items.complete
        for item in items or ([] if items.complete else [UNKNOWN]):
            _assign(generators[0].target, item, inner)
            tests = [value_of(test, inner) for test in generators[0].ifs]
            found.complete = found.complete and UNKNOWN not in tests
            if all(test is UNKNOWN or truth(test) for test in tests):
                fill(generators[1:])

    try:
        fill(node.generators)
    except _Exhausted:
        found.complete = False
    return found


def _call(node: ast.Call, frame: Frame) -> Any:
    name = last_name(node.func)
    args, keywords = values_passed(node, frame)
    if name == "Config":
        return written_config(node, args, keywords)
    if len(args) == 1 and (isinstance(node.func, ast.Call) or name == "jit"):
        return applied(args[0], node.func, frame)
    function = value_of(node.func, frame)
    if isinstance(function, functools.partial):
        args, keywords = [*function.args, *args], {**function.keywords, **keywords}
        function = function.func
    if hasattr(function, "text"):
        return _run_function(function, args, keywords)
    if isinstance(node.func, ast.Attribute):
        owner = value_of(node.func.value, frame)
        if isinstance(owner, (Items, dict)):
            return method(owner, name, args, bool(frame.unsure))
    if name == "partial" and args and isinstance(args[0], FunctionType):
        return functools.partial(args[0], *args[1:], **keywords)
    return known_call(name, args, keywords)


def values_passed(node: ast.Call, frame: Frame) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call as far as they are known, those by name as a dict."""
    found: dict[str, Any] = {}
    for keyword in node.keywords:
        value = value_of(keyword.value, frame)
        if keyword.arg:
            found[keyword.arg] = value
        elif isinstance(value, Mapping):
            found.update(value)
    return list(_sequence(node.args, frame)), found


def _run_function(function: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    node, outer = function.text
    inner, files = _frame_of(node, outer, args, keywords), outer.file.files
    if isinstance(node, ast.Lambda):
        return value_of(node.body, inner)
    if files.depth >= _DEPTH or isinstance(node, ast.AsyncFunctionDef):
        return UNKNOWN
    files.depth += 1
    try:
        _run(node.body, inner)
        inner.returned.append(None)
    except _Returned:
        pass
    except _Exhausted:
        return UNKNOWN
    finally:
        files.depth -= 1
    return either(inner.returned)


def _frame_of(
    node: FunctionNode, outer: Frame, args: Sequence[Any], keywords: Mapping[str, Any]
) -> Frame:
    inner = Frame(outer.file, outer, parameters(node))
    inner.values.update((name, value_of(each, outer)) for name, each in defaults(node).items())
    positional = [*node.args.posonlyargs, *node.args.args]
    inner.values.update(zip([arg.arg for arg in positional], args, strict=False))
    inner.values.update((name, v) for name, v in keywords.items() if name in inner.values)
    return inner


def decorated(node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame, below: int = 0) -> Any:
    """Return what a function's name stands for, below its first `below` decorators."""
    function = function_of(node, frame)
    if function is None:
        return UNKNOWN
    found: Any = function
    for decorator in reversed(node.decorator_list[below:]):
        found = _above(found, decorator, node, frame)
    return found


def applied(found: Any, decorator: ast.expr, frame: Frame) -> Any:
    """Return what a decorator makes of a value that it is called with."""
    function = base_of(found)
    return UNKNOWN if function is None else _above(found, decorator, function, frame)


def base_of(found: Any) -> Any:
    """Return the text of the function that a value of the tree is, or decorates; else None."""
    while not isinstance(found, FunctionType):
        if (found := getattr(found, "fn", None)) is None:
            return None
    return found.text[0] if hasattr(found, "text") else None


def _above(found: Any, decorator: ast.expr, node: Any, frame: Frame) -> Any:
    call = decorator if isinstance(decorator, ast.Call) else None
    name = last_name(call.func if call else decorator)
    if isinstance(found, FunctionType):
        if name.endswith("jit") or name == "constexpr_function":
            return _jit(found, call, node, frame)
        return found if name in _TRANSPARENT else UNKNOWN
    if name == "heuristics" and call and found is not UNKNOWN:
        args, keywords = values_passed(call, frame)
        values: Any = next(iter([*args, *keywords.values()]), {})
        if isinstance(values, Mapping):
            return WrittenHeuristics(found, values)
    return found if found is UNKNOWN else WrittenLayer(found)


def _jit(function: FunctionType, call: ast.Call | None, node: Any, frame: Frame) -> WrittenFunction:
    given = values_passed(call, frame)[1] if call else {}
    options = [given.get(name) for name in _JIT_OPTIONS]
    first = function.__code__.co_firstlineno
    lines = tuple(frame.file.lines[first - 1 : node.end_lineno])
    return WrittenFunction(function, lines, first, *options)
