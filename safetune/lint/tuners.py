"""The tuners in a file: each decorator with configs and a key above a Triton kernel."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from safetune import forks
from safetune.frozen import dataclass
from safetune.keys.key_names import KernelFacts
from safetune.keys.launch_usage import bindings
from safetune.keys.run_order import bind
from safetune.keys.source_text import children, dotted, last_name, parameters, walk
from safetune.keys.written_kernel import WrittenFunction, WrittenHeuristics, WrittenLayer
from safetune.keys.written_key import WrittenKey, buckets_of
from safetune.lint.names import (
    UNKNOWN,
    File,
    Scope,
    WrittenConfig,
    base_of,
    config_of,
    decorated,
    value_of,
)

#: What a file with a tuner has in its text.
MENTION = re.compile(r"autotune|safetune|\bconfigs\s*=")

_NAMES = frozenset({"autotune", "safetune"})
_KERNELS = (WrittenFunction, WrittenHeuristics, WrittenLayer)

#: The roots of decorators named `jit` that are not Triton's.
_OTHER_JITS = frozenset({"jax", "numba", "tilelang", "torch"})

#: Functions whose first argument points to memory, and those that return such a pointer.
_ACCESSES = frozenset({"load", "store", "atomic_add", "make_block_ptr", "make_tensor_descriptor"})


@dataclass(frozen=True)
class Tuner:
    """A tuner and its kernel, as written."""

    file: File
    scope: Scope
    decorator: ast.Call
    function: ast.FunctionDef
    kernel: Any  # below the tuner

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.function.name

    def option(self, name: str, position: int = 99) -> ast.expr | None:
        """Return the decorator's argument for an option."""
        by_name = {keyword.arg: keyword.value for keyword in self.decorator.keywords}
        by_position = self.decorator.args[position : position + 1]
        return by_name.get(name) or next(iter(by_position), None)

    def _value(self, name: str, position: int = 99) -> Any:
        node = self.option(name, position)
        return None if node is None else value_of(node, self.scope)

    @forks.cached_property
    def configs(self) -> list[Any] | None:
        """The configs; None if the text does not show all of them."""
        value = self._value("configs", 0)
        return value if isinstance(value, list) else None

    @property
    def is_single(self) -> bool:
        """Whether there is only one config, which is launched without timing."""
        return self.configs is not None and len(self.configs) == 1

    @forks.cached_property
    def written(self) -> list[WrittenConfig]:
        """The configs in the text, even if it does not show all of them."""
        found = self.configs or _mentioned(self.option("configs", 0), self.scope)
        return [config for config in found if isinstance(config, WrittenConfig)]

    @forks.cached_property
    def tensors(self) -> set[str]:
        """The parameters that the kernel loads from or stores to."""
        return _tensors_in(self.function, self.scope, frozenset())

    def key(self) -> WrittenKey | None:
        """Return the key as written; None if the text does not show it."""
        given, keep = self._value("key", 1) or [], self._value("keep") or []
        if not (_are_names(given) and _are_names(keep)):
            return None
        written = {n: f for n, f in given.items() if callable(f)} if isinstance(given, dict) else {}
        buckets = buckets_of(self.name, written)
        return WrittenKey(tuple(dict.fromkeys(given)), tuple(keep), tuple(buckets), buckets)

    def facts(self) -> KernelFacts:
        """Return the known facts of the kernel."""
        callbacks = {name: self._value(name) for name in ("pre_hook", "post_hook")}
        prune = self._value("prune_configs_by", 2)
        if prune is not None and not (isinstance(prune, Mapping) and prune):
            prune = {"perf_model": UNKNOWN}  # it may read anything
        return KernelFacts(self.kernel, self.written, {**callbacks, "prune_configs_by": prune})


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, dict)) and all(isinstance(name, str) for name in value)


def _mentioned(node: ast.AST | None, scope: Scope) -> Iterator[WrittenConfig]:
    """Yield each config in an expression, and in the lists and functions that it names."""
    pending, seen = [(node or ast.Pass(), scope)], set[str]()
    while pending:
        node, scope = pending.pop()
        for part in walk(node):
            if isinstance(part, ast.Call) and last_name(part.func) == "Config":
                yield config_of(part, scope)
            elif isinstance(part, (ast.Name, ast.Attribute)) and dotted(part) not in seen:
                seen.add(dotted(part))
                value = value_of(part, scope)
                if isinstance(value, list):
                    yield from value
                elif hasattr(value, "text"):
                    function, around = value.text
                    pending.append((function, around.inside(function, {})))
                elif isinstance(part, ast.Name):
                    bound = bindings(part.id, (scope.node, scope.file.tree))
                    pending += [(each, scope) for each in bound if isinstance(each, ast.expr)]


