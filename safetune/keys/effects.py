"""What a kernel's text says of its writes: its atomic operations, and what it stores to only.

A mistake calls a parameter read that is not, and then a check of it is left out. Comments and texts
are not looked at.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import field
from types import ModuleType
from typing import Any

from safetune.frozen import dataclass
from safetune.keys.body_usage import can_be_followed
from safetune.keys.kernel_digest import base_function
from safetune.keys.run_order import bind
from safetune.keys.source_text import (
    FRAME_READERS,
    MISSING,
    Scope,
    arguments_of,
    children,
    dotted,
    is_foreign,
    last_name,
    parameters,
    source_of,
    stores,
    tree_of,
    walk,
)
from safetune.outcome import Effects

#: Calls whose result points to where their first argument does.
_POINTING = frozenset(
    {"make_block_ptr", "make_tensor_descriptor", "advance", "multiple_of", "max_contiguous", "cast"}
    | {"to", "broadcast_to"}
)
#: What a call does beside a store; these atomic operations give another result when they run again.
_ACCESSES = {"load": "load", "atomic_add": "update", "atomic_xor": "update"}
#: Attributes of a pointer that say nothing of what it points to.
_OF_THE_TYPE = frozenset({"dtype", "type"})
_ASSEMBLY = "inline_asm_elementwise"


def effects_of(kernel: Any) -> Effects:
    """Return what a kernel writes, through every jit function that it calls."""
    functions = _functions(kernel)
    if not functions:
        return Effects(atomics=True, any_order=True)
    used = [used for function in functions for used in function.atomics]
    return Effects(bool(used), any(used), tuple(sorted(functions[0].only_stored())))


@dataclass(frozen=True)
class Accesses:
    """The arguments of a kernel by how it uses their memory, where its text tells that."""

    loaded: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()
    #: Those that it changes by what they hold, and how: a second launch finds other values.
    updated: Mapping[str, str] = field(default_factory=dict)


def accesses_of(kernel: Any) -> Accesses:
    """Return how a kernel uses the memory of its arguments."""
    root = next(iter(_functions(kernel)), None)
    if root is None:
        return Accesses()
    return Accesses(root.accessed("load"), root.accessed("store"), root.updated())


def _functions(kernel: Any) -> list[_Function]:
    """Return a kernel and all that it calls; nothing where the text of one is not what runs."""
    functions: dict[Any, _Function | None] = {}
    _analysed(base_function(kernel)[0], functions)
    found = [function for function in functions.values() if function is not None]
    return found if len(found) == len(functions) else []


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
        #: The parameters that a name points to here, without what is added to a pointer.
        self._based_on = {name: {name} for name in parameters(node)}
        self._read: set[str] = set()
        self._stored: set[str] = set()
        self._accesses: list[tuple[str, set[str]]] = []  # loads, stores, updates, in this order

    def visit(self) -> None:
        """Follow the whole text."""
        for statement in self._node.body:
            self._statement(statement)

    def only_stored(self) -> set[str]:
        """Return the parameters that the function stores through and does not read."""
        origins = self._origins(self._stored) - self._origins(self._read)
        return origins & set(parameters(self._node))

    def updated(self) -> dict[str, str]:
        """Return the parameters that change by what they hold, and how."""
        found: dict[str, str] = {}
        accessed: dict[str, set[str]] = {}
        for kind, names in self._accesses:
            for name in names:
                before = accessed.setdefault(name, set())
                if kind == "update":
                    found.setdefault(name, "adds to it by an atomic operation")
                elif kind == "store" and before and "store" not in before:
                    found.setdefault(name, "loads from it and then stores to it")
                before.add(kind)
        return found

    def accessed(self, kind: str) -> frozenset[str]:
        """Return the parameters whose memory is loaded from, or stored to."""
        return frozenset().union(*(names for found, names in self._accesses if found == kind))

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
                for target in targets:
                    self._rebase(target, value)
            case (
                ast.AugAssign(target=target, value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ):
                self._assign([target], value)
            case ast.Expr(value=ast.Call() as call):
                self._call(call, used=False)
            case ast.expr():
                self._use(node)
            case ast.If() | ast.For() | ast.While():
                self._branches(node)
            case _:
                for child in children(node):
                    self._statement(child)

    def _branches(self, node: ast.If | ast.For | ast.While) -> None:
        """Follow two texts of which either may run: after them, names point to what either says."""
        for child in children(node):
            if isinstance(child, ast.expr):
                self._statement(child)
        before = dict(self._based_on)
        for statement in node.body:
            self._statement(statement)
        after, self._based_on = self._based_on, before
        for statement in node.orelse:
            self._statement(statement)
        for name, bases in after.items():
            self._based_on[name] = bases | self._based_on.get(name, set())

    def _assign(self, targets: Iterable[ast.expr], value: ast.expr) -> None:
        pointers = self._pointers(value)
        for target in targets:
            for part in walk(target):
                if isinstance(part, (ast.Subscript, ast.Attribute)):
                    self._read |= pointers
                elif isinstance(part, ast.Name):
                    self._from.setdefault(part.id, set()).update(pointers - {part.id})

    def _rebase(self, target: ast.expr, value: ast.expr) -> None:
        """Note what a name that is assigned points to."""
        if isinstance(target, ast.Name):
            self._based_on[target.id] = self._bases(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, item in zip(target.elts, value.elts, strict=False):
                self._rebase(part, item)

    def _bases(self, node: ast.expr) -> set[str]:
        """Return the names that a pointer expression begins with; what is added is an offset."""
        match node:
            case ast.Name(id=name):
                return self._based_on.get(name, set())
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                return self._bases(left) or self._bases(right)
            case ast.IfExp(body=body, orelse=other):
                return self._bases(body) | self._bases(other)
            case ast.Call(func=func) if last_name(func) in _POINTING and self._is_triton(func):
                return set().union(*map(self._bases, self._pointer_of(node)))
        return set()

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
                self._read |= {*parameters(self._node)} if name in FRAME_READERS else {name}
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
        callee = self._callee(func)
        accesses: list[tuple[str, set[str]]] = []
        if callee is not None:
            inner = _analysed(callee, self._functions)
            accepted = inspect.getfullargspec(callee.fn)
            bound = list(bind(node, [*accepted.args, *accepted.kwonlyargs]))
            kept = inner.only_stored() if inner is not None else set()
            pointers = [value for name, value in bound if name in kept]
            accesses = self._accesses_of(inner, bound) if inner is not None else []
        elif last_name(func) == "store" and self._is_triton(func):
            pointers = self._pointer_of(node)
        else:
            self._use(func)
            pointers = []
            accesses = self._access(node)
        for pointer in pointers:
            self._stored |= self._pointers(pointer)
        for value in arguments_of(node):
            if value not in pointers:
                self._use(value)
        stored = [("store", self._bases(pointer)) for pointer in pointers if callee is None]
        self._accesses += accesses + stored

    def _pointer_of(self, node: ast.Call) -> list[ast.expr]:
        """Return what a call of Triton's points with: the owner of a method, or an argument."""
        func = node.func
        if isinstance(func, ast.Attribute) and self._value(func) is MISSING:
            owner = self._value(func.value)
            if not isinstance(owner, ModuleType):
                return [func.value]
        return [*node.args[:1], *(k.value for k in node.keywords if k.arg in ("base", "pointer"))]

    def _access(self, node: ast.Call) -> list[tuple[str, set[str]]]:
        """Return the memory access that a call of Triton's is."""
        kind = _ACCESSES.get(last_name(node.func))
        if kind is None or not self._is_triton(node.func):
            return []
        return [(kind, self._bases(p)) for p in self._pointer_of(node)]

    def _accesses_of(
        self, inner: _Function, bound: list[tuple[str, ast.expr]]
    ) -> list[tuple[str, set[str]]]:
        """Return the accesses of a function that is called, by what is passed to it."""
        found = []
        for kind, names in inner._accesses:
            passed = [self._bases(value) for name, value in bound if name in names]
            found.append((kind, set().union(*passed)))
        return found

    def _is_atomic(self, node: ast.Call) -> bool:
        value = self._value(node.func)
        name = last_name(node.func) if value is MISSING else getattr(value, "__name__", "")
        if name == _ASSEMBLY:
            texts = [n.value for n in walk(node) if isinstance(n, ast.Constant)]
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

    def _value(self, func: ast.expr) -> Any:
        name = dotted(func)
        local = name.partition(".")[0] in self._local
        return MISSING if local else self._scope.value_of(name)
