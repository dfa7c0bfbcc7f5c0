"""What a kernel's text says of its writes: its atomic operations, and what it stores to only.

A mistake calls a parameter read that is not, and then a check of it is left out. Comments and texts
are not looked at.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from safetune.keys.body_usage import can_be_followed
from safetune.keys.kernel_digest import base_function
from safetune.keys.run_order import bind
from safetune.keys.source_text import (
    FRAME_READERS,
    MISSING,
    Scope,
    dotted,
    is_foreign,
    last_name,
    parameters,
    source_of,
    stores,
    tree_of,
)
from safetune.outcome import Effects

#: Calls whose result points to where their first argument does.
_POINTING = frozenset(
    {"make_block_ptr", "make_tensor_descriptor", "advance", "multiple_of", "max_contiguous", "cast"}
    | {"to", "broadcast_to"}
)
#: Attributes of a pointer that say nothing of what it points to.
_OF_THE_TYPE = frozenset({"dtype", "type"})
_ASSEMBLY = "inline_asm_elementwise"


def effects_of(kernel: Any) -> Effects:
    """Return what a kernel writes, through every jit function that it calls."""
    jit, _ = base_function(kernel)
    functions: dict[Any, _Function | None] = {}
    root = _analysed(jit, functions)
    if root is None or None in functions.values():
        return Effects(atomics=True, any_order=True)
    known = [function for function in functions.values() if function is not None]
    used = [used for function in known for used in function.atomics]
    return Effects(bool(used), any(used), tuple(sorted(root.only_stored())))


def _analysed(jit: Any, functions: dict[Any, _Function | None]) -> _Function | None:
    """Return a function's analysis, None where its text is not what runs; it enters `functions`."""
    if jit.fn not in functions:
        text = source_of(jit) if can_be_followed(jit) else None
        node = tree_of(text).body[0] if text else None
        if not isinstance(node, ast.FunctionDef):
            functions[jit.fn] = None
            return None
        found = functions[jit.fn] = _Function(node, Scope(jit.fn), functions)
        found.visit()
    return functions[jit.fn]


class _Function:
    """One function: which names point to where a parameter does, and which of them are read."""

    def __init__(
        self, node: ast.FunctionDef, scope: Scope, functions: dict[Any, _Function | None]
    ) -> None:
        self.atomics: list[bool] = []  # for each atomic operation, whether its result is used
        self._node = node
        self._scope = scope
        self._functions = functions
        self._local = {name for _, name in stores(node)}
        self._from: dict[str, set[str]] = {}
        self._read: set[str] = set()
        self._stored: set[str] = set()

    def visit(self) -> None:
        """Follow the whole text."""
        for statement in self._node.body:
            self._statement(statement)

    def only_stored(self) -> set[str]:
        """Return the parameters that the function stores through and does not read."""
        origins = self._origins(self._stored) - self._origins(self._read)
        return origins & set(parameters(self._node))

    def _origins(self, names: Iterable[str]) -> set[str]:
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting.extend(self._from.get(name, ()))
        return found

    def _statement(self, node: ast.AST) -> None:
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
                for child in ast.iter_child_nodes(node):
                    self._statement(child)

    def _assign(self, targets: Iterable[ast.expr], value: ast.expr) -> None:
        pointers = self._pointers(value)
        for target in targets:
            for part in ast.walk(target):
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
                owner = self._owner(func)
                first = [*([owner] if owner is not None else node.args[:1])]
                first += [k.value for k in node.keywords if k.arg == "base" and not first]
                for value in _values(node):
                    if value not in first:
                        self._use(value)
                return set().union(*map(self._pointers, first))
        self._use(node)
        return set()

    def _use(self, node: ast.AST) -> None:
        """Take everything in an expression as read."""
        match node:
            case ast.Name(id=name):
                self._read |= {*parameters(self._node)} if name in FRAME_READERS else {name}
            case ast.Call():
                self._call(node, used=True)
            case ast.Attribute(attr=attribute) if attribute in _OF_THE_TYPE:
                pass
            case ast.Compare(left=ast.Name(), ops=[ast.Is() | ast.IsNot()]):
                pass
            case ast.Lambda() | ast.FunctionDef():
                self._read |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            case _:
                for child in ast.iter_child_nodes(node):
                    self._use(child)

    def _call(self, node: ast.Call, used: bool) -> None:
        func, owner = node.func, self._owner(node.func)
        if self._is_atomic(node):
            self.atomics.append(used)
        callee = self._callee(func)
        values = list(_values(node))
        if callee is not None:
            inner = _analysed(callee, self._functions)
            accepted = inspect.getfullargspec(callee.fn)
            names = [*accepted.args, *accepted.kwonlyargs]
            kept = inner.only_stored() if inner is not None else set()
            pointers = [value for name, value in bind(node, names) if name in kept]
        elif last_name(func) == "store" and self._is_triton(func):
            given = [k.value for k in node.keywords if k.arg == "pointer"]
            pointers = [owner] if owner is not None else [*node.args[:1], *given]
        else:
            self._use(func)
            pointers = []
        for pointer in pointers:
            self._stored |= self._pointers(pointer)
        for value in values:
            if not any(value is pointer for pointer in pointers):
                self._use(value)

    def _is_atomic(self, node: ast.Call) -> bool:
        value = self._value(node.func)
        name = last_name(node.func) if value is MISSING else getattr(value, "__name__", "")
        if name == _ASSEMBLY:
            texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
            return any(isinstance(t, str) and ("atom" in t or "red." in t) for t in texts)
        return name.startswith("atomic_") and self._is_triton(node.func)

    def _callee(self, func: ast.expr) -> Any:
        """Return the jit function that is called, if it is not Triton's own."""
        value = self._value(func)
        inner = getattr(value, "fn", None)
        own = inspect.isfunction(inner) and not is_foreign(inner)
        return value if own else None

    def _is_triton(self, func: ast.expr) -> bool:
        """Whether a function may be one of Triton's, or a method of a tensor or descriptor."""
        value = self._value(func)
        function = value if inspect.isfunction(value) else getattr(value, "fn", None)
        return value is MISSING or (inspect.isfunction(function) and is_foreign(function))

    def _owner(self, func: ast.expr) -> ast.expr | None:
        """Return the object of a method call; None for a function of a module."""
        if not isinstance(func, ast.Attribute) or self._value(func) is not MISSING:
            return None
        return None if isinstance(self._value(func.value), ModuleType) else func.value

    def _value(self, func: ast.expr) -> Any:
        name = dotted(func)
        if name is None or name.partition(".")[0] in self._local:
            return MISSING
        return self._scope.value_of(name)


def _values(node: ast.Call) -> Iterator[ast.expr]:
    yield from node.args
    yield from (keyword.value for keyword in node.keywords)
