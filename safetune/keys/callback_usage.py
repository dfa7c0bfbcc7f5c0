"""Which kernel arguments the Python functions around a kernel read.

Heuristics, prune functions, performance models, hooks and launch metadata get the arguments as a
dict or by name. One that hands its whole dict on, or whose source is missing, reads everything.
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

from safetune.keys.body_usage import FRAME_READERS, Reads, parameter_lines
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


def reader_reads(
    kernel: Any,
    configs: Iterable[Any] = (),
    prune_configs_by: Mapping[str, Any] | None = None,
    pre_hook: Any = None,
    post_hook: Any = None,
) -> Reads:
    """Return what every Python function around the kernel reads.

    Raises:
        InvalidSetting: `kernel` is not a Triton kernel.
    """
    jit, _ = base_function(kernel)
    prune = prune_configs_by or {}
    found = Reads()
    for name, heuristic in inner_heuristics(kernel).items():
        found.add(callable_reads(f"the heuristic for {name}", heuristic, position=0))
    found.add(_decorating_heuristics(jit, below=_heuristics_count(kernel)))
    found.add(
        callable_reads(
            "early_config_prune", prune.get("early_config_prune"), position=1, by_name=True
        )
    )
    found.add(callable_reads("perf_model", prune.get("perf_model"), by_name=True))
    found.add(callable_reads("pre_hook", pre_hook, position=0))
    found.add(callable_reads("post_hook", post_hook, position=0))
    hooks = {id(config.pre_hook): config.pre_hook for config in configs}
    for hook in hooks.values():
        found.add(callable_reads("a config's pre_hook", hook, position=0))
    metadata = option_of(jit, "launch_metadata")
    found.add(callable_reads("launch_metadata", metadata, position=2))
    fields = ("constants", "signature")
    found.add(callable_reads("repr", option_of(jit, "repr"), position=0, fields=fields))
    return found


def callable_reads(
    who: str,
    reader: Any,
    *,
    position: int | None = None,
    by_name: bool = False,
    fields: tuple[str, ...] = (),
) -> Reads:
    """Return which names one function reads.

    Args:
        who: what to call the function in an explanation.
        reader: the function, or any callable; None reads nothing.
        position: of the parameter that gets the arguments as a dict.
        by_name: the other parameters are kernel arguments too.
        fields: the attributes that hold the dicts, where the parameter is not a dict itself.
    """
    if reader is None:
        return Reads()
    function, shift = _python_function(reader)
    nodes = nodes_of(function) if function is not None else ()
    if function is None or not nodes:
        return Reads(everything=f"{who}, whose source is missing")
    index = None if position is None else position + shift
    skip = shift if index is None else index + 1
    place = Path(function.__code__.co_filename).name
    found = Reads()
    for node in nodes:
        found.add(
            _node_reads(f"{who} ({place}:{{}})", node, index, skip if by_name else None, fields)
        )
    return found


def _node_reads(
    who: str, node: FunctionNode, index: int | None, named_from: int | None, fields: tuple[str, ...]
) -> Reads:
    """What one function reads; `who` has a place for the line."""
    arguments = node.args
    positional = [arg.arg for arg in [*arguments.posonlyargs, *arguments.args]]
    dicts = []
    if index is not None and index < len(positional):
        dicts.append(positional[index])
    elif index is not None:
        return Reads(everything=who.format(node.lineno))
    found = Reads()
    if named_from is not None:
        named = {*positional[named_from:], *(arg.arg for arg in arguments.kwonlyargs)}
        lines = parameter_lines(node)
        found.names = {name: who.format(lines[name]) for name in lines if name in named}
        if arguments.kwarg is not None:
            dicts.append(arguments.kwarg.arg)
    for name in dicts:
        found.add(entry_reads(who, node, name, fields))
    return found


def entry_reads(who: str, node: FunctionNode, name: str, fields: tuple[str, ...] = ()) -> Reads:
    """Return which entries of the dict `name` a function reads; `who` has a place for the line."""
    visitor = _DictUse(name, fields)
    for statement in node.body if isinstance(node.body, list) else [node.body]:
        visitor.visit(statement)
    names = {entry: who.format(line) for entry, line in visitor.lines.items()}
    whole = f"{who.format(visitor.whole)}, which hands all of `{name}` on" if visitor.whole else ""
    return Reads(names, whole)


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


def _decorating_heuristics(jit: Any, below: int) -> Reads:
    """What `@triton.heuristics` in the text above a kernel read, but for the last `below`.

    Those above the tuner do not exist yet when the tuner is made, only their text does.
    """
    lines, first = source_lines(jit)
    text = "".join(lines[: definition_line(jit) - first])
    if "heuristics" not in text:
        return Reads()
    module = parse("\n" * (first - 1) + textwrap.dedent(text) + "def decorated(): ...")
    decorators = [
        decorator
        for node in (module.tree.body[:1] if module else [])
        for decorator in getattr(node, "decorator_list", [])
        if isinstance(decorator, ast.Call) and last_name(decorator.func) == "heuristics"
    ]
    found = Reads()
    for decorator in decorators[: len(decorators) - below]:
        for value in [*decorator.args, *(keyword.value for keyword in decorator.keywords)]:
            for reader in value.values if isinstance(value, ast.Dict) else [value]:
                found.add(_written_reader("a heuristic", reader, jit.fn))
    return found


def _written_reader(who: str, value: ast.expr, function: FunctionType) -> Reads:
    """What a reader, or a dict of them, reads that a decorator of `function` names."""
    place = f"{Path(function.__code__.co_filename).name}:{{}}"
    if isinstance(value, ast.Lambda):
        return _node_reads(f"{who} ({place})", value, 0, None, ())
    known = Scope(function).resolve(value)
    if known is MISSING:
        return Reads(everything=f"{who} ({place.format(value.lineno)})")
    found = Reads()
    for reader in known.values() if isinstance(known, dict) else [known]:
        found.add(callable_reads(who, reader, position=0))
    return found


def _heuristics_count(kernel: Any) -> int:
    count = 0
    while hasattr(kernel, "fn"):
        count += isinstance(getattr(kernel, "values", None), dict)
        kernel = kernel.fn
    return count


def _python_function(reader: Any) -> tuple[FunctionType | None, int]:
    """The Python function that a callable ends in, and how many parameters it has bound."""
    shift = 0
    while not inspect.isfunction(reader):
        if isinstance(reader, functools.partial):
            shift += len(reader.args)
            reader = reader.func
        elif inspect.ismethod(reader):
            shift += 1
            reader = reader.__func__
        elif inspect.isfunction(call := inspect.getattr_static(type(reader), "__call__", None)):
            shift += 1
            reader = call
        else:
            return None, 0
    return reader, shift
