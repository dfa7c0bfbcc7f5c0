"""Runs the text of a module as far as it tells its values: lists of configs, numbers, functions.

Where a condition is not known, both branches run, and a list that either changes is not complete.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from safetune.keys.source_text import MISSING, FunctionNode, last_name
from safetune.lint.frames import Deferred, Frame, TextModule, function_of
from safetune.lint.kernels import applied, decorated
from safetune.lint.operations import (
    all_or_any,
    either,
    entry,
    extend,
    items_of,
    known_call,
    operate,
    truth,
)
from safetune.lint.values import UNKNOWN, Items, written_config

#: The statements that are run for one file, and the calls inside each other.
_STEPS, _DEPTH = 100_000, 8


class _Exhausted(Exception):
    """A text runs for too long."""


class _Returned(Exception):
    """A call is over."""


#: Whatever ends a run; the names that were bound until then stay.
_STOPPED = contextlib.suppress(_Exhausted, _Returned, RecursionError)


class Interpreter:
    """Runs statements and evaluates expressions of one module, in frames."""

    def __init__(self) -> None:
        self._depth = 0  # of calls

    def run_module(self, frame: Frame, tree: ast.Module) -> None:
        """Bind the names of a module."""
        with _STOPPED:
            self._run(tree.body, frame)

    def run_around(self, function: FunctionNode, frame: Frame) -> Frame:
        """Return the names inside a function whose arguments are not known."""
        inner = Frame(frame.file, frame)
        inner.values.update((arg.arg, UNKNOWN) for arg in _all_args(function))
        body = function.body if isinstance(function.body, list) else []
        with _STOPPED:
            self._run(body, inner)
        return inner

    def _run(self, statements: Sequence[ast.stmt], frame: Frame) -> None:
        for statement in statements:
            self._count(frame)
            self._statement(statement, frame)

    @staticmethod
    def _count(frame: Frame) -> None:
        frame.file.steps += 1
        if frame.file.steps > _STEPS:
            raise _Exhausted

    def _statement(self, node: ast.stmt, frame: Frame) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                found = self.value(value, frame)
                for target in targets:
                    self._assign(target, found, frame)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self.value(value, frame), frame)
            case ast.AugAssign():
                self._augment(node, frame)
            case ast.Expr(value=ast.Call() as call):
                self.value(call, frame)
            case ast.If():
                self._branch(node, frame)
            case ast.For():
                self._loop(node, frame)
            case ast.While():
                self._maybe(node.body, frame)
            case ast.With() | ast.AsyncWith():
                self._run(node.body, frame)
            case ast.Try():
                self._run([*node.body, *node.orelse], frame)
                for handler in node.handlers:
                    self._maybe(handler.body, frame)
                self._run(node.finalbody, frame)
            case ast.Return():
                frame.returned.append(self.value(node.value, frame) if node.value else None)
                if not frame.unsure:
                    raise _Returned
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if not (frame.unsure and node.name in frame.values):
                    frame.values[node.name] = Deferred(lambda: decorated(node, frame, self.value))
            case ast.ClassDef():
                frame.values[node.name] = UNKNOWN
            case ast.Import(names=names):
                for alias in names:
                    self._import(alias, frame)
            case ast.ImportFrom():
                for alias in node.names:
                    self._import_from(node, alias, frame)

    def _import(self, alias: ast.alias, frame: Frame) -> None:
        files, file = frame.file.files, frame.file
        name = alias.name if alias.asname else alias.name.partition(".")[0]
        frame.values[alias.asname or name] = Deferred(lambda: files.imported(file, 0, name))

    def _import_from(self, node: ast.ImportFrom, alias: ast.alias, frame: Frame) -> None:
        files, file, module = frame.file.files, frame.file, node.module or ""
        if alias.name == "*":
            owner = files.imported(file, node.level, module)
            if isinstance(owner, TextModule):
                frame.values.update(owner._text.frame.values)
            return
        if frame.unsure and alias.name in frame.values:
            return
        frame.values[alias.asname or alias.name] = Deferred(
            lambda: files.imported_name(file, node.level, module, alias.name)
        )

    def _maybe(self, statements: Sequence[ast.stmt], frame: Frame) -> None:
        """Run statements that may run never, or more than once."""
        frame.unsure += 1
        self._run(statements, frame)
        frame.unsure -= 1

    def _branch(self, node: ast.If, frame: Frame) -> None:
        test = self.value(node.test, frame)
        if test is UNKNOWN:
            self._maybe(node.body, frame)
            self._maybe(node.orelse, frame)
        else:
            self._run(node.body if truth(test) else node.orelse, frame)

    def _loop(self, node: ast.For, frame: Frame) -> None:
        items = items_of(self.value(node.iter, frame))
        if not items.complete:
            frame.unsure += 1
        for item in items or ([] if items.complete else [UNKNOWN]):
            self._assign(node.target, item, frame)
            self._run(node.body, frame)
        if not items.complete:
            frame.unsure -= 1

    def _assign(self, target: ast.expr, value: Any, frame: Frame) -> None:
        match target:
            case ast.Name(id=name):
                old = frame.values.get(name, MISSING) if frame.unsure else MISSING
                frame.values[name] = value if old is MISSING else either([old, value])
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                known = isinstance(value, Items) and len(value) == len(parts)
                items = value if known else itertools.repeat(UNKNOWN)
                for part, item in zip(parts, items, strict=False):
                    self._assign(part, item, frame)
            case ast.Subscript():
                owner, key = self.value(target.value, frame), self.value(target.slice, frame)
                if isinstance(owner, dict) and isinstance(key, str):
                    owner[key] = UNKNOWN if frame.unsure else value
                elif isinstance(owner, Items):
                    owner.complete = False

    def _augment(self, node: ast.AugAssign, frame: Frame) -> None:
        if isinstance(node.target, ast.Name):
            whole = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
            self._assign(node.target, self.value(whole, frame), frame)

    def value(self, node: ast.expr, frame: Frame) -> Any:
        """Return what an expression stands for, or `UNKNOWN`."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                found = frame.get(name)
                return UNKNOWN if found is MISSING else found
            case ast.Attribute():
                return self._attribute(node, frame)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return self._sequence(parts, frame)
            case ast.Dict():
                return self._dict(node, frame)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node, frame)
            case ast.BinOp(left=left, right=right):
                return operate(node.op, self.value(left, frame), self.value(right, frame))
            case ast.UnaryOp(operand=operand):
                return operate(node.op, self.value(operand, frame))
            case ast.BoolOp(values=values):
                return all_or_any(node.op, [self.value(value, frame) for value in values])
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [self.value(side, frame) for side in [left, *others]]
                pairs = zip(ops, sides, sides[1:], strict=False)
                return all_or_any(ast.And(), [operate(op, a, b) for op, a, b in pairs])
            case ast.IfExp():
                return self._either_side(node, frame)
            case ast.Subscript():
                return entry(self.value(node.value, frame), self.value(node.slice, frame))
            case ast.Lambda():
                return function_of(node, frame) or UNKNOWN
            case ast.Starred():
                return self.value(node.value, frame)
            case ast.NamedExpr(target=target, value=value):
                found = self.value(value, frame)
                self._assign(target, found, frame)
                return found
            case ast.Call():
                return self._call(node, frame)
        return UNKNOWN

    def _attribute(self, node: ast.Attribute, frame: Frame) -> Any:
        owner = self.value(node.value, frame)
        if isinstance(owner, ModuleType):
            found = getattr(owner, node.attr, MISSING)
            return UNKNOWN if found is MISSING else found
        return UNKNOWN

    def _sequence(self, parts: Sequence[ast.expr], frame: Frame) -> Items:
        found = Items()
        for part in parts:
            value = self.value(part, frame)
            if isinstance(part, ast.Starred):
                extend(found, items_of(value))
            else:
                found.append(value)
        return found

    def _dict(self, node: ast.Dict, frame: Frame) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            item = self.value(value, frame)
            if key is None:
                found.update(item if isinstance(item, Mapping) else {})
            elif isinstance(name := self.value(key, frame), (str, int, bool)):
                found[name] = item
        return found

    def _comprehension(
        self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, frame: Frame
    ) -> Items:
        found = Items()
        inner = Frame(frame.file, frame)

        def fill(generators: Sequence[ast.comprehension]) -> None:
            if not generators:
                self._count(frame)
                found.append(self.value(node.elt, inner))
                return
            items = items_of(self.value(generators[0].iter, inner))
            found.complete = found.complete and items.complete
            for item in items or ([] if items.complete else [UNKNOWN]):
                self._assign(generators[0].target, item, inner)
                tests = [self.value(test, inner) for test in generators[0].ifs]
                found.complete = found.complete and UNKNOWN not in tests
                if all(test is UNKNOWN or truth(test) for test in tests):
                    fill(generators[1:])

        fill(node.generators)
        return found

    def _either_side(self, node: ast.IfExp, frame: Frame) -> Any:
        test = self.value(node.test, frame)
        if test is not UNKNOWN:
            return self.value(node.body if truth(test) else node.orelse, frame)
        return either([self.value(node.body, frame), self.value(node.orelse, frame)])

    def _call(self, node: ast.Call, frame: Frame) -> Any:
        name = last_name(node.func)
        args = list(self._sequence(node.args, frame))
        keywords = self._keywords(node, frame)
        if name == "Config":
            return written_config(node, args, keywords)
        if len(args) == 1 and (isinstance(node.func, ast.Call) or name == "jit"):
            return applied(args[0], node.func, frame, self.value)
        function = self.value(node.func, frame)
        if isinstance(function, functools.partial):
            args, keywords = [*function.args, *args], {**function.keywords, **keywords}
            function = function.func
        if hasattr(function, "text"):
            return self._run_function(function, args, keywords)
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, frame)
            if isinstance(owner, (Items, dict)):
                return self._method(owner, name, args, frame)
        if name == "partial" and args and isinstance(args[0], FunctionType):
            return functools.partial(args[0], *args[1:], **keywords)
        return known_call(name, args, keywords)

    def _keywords(self, node: ast.Call, frame: Frame) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, frame)
            if keyword.arg:
                found[keyword.arg] = value
            elif isinstance(value, Mapping):
                found.update(value)
        return found

    def _method(self, owner: Any, name: str, args: list[Any], frame: Frame) -> Any:
        if isinstance(owner, Items):
            if name in ("append", "extend", "add", "update", "insert"):
                added = [Items([args[-1]]) if name in ("append", "add", "insert") else args[-1]]
                extend(owner, items_of(added[0]))
                owner.complete = owner.complete and not frame.unsure
                return None
            if name == "copy":
                return Items(owner, owner.complete)
            owner.complete = False  # it may have been changed
            return UNKNOWN
        if name == "items":
            return Items(Items(pair) for pair in owner.items())
        if name in ("keys", "values"):
            return Items(getattr(owner, name)())
        if name == "copy":
            return dict(owner)
        if name == "get" and args and isinstance(args[0], str):
            return owner.get(args[0], args[1] if args[1:] else None)
        if name == "update" and args and isinstance(args[0], dict):
            owner.update(args[0])
        return UNKNOWN

    def _run_function(self, function: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        node, outer = function.text
        if isinstance(node, ast.Lambda):
            return self.value(node.body, self._frame_of(node, outer, args, keywords))
        if self._depth >= _DEPTH or isinstance(node, ast.AsyncFunctionDef):
            return UNKNOWN
        inner = self._frame_of(node, outer, args, keywords)
        self._depth += 1
        try:
            self._run(node.body, inner)
            inner.returned.append(None)
        except _Returned:
            pass
        finally:
            self._depth -= 1
        return either(inner.returned)

    def _frame_of(
        self, node: FunctionNode, outer: Frame, args: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Frame:
        inner = Frame(outer.file, outer)
        positional = [*node.args.posonlyargs, *node.args.args]
        inner.values.update((arg.arg, UNKNOWN) for arg in _all_args(node))
        defaults = zip(reversed(positional), reversed(node.args.defaults), strict=False)
        named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        for arg, default in [*defaults, *named]:
            if default is not None:
                inner.values[arg.arg] = self.value(default, outer)
        inner.values.update(zip([arg.arg for arg in positional], args, strict=False))
        inner.values.update((name, v) for name, v in keywords.items() if name in inner.values)
        return inner


def _all_args(node: FunctionNode) -> Iterator[ast.arg]:
    args = node.args
    yield from [*args.posonlyargs, *args.args, *args.kwonlyargs]
    yield from filter(None, [args.vararg, args.kwarg])
