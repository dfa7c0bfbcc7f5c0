"""Which files of a package import a function, by the text on disk.

Modules that are loaded are not asked: every process finds the same files, whatever it imported
before.
"""

from __future__ import annotations

import functools
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

#: A module of a package, from the package's own name on.
Module = tuple[str, ...]

#: For a module: (the file that imports from it, the name there, the name in the file). An empty
#: name stands for the module itself.
Imports = dict[Module, list[tuple[Path, str, str]]]

#: The most folders without `__init__.py` between two that have one.
_NAMESPACE_FOLDERS = 3

#: The most text of one import statement.
_LONGEST = 8192

_IMPORT = re.compile(r"import[ \t(*]")
_COMMENT = re.compile(r"#[^\n]*")


def importers(file: str, function: str) -> dict[Path, set[str]]:
    """Return the other files of a file's package that import a function of it, with its names."""
    path = Path(os.path.abspath(file))
    package = _package(path.parent)
    if package is None:
        return {}
    imports = _imports(package)
    found, pending = {path: {function}}, [path]
    while pending:
        exporter = pending.pop()
        exported = found[exporter]
        for importer, name, alias in imports.get(_module(exporter, package), ()):
            names = {alias} if name in exported else exported if name in ("", "*") else set()
            if not names <= found.setdefault(importer, set()):
                found[importer] = found[importer] | names
                pending.append(importer)
    return {importer: names for importer, names in found.items() if names and importer != path}


@functools.cache
def _package(folder: Path) -> Path | None:
    """Return the outermost package around a folder."""
    found, without = None, 0
    while without <= _NAMESPACE_FOLDERS and folder.name.isidentifier():
        if (folder / "__init__.py").is_file():
            found, without = folder, 0
        else:
            without += 1
        folder = folder.parent
    return found


@functools.lru_cache(maxsize=8)
def _imports(package: Path) -> Imports:
    """Return what the files of a package import from each other."""
    found: Imports = defaultdict(list)
    for folder, folders, files in os.walk(package):
        folders[:] = sorted(name for name in folders if name.isidentifier())
        for name in sorted(files):
            if name.endswith(".py"):
                file = Path(folder, name)
                for module, imported, alias in _imported(file, package):
                    found[module].append((file, imported, alias))
                    submodule = (*module, imported)
                    if imported:
                        found[submodule].append((file, "", alias))
    return dict(found)


def _imported(file: Path, package: Path) -> Iterator[tuple[Module, str, str]]:
    """Yield (module, name, name in the file) for what a file imports from its own package."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    own = _module(file, package)
    around = own if file.name == "__init__.py" else own[:-1]
    for match in _IMPORT.finditer(text):
        head = text[text.rfind("\n", 0, match.start()) + 1 : match.start()].split()
        names = _names(text[match.start() + len("import") :][:_LONGEST])
        if not head:
            for name, alias in names:
                if module := _absolute(name, package):
                    yield module, "", alias
        elif head[0] == "from" and len(head) == 2:
            level = len(head[1]) - len(head[1].lstrip("."))
            inner = tuple(filter(None, head[1].lstrip(".").split(".")))
            outer = around[: len(around) - level + 1]
            module = (*outer, *inner) if level else _absolute(head[1], package)
            for name, alias in names if module else ():
                yield module, name, alias


def _names(text: str) -> list[tuple[str, str]]:
    """Return (name, name in the file) for the names behind `import`."""
    text = text.lstrip(" \t")
    if text.startswith("("):
        text = _COMMENT.sub("", text)
        text = text[1 : text.find(")")]
    else:
        text = text.replace("\\\n", " ").partition("\n")[0]
    parts = [part.split() for part in _COMMENT.sub("", text).partition(";")[0].split(",")]
    return [(words[0], words[-1]) for words in parts if words]


def _absolute(name: str, package: Path) -> Module:
    """Return a module of the package by its full name; empty for one of another package."""
    parts = name.split(".")
    return tuple(parts[parts.index(package.name) :]) if package.name in parts else ()


def _module(file: Path, package: Path) -> Module:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts
