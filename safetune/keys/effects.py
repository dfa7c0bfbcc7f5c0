"""The writes of a kernel according to its text: atomic operations, and write-only parameters.

A mistake here counts a write-only parameter as read, which only skips a check of it. Comments and
strings are ignored.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from safetune.keys.kernel_text import KernelText, kernel_texts
from safetune.keys.run_order import bind
from safetune.keys.source_text import (
    FRAME_READERS,
    MISSING,
    arguments_of,
    children,
    is_foreign,
    last_name,
    parameters,
    walk,
)
from safetune.outcome import Effects

#: Calls whose result points to where their first argument does.
_POINTING = frozenset(
    {"make_block_ptr", "make_tensor_descriptor", "advance", "multiple_of", "max_contiguous", "cast"}
    | {"to", "broadcast_to"}
)
#: Attributes of a pointer that do not depend on its target.
_OF_THE_TYPE = frozenset({"dtype", "type"})
_ASSEMBLY = "inline_asm_elementwise"
_DRAWS = re.compile(r"(rand|philox)\w*")
_CLOCK = re.compile(r"\w*(timer|clock|smid)\w*")


def effects_of(kernel: Any) -> Effects:
    """Return the writes of a kernel, including those of all jit functions that it calls."""
    texts = kernel_texts(kernel)
    functions: dict[Any, _Function] = {}
    for function, text in texts.items():
        if text is None:
            return Effects(atomics=True, any_order=True)
        _analysed(function, texts, functions)
    used = [used for function in functions.values() for used in function.atomics]
    kernel_function = next(iter(functions.values()))
    calls = {name for text in texts.values() if text for name in _names_of_triton(text)}
    steady = not used and _ASSEMBLY not in calls and not any(map(_CLOCK.fullmatch, calls))
    return Effects(
        atomics=bool(used),
        any_order=any(used),
        only_stored=tuple(sorted(kernel_function.only_stored())),
        draws=any(map(_DRAWS.fullmatch, calls)),
        repeats=steady,
    )


def _names_of_triton(text: KernelText) -> Iterator[str]:
    """Yield the names of all that a function calls, but jit functions with a text of their own."""
    for call in text.calls():
        if text.callee(call.func) is None:
            yield from text.names(call.func)


def _analysed(
    function: Any, texts: dict[Any, KernelText | None], functions: dict[Any, _Function]
) -> _Function | None:
    """Return a function's analysis, None where its text is not what runs; it enters `functions`."""
    text = texts.get(function)
    if function not in functions and text is not None:
        found = functions[function] = _Function(text, texts, functions)
        for statement in text.node.body:
            found.statement(statement)
    return functions.get(function)


class _Function:
    """One function: which names point to where a parameter does, and which of them are read."""

    def __init__(
        self,
        text: KernelText,
        texts: dict[Any, KernelText | None],
        functions: dict[Any, _Function],
    ) -> None:
        self.atomics: list[bool] = []  # for each atomic operation, whether its result is used
        self._text, self._texts, self._functions = text, texts, functions
        self._parameters = {*parameters(text.node)}
        self._from: dict[str, set[str]] = {}
        self._read: set[str] = set()
        self._stored: set[str] = set()

    def only_stored(self) -> set[str]:
        """Return the parameters that the function stores through and does not read."""
        origins = self._origins(self._stored) - self._origins(self._read)
        return origins & self._parameters

    def _origins(self, names: Iterable[str]) -> set[str]:
        origins: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in origins:
                origins.add(name)
                waiting.extend(self._from.get(name, ()))
        return origins

    def statement(self, node: ast.AST) -> None:
        """Follow one statement."""
        match node:
            case ast.Assign(targets=targets, value=value):
                self._assign(targets, value)
            case (
                ast.AugAssign(target=target, value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ):
                self._assign([target], value)
            case ast.Expr(value=ast.Call() as call):
                self._call(call, used=False)
            case ast.expr():
                self._use(node)
            case _:
                for child in children(node):
                    self.statement(child)

    def _assign(self, targets: Iterable[ast.expr], value: ast.expr) -> None:
        pointers = self._pointers(value)
        for target in targets:
            for part in walk(target):
                if isinstance(part, (ast.Subscript, ast.Attribute)):
                    self._read |= pointers
                elif isinstance(part, ast.Name):
                    self._from.setdefault(part.id, set()).update(pointers - {part.id})

    def _pointers(self, node: ast.expr) -> set[str]:
        """Return the names that an expression points with; everything else in it is read."""
        match node:
            case ast.Name(id=name):
                return {name}
            case ast.BinOp(left=left, right=right):
                return self._pointers(left) | self._pointers(right)
            case ast.IfExp(test=test, body=body, orelse=other):
                self._use(test)
                return self._pointers(body) | self._pointers(other)
            case ast.Tuple(elts=items):
                return set().union(*map(self._pointers, items))
            case ast.Call(func=func) if last_name(func) in _POINTING and self._is_triton(func):
                first = self._pointer_of(node)
                for value in arguments_of(node):
                    if value not in first:
                        self._use(value)
                return set().union(*map(self._pointers, first))
        self._use(node)
        return set()

    def _use(self, node: ast.AST) -> None:
        """Take everything in an expression as read."""
        match node:
            case ast.Name(id=name):
                self._read |= self._parameters if name in FRAME_READERS else {name}
            case ast.Call():
                self._call(node, used=True)
            case ast.Attribute(attr=attribute) if attribute in _OF_THE_TYPE:
                pass
            case ast.Compare(left=ast.Name(), ops=[ast.Is() | ast.IsNot()]):
                pass
            case ast.Lambda() | ast.FunctionDef():
                self._read |= {n.id for n in walk(node) if isinstance(n, ast.Name)}
            case _:
                for child in children(node):
                    self._use(child)

    def _call(self, node: ast.Call, used: bool) -> None:
        func = node.func
        if self._is_atomic(node):
            self.atomics.append(used)
        callee = self._text.callee(func)
        if callee is not None:
            inner = _analysed(callee.fn, self._texts, self._functions)
            accepted = inspect.getfullargspec(callee.fn)
            bound = list(bind(node, [*accepted.args, *accepted.kwonlyargs]))
            kept = inner.only_stored() if inner is not None else set()
            pointers = [value for name, value in bound if name in kept]
        elif last_name(func) == "store" and self._is_triton(func):
            pointers = self._pointer_of(node)
        else:
            self._use(func)
            pointers = []
        for pointer in pointers:
            self._stored |= self._pointers(pointer)
        for value in arguments_of(node):
            if value not in pointers:
                self._use(value)

    def _pointer_of(self, node: ast.Call) -> list[ast.expr]:
        """Return the pointer of a call of Triton's: the owner of a method, or an argument."""
        func = node.func
        if isinstance(func, ast.Attribute) and self._text.value(func) is MISSING:
            owner = self._text.value(func.value)
            if not isinstance(owner, ModuleType):
                return [func.value]
        return [*node.args[:1], *(k.value for k in node.keywords if k.arg in ("base", "pointer"))]

    def _is_atomic(self, node: ast.Call) -> bool:
        names = self._text.names(node.func)
        if _ASSEMBLY in names:
            texts = [n.value for n in walk(node) if isinstance(n, ast.Constant)]
            return any(isinstance(t, str) and ("atom" in t or "red." in t) for t in texts)
        return any(n.startswith("atomic_") for n in names) and self._is_triton(node.func)

    def _is_triton(self, func: ast.expr) -> bool:
        """Whether a function may be one of Triton's, or a method of a tensor or descriptor."""
        value = self._text.value(func)
        function = value if inspect.isfunction(value) else getattr(value, "fn", None)
        return value is MISSING or (inspect.isfunction(function) and is_foreign(function))