def _tensors_in(function: ast.FunctionDef, scope: Scope, around: frozenset[str]) -> set[str]:
    """Return the parameters that pointers to memory begin with, also in the functions called."""
    tensors: set[str] = set()
    for call in walk(function):
        if not isinstance(call, ast.Call):
            continue
        callee = base_of(value_of(call.func, scope))
        pointers: list[ast.expr] = []
        if isinstance(callee, ast.FunctionDef) and callee.name not in around:
            names = _tensors_in(callee, scope, around | {function.name})
            pointers = [value for name, value in bind(call, parameters(callee)) if name in names]
        elif last_name(call.func) in _ACCESSES:
            pointers = _pointers_of(call)
        for pointer in pointers:
            tensors |= _starts(pointer, function, frozenset())
    return tensors


def _pointers_of(call: ast.Call) -> list[ast.expr]:
    """Return the pointer of a call of Triton's: its first argument, or a method's owner."""
    owners = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return [
        *owners,
        *call.args[:1],
        *(k.value for k in call.keywords if k.arg in ("base", "pointer")),
    ]


def _starts(node: ast.AST, function: ast.FunctionDef, seen: frozenset[str]) -> set[str]:
    """Return the parameters at the start of a pointer expression; the rest are offsets."""
    while isinstance(node, ast.BinOp):
        node = node.left
    parts: list[Any] = _pointers_of(node) if isinstance(node, ast.Call) else []
    if isinstance(node, ast.Name) and node.id not in seen:
        if node.id in parameters(function):
            return {node.id}
        parts, seen = bindings(node.id, (function,)), seen | {node.id}
    return set().union(*(_starts(part, function, seen) for part in parts if part))


def tuners_in(file: File) -> Iterator[Tuner]:
    """Yield the tuners in a file, in line order."""
    if not any(isinstance(node, ast.Call) and _is_tuner(node) for node in walk(file.tree)):
        return
    pending: list[tuple[ast.AST, Scope]] = [(file.tree, file.scope)]
    while pending:
        node, scope = pending.pop()
        if isinstance(node, ast.Call) and (tuner := _of_call(node, scope)):
            yield tuner
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _of_function(node, scope)
            if not MENTION.search("".join(scope.file.lines[node.lineno : node.end_lineno])):
                continue
            scope = Scope(file, node, scope)
        pending += [(child, scope) for child in reversed(children(node))]


def _of_function(node: Any, scope: Scope) -> Iterator[Tuner]:
    for position, decorator in enumerate(node.decorator_list):
        call = _written_call(decorator, scope)
        if call is None or not _is_tuner(call) or _is_another_language(node):
            continue
        kernel = decorated(node, scope, position + 1)
        if isinstance(kernel, _KERNELS):
            yield Tuner(scope.file, scope, call, node, kernel)


def _of_call(node: ast.Call, scope: Scope) -> Tuner | None:
    """Return the tuner that `triton.autotune(...)(kernel)` makes."""
    call = _written_call(node.func, scope)
    if call is None or not _is_tuner(call) or not node.args:
        return None
    kernel = value_of(node.args[0], scope)
    if isinstance(kernel, WrittenLayer):  # `kernel = tuner(kernel)`: the name is of the tuner now
        kernel = kernel.fn
    function = base_of(kernel)
    if not isinstance(kernel, _KERNELS) or not isinstance(function, ast.FunctionDef):
        return None
    return Tuner(scope.file, scope, call, function, kernel)


def _written_call(decorator: ast.expr, scope: Scope) -> ast.Call | None:
    """Return a decorator's call, also where a name of the module stands for it."""
    values: list[Any] = [decorator]
    if isinstance(decorator, ast.Name):
        values = bindings(decorator.id, (scope.file.tree,))
    return next((each for each in values if isinstance(each, ast.Call)), None)


def _is_tuner(call: ast.Call) -> bool:
    given = {keyword.arg for keyword in call.keywords}
    return {"configs", "key"} <= given or (
        last_name(call.func) in _NAMES and ("configs" in given or bool(call.args))
    )


def _is_another_language(node: ast.FunctionDef) -> bool:
    calls = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
    return any(dotted(call).partition(".")[0] in _OTHER_JITS for call in calls)
