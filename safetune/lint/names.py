"""The values of a file's names: functions, modules of the tree, and literals.

Only Triton's own modules are imported, so that a kernel's calls resolve as at run time. Functions
of the tree are compiled but never called. A value is `UNKNOWN` unless it is a literal, or made of
literals by `+`, a comprehension or `itertools.product`.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import itertools
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, TypeAlias

from safetune.config import OPTION_DEFAULTS, shown_options
from safetune.frozen import dataclass
from safetune.keys.launch_usage import bindings
from safetune.keys.source_text import (
    MISSING,
    UNREADABLE,
    FunctionNode,
    last_name,
    package_of,
    parameters,
    tree_of,
    walk,
)
from safetune.keys.written_kernel import WrittenFunction, WrittenHeuristics, WrittenLayer

_JIT_OPTIONS = ("do_not_specialize", "launch_metadata", "repr")
#: The most items of a list that are looked at.
_LONGEST = 20_000
#: The parameters of `triton.Config`, in their order.
POSITIONS = ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg", "pre_hook", "ir_override")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.Import, ast.ImportFrom)

#: A value that the text does not tell.
UNKNOWN: Any = object()


class _NotTold(Exception):
    """The text does not tell the value of an expression."""


@dataclass(frozen=True)
class WrittenConfig:
    """A `triton.Config` as written."""

    kwargs: Mapping[str, Any]
    options: Mapping[str, Any]
    pre_hook: Any = None

    @property
    def identity(self) -> tuple[Any, ...] | None:
        """A comparison key: equal for equal configs; None if any value is unknown."""
        parts = [*self.kwargs.items(), *self.options.items()]
        if any(value is UNKNOWN for _, value in parts) or self.pre_hook is UNKNOWN:
            return None
        return (*sorted((name, repr(value)) for name, value in parts), id(self.pre_hook))

    def __str__(self) -> str:
        parts = {**self.kwargs, **shown_options(self.options)}
        return " ".join(f"{name}={value!r}" for name, value in parts.items())


class Scope:
    """The names of a module or of a function, and the enclosing scope."""

    def __init__(
        self,
        file: File,
        node: ast.AST,
        outer: Scope | None = None,
        values: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.file, self.node, self.outer = file, node, outer
        self.values = {**values}

    def get(self, name: str) -> Any:
        """Return the value of a name, or `MISSING`."""
        if name not in self.values:
            self.values[name] = MISSING  # what needs itself has no value
            self.values[name] = self._value(name)
        found = self.values[name]
        return self.outer.get(name) if found is MISSING and self.outer else found

    def inside(self, function: FunctionNode, given: Mapping[str, Any]) -> Scope:
        """Return the scope inside a function that is called with some arguments."""
        values = {name: value_of(each, self) for name, each in defaults(function).items()}
        return Scope(self.file, function, self, {**values, **given})

    def _value(self, name: str) -> Any:
        bound: list[Any] = bindings(name, (self.node,))
        at_top = {*map(id, _body(self.node))}
        defined = [node for node in bound if isinstance(node, _DEFINITIONS)]
        if defined:  # the rest decorates it, or stands in for a failed import
            defined.sort(key=lambda node: (id(node) in at_top, node.lineno))
            return self._defined(defined[-1 if id(defined[-1]) in at_top else 0], name)
        return self._assigned(name, bound) if bound else MISSING

    def _assigned(self, name: str, bound: list[Any]) -> Any:
        """Return the assignments to a name, also in sequence if each uses the last."""
        straight = {id(each.value) for each in _body(self.node) if isinstance(each, ast.Assign)}
        if None in bound:
            return UNKNOWN
        for number, node in enumerate(sorted(bound, key=lambda node: node.lineno)):
            mentions = any(getattr(part, "id", "") == name for part in walk(node))
            if number and not (mentions and {*map(id, bound)} <= straight):
                return UNKNOWN
            self.values[name] = value_of(node, self)
        return self.values[name]

    def _defined(self, node: Any, name: str) -> Any:
        """Return the function or the import that a name refers to."""
        if isinstance(node, _FUNCTIONS):
            return decorated(node, self)
        (alias, *_) = (a for a in node.names if name in (a.asname, a.name.partition(".")[0]))
        if isinstance(node, ast.ImportFrom):
            return self.file.imported(node, alias.name)
        return self.file.module_named(0, alias.name if alias.asname else name)


def _body(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", ())
    return body if isinstance(body, list) else []


class _Globals(dict[str, Any]):
    """The globals of a compiled function: the names of its module."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(__name__=scope.file.module, __file__=str(scope.file.path))
        self._scope = scope

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a name."""
        value = self._scope.get(name)
        return super().get(name, default) if value is MISSING else value


class File:
    """One file of the tree."""

    def __init__(self, path: Path, text: str, known: Files) -> None:
        package = package_of(path.parent)
        self.root = package.parent if package else path.parent
        parts = path.relative_to(self.root).with_suffix("").parts
        self.module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.path = path
        self.tree = tree_of(text)
        self.lines = text.splitlines(keepends=True)
        self.scope = Scope(self, self.tree)
        self._known = known

    def module_named(self, level: int, name: str) -> Any:
        """Return a module named in an import statement, or `MISSING` if it is not in the tree."""
        parts = [part for part in name.split(".") if part]
        folders = [self.root, self.path.parent]
        folders = [*self.path.parents][level - 1 : level] if level else folders
        if not level and parts[0] == "triton":
            with contextlib.suppress(ImportError):
                return importlib.import_module(name)
            return MISSING
        modules = (self._module(folder.joinpath(*parts), bool(parts)) for folder in folders)
        return next((module for module in modules if module is not MISSING), MISSING)

    def _module(self, place: Path, may_be_file: bool) -> Any:
        files = [place / "__init__.py", place.with_name(f"{place.name}.py")]
        for path in files[: 1 + may_be_file]:
            if path.is_file() and (file := file_at(path, self._known)):
                return _TextModule(file)
        return MISSING

    def imported(self, statement: ast.ImportFrom, name: str) -> Any:
        """Return the result of `from module import name`, or `MISSING`."""
        level, module = statement.level, statement.module or ""
        value = getattr(self.module_named(level, module), name, MISSING)
        return self.module_named(level, f"{module}.{name}") if value is MISSING else value


class _TextModule(ModuleType):
    """A file of the tree, as a module."""

    def __init__(self, file: File) -> None:
        super().__init__(file.module)
        self.__file__ = str(file.path)
        self._text = file

    def __getattr__(self, name: str) -> Any:
        value = MISSING if name.startswith("__") else self._text.scope.get(name)
        if value is MISSING and self._text.path.name == "__init__.py":
            value = self._text.module_named(1, name)
        if value is MISSING:
            raise AttributeError(name)
        return value


#: The files that were asked for.
Files: TypeAlias = "dict[Path, File | None]"


def file_at(path: Path, known: Files) -> File | None:
    """Return a file of the tree; None if it is missing, or if Python cannot read it."""
    if path not in known:
        known[path] = None
        with contextlib.suppress(OSError, *UNREADABLE), tokenize.open(path) as text:
            known[path] = File(path, text.read(), known)
    return known[path]


def value_of(node: ast.expr, scope: Scope) -> Any:
    """Return the value of an expression, or `UNKNOWN`."""
    try:
        return _told(node, scope)
    except (_NotTold, RecursionError, TypeError, ValueError):  # such as `range(None)`
        return UNKNOWN


def _told(node: ast.expr, scope: Scope) -> Any:
    """Return the value of an expression; raises `_NotTold`."""
    value: Any = UNKNOWN
    match node:
        case ast.Constant(value=value):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            value = -number
        case ast.Name(id=name):
            value = scope.get(name)
        case ast.Attribute(value=owner, attr=name):
            module = _told(owner, scope)
            value = getattr(module, name, UNKNOWN) if isinstance(module, ModuleType) else UNKNOWN
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return _items(parts, scope)
        case ast.Dict(keys=keys, values=values):
            return _dict(zip(keys, values, strict=True), scope)
        case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
            inside = itertools.islice(_loops(node.generators, scope), _LONGEST)
            return [_told(node.elt, inner) for inner in inside]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            sides = _told(left, scope), _told(right, scope)
            value = [*sides[0], *sides[1]] if all(isinstance(s, list) for s in sides) else UNKNOWN
        case ast.Lambda():
            value = function_of(node, scope)
        case ast.Call():
            value = _call(node, scope)
    if value is UNKNOWN or value is MISSING:
        raise _NotTold
    return value


def _items(parts: Sequence[ast.expr], scope: Scope) -> list[Any]:
    items = (
        _told(p.value, scope) if isinstance(p, ast.Starred) else [_told(p, scope)] for p in parts
    )
    return [*itertools.chain.from_iterable(items)]


def _dict(pairs: Iterable[tuple[Any, ast.expr]], scope: Scope) -> dict[str, Any]:
    """Return the known part of a dict; functions may return any other entries."""
    entries: dict[Any, Any] = {}
    for key, value in pairs:
        item = value_of(value, scope)
        if key is None:
            entries.update(item if isinstance(item, Mapping) else {})
        elif isinstance(key, ast.Constant):
            entries[key.value] = item
    return entries


def _loops(loops: Sequence[Any], scope: Scope) -> Iterator[Scope]:
    """Yield the names inside of a comprehension, for each of its items."""
    if not loops:
        yield scope
        return
    if loops[0].ifs:
        raise _NotTold
    for item in _told(loops[0].iter, scope):
        values: dict[str, Any] = {}
        match loops[0].target:
            case ast.Name(id=name):
                values[name] = item
            case ast.Tuple(elts=parts) if isinstance(item, (list, tuple)):
                values |= {last_name(part): each for part, each in zip(parts, item, strict=False)}
        yield from _loops(loops[1:], Scope(scope.file, ast.Pass(), scope, values))


def _call(node: ast.Call, scope: Scope) -> Any:
    name = last_name(node.func)
    if name == "Config":
        return config_of(node, scope)
    if len(node.args) == 1 and (isinstance(node.func, ast.Call) or name == "jit"):
        below = _told(node.args[0], scope)
        function = base_of(below)
        return UNKNOWN if function is None else _above(below, node.func, function, scope)
    args, keywords = _items(node.args, scope), keywords_of(node, scope)
    if name == "product" and not keywords:
        return [*itertools.islice(itertools.product(*args), _LONGEST)]
    if name == "dict" and not args:
        return keywords
    if name == "range" and args and all(isinstance(each, int) for each in args):
        return [*itertools.islice(range(*args), _LONGEST)]
    return _returned(_told(node.func, scope), args, keywords)


def _returned(function: Any, args: list[Any], keywords: Mapping[str, Any]) -> Any:
    """Return the result of a function of the tree that only returns an expression."""
    text: tuple[Any, Any] = getattr(function, "text", (None, None))
    match node := text[0]:
        case ast.FunctionDef(body=[*before, ast.Return(value=ast.expr() as value)]):
            if all(isinstance(each, ast.Expr) for each in before):  # a docstring
                given = dict(zip(parameters(node), args, strict=False))
                return _told(value, text[1].inside(node, {**given, **keywords}))
    return UNKNOWN


def config_of(node: ast.Call, scope: Scope) -> WrittenConfig:
    """Return a config as far as its text shows."""
    given = {name: value_of(each, scope) for name, each in zip(POSITIONS, node.args, strict=False)}
    given |= keywords_of(node, scope)
    kwargs = given.get("kwargs", {})
    options = {name: given.get(name, default) for name, default in OPTION_DEFAULTS.items()}
    known = kwargs if isinstance(kwargs, dict) else {}
    return WrittenConfig(known, options, given.get("pre_hook"))


def keywords_of(node: ast.Call, scope: Scope) -> dict[str, Any]:
    """Return the keyword arguments of a call."""
    names = (keyword.arg and ast.Constant(keyword.arg) for keyword in node.keywords)
    return _dict(zip(names, (keyword.value for keyword in node.keywords), strict=True), scope)


def decorated(node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope, below: int = 0) -> Any:
    """Return the value of a function's name, below its first `below` decorators."""
    found: Any = function_of(node, scope)
    for decorator in reversed(node.decorator_list[below:]):
        found = _above(found, decorator, node, scope)
    return found


