"""A kernel's source with a shorter list of configs, as a diff.

Entries of a list that is written out are taken out of it; a list that code makes is replaced by one
that is written out.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from triton.runtime.autotuner import Config

from safetune.config import OPTION_DEFAULTS, config_digest
from safetune.errors import TargetError

_WIDTH = 4


def diff(function: FunctionType, declared: Sequence[Config], kept: Collection[str]) -> str:
    """Return a unified diff, which `git apply` takes, that leaves only the configs with these
    digests in the decorator of a kernel.

    Raises:
        TargetError: the source does not show the list, or a config has a hook without a name.
    """
    path = inspect.getsourcefile(function)
    if path is None:
        raise TargetError(f"{function.__name__} has no source file")
    before = Path(path).read_text(encoding="utf-8")
    after = _edited(before, function, declared, kept)
    name = os.path.relpath(path)
    name = path.lstrip("/") if name.startswith("..") else name  # `git apply` in the root finds it
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(lines)


def config_source(config: Config, function: FunctionType, callee: str = "triton.Config") -> str:
    """Return a config as Python source; raises `TargetError` for a hook without a name."""
    words = [repr(config.kwargs)]
    for name, default in OPTION_DEFAULTS.items():
        if (value := getattr(config, name)) != default or name == "num_warps":
            words.append(f"{name}={value!r}")
    if config.pre_hook is not None:
        words.append(f"pre_hook={_global_name(config.pre_hook, function)}")
    return f"{callee}({', '.join(words)})"


def _edited(
    source: str, function: FunctionType, declared: Sequence[Config], kept: Collection[str]
) -> str:
    text = source.encode()
    listed = _list_of(source, function)
    start, end = _span(listed, source)
    stays = [config_digest(config) in kept for config in declared]
    written = isinstance(listed, ast.List) and all(isinstance(e, ast.Call) for e in listed.elts)
    if written and len(listed.elts) == len(declared):  # type: ignore[attr-defined]
        new = _without(source, listed, stays)  # type: ignore[arg-type]
    else:
        callees = [n.func for n in ast.walk(listed) if isinstance(n, ast.Call)]
        named = [ast.unparse(func) for func in callees]
        callee = next((n for n in named if n.rpartition(".")[2] == "Config"), "triton.Config")
        line = source.splitlines()[listed.lineno - 1]
        indent = " " * (len(line) - len(line.lstrip()))
        entries = [
            f"{indent}{' ' * _WIDTH}{config_source(config, function, callee)},\n"
            for config, stay in zip(declared, stays, strict=True)
            if stay
        ]
        new = f"[\n{''.join(entries)}{indent}]".encode()
    return (text[:start] + new + text[end:]).decode()


def _list_of(source: str, function: FunctionType) -> ast.expr:
    """Return the expression of the configs in the decorator of a kernel."""
    first = function.__code__.co_firstlineno
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.FunctionDef) and node.name == function.__name__):
            continue
        if first not in (node.lineno, *(each.lineno for each in node.decorator_list)):
            continue
        for call in node.decorator_list:
            if isinstance(call, ast.Call):
                given = [word.value for word in call.keywords if word.arg == "configs"]
                is_tuner = ast.unparse(call.func).endswith(("autotune", "safetune"))
                if found := given or (call.args[:1] if is_tuner else []):
                    return found[0]
    raise TargetError(
        f"no decorator of {function.__name__} in its source has configs=: change the list by hand"
    )


def _without(source: str, listed: ast.List, stays: Sequence[bool]) -> bytes:
    """Return a written list with only some of its entries, and what stands between them."""
    text = source.encode()
    begin, end = _span(listed, source)
    spans = [_span(entry, source) for entry in listed.elts]
    after = [start for start, _ in spans[1:]]  # where the next entry begins
    last = max(i for i, stay in enumerate(stays) if stay)
    parts = [text[begin : spans[0][0]]]
    for i, stay in enumerate(stays[:last]):
        if stay:
            parts.append(text[spans[i][0] : after[i]])
    return b"".join([*parts, text[slice(*spans[last])], text[spans[-1][1] : end]])


def _span(node: Any, source: str) -> tuple[int, int]:
    """Return where a node begins and ends, in bytes."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    return (
        starts[node.lineno - 1] + node.col_offset,
        starts[node.end_lineno - 1] + node.end_col_offset,
    )


def _global_name(value: Any, function: FunctionType) -> str:
    for name, found in function.__globals__.items():
        if found is value:
            return name
    raise TargetError(
        f"a config of {function.__name__} has a pre_hook that is not a global of its module: "
        "change the list by hand"
    )
