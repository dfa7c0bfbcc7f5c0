"""The names of a file of the tree, and what each stands for, without an import of the file.

A function is compiled and never run. Triton's own modules are imported: what a kernel calls of them
is what it calls at run time. A name of another package that is not in the tree has no value.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import sys
import tokenize
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from safetune.keys.source_text import (
    MISSING,
    FunctionNode,
    last_name,
    package_of,
    tree_of,
)
from safetune.lint.values import UNKNOWN

#: The packages beside Python's own whose functions are not the user's.
_TOOLCHAIN = frozenset({"torch", "numpy", "jax"})


class Deferred:
    """A name's value that is found when it is first asked for."""

    def __init__(self, find: Callable[[], Any]) -> None:
        self.find = find


class Frame:
    """The names of a module or of a call, which has parameters, and the frame around it."""

    def __init__(self, file: File, outer: Frame | None = None, names: Iterable[str] = ()) -> None:
        self.file = file
        self.outer = outer
        self.values: dict[str, Any] = dict.fromkeys(names, UNKNOWN)
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

    def bind(self, node: ast.Import | ast.ImportFrom) -> None:
        """Bind the names of an import statement."""
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.Import):
                module = alias.name if alias.asname else alias.name.partition(".")[0]
                find = functools.partial(self.file.files.imported, self.file, 0, module)
                self.values[alias.asname or module] = Deferred(find)
                continue
            place = (self.file, node.level, node.module or "")
            if name == "*":
                owner = self.file.files.imported(*place)
                if isinstance(owner, TextModule):
                    self.values.update(owner._text.frame.values)
            elif not (self.unsure and alias.name in self.values):
                find = functools.partial(self.file.files.imported_name, *place, alias.name)
                self.values[name] = Deferred(find)


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

    def __init__(self, path: Path, text: str, files: Files) -> None:
        package = package_of(path.parent)
        self.root = package.parent if package else path.parent
        parts = path.relative_to(self.root).with_suffix("").parts
        self.module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.path = path
        self.tree = tree_of(text)
        self.lines = text.splitlines(keepends=True)
        self.files = files
        self.steps = 0  # that its text has been run for
        self._frame: Frame | None = None

    @property
    def frame(self) -> Frame:
        """The names of the module."""
        if self._frame is None:
            self._frame = Frame(self)
            self.files.run(self._frame, self.tree)
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
        self.depth = 0  # of calls
        self._known: dict[Path, File | None] = {}

    def file(self, path: Path) -> File | None:
        """Return a file; None where it is not there, or is not Python."""
        if path not in self._known:
            self._known[path] = None
            with contextlib.suppress(OSError, SyntaxError, ValueError), tokenize.open(path) as text:
                self._known[path] = File(path, text.read(), self)
        return self._known[path]

    def module(self, folder: Path, parts: list[str]) -> Any:
        """Return the module that lies there, or `MISSING`."""
        place = folder.joinpath(*parts)
        files = [place / "__init__.py", *([place.with_name(f"{place.name}.py")] if parts else [])]
        for path in files:
            if path.is_file() and (file := self.file(path)):
                return TextModule(file)
        return MISSING

    def imported(self, file: File, level: int, name: str) -> Any:
        """Return the module that an import statement in a file names, or `MISSING`."""
        parts = [part for part in name.split(".") if part]
        if level:
            return self.module(file.path.parents[level - 1], parts)
        if parts[0] == "triton":
            return _of_triton(name)
        if parts[0] in sys.stdlib_module_names or parts[0] in _TOOLCHAIN:
            return UNKNOWN
        found = (self.module(root, parts) for root in dict.fromkeys([file.root, file.path.parent]))
        return next((module for module in found if module is not MISSING), MISSING)

    def imported_name(self, file: File, level: int, module: str, name: str) -> Any:
        """Return what `from module import name` gives in a file, or `MISSING`."""
        owner = self.imported(file, level, module)
        if owner is UNKNOWN:
            return UNKNOWN
        if owner is MISSING and level:
            return self.module(file.path.parents[level - 1], [*module.split("."), name])
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
    code = _compiled(node, str(frame.file.path))
    if code is None:
        return None
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    function = FunctionType(code.replace(co_firstlineno=first), Names(frame))
    named = arguments(node).values()
    function.__annotations__ = {a.arg: ast.unparse(a.annotation) for a in named if a.annotation}
    function.text = (node, frame)  # type: ignore[attr-defined]
    return function


def _compiled(node: FunctionNode, file: str) -> CodeType | None:
    bare: Any = copy.copy(node)
    if isinstance(node, ast.Lambda):
        bare = ast.copy_location(ast.Expr(node), node)
    else:
        calls = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
        if any(last_name(call).endswith("jit") for call in calls):  # its text is what counts
            bare.body = [ast.copy_location(ast.Pass(), node)]
        bare.decorator_list = []
        bare.type_params = []  # the code of a function with some is inside another one
    name = getattr(node, "name", "<lambda>")
    try:
        whole = compile(ast.Module([bare], []), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # `nonlocal`
        return None
    codes = [c for c in whole.co_consts if isinstance(c, CodeType) and c.co_name == name]
    return codes[-1] if codes else None  # those before it are of defaults


def arguments(node: FunctionNode) -> dict[str, ast.arg]:
    """Return the parameters of a function by name, but for those with a star."""
    args = node.args
    return {arg.arg: arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]}


def defaults(node: FunctionNode) -> dict[str, ast.expr]:
    """Return the defaults of the parameters that have one, by name."""
    args = node.args
    positional = [*args.posonlyargs, *args.args][-len(args.defaults) :] if args.defaults else []
    pairs = [*zip(positional, args.defaults, strict=True)]
    named = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    pairs += [(arg, default) for arg, default in named if default is not None]
    return {arg.arg: default for arg, default in pairs}
