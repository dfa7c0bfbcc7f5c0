"""The text of Python functions, the objects that its names refer to, and whose code they are."""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import copy
import functools
import inspect
import io
import linecache
import os
import re
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from tokenize import TokenError
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeAlias

#: Builtins that see every local variable.
FRAME_READERS = frozenset({"locals", "vars", "eval", "exec", "dir"})

#: What cloudpickle 3.1.3 names the file of all code.
_CODE_OF_A_COPY = "<dynamic-code>"

_DEF = re.compile(r"^def\s+\w+\s*\(", re.MULTILINE)

#: The most folders without `__init__.py` between two that have one.
_NAMESPACE_FOLDERS = 3


#: The packages of the toolchain.
_TOOLCHAIN = frozenset({"triton", "torch", "numpy", "jax"})

#: The flag of classes that are not built into the interpreter.
_HEAP_TYPE = 1 << 9

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_PARSE_ATTEMPTS = 10

#: A module's kernels are decorated one after the other. Every garbage collection walks through
#: trees that are kept longer (measured with FLA's 142 kernels: 1.3 s when the process ends).
KEPT_TREES = 8

#: Fields of nodes that have none below them that is looked for: names, operators, contexts.
_NO_NODES = frozenset(
    {"arg", "attr", "conversion", "ctx", "id", "is_async", "kind", "level", "module", "op", "ops"}
    | {"simple", "type_comment"}
)


@functools.cache
def _fields(node: type[ast.AST]) -> tuple[str, ...]:
    """Return the other fields of a class of nodes."""
    return tuple(name for name in node._fields if name not in _NO_NODES)


#: What reading a text or its tree may raise; the last two where it is too deep.
UNREADABLE = (SyntaxError, TokenError, ValueError, RecursionError, MemoryError)

#: The value of a name that is not bound.
MISSING: Any = object()


class Use(NamedTuple):
    """One use of a parameter: a read, or an argument `slot` of the function that `callee` names."""

    parameter: str
    line: int
    callee: str = ""
    slot: int | str = 0


@functools.cache
def package_of(folder: Path) -> Path | None:
    """Return the outermost package around a folder."""
    package, without = None, 0
    while without <= _NAMESPACE_FOLDERS and folder.name.isidentifier():
        if (folder / "__init__.py").is_file():
            package, without = folder, 0
        else:
            without += 1
        folder = folder.parent
    return package


def files_in(package: Path) -> Iterator[Path]:
    """Yield the module files of a package, always in the same order."""
    for folder, folders, files in os.walk(package):
        folders[:] = sorted(name for name in folders if name.isidentifier())
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def code_record(code: CodeType) -> list[Any]:
    """Return compiled code as plain data, without its location."""
    return [
        code.co_code.hex(),
        [*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars],
        [_constant(const) for const in code.co_consts],
    ]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return code_record(value)
    if isinstance(value, tuple):
        return ["tuple", *map(_constant, value)]
    if isinstance(value, frozenset):
        return ["set", *sorted(map(repr, value))]
    text = value.rpartition("<locals>.")[2] if isinstance(value, str) else value
    return [type(value).__name__, repr(text)]


def file_of(function: FunctionType) -> str:
    """Return the name of the file that defines `function`.

    A copy by cloudpickle 3.1.3 or newer says `<dynamic-code>`; its module's globals have the name.
    """
    file = function.__code__.co_filename
    return function.__globals__.get("__file__") or file if file == _CODE_OF_A_COPY else file


def file_text(function: FunctionType) -> str:
    """Return the text of the file that defines `function`; empty without one."""
    file = file_of(function)
    linecache.checkcache(file)  # a module that was edited and reloaded has other text
    return "".join(linecache.getlines(file, function.__globals__))


def source_of(jit: Any) -> str | None:
    """Return the text of a jit or constexpr function from `def` on; None without one."""
    text = getattr(jit, "_src", None) or getattr(jit, "src", None)
    if text is None:
        text = textwrap.dedent("".join(source_lines(jit)[0]))
    start = _DEF.search(text)
    if start is None:
        return None
    return "\n".join(line.rstrip() for line in text[start.start() :].splitlines()).rstrip() + "\n"


