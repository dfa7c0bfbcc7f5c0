"""The names of a file of the tree, and what each stands for, without an import of the file.

A function is compiled and never run. Triton's own modules are imported: what a kernel calls of them
is what it calls at run time. A name of another package that is not in the tree has no value.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from safetune.keys.source_text import (
    MISSING,
    FunctionNode,
    ModuleText,
    last_name,
    package_of,
    parse,
)
from safetune.lint.values import UNKNOWN

#: The packages beside Python's own whose functions are not the user's.
_TOOLCHAIN = frozenset({"torch", "numpy", "jax"})


class Deferred:
    """A name's value that is found when it is first asked for."""

    def __init__(self, find: Callable[[], Any]) -> None:
        self.find = find


class Frame:
    """The names of a module or of a call, and the frame around it."""

    def __init__(self, file: File, outer: Frame | None = None) -> None:
        self.file = file
        self.outer = outer
        self.values: dict[str, Any] = {}
        self.returned: list[Any] = []
        self.unsure = 0  # above 0 in a branch that may not run

    def get(self, name: str) -> Any:
        """Return what a name stands for, or `MISSING`."""
        if name not in self.values:
            return MISSING if self.outer is None else self.outer.get(name)
        value = self.values[name]
        if isinstance(value, Deferred):
            self.values[name] = MISSING  # what needs itself has no value
            value = self.values[name] = value.find()
        return value


class Names(dict[str, Any]):
    """The globals of a compiled function: the names of a frame."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(__name__=frame.file.module, __file__=str(frame.file.path))
        self._frame = frame

    def get(self, name: str, default: Any = None) -> Any:
        """Return what a name stands for."""
        value = self._frame.get(name)
        return super().get(name, default) if value is MISSING else value


class File:
    """One file of the tree; `frame` has its names once `run` has gone through its text."""

    def __init__(self, path: Path, text: ModuleText, files: Files) -> None:
        package = package_of(path.parent)
        self.root = package.parent if package else path.parent
        parts = path.relative_to(self.root).with_suffix("").parts
        self.module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.path = path
        self.text = text
        self.lines = text.text.splitlines(keepends=True)
        self.files = files
        self.steps = 0  # that its text has been run for
        self._frame: Frame | None = None

    @property
    def frame(self) -> Frame:
        """The names of the module."""
        if self._frame is None:
            self._frame = Frame(self)
            self.files.run(self._frame, self.text.tree)
        return self._frame


class TextModule(ModuleType):
    """A file of the tree, as a module."""

    def __init__(self, file: File) -> None:
        super().__init__(file.module)
        self.__file__ = str(file.path)
        self._text = file

    def __getattr__(self, name: str) -> Any:
        value = MISSING if name.startswith("__") else self._text.frame.get(name)
        if value is MISSING and self._text.path.name == "__init__.py":
            value = self._text.files.module(self._text.path.parent, [name])
        if value is MISSING:
            raise AttributeError(name)
        return value


class Files:
    """The files of the tree that were asked for; `run` goes through the text of one."""

    def __init__(self, run: Callable[[Frame, ast.Module], None]) -> None:
        self.run = run
        self._known: dict[Path, File | None] = {}

    def file(self, path: Path) -> File | None:
        """Return a file; None where it is not there, or is not Python."""
        if path not in self._known:
            self._known[path] = None
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if text := parse(path.read_text(encoding="utf-8")):
                    self._known[path] = File(path, text, self)
        return self._known[path]

    def module(self, folder: Path, parts: list[str]) -> Any:
        """Return the module that lies there, or `MISSING`."""
        place = folder.joinpath(*parts)
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if place.name and path.is_file() and (file := self.file(path)):
                return TextModule(file)
        return MISSING

    def imported(self, file: File, level: int, name: str) -> Any:
        """Return the module that an import statement in a file names, or `MISSING`."""
        parts = [part for part in name.split(".") if part]
        if level:
            return (
                self.module(file.path.parents[level - 1], parts)
                if parts
                else self._package(file.path.parents[level - 1])
            )
        if parts[0] == "triton":
            return _of_triton(name)
        if parts[0] in sys.stdlib_module_names or parts[0] in _TOOLCHAIN:
            return UNKNOWN
        found = (self.module(root, parts) for root in dict.fromkeys([file.root, file.path.parent]))
        return next((module for module in found if module is not MISSING), MISSING)

    def _package(self, folder: Path) -> Any:
        file = self.file(folder / "__init__.py")
        return TextModule(file) if file else MISSING

    def imported_name(self, file: File, level: int, module: str, name: str) -> Any:
        """Return what `from module import name` gives in a file, or `MISSING`."""
        owner = self.imported(file, level, module)
        if owner is UNKNOWN:
            return UNKNOWN
        if owner is MISSING and level:
            folder = file.path.parents[level - 1]
            return self.module(folder.joinpath(*module.split(".")) if module else folder, [name])
        value = getattr(owner, name, MISSING)
        if value is MISSING and isinstance(owner, ModuleType) and owner.__name__[:6] == "triton":
            return _of_triton(f"{owner.__name__}.{name}")
        return value


def _of_triton(name: str) -> Any:
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)
    return MISSING


def function_of(node: FunctionNode, frame: Frame) -> FunctionType | None:
    """Return a function of the tree, which is never called; None where Python refuses it alone."""
    args = node.args
    stars = [each and _bare(each) for each in (args.vararg, args.kwarg)]
    bare = ast.arguments(
        [*map(_bare, args.posonlyargs)],
        [*map(_bare, args.args)],
        stars[0],
        [*map(_bare, args.kwonlyargs)],
        [None for _ in args.kwonlyargs],
        stars[1],
        [],
    )
    code = _compiled(node, bare, str(frame.file.path))
    if code is None:
        return None
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    function = FunctionType(code.replace(co_firstlineno=first), Names(frame))
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    function.__annotations__ = {a.arg: ast.unparse(a.annotation) for a in named if a.annotation}
    function.text = (node, frame)  # type: ignore[attr-defined]
    return function


def _bare(arg: ast.arg) -> ast.arg:
    return ast.copy_location(ast.arg(arg.arg), arg)


def _compiled(node: FunctionNode, args: ast.arguments, file: str) -> CodeType | None:
    if isinstance(node, ast.Lambda):
        bare = ast.copy_location(ast.Lambda(args, node.body), node)
        statement: ast.stmt = ast.Expr(bare)
    else:
        generic: dict[str, Any] = {"type_params": []} if sys.version_info >= (3, 12) else {}
        calls = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
        jitted = any(last_name(call).endswith("jit") for call in calls)  # its text is what counts
        body: list[ast.stmt] = [ast.copy_location(ast.Pass(), node)] if jitted else node.body
        statement = ast.FunctionDef(node.name, args, body, [], **generic)
    located = ast.copy_location(statement, node)
    try:
        whole = compile(ast.Module([located], []), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # `nonlocal`
        return None
    return next((each for each in whole.co_consts if isinstance(each, CodeType)), None)
