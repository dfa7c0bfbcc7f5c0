"""The launches of a kernel in the text of its package, on disk.

The search covers the kernel's own module and the modules of its package that import it under its
name. Launches elsewhere are unknown. Loaded modules are not used, so every process finds the same
launches.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from safetune.frozen import dataclass
from safetune.keys.identity import base_function
from safetune.keys.run_order import bind
from safetune.keys.source_text import (
    KEPT_TREES,
    arguments_of,
    children,
    dotted,
    file_of,
    file_text,
    files_in,
    last_name,
    package_of,
    parse,
    walk,
)

#: The functions around an expression and the module, innermost first.
Scopes: TypeAlias = "tuple[ast.AST, ...]"


#: An import statement. No whole file is parsed for it: a package may have thousands.
_IMPORT = re.compile(
    r"^[ \t]*((?:from[ \t]+[.\w]+[ \t]+)?import\b(?:[ \t]*\((?:#.*|[^)#])*\)|(?:\\\n|[^\n;#])*))",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Launch:
    """An expression that launches something on a grid; `call` has the kernel's arguments."""

    target: ast.AST
    grid: ast.expr
    call: ast.Call | None
    scopes: Scopes
    file: str = ""

    @property
    def location(self) -> str:
        """The file and the line, for people."""
        return f"{self.file}:{self.grid.lineno}"

    def arguments(self, arg_names: Sequence[str]) -> dict[str, ast.expr] | None:
        """Return the expression of each argument; None if the text does not show them all."""
        call = self.call
        if call is None or any(keyword.arg is None for keyword in call.keywords):
            return None
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            return None
        if self.target is call and last_name(call.func) not in ("run", "warmup"):
            return None  # a function that gets the kernel and a grid, and places the arguments
        return dict(bind(call, arg_names))


def launches_of(kernel: Any) -> list[Launch]:
    """Return the launches of a kernel, starting with its own module's."""
    name = base_function(kernel)[1].__name__
    return [
        replace(launch, file=file.name)
        for file, text in _texts(kernel)
        for launch in _launches(text)
        if _is_one_of(launch.target, _aliases(text, name))
    ]


def may_be_launched_unseen(kernel: Any) -> bool:
    """Whether the text passes a kernel on, so that it may be launched under another name.

    True if a function takes or returns it, or if two functions have the kernel's name.
    """
    name = base_function(kernel)[1].__name__
    return any(
        len(re.findall(rf"\bdef {name}\b", text)) > 1 or _is_handed_on(text, _aliases(text, name))
        for _, text in _texts(kernel)
    )


def _texts(kernel: Any) -> Iterator[tuple[Path, str]]:
    """Yield (file, text) of the modules that may launch a kernel."""
    _, function = base_function(kernel)
    name = function.__name__
    yield Path(file_of(function)), file_text(function)
    for path in importers(file_of(function), name):
        text = _text_of(path)
        if name in text and not _has_own(text, name):
            yield path, text


def _has_own(text: str, name: str) -> bool:
    """Whether a module has a kernel of this name; a function may have the name of its kernel."""
    nodes = walk(parse(text)) if f"def {name}(" in text else ()
    return any(_is_kernel(node) and getattr(node, "name", "") == name for node in nodes)


def _text_of(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""


def _is_handed_on(text: str, names: Collection[str]) -> bool:
    known = [launch.target for launch in _launches(text)]
    known += [value for value, _ in _names_assigned(text)]
    followed = {id(part) for value in known for part in walk(value)}
    for node in walk(parse(text)):
        parts: Sequence[ast.AST | None] = ()
        if isinstance(node, ast.Call) and id(node) not in followed:
            parts = arguments_of(node)
        elif isinstance(node, (ast.Return, ast.Yield)):
            parts = [node.value]
        if any(part is not None and _is_one_of(part, names) for part in parts):
            return True
    return False


@functools.lru_cache(KEPT_TREES)
def _launches(text: str) -> tuple[Launch, ...]:
    """Every launch in a module: `k[grid](...)`, `k[grid]`, and calls with `grid=`."""
    return tuple(_find_launches(parse(text)))


def _find_launches(tree: ast.AST) -> Iterator[Launch]:
    pending: list[tuple[ast.AST, ast.AST, Scopes]] = [(tree, tree, ())]
    while pending:  # an expression may have thousands of terms, one inside the other
        node, above, scopes = pending.pop()
        if _is_kernel(node):
            continue
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Subscript):
                yield Launch(node.func.value, node.func.slice, node, scopes)
            for keyword in node.keywords:
                if keyword.arg == "grid":
                    yield Launch(node, keyword.value, node, scopes)
        elif isinstance(node, ast.Subscript) and node is not getattr(above, "func", None):
            yield Launch(node.value, node.slice, None, scopes)
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.Lambda)):
            scopes = (node, *scopes)
        pending += [(child, node, scopes) for child in reversed(children(node))]