def base_of(value: Any) -> Any:
    """Return the text of the function that a value from the tree is or decorates; None
    otherwise.
    """
    while not isinstance(value, FunctionType):
        if (value := getattr(value, "fn", None)) is None:
            return None
    return value.text[0] if hasattr(value, "text") else None


def _above(value: Any, decorator: ast.expr, node: Any, scope: Scope) -> Any:
    """Return a decorator's result for a value."""
    call = decorator if isinstance(decorator, ast.Call) else None
    name = last_name(call.func if call else decorator)
    if isinstance(value, FunctionType):
        if name.endswith("jit") or name == "constexpr_function":
            given = keywords_of(call, scope) if call else {}
            if not isinstance(given.get("do_not_specialize"), list):
                given.pop("do_not_specialize", None)
            first = value.__code__.co_firstlineno
            lines = tuple(scope.file.lines[first - 1 : node.end_lineno])
            return WrittenFunction(value, lines, first, *map(given.get, _JIT_OPTIONS))
        return UNKNOWN
    if name == "heuristics" and call and value is not UNKNOWN:
        passed = [value_of(each, scope) for each in call.args]
        values: Any = next(iter([*passed, *keywords_of(call, scope).values()]), {})
        if isinstance(values, Mapping):
            return WrittenHeuristics(value, values)
    return value if value is UNKNOWN else WrittenLayer(value)


