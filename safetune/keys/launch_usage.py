"""The uses of a kernel's arguments in its launches, as far as their text shows.

A grid reads the entries of its dict, and every argument computed from the same values as the grid.
An unread key name affects the best config if it stands for another value: an argument that is read
and missing from the key, or the size of a matrix product.

Names are followed through assignments, and parameters to the calls of their function in the module.
`None` stands for a value that is not in the text: a parameter, or a part of something unpacked. An
imported name stands for its import statement.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence

from safetune.keys.callback_usage import usage_of_dict
from safetune.keys.kernel_text import Usage
from safetune.keys.launches import Launch, Scopes, walk_hosts
from safetune.keys.run_order import bind
from safetune.keys.source_text import (
    KEPT_TREES,
    arguments_of,
    body_of,
    children,
    dotted,
    last_name,
    parameters,
    walk,
)

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_GRIDS = (ast.Tuple, ast.List, ast.Lambda, ast.FunctionDef, ast.Constant, ast.BinOp)
_VALUES = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp)

#: Attributes, methods and functions that tell something else of a tensor than a size.
_NOT_SIZES = frozenset(
    {"contiguous", "data_ptr", "device", "dtype", "element_size", "get_device", "is_contiguous"}
    | {"hasattr", "isinstance", "itemsize", "layout", "requires_grad", "str", "stride", "type"}
)

_NO_SIZES = (ast.BoolOp, ast.Compare, ast.Constant, ast.JoinedStr, ast.Lambda, ast.Dict)
_MADE_OF_PARTS = (ast.BinOp, ast.IfExp, ast.List, ast.NamedExpr, ast.Tuple, ast.UnaryOp)


def usage_in_grids(launches: Sequence[Launch], arg_names: Sequence[str]) -> Usage:
    """Return the arguments that the grids of some launches read."""
    found = Usage()
    for launch in launches:
        found.add(_usage_in_launch(f"the grid ({launch.file}:{{}})", launch, arg_names))
    return found


def _usage_in_launch(label: str, launch: Launch, arg_names: Sequence[str]) -> Usage:
    usage = Usage()
    parts: set[str] = set()
    line = launch.grid.lineno
    for grid in _definitions(launch.grid, launch.scopes):
        scopes = launch.scopes
        if grid is None:
            return Usage(everything=f"{label.format(line)}, which cannot be followed")
        if isinstance(grid, (ast.Lambda, ast.FunctionDef)):
            scopes = (grid, *scopes)
            for parameter in [*grid.args.posonlyargs, *grid.args.args][:1]:
                usage.add(usage_of_dict(label, grid, parameter.arg))
        parts |= texts_of(grid, scopes, whole=True)
    for name in arg_names:
        if ast.dump(ast.Name(name, ast.Load())) in parts:
            usage.names.setdefault(name, label.format(line))
    for name, value in bind(launch.call, arg_names) if launch.call else ():
        if texts_of(value, launch.scopes, whole=False) & parts:
            usage.names.setdefault(name, label.format(line))
    return usage


def _definitions(grid: ast.AST | None, scopes: Scopes, depth: int = 8) -> list[ast.AST | None]:
    """Return the expressions that a grid may be: functions, or expressions of a tuple."""
    if grid is None or depth == 0:
        return [None]
    match grid:
        case ast.Name(id=name):
            values = bindings(name, scopes)
        case ast.IfExp():
            values = [grid.body, grid.orelse]
        case ast.Call(func=ast.Name(id="tuple" | "list"), args=[values_given]):
            values = [values_given]
        case ast.Call():
            makers = bindings(getattr(grid.func, "id", ""), scopes) or [None]
            return [grid, *itertools.chain.from_iterable(map(_functions_in, makers))]
        case _:
            return [grid if isinstance(grid, _GRIDS) else None]
    found = (_definitions(value, scopes, depth - 1) for value in values or [None])
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


def _functions_in(maker: ast.AST | None) -> list[ast.AST | None]:
    """Return the functions in the text of a function that makes a grid."""
    if not isinstance(maker, ast.FunctionDef):
        return [None]
    return [n for n in walk(maker) if isinstance(n, _FUNCTIONS) and n is not maker]


class LaunchArguments:
    """The arguments of each launch of a kernel, as expressions."""

    def __init__(self, launches: Sequence[Launch], arg_names: Sequence[str]) -> None:
        passed = [
            (launch, launch.arguments(arg_names))
            for launch in launches
            if launch.call is not None or not isinstance(launch.grid, ast.Constant)  # a table's
        ]
        #: Whether the text shows the arguments of every launch, and there is one.
        self.shown = bool(passed) and all(arguments is not None for _, arguments in passed)
        self._passed = [(launch, arguments or {}) for launch, arguments in passed]

    def made_of(self, name: str, others: Collection[str]) -> str:
        """Return which of some other arguments is computed from the value passed for a name.

        NB = f(T) and BS = g(T) do not depend on each other; BS = f(NB) depends on NB.
        """
        for launch, arguments in self._passed:
            values = texts_of(arguments.get(name), launch.scopes, whole=False)
            for other in others:
                if values & texts_of(arguments.get(other), launch.scopes, whole=True):
                    return f"{other}, which the key lacks, is made of it at {launch.location}"
        return ""

    def sizes_of(self, name: str, given: Collection[str]) -> str:
        """Return the sizes from which the value of a name is computed and that no given name
        has.
        """
        for launch, arguments in self._passed:
            if name not in arguments:
                continue
            others = [texts_of(arguments.get(n), launch.scopes, whole=False) for n in given]
            known = set[str]().union(*others)
            left = [
                ast.unparse(size)
                for size in sizes_in(arguments[name], launch.scopes)
                if not known & texts_of(size, launch.scopes, whole=False)
            ]
            if left:
                return f"{', '.join(left)} at {launch.location}"
        return ""


def texts_of(expression: ast.AST | None, scopes: Scopes, whole: bool) -> set[str]:
    """Return the text of all values that equal `expression`; if `whole`, also of its parts."""
    texts: set[str] = set()
    stack = [expression] if expression else []
    while stack:
        value = stack.pop()
        for node in walk(value) if whole else [value]:
            if not isinstance(node, _VALUES) or (text := ast.dump(node)) in texts:
                continue
            texts.add(text)
            if isinstance(node, ast.Call) and last_name(node.func) == "stride":
                texts.add(ast.dump(node.func))  # one stride tells how the others lie
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr="size"), args=[index]):
                    texts.add(ast.dump(_size(owner, ast.unparse(index))))
            stack += [value for value in followed(node, scopes) if isinstance(value, ast.expr)]
    return texts


def sizes_in(expression: ast.AST, scopes: Scopes) -> list[ast.AST]:
    """Return the run-time values in an expression that may be sizes.

    Anything not known to be something else may be a size: a parameter, a part of a shape, the
    result of a call.
    """
    sizes: list[ast.AST] = []
    pending, seen = [expression], {ast.dump(expression)}
    while pending:
        node = pending.pop()
        parts = _parts(node, scopes)
        if parts is None:
            sizes.append(node)
        for part in parts or ():
            if (text := ast.dump(part)) not in seen:
                seen.add(text)
                pending.append(part)
    return sizes


def _parts(node: ast.AST, scopes: Scopes) -> list[ast.AST] | None:
    """Return the expressions whose sizes a node has; None where it may be one itself."""
    match node:
        case ast.UnaryOp(op=ast.Not()):
            return []
        case ast.Name(id=name):
            values = bindings(name, scopes)
            if not values or None in values:
                return None
            return [value for value in values if isinstance(value, ast.expr)]
        case ast.Attribute(attr=attribute):
            constant = _is_imported(node.value, scopes) or attribute in _NOT_SIZES
            return [] if constant else None
        case ast.Subscript(value=value):
            return None if last_name(value) == "shape" else [value]
        case ast.Call(func=ast.Attribute(attr="numel" | "size")):
            return None
        case ast.Call(func=function):
            if last_name(function) in _NOT_SIZES:
                return []
            owner = [function.value] if isinstance(function, ast.Attribute) else []
            own = [each for each in owner if not _is_imported(each, scopes)]
            return [*own, *arguments_of(node)]
    if isinstance(node, _NO_SIZES):
        return []
    if isinstance(node, _MADE_OF_PARTS):
        return [part for part in children(node) if isinstance(part, ast.expr)]
    return None


def _is_imported(node: ast.AST, scopes: Scopes) -> bool:
    """Whether an expression is a dotted name that begins with an imported one."""
    values = bindings(dotted(node).partition(".")[0], scopes)
    return any(isinstance(value, (ast.Import, ast.ImportFrom)) for value in values)


def followed(node: ast.AST, scopes: Scopes) -> list[ast.AST | None]:
    """Return the values of a name, of a parameter at its calls, or of an object's field."""
    passed_values = _passed_and_set(scopes[-1])
    match node:
        case ast.Name(id=name):
            functions = [scope.name for scope in scopes if isinstance(scope, ast.FunctionDef)]
            passed = [passed_values.get((function, name), []) for function in functions]
            return [*bindings(name, scopes), *itertools.chain.from_iterable(passed)]
        case ast.Attribute(value=ast.Name(), attr=field):
            return passed_values.get(("", field), [])
    return []