def walk_hosts(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node like `walk`, except in kernels, whose text runs on the device."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if not _is_kernel(node):
            yield node
            pending += children(node)


def _is_kernel(node: ast.AST) -> bool:
    """Whether a node is a function that is decorated with `@triton.jit`."""
    return isinstance(node, ast.FunctionDef) and any(
        dotted(each.func if isinstance(each, ast.Call) else each) == "triton.jit"
        for each in node.decorator_list
    )


def _is_one_of(node: ast.AST, names: Collection[str]) -> bool:
    """Whether a launch target, or one side of an assignment, is the kernel or is made of it."""
    parts: Sequence[ast.AST] = ()
    match node:
        case ast.Attribute(attr="fn"):  # what a tuner or heuristics launch
            parts = [node.value]
        case ast.Name() | ast.Attribute():
            return last_name(node) in names
        case ast.Call(func=function):
            owner = function.value if isinstance(function, ast.Attribute) else function
            parts = [owner, *arguments_of(node)]
        case ast.IfExp():
            parts = [node.body, node.orelse]
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            pass
        case ast.Dict(values=parts):
            pass
        case ast.Subscript():
            parts = [node.value]
    return any(_is_one_of(part, names) for part in parts)


@functools.lru_cache(KEPT_TREES)
def _aliases(text: str, name: str) -> set[str]:
    """Return a kernel's name and every name that its module gives it, decorated or not."""
    names = {name}
    for _ in range(3):
        for value, targets in _names_assigned(text):
            if _is_one_of(value, names):
                names.update(targets)
    return names


@functools.lru_cache(KEPT_TREES)
def _names_assigned(text: str) -> list[tuple[ast.expr, list[str]]]:
    """Return the values that a module gives names to, except for results of a launch."""
    assignments = []
    for node in walk_hosts(parse(text)):
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                targets = [target]
            case ast.NamedExpr(target=target, value=value):
                targets = [target]
            case ast.alias(name=name, asname=str(other)):
                value, targets = ast.Name(name), [ast.Name(other)]
            case _:
                continue
        if not any(map(_is_launch, walk(value))):
            assignments.append(
                (value, [name for target in targets for name in _target_names(target)])
            )
    return assignments


def _is_launch(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and (
        isinstance(node.func, ast.Subscript) or any(k.arg == "grid" for k in node.keywords)
    )


def _target_names(target: ast.AST) -> Iterator[str]:
    match target:
        case ast.Name() | ast.Attribute():
            yield last_name(target)
        case ast.Subscript():
            yield from _target_names(target.value)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            for item in items:
                yield from _target_names(item)


def importers(file: str, name: str) -> list[Path]:
    """Return the other files in a file's package that import a function of it, or the module."""
    path = Path(os.path.abspath(file))
    package = package_of(path.parent)
    if package is None:
        return []
    module = path.parent.name if path.stem == "__init__" else path.stem
    files = _files_by_import(package)
    found = dict.fromkeys([*files.get(name, ()), *files.get(module, ())])
    return [other for other in found if other != path]


@functools.lru_cache(maxsize=8)
def _files_by_import(package: Path) -> dict[str, list[Path]]:
    """Return the files of a package by each word of their imports from it."""
    files: dict[str, list[Path]] = defaultdict(list)
    for file in files_in(package):
        imports = [match[1] for match in _IMPORT.finditer(_text_of(file))]
        own = [text for text in imports if package.name in text or " ." in text]
        for word in dict.fromkeys(re.findall(r"\w+", " ".join(own))):
            files[word].append(file)
    return dict(files)