def function_of(node: FunctionNode, scope: Scope) -> Any:
    """Return a function of the tree, which is never called; `UNKNOWN` if Python rejects it alone.

    Only the parameters of a `def` are compiled; its text shows the rest.
    """
    bare: Any = copy.copy(node)
    if isinstance(node, ast.Lambda):
        bare = ast.copy_location(ast.Expr(node), node)
    else:
        bare.body = [ast.copy_location(ast.Pass(), node)]
        bare.decorator_list = bare.type_params = []  # with some, its code is inside another one
    name = getattr(node, "name", "<lambda>")
    try:
        whole = compile(ast.Module([bare], []), str(scope.file.path), "exec", dont_inherit=True)
    except UNREADABLE:
        return UNKNOWN
    codes = [c for c in whole.co_consts if isinstance(c, CodeType) and c.co_name == name]
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    # Those before the last one are of defaults.
    function: Any = FunctionType(codes[-1].replace(co_firstlineno=first), _Globals(scope))
    named = arguments(node).values()
    function.__annotations__ = {a.arg: ast.unparse(a.annotation) for a in named if a.annotation}
    function.text = (node, scope)
    return function


def arguments(node: FunctionNode) -> dict[str, ast.arg]:
    """Return the parameters of a function by name, except starred ones."""
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
