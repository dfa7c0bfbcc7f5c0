"""The kernel arguments that the Python functions around a kernel read.

Heuristics, prune functions, performance models, hooks and launch metadata get the arguments as a
dict or by name. A function that passes its whole dict on, or whose source is missing, counts as
reading everything.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from safetune.keys.identity import base_function, heuristics_below, is_own, layers, option_of
from safetune.keys.kernel_text import Usage
from safetune.keys.run_order import parameter_lines
from safetune.keys.source_text import (
    FRAME_READERS,
    MISSING,
    FunctionNode,
    Scope,
    arguments_of,
    body_of,
    definition_line,
    dotted,
    file_of,
    last_name,
    nodes_of,
    parse,
    source_lines,
    walk,
)


def usage_in_callbacks(
    kernel: Any,
    configs: Iterable[Any] = (),
    prune_configs_by: Mapping[str, Any] | None = None,
    pre_hook: Any = None,
    post_hook: Any = None,
) -> Usage:
    """Return the arguments that the Python functions around the kernel read."""
    jit, function = base_function(kernel)
    prune = prune_configs_by or {}
    first: dict[str, Any] = {"position": 0}
    hooks = {id(config.pre_hook): config.pre_hook for config in configs}
    callbacks: list[tuple[str, Any, dict[str, Any]]] = [
        ("early_config_prune", prune.get("early_config_prune"), {"position": 1, "by_name": True}),
        ("perf_model", prune.get("perf_model"), {"by_name": True}),
        ("pre_hook", pre_hook, first),
        ("post_hook", post_hook, first),
        *(("a config's pre_hook", hook, first) for hook in hooks.values()),
        ("launch_metadata", option_of(jit, "launch_metadata"), {"position": 2}),
        ("repr", option_of(jit, "repr"), first),
    ]
    usage = Usage()
    if others := [type(layer).__name__ for layer in layers(kernel) if not is_own(layer)]:
        usage.everything = f"{others[0]}, whose `run` is not Triton's own"
    heuristics = heuristics_below(kernel)
    for name, heuristic in itertools.chain.from_iterable(map(dict.items, heuristics)):
        usage.add(usage_in_callback(f"the heuristic for {name}", heuristic, position=0))
    for _, heuristic in _heuristics_above(jit, below=len(heuristics)):
        usage.add(_usage_of_heuristic(heuristic, function))
    for label, callback, arguments in callbacks:
        usage.add(usage_in_callback(label, callback, **arguments))
    return usage


def usage_in_callback(
    label: str,
    callback: Any,
    *,
    position: int | None = None,
    by_name: bool = False,
) -> Usage:
    """Return the names that a callable reads; none for None.

    Args:
        position: of the parameter that gets the arguments as a dict.
        by_name: whether the other parameters are kernel arguments too.
    """
    if callback is None:
        return Usage()
    function, bound = _python_function(callback)
    nodes = nodes_of(function) if function is not None else ()
    if function is None or not nodes:
        return Usage(everything=f"{label}, whose source is missing")
    label = f"{label} ({Path(file_of(function)).name}:{{}})"
    usage = Usage()
    for node in nodes:
        skipped = bound
        if position is not None:
            usage.add(_usage_of_argument(label, node, bound + position))
            skipped += position + 1
        if by_name:
            usage.add(_usage_by_name(label, node, skipped))
    return usage


def _usage_of_argument(label: str, node: FunctionNode, index: int) -> Usage:
    """Return the entries that a function reads of the dict that it gets at a position."""
    positional = [*node.args.posonlyargs, *node.args.args]
    if index >= len(positional):
        return Usage(everything=label.format(node.lineno))
    return usage_of_dict(label, node, positional[index].arg)


def _usage_by_name(label: str, node: FunctionNode, skipped: int) -> Usage:
    """Return the parameters of its own that a function reads, and the entries of its `**kwargs`."""
    named = [*[*node.args.posonlyargs, *node.args.args][skipped:], *node.args.kwonlyargs]
    lines = parameter_lines(node)
    found = Usage({p.arg: label.format(lines[p.arg]) for p in named if p.arg in lines})
    if node.args.kwarg is not None:
        found.add(usage_of_dict(label, node, node.args.kwarg.arg))
    return found


def usage_of_dict(label: str, node: FunctionNode, name: str) -> Usage:
    """Return the entries of a dict that a function reads; `label` has braces for the line."""
    parts = [part for statement in body_of(node) for part in walk(statement)]
    lines: dict[str, int] = {}
    followed: set[ast.AST] = set()
    for part in parts:
        entry, owner, reads = _entry(part)
        if owner is None or dotted(owner) != name:
            continue
        followed.update(walk(owner))
        if reads:
            lines[entry] = min(lines.get(entry, part.lineno), part.lineno)  # type: ignore[attr-defined]
    passed_on = [
        part.lineno
        for part in parts
        if isinstance(part, ast.Name) and part.id in {name, *FRAME_READERS}
        if part not in followed
    ]
    names = {entry: label.format(line) for entry, line in lines.items()}
    if not passed_on:
        return Usage(names)
    return Usage(names, f"{label.format(min(passed_on))}, which passes all of `{name}` on")


def _entry(node: ast.AST) -> tuple[str, ast.expr | None, bool]:
    """Return the entry of a dict that an expression names, the dict, and whether it is read."""
    match node:
        case ast.Subscript(value=owner, slice=ast.Constant(value=entry)):
            return str(entry), owner, isinstance(node.ctx, ast.Load)
        case ast.AugAssign(target=ast.Subscript(value=owner, slice=ast.Constant(value=entry))):
            return str(entry), owner, True
        case ast.Call(
            func=ast.Attribute(value=owner, attr="get" | "pop" | "setdefault" | "__getitem__"),
            args=[ast.Constant(value=str(entry)), *_],
        ):
            return entry, owner, True
        case ast.Compare(
            left=ast.Constant(value=str(entry)),
            ops=[ast.In() | ast.NotIn()],
            comparators=[owner],
        ):
            return entry, owner, True
    return "", None, False


def set_above(kernel: Any) -> set[str]:
    """Return the parameters that heuristics above the tuner set, as far as their text shows."""
    above = _heuristics_above(base_function(kernel)[0], len(heuristics_below(kernel)))
    return {name for name, _ in above} - {""}


def _heuristics_above(jit: Any, below: int) -> list[tuple[str, Any]]:
    """Return the heuristics of each `@triton.heuristics` on a kernel, except for the last `below`,
    after the name that each sets: functions, or their text. The name is "" if it is unknown.

    Heuristics above the tuner do not exist yet when the tuner is made; only their text does.
    """
    lines, first = source_lines(jit)
    text = "".join(lines[: definition_line(jit) - first])
    if text.count("heuristics") <= below:
        return []
    tree = parse("\n" * (first - 1) + textwrap.dedent(text) + "def decorated(): ...")
    decorators = [
        decorator
        for node in tree.body[:1]
        for decorator in getattr(node, "decorator_list", [])
        if isinstance(decorator, ast.Call) and last_name(decorator.func) == "heuristics"
    ]
    found: list[tuple[str, Any]] = []
    for decorator in decorators[: len(decorators) - below]:
        for value in arguments_of(decorator):
            if isinstance(value, ast.Dict):
                names = [str(getattr(key, "value", "")) for key in value.keys]
                found += zip(names, value.values, strict=True)
            else:
                known = Scope(jit.fn).value_of(dotted(value))
                found += known.items() if isinstance(known, dict) else [("", value)]
    return found


def _usage_of_heuristic(value: Any, function: FunctionType) -> Usage:
    """Return the names that a heuristic above the tuner reads: a function, or its text."""
    label = f"a heuristic ({Path(file_of(function)).name}:{{}})"
    if isinstance(value, ast.Lambda):
        return _usage_of_argument(label, value, 0)
    if isinstance(value, ast.expr):
        known = Scope(function).value_of(dotted(value))
        if known is MISSING:
            return Usage(everything=label.format(value.lineno))
        value = known
    return usage_in_callback("a heuristic", value, position=0)


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
