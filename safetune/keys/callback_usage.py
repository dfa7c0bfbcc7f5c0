"""Which kernel arguments the Python functions around a kernel read.

Heuristics, prune functions, performance models, hooks and launch metadata get the arguments as a
dict or by name. A function that passes its whole dict on, or whose source is missing, reads
everything.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from safetune.keys.body_usage import FRAME_READERS, Usage, parameter_lines
from safetune.keys.kernel_digest import (
    base_function,
    definition_line,
    inner_heuristics,
    option_of,
    source_lines,
)
from safetune.keys.source_text import MISSING, FunctionNode, Scope, last_name, nodes_of, parse

#: Methods of a dict that read the one entry named by their first argument.
_ENTRY_METHODS = frozenset({"get", "pop", "setdefault", "__getitem__"})


def usage_in_callbacks(
    kernel: Any,
    configs: Iterable[Any] = (),
    prune_configs_by: Mapping[str, Any] | None = None,
    pre_hook: Any = None,
    post_hook: Any = None,
) -> Usage:
    """Return the arguments that every Python function around the kernel reads.

    Raises:
        InvalidSetting: `kernel` is not a Triton kernel.
    """
    jit, _ = base_function(kernel)
    prune = prune_configs_by or {}
    found = Usage()
    for name, heuristic in inner_heuristics(kernel).items():
        found.add(usage_in_callback(f"the heuristic for {name}", heuristic, position=0))
    found.add(_decorating_heuristics(jit, below=_heuristics_count(kernel)))
    found.add(
        usage_in_callback(
            "early_config_prune", prune.get("early_config_prune"), position=1, by_name=True
        )
    )
    found.add(usage_in_callback("perf_model", prune.get("perf_model"), by_name=True))
    found.add(usage_in_callback("pre_hook", pre_hook, position=0))
    found.add(usage_in_callback("post_hook", post_hook, position=0))
    hooks = {id(config.pre_hook): config.pre_hook for config in configs}
    for hook in hooks.values():
        found.add(usage_in_callback("a config's pre_hook", hook, position=0))
    metadata = option_of(jit, "launch_metadata")
    found.add(usage_in_callback("launch_metadata", metadata, position=2))
    fields = ("constants", "signature")
    found.add(usage_in_callback("repr", option_of(jit, "repr"), position=0, fields=fields))
    return found


def usage_in_callback(
    label: str,
    callback: Any,
    *,
    position: int | None = None,
    by_name: bool = False,
    fields: tuple[str, ...] = (),
) -> Usage:
    """Return the names that one function reads.

    Args:
        label: the function's name in an explanation.
        callback: the function, or any callable; None reads nothing.
        position: of the parameter that gets the arguments as a dict.
        by_name: the other parameters are kernel arguments too.
        fields: the attributes that hold the dicts, where the parameter is not a dict itself.
    """
    if callback is None:
        return Usage()
    function, shift = _python_function(callback)
    nodes = nodes_of(function) if function is not None else ()
    if function is None or not nodes:
        return Usage(everything=f"{label}, whose source is missing")
    index = None if position is None else position + shift
    skip = shift if index is None else index + 1
    file = Path(function.__code__.co_filename).name
    found = Usage()
    for node in nodes:
        found.add(
            _usage_in_node(f"{label} ({file}:{{}})", node, index, skip if by_name else None, fields)
        )
    return found


def _usage_in_node(
    label: str,
    node: FunctionNode,
    index: int | None,
    named_from: int | None,
    fields: tuple[str, ...],
) -> Usage:
    """Return what one function reads; `label` has braces for the line."""
    arguments = node.args
    positional = [arg.arg for arg in [*arguments.posonlyargs, *arguments.args]]
    dicts = []
    if index is not None and index < len(positional):
        dicts.append(positional[index])
    elif index is not None:
        return Usage(everything=label.format(node.lineno))
    found = Usage()
    if named_from is not None:
        named = {*positional[named_from:], *(arg.arg for arg in arguments.kwonlyargs)}
        lines = parameter_lines(node)
        found.names = {name: label.format(lines[name]) for name in lines if name in named}
        if arguments.kwarg is not None:
            dicts.append(arguments.kwarg.arg)
    for name in dicts:
        found.add(usage_of_dict(label, node, name, fields))
    return found


def usage_of_dict(label: str, node: FunctionNode, name: str, fields: tuple[str, ...] = ()) -> Usage:
    """Return the entries of a dict that a function reads; `label` has braces for the line."""
    visitor = _DictUse(name, fields)
    for statement in node.body if isinstance(node.body, list) else [node.body]:
        visitor.visit(statement)
    names = {entry: label.format(line) for entry, line in visitor.lines.items()}
    whole = (
        f"{label.format(visitor.whole)}, which passes all of `{name}` on" if visitor.whole else ""
    )
    return Usage(names, whole)


class _DictUse(ast.NodeVisitor):
    """Finds the entries of one dict that are read.

    Attributes:
        lines: the first line that reads each entry.
        whole: the first line where the dict goes somewhere else, or 0.
    """

    def __init__(self, name: str, fields: tuple[str, ...]) -> None:
        self.lines: dict[str, int] = {}
        self.whole = 0
        self._name = name
        self._fields = fields

    def _is_dict(self, node: ast.AST) -> bool:
        if self._fields:
            return (
                isinstance(node, ast.Attribute)
                and node.attr in self._fields
                and isinstance(node.value, ast.Name)
                and node.value.id == self._name
            )
        return isinstance(node, ast.Name) and node.id == self._name

    def _entry(self, key: ast.AST, line: int) -> bool:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            self.lines.setdefault(key.value, line)
            return True
        return False

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if self._is_dict(node.value) and isinstance(node.slice, ast.Constant):
            if isinstance(node.ctx, ast.Load):
                self._entry(node.slice, node.lineno)
        else:
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Subscript) and self._is_dict(node.target.value):
            self._entry(node.target.slice, node.lineno)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if (
            isinstance(function, ast.Attribute)
            and function.attr in _ENTRY_METHODS
            and self._is_dict(function.value)
            and node.args
            and self._entry(node.args[0], node.lineno)
        ):
            for rest in [*node.args[1:], *node.keywords]:
                self.visit(rest)
        else:
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        simple = len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn))
        if not (
            simple and self._is_dict(node.comparators[0]) and self._entry(node.left, node.lineno)
        ):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if (node.id == self._name or node.id in FRAME_READERS) and not self.whole:
            self.whole = node.lineno


def _decorating_heuristics(jit: Any, below: int) -> Usage:
    """Return what the `@triton.heuristics` above a kernel read, except for the last `below`.

    Heuristics above the tuner do not exist yet when the tuner is made; only their text does.
    """
    lines, first = source_lines(jit)
    text = "".join(lines[: definition_line(jit) - first])
    if "heuristics" not in text:
        return Usage()
    module = parse("\n" * (first - 1) + textwrap.dedent(text) + "def decorated(): ...")
    decorators = [
        decorator
        for node in (module.tree.body[:1] if module else [])
        for decorator in getattr(node, "decorator_list", [])
        if isinstance(decorator, ast.Call) and last_name(decorator.func) == "heuristics"
    ]
    found = Usage()
    for decorator in decorators[: len(decorators) - below]:
        for value in [*decorator.args, *(keyword.value for keyword in decorator.keywords)]:
            for function in value.values if isinstance(value, ast.Dict) else [value]:
                found.add(_usage_in_written("a heuristic", function, jit.fn))
    return found


def _usage_in_written(label: str, value: ast.expr, function: FunctionType) -> Usage:
    """Return what a function, or a dict of functions, in a decorator's text reads."""
    location = f"{Path(function.__code__.co_filename).name}:{{}}"
    if isinstance(value, ast.Lambda):
        return _usage_in_node(f"{label} ({location})", value, 0, None, ())
    known = Scope(function).resolve(value)
    if known is MISSING:
        return Usage(everything=f"{label} ({location.format(value.lineno)})")
    found = Usage()
    for callback in known.values() if isinstance(known, dict) else [known]:
        found.add(usage_in_callback(label, callback, position=0))
    return found


def _heuristics_count(kernel: Any) -> int:
    count = 0
    while hasattr(kernel, "fn"):
        count += isinstance(getattr(kernel, "values", None), dict)
        kernel = kernel.fn
    return count


def _python_function(callback: Any) -> tuple[FunctionType | None, int]:
    """Return the Python function that a callable calls, and how many parameters are bound."""
    shift = 0
    while not inspect.isfunction(callback):
        if isinstance(callback, functools.partial):
            shift += len(callback.args)
            callback = callback.func
        elif inspect.ismethod(callback):
            shift += 1
            callback = callback.__func__
        elif inspect.isfunction(call := inspect.getattr_static(type(callback), "__call__", None)):
            shift += 1
            callback = call
        else:
            return None, 0
    return callback, shift