@functools.lru_cache(KEPT_TREES)
def _passed_and_set(module: ast.AST) -> dict[tuple[str, str], list[ast.AST | None]]:
    """Return a module's values for each (function, parameter), and for each ("", field)."""
    values_by_name: dict[tuple[str, str], list[ast.AST | None]] = {}
    nodes = [*walk_hosts(module)]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        if isinstance(node, ast.Assign):
            fields = [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
            for field in fields:
                values_by_name.setdefault(("", field), []).append(node.value)
        elif isinstance(node, ast.Call) and (function := functions.get(last_name(node.func))):
            names = [name for name in parameters(function) if name not in ("self", "cls")]
            for name, value in bind(node, names):
                values_by_name.setdefault((function.name, name), []).append(value)
    return values_by_name


def bindings(name: str, scopes: Scopes) -> list[ast.AST | None]:
    """Return the values that `name` is bound to in the innermost scope that has it; [] without
    one.
    """
    return next((found[name] for scope in scopes if name in (found := _bound_in(scope))), [])


@functools.lru_cache(maxsize=8 * KEPT_TREES)
def _bound_in(scope: ast.AST) -> dict[str, list[ast.AST | None]]:
    values_by_name: dict[str, list[ast.AST | None]] = {}
    stack: list[ast.AST] = []
    if isinstance(scope, _FUNCTIONS):
        values_by_name = {
            node.arg: [None] for node in walk(scope.args) if isinstance(node, ast.arg)
        }
        stack = body_of(scope)
    elif isinstance(scope, ast.Module):
        stack = [*scope.body]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            values_by_name.setdefault(node.name, []).append(node)
        elif not isinstance(node, (ast.Lambda, ast.ClassDef)):
            for name, value in _bound_by(node):
                values_by_name.setdefault(name, []).append(value)
            stack.extend(children(node))
    return values_by_name


def _bound_by(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _unpacked(target, value)
        case ast.AnnAssign() | ast.NamedExpr() | ast.AugAssign():
            yield from _unpacked(node.target, node.value)
        case ast.For() | ast.comprehension():
            yield from _unpacked(node.target, None)
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            for alias in names:
                yield (alias.asname or alias.name).partition(".")[0], node


def _unpacked(target: ast.AST, value: ast.AST | None) -> Iterator[tuple[str, ast.AST | None]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, (ast.Tuple, ast.List)):
        items = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
        if len(items) == len(target.elts):
            for part, item in zip(target.elts, items, strict=True):
                yield from _unpacked(part, item)
            return
        for position, part in enumerate(target.elts):
            for size in [None, *_sizes(value, position, target.elts)]:
                yield from _unpacked(part, size)


def _sizes(value: ast.AST | None, position: int, targets: Sequence[ast.AST]) -> list[ast.AST]:
    """Return the dimension that one of several targets receives: `x.shape[0]`, or from the end."""
    match value:
        case ast.Attribute(value=owner, attr="shape"):
            pass
        case ast.Call(func=ast.Attribute(value=owner, attr="size"), args=[]):
            pass
        case _:
            return []
    stars = [n for n, target in enumerate(targets) if isinstance(target, ast.Starred)]
    from_start = [position] if not any(n < position for n in stars) else []
    from_end = [position - len(targets)] if not any(n > position for n in stars) else []
    return [_size(owner, str(index)) for index in [*from_start, *from_end]]


def _size(owner: ast.AST, index: str) -> ast.AST:
    return ast.parse(f"{ast.unparse(owner)}.shape[{index}]", mode="eval").body