def source_lines(jit: Any) -> tuple[list[str], int]:
    """Return the lines in the file, with decorators, and the first line's number; or no lines."""
    if hasattr(jit, "raw_src"):
        return list(jit.raw_src), jit.starting_line_number
    first = jit.fn.__code__.co_firstlineno
    return inspect.getblock(io.StringIO(file_text(jit.fn)).readlines()[first - 1 :]), first


def definition_line(jit: Any) -> int:
    """Return the line of the `def` itself, below the decorators; 0 if the source is missing."""
    lines, first = source_lines(jit)
    return next((first + i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)


class Scope:
    """The values of a function's free names: from its closure first, then from its globals."""

    def __init__(self, function: FunctionType) -> None:
        self._globals: Mapping[str, Any] = function.__globals__
        self._closure: dict[str, Any] = {}
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                self._closure[name] = cell.cell_contents
            except ValueError:  # not bound yet; a global of the same name is another variable
                self._closure[name] = MISSING

    def lookup(self, name: str) -> Any:
        """Return the value of `name`, or `MISSING`."""
        if name in self._closure:
            return self._closure[name]
        return self._globals.get(name, MISSING)

    def value_of(self, name: str, into_foreign: bool = True) -> Any:
        """Return the value of a dotted name, or `MISSING`; if not `into_foreign`, for a name of
        Python or the toolchain the module that it begins with.
        """
        first, *attributes = name.split(".")
        value = self.lookup(first)
        for attribute in attributes:
            if value is MISSING:
                break
            if not into_foreign and isinstance(value, ModuleType) and is_foreign(value):
                break
            value = getattr(value, attribute, MISSING)
        return value


def is_foreign(defined: ModuleType | FunctionType) -> bool:
    """Whether a module, or a function's module, belongs to Python or the toolchain.

    User code is part of a kernel's identity by its text, foreign code by its name, because its text
    differs between versions. Name and file decide: a user's module may be named `profile.py`, and
    `torch.no_grad()` returns a function of torch's text that has the name of the user's.
    """
    if isinstance(defined, ModuleType):
        name, file = defined.__name__, getattr(defined, "__file__", None)
        if getattr(defined.__spec__, "origin", None) in ("built-in", "frozen"):
            file = file or "built-in"
    else:
        name, file = defined.__module__ or "", file_of(defined)
        if file.startswith("<frozen "):
            file = defined.__globals__.get("__file__") or "built-in"
    first = name.partition(".")[0]
    is_named = first in sys.stdlib_module_names or first in _TOOLCHAIN
    return is_named and bool(file) and _is_installed(str(file))


def is_heap_class(cls: type) -> bool:
    """Whether a class is not built into the interpreter, like one written in Python."""
    return bool(cls.__flags__ & _HEAP_TYPE)


def is_foreign_class(cls: type) -> bool:
    """Whether a class belongs to Python or the toolchain."""
    module = sys.modules.get(cls.__module__)
    if module is builtins:  # also the module of a class that `exec` made without `__name__`
        return not is_heap_class(cls)
    return module is not None and is_foreign(module)


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    """Whether a file is of the standard library or of a package of the toolchain."""
    path = os.path.normpath(file)  # not by the working directory, which may be gone
    folders = path.split(os.sep)
    for packages in ("site-packages", "dist-packages"):
        if packages in folders:
            return folders[folders.index(packages) + 1] in _TOOLCHAIN
    return file == "built-in" or path.startswith(_installed_folders())


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    """Return the folders of the standard library, and that of a Triton built from its sources."""
    folders = {os.path.dirname(os.__file__), sysconfig.get_path("stdlib")}
    folders.add(sysconfig.get_path("platstdlib"))
    folders.update(getattr(find_spec("triton"), "submodule_search_locations", ()))
    return tuple(os.path.join(os.path.abspath(folder), "") for folder in folders)


def parse(text: str) -> ast.Module:
    """Return the tree of `text`; an empty tree if it is not Python."""
    try:
        return tree_of(text)
    except UNREADABLE:
        return ast.Module([], [])


@functools.lru_cache(KEPT_TREES)
def tree_of(text: str) -> ast.Module:
    """Return the tree of `text` like `ast.parse`; raises the same errors.

    Up to Python 3.12, threads that parse at the same time share one depth counter (CPython issue
    106905), so another thread's parse can make this one fail. It is retried.
    """
    for _ in range(_PARSE_ATTEMPTS - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(text)
    return ast.parse(text)


def nodes_of(function: FunctionType) -> tuple[FunctionNode, ...]:
    """Return the tree of `function`, with the file's line numbers.

    Several trees for lambdas on one line; none if the source is missing.
    """
    code = function.__code__
    names, *stars = inspect.getargs(code)
    expected = (*names, *filter(None, stars))
    return tuple(
        node
        for node in _functions_by_line(file_text(function)).get(code.co_firstlineno, ())
        if getattr(node, "name", "<lambda>") == code.co_name and parameters(node) == expected
    )


@functools.lru_cache(KEPT_TREES)
def _functions_by_line(text: str) -> dict[int, list[FunctionNode]]:
    functions: dict[int, list[FunctionNode]] = {}
    for node in walk(parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            functions.setdefault(first, []).append(node)
    return functions


def parameters(node: FunctionNode) -> tuple[str, ...]:
    """Return the names of all parameters; the stars come last."""
    args = node.args
    stars = [star for star in (args.vararg, args.kwarg) if star is not None]
    return tuple(arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs, *stars])


def undecorated(node: FunctionNode) -> FunctionNode:
    """Return the tree of a function without its decorators."""
    if isinstance(node, ast.Lambda):
        return node
    inner = copy.copy(node)
    inner.decorator_list = []
    return inner


def compiles_to(node: FunctionNode, function: FunctionType) -> bool:
    """Whether `node` is the text of this function; the file may have changed by now.

    Since Python 3.11, a call `module.name()` has other code where the same compilation imports the
    module. A notebook compiles each statement on its own.
    """
    imports = _imports_in(file_text(function))
    return any(_compiles_to(node, function.__code__, before) for before in ([], imports))


def _compiles_to(node: FunctionNode, code: CodeType, before: list[ast.stmt]) -> bool:
    inner: Any = undecorated(node)
    statement = ast.Expr(inner) if isinstance(inner, ast.Lambda) else inner
    outer = ast.parse(f"def outer({', '.join(code.co_freevars)}): pass")
    outer.body[-1].body = [ast.copy_location(statement, node)]  # type: ignore[attr-defined]
    outer.body = [*before, *outer.body]
    flags = code.co_flags & __future__.annotations.compiler_flag
    try:
        module = compile(outer, "", "exec", flags, dont_inherit=True)
    except UNREADABLE:  # `nonlocal`, and other names that need the whole file
        return False
    (around,) = (const for const in module.co_consts if isinstance(const, CodeType))
    record = code_record(code)
    return any(isinstance(c, CodeType) and code_record(c) == record for c in around.co_consts)


@functools.lru_cache(KEPT_TREES)
def _imports_in(text: str) -> list[ast.stmt]:
    """Return the imports of a file at module level."""
    imports, pending = list[ast.stmt](), children(parse(text))
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            pending += children(node)
    return [node for node in imports if getattr(node, "module", "") != "__future__"]


def dotted(node: ast.AST) -> str:
    """Return a dotted name as text, such as `a.b.c`; empty for any other expression."""
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST) -> str:
    """Return `c` for the expression `a.b.c`, "" for any expression but a name or attribute."""
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """Return all arguments of a call, keyword arguments last."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def body_of(node: FunctionNode) -> list[ast.AST]:
    """Return the statements of a function, or the expression of a lambda."""
    return [*node.body] if isinstance(node.body, list) else [node.body]


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node but operators like `ast.walk`, in another order and much faster."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        pending += children(node)


def children(node: ast.AST) -> list[ast.AST]:
    """Return the child nodes of a node except operators, in field order."""
    nodes: list[ast.AST] = []
    for field in _fields(node.__class__):  # type: ignore[arg-type]
        value = getattr(node, field, None)
        if value.__class__ is list:
            nodes += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST):
            nodes.append(value)
    return nodes


def stores(tree: ast.AST) -> list[tuple[int, str]]:
    """Return (line, name) for each binding anywhere in `tree`."""
    bound_names: list[tuple[int, str]] = []
    for node in walk(tree):
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                bound_names.append((node.lineno, node.id))
        elif isinstance(node, ast.arg):
            bound_names.append((node.lineno, node.arg))
        elif isinstance(node, ast.alias):
            bound_names.append((node.lineno, (node.asname or node.name).partition(".")[0]))
        elif name := getattr(node, "name", None):  # a function, a class, a pattern or an exception
            bound_names.append((node.lineno, name))  # type: ignore[attr-defined]
    return bound_names
