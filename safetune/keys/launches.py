"""The launches of a kernel in the text of its package, on disk.

The search covers the kernel's own module and the modules of its package that import it. Launches
elsewhere are unknown. Loaded modules are not used, so every process finds the same launches.
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
    tree_of,
    walk,
)

#: The functions around an expression and the module, innermost first.
Scopes: TypeAlias = "tuple[ast.AST, ...]"

#: A module of a package, from the package's own name on.
Module = tuple[str, ...]

#: For a module: (the file that imports from it, the name there, the name in the file). An empty
#: name stands for the module itself.
Imports = dict[Module, list[tuple[Path, str, str]]]

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
    return [
        replace(launch, file=Path(file).name)
        for file, text, names in _texts(kernel)
        for launch in _launches(text)
        if _is_one_of(launch.target, _aliases(text, names))
    ]


def may_be_launched_unseen(kernel: Any) -> bool:
    """Whether the text passes a kernel on, so that it may be launched under another name.

    True if a function takes or returns it, or if two functions have the kernel's name.
    """
    name = base_function(kernel)[1].__name__
    for number, (_, text, names) in enumerate(_texts(kernel)):
        if number == 0 and len(re.findall(rf"\bdef {name}\b", text)) > 1:
            return True
        if _is_mentioned(text, names) and _is_handed_on(text, _aliases(text, names)):
            return True
    return False


def _texts(kernel: Any) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield (file, text, names of the kernel) of the modules that may launch a kernel."""
    _, function = base_function(kernel)
    file, name = file_of(function), function.__name__
    yield file, file_text(function), frozenset([name])
    for path, names in importers(file, name).items():
        yield str(path), path.read_text(encoding="utf-8", errors="replace"), frozenset(names)


def _is_mentioned(text: str, names: Collection[str]) -> bool:
    """Whether a text does more with a kernel than to define it and to launch it by its name."""
    # The name comes first: the text is searched for it.
    return any(re.search(rf"{n}(?<!\w{n})(?<!def {n})\b(?!\s*\[)", text) for n in names)


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
def _aliases(text: str, imported: frozenset[str]) -> set[str]:
    """Return a kernel's names and those that the module assigns it to, decorated or not."""
    names = set(imported)
    if not _is_mentioned(text, names):
        return names
    for _ in range(3):
        for value, targets in _names_assigned(text):
            if _is_one_of(value, names):
                names.update(targets)
    return names


@functools.lru_cache(KEPT_TREES)
def _names_assigned(text: str) -> list[tuple[ast.expr, list[str]]]:
    """Return the values that a module assigns to names, except for results of a launch."""
    assignments = []
    for node in walk_hosts(parse(text)):
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                targets = [target]
            case ast.NamedExpr(target=target, value=value):
                targets = [target]
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


def importers(file: str, function: str) -> dict[Path, set[str]]:
    """Return the other files in a file's package that import a function of it, with its names
    there.
    """
    path = Path(os.path.abspath(file))
    package = package_of(path.parent)
    if package is None:
        return {}
    imports = _imports(package)
    names_by_file, pending = {path: {function}}, [path]
    while pending:
        exporter = pending.pop()
        exported = names_by_file[exporter]
        for importer, name, alias in imports.get(_module(exporter, package), ()):
            names = {alias} if name in exported else exported if name in ("", "*") else set()
            if not names <= names_by_file.setdefault(importer, set()):
                names_by_file[importer] = names_by_file[importer] | names
                pending.append(importer)
    return {
        importer: names for importer, names in names_by_file.items() if names and importer != path
    }


@functools.lru_cache(maxsize=8)
def _imports(package: Path) -> Imports:
    """Return the imports between the files of a package."""
    imports: Imports = defaultdict(list)
    for file in files_in(package):
        for module, imported, alias in _imported(file, package):
            imports[module].append((file, imported, alias))
            submodule = (*module, imported)
            if imported:
                imports[submodule].append((file, "", alias))
    return dict(imports)


def _imported(file: Path, package: Path) -> Iterator[tuple[Module, str, str]]:
    """Yield (module, name, name in the file) for a file's imports from its own package."""
    own = _module(file, package)
    around = own if file.name == "__init__.py" else own[:-1]
    for node in _import_statements(file, package.name):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if module := _absolute(alias.name, package):
                    yield module, "", alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            outer = around[: len(around) - node.level + 1]
            inner = filter(None, (node.module or "").split("."))
            module = (*outer, *inner) if node.level else _absolute(node.module or "", package)
            for alias in node.names if module else ():
                yield module, alias.name, alias.asname or alias.name


def _import_statements(file: Path, package: str) -> Iterator[ast.stmt]:
    """Yield the statements that may import from a package; text that looks like one is left out."""
    with contextlib.suppress(OSError):
        for match in _IMPORT.finditer(file.read_text(encoding="utf-8", errors="replace")):
            if package in match[1] or " ." in match[1]:
                with contextlib.suppress(SyntaxError, ValueError):
                    yield from tree_of(match[1]).body


def _absolute(name: str, package: Path) -> Module:
    """Return a module of the package by its full name; empty for one of another package."""
    parts = name.split(".")
    return tuple(parts[parts.index(package.name) :]) if package.name in parts else ()


def _module(file: Path, package: Path) -> Module:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts
