"""The values that launches pass for a constexpr: whether they can differ, or are lengths."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from safetune.keys.launch_usage import bindings, followed, sizes_in, texts_of
from safetune.keys.launches import Launch, Scopes
from safetune.keys.run_order import bind
from safetune.keys.source_text import KEPT_TREES, FunctionNode, children, last_name, walk
from safetune.lint.names import arguments, defaults

#: Attributes of a tensor that Triton's key has, or that a process has one of.
_COVERED = frozenset({"device", "dtype", "element_size", "itemsize"})
_COVERED_CALLS = frozenset({"element_size", "is_complex", "is_floating_point"})

#: Names of per-model values, and of values that differ from one batch to the next.
_FIXED = re.compile(
    r"^(?:[CDEGHKVW]|H[QKV])$|head|dim|channel|group|expert|hidden|vocab|weight|width|stride|block",
    re.IGNORECASE,
)
_LENGTH = re.compile(  # names that are unpacked from a shape
    r"^(?:[BLMST]|[NT][TQKS]|N_CTX)$|seq|len|token|rows?$|batch", re.IGNORECASE
)
_SURE_LENGTH = re.compile(r"^(?:[BT]|N_CTX)$|seq_?len|length|tokens?$|rows?$|^batch", re.IGNORECASE)

#: Names of integer tensors: their dtypes differ from other tensors' dtypes.
_INTEGERS = re.compile(r"idx|index|indices|offset|seq_?len|length|table|slot|count", re.IGNORECASE)

#: Calls whose result has few values.
_FEW = frozenset({"bit_length", "bool", "get", "log2", "min", "next_power_of_2"})

#: The arguments of a launch, by name.
_Given = dict[str, ast.expr]
#: A condition, and the values with and without it.
_Choice = tuple[ast.expr, tuple[ast.AST, ast.AST]]


class Passed:
    """The arguments of a kernel's launches, as far as the text shows them.

    `value` returns the value of a name in the kernel's module; `key` has the kernel's key names.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        names: Sequence[str],
        key: Sequence[str],
        function: FunctionNode,
        value: Callable[[str], Any],
    ) -> None:
        shown = [(launch, _arguments(launch, names, key)) for launch in launches if launch.call]
        self._shown = [(launch, given) for launch, given in shown if given is not None]
        self._tested = {node.id for node in _tested_in(function)}
        self._value = value

    def names(self) -> set[str]:
        """Return the parameters that any launch passes."""
        return set().union(*(given for _, given in self._shown))

    def is_dtype(self, name: str) -> bool:
        """Whether a launch passes a dtype, or something derived from one, for a parameter."""
        return any(
            "attr='dtype'" in text
            for launch, given in self._passing(name)
            for text in texts_of(given[name], launch.scopes, whole=True)
        )

    def flag(self, name: str, key: Sequence[str]) -> str:
        """Return why a boolean parameter can differ between equal keys, or ""."""
        constants = set[str]()
        for launch, given in self._passing(name):
            value, scopes = given[name], launch.scopes
            leaves = self._leaves(value, scopes)
            known = _texts((given[each] for each in key if each in given), scopes)
            if not leaves:
                constants |= _constants(value, scopes)
            elif not all(texts_of(leaf, scopes, False) & known for leaf in leaves):
                is_flag = name in self._tested or _is_boolean(value, scopes)
                return f"{ast.unparse(value)} at {launch.location}" if is_flag else ""
        is_flag = name in self._tested or constants <= {"True", "False"}
        return " and ".join(sorted(constants)) if len(constants) > 1 and is_flag else ""

    def is_told(self, name: str, tensors: Collection[str], key: Sequence[str]) -> bool:
        """Whether Triton's key implies a flag, because the flag tests a tensor for None.

        The key has the dtypes of all tensor arguments, so an argument that is None makes it
        shorter. If another tensor of the same kind may be None, the dtypes do not say which one it
        is, unless the key has a flag for that.

        Args:
            tensors: the parameters that the kernel loads from or stores to.
        """
        return all(
            _is_told(given, name, tensors, key, launch.scopes)
            for launch, given in self._passing(name)
        )

    def length(self, name: str) -> str:
        """Return the length that launches pass for a parameter, or "". A length has many values."""
        if name in self._tested or _FIXED.search(name):
            return ""
        for launch, given in self._passing(name):
            for leaf in _lengths(given[name], launch.scopes):
                return f"{ast.unparse(given[name])}, made of {leaf}, at {launch.location}"
        return ""

    def _passing(self, name: str) -> Iterator[tuple[Launch, _Given]]:
        return ((launch, given) for launch, given in self._shown if name in given)

    def _leaves(self, value: ast.AST, scopes: Scopes) -> list[ast.AST]:
        """Return the run-time values in an part, tests included."""
        leaves, pending, seen = [], [value], set[str]()
        while pending:
            node = pending.pop()
            if (text := ast.dump(node)) in seen:
                continue
            seen.add(text)
            match node:
                case ast.Name(id=name) if (values := bindings(name, scopes)) and None not in values:
                    pending += [part for part in values if isinstance(part, ast.expr)]
                case ast.Compare() | ast.BoolOp() | ast.UnaryOp() | ast.IfExp():
                    pending += [part for part in children(node) if isinstance(part, ast.expr)]
                case ast.Attribute(attr=attribute) if attribute in _COVERED:
                    pass
                case ast.Call(func=ast.Name(id="bool" | "int" | "isinstance" | "hasattr")):
                    pending += node.args[:1]
                case ast.Call(func=function) if last_name(function) in _COVERED_CALLS:
                    pass
                case ast.Call(func=ast.Name(id=name)) if self._tells_dtypes(name, scopes):
                    pass
                case _:
                    leaves += sizes_in(node, scopes)
        return leaves

    def _tells_dtypes(self, name: str, scopes: Scopes) -> bool:
        """Whether a function of the tree computes its result from the dtypes of its arguments."""
        text: tuple[Any, Any] = getattr(self._value(name), "text", (None, None))
        node, outer = text
        if not isinstance(node, ast.FunctionDef) or node in scopes:
            return False
        results = [each.value for each in walk(node) if isinstance(each, ast.Return) and each.value]
        inside = (node, *scopes[:-1], outer.file.tree)
        return bool(results) and not any(self._leaves(result, inside) for result in results)


def _arguments(launch: Launch, names: Sequence[str], key: Sequence[str]) -> _Given | None:
    """Return the arguments of a launch; beside a starred argument only those with visible names.

    None if the text does not show the key's arguments.
    """
    if (shown := launch.arguments(names)) is not None or launch.call is None:
        return shown
    given = dict(bind(launch.call, names)) if launch.target is not launch.call else {}
    return given if given and set(key) <= given.keys() else None


def _tested_in(function: FunctionNode) -> Iterator[ast.Name]:
    """Yield the names that a body takes as true or false."""
    pending: list[ast.AST] = [
        node.test for node in walk(function) if isinstance(node, (ast.If, ast.IfExp))
    ]
    while pending:
        match pending.pop():
            case ast.Name() as name:
                yield name
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                pending.append(operand)
            case ast.BoolOp(values=values):
                pending += values


def _texts(values: Iterable[ast.AST], scopes: Scopes) -> set[str]:
    return set().union(*(texts_of(value, scopes, whole=False) for value in values))


def _constants(value: ast.AST, scopes: Scopes) -> set[str]:
    """Return the constants that an expression without run-time values may be."""
    match value:
        case ast.Constant():
            return {repr(value.value)}
        case ast.Name(id=name) if values := bindings(name, scopes):
            return set().union(*(_constants(v, scopes) for v in values if v is not None))
        case ast.IfExp():
            # A test without run-time values is of dtypes: they are in the key, so it is one value.
            sides = _constants(value.body, scopes) | _constants(value.orelse, scopes)
            return {" or ".join(sorted(sides))} if sides else sides
    return set()


def _is_boolean(value: ast.AST, scopes: Scopes, depth: int = 4) -> bool:
    match value:
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()) | ast.Constant(value=bool()):
            return True
        case ast.Call(func=ast.Name(id="bool" | "isinstance" | "hasattr")):
            return True
        case ast.IfExp(body=body, orelse=other):
            return _is_boolean(body, scopes, depth) and _is_boolean(other, scopes, depth)
        case ast.Name(id=name) if depth:
            if declared := _declared(name, scopes):
                return "bool" in declared or declared in ("True", "False")
            values = [each for each in bindings(name, scopes) if each is not None]
            return bool(values) and all(_is_boolean(each, scopes, depth - 1) for each in values)
    return False


def _declared(name: str, scopes: Scopes) -> str:
    """Return a function's annotation and default of a parameter, `int = 4`; "" for another name."""
    for scope in scopes:
        if isinstance(scope, ast.FunctionDef) and (argument := arguments(scope).get(name)):
            default = defaults(scope).get(name)
            return f"{_text(argument.annotation)} = {_text(default)}"
    return ""


def _text(node: ast.AST | None) -> str:
    return ast.unparse(node) if node else ""


def _is_told(
    given: _Given, name: str, tensors: Collection[str], key: Sequence[str], scopes: Scopes
) -> bool:
    deciding = _tests(given[name], scopes)
    tested, key_tests = (
        set[str]().union(*(_tests(given[arg], scopes) for arg in names if arg in given))
        for names in (given, key)
    )
    optional = {arg for arg, value in given.items() if _is_none_test(value) in tested}
    values = {arg: value for arg, value in given.items() if arg in optional.union(tensors)}
    tied = {arg for arg, value in values.items() if deciding & _absences(value, scopes)}
    unclear = {
        _is_of_integers(value)
        for arg, value in values.items()
        if arg not in tied and not key_tests & _absences(value, scopes)
        if arg in optional or _may_be_none(value, scopes)
    }
    return any(_is_of_integers(values[arg]) not in unclear for arg in tied)


def _is_of_integers(value: ast.AST) -> bool:
    return _INTEGERS.search(ast.unparse(value)) is not None


def _is_none_test(value: ast.AST) -> str:
    return f"None is {ast.dump(value)}"


def _tests(value: ast.AST, scopes: Scopes) -> set[str]:
    """Return the tests that decide a true-or-false value: those that are equal are the same."""
    match value:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _tests(operand, scopes)
        case ast.Compare(
            left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]
        ):
            return {_is_none_test(left)}
        case ast.IfExp(test=test, body=ast.Constant(), orelse=ast.Constant()):
            return _tests(test, scopes)
        case ast.Name(id=name):
            tests = {ast.dump(value)}
            known = bindings(name, scopes)
            if len(known) == 1 and isinstance(known[0], (ast.Compare, ast.IfExp, ast.UnaryOp)):
                tests |= _tests(known[0], scopes)
            for test, sides in _branches(name, scopes):
                if all(isinstance(side, ast.Constant) for side in sides):
                    tests |= _tests(test, scopes)
            return tests
    return set()


def _absences(value: ast.AST, scopes: Scopes) -> set[str]:
    """Return the tests that make an argument None."""
    found = {_is_none_test(value)}
    for test, sides in _choices(value, scopes):
        if sum(map(_is_none, sides)) == 1:
            found |= _tests(test, scopes)
    return found


def _may_be_none(value: ast.AST, scopes: Scopes) -> bool:
    if any(_is_none(side) for _, sides in _choices(value, scopes) for side in sides):
        return True
    if not isinstance(value, ast.Name):
        return False
    values = bindings(value.id, scopes)
    return any(map(_is_none, values)) or (
        re.search("Optional|None", _declared(value.id, scopes)) is not None
    )


def _choices(value: ast.AST, scopes: Scopes) -> Iterator[_Choice]:
    """Yield the conditions that select an argument's value."""
    expressions: list[Any] = [value]
    if isinstance(value, ast.Name):
        expressions = bindings(value.id, scopes)
        yield from _branches(value.id, scopes)
    for each in expressions:
        if isinstance(each, ast.IfExp):
            yield each.test, (each.body, each.orelse)


def _branches(name: str, scopes: Scopes) -> Iterator[_Choice]:
    """Yield each `if` with an `else` where both set a name."""
    for scope in scopes:
        yield from _conditions(scope).get(name, ())


@functools.lru_cache(maxsize=8 * KEPT_TREES)
def _conditions(scope: ast.AST) -> dict[str, list[_Choice]]:
    """Return for each name the conditions of a function that set it either way."""
    choices: dict[str, list[_Choice]] = {}
    for node in walk(scope) if isinstance(scope, ast.FunctionDef) else ():
        if isinstance(node, ast.If) and node.orelse:
            first, second = _set_in(node.body), _set_in(node.orelse)
            for name in first.keys() & second.keys():
                choices.setdefault(name, []).append((node.test, (first[name], second[name])))
    return choices


def _set_in(body: Iterable[ast.stmt]) -> dict[str, ast.AST]:
    """Return the final values that the statements of a branch give to names."""
    values: dict[str, ast.AST] = {}
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = value
    return values


def _is_none(value: ast.AST | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _lengths(value: ast.AST, scopes: Scopes) -> Iterator[str]:
    """Yield the lengths in an expression: leading sizes of a tensor, as texts."""
    pending, seen = [value], set[str]()
    while pending:
        node = pending.pop()
        if (text := ast.dump(node)) in seen:
            continue
        seen.add(text)
        match node:
            case ast.Name(id=name):
                if not _FIXED.search(name):
                    values = followed(node, scopes)
                    sizes = [size for size in values if size is not None]
                    if _is_leading(sizes, name):
                        yield ast.unparse(sizes[0])
                    elif not sizes and values and _SURE_LENGTH.search(name):
                        yield name
                    else:
                        pending += [v for v in sizes if isinstance(v, ast.expr)]
            case ast.Subscript() if _is_leading([node], ""):
                yield ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr="numel")):
                yield ast.unparse(node)
            case ast.Call(
                func=ast.Attribute(value=owner, attr="size"), args=[ast.Constant(value=0)]
            ):
                if not _is_weight(last_name(owner)):
                    yield ast.unparse(node)
            case ast.Call(func=function) if last_name(function) in _FEW:
                pass
            case ast.Call() | ast.BinOp() | ast.IfExp() | ast.UnaryOp():
                pending += [size for size in children(node) if isinstance(size, ast.expr)]


def _is_leading(values: Sequence[Any], name: str) -> bool:
    """Whether expressions are one size of a tensor, and not of its last dimensions."""
    places = [_place(value) for value in values]
    if not places or None in places:
        return False
    indices = [place[1] for place in places if place]
    if places[0] and _is_weight(places[0][0]):
        return False
    front, back = max(indices), min(indices)
    rank = front - back if back < 0 <= front else 0  # `B, T = x.shape` tells it
    if front < 0 or (rank > 1 and front == rank - 1):
        return False
    return front == 0 or bool(_LENGTH.search(name))


def _is_weight(name: str) -> bool:
    return name in ("w", "b") or _FIXED.search(name) is not None


def _place(value: ast.AST) -> tuple[str, int] | None:
    """Return (tensor, index) of `x.shape[0]`."""
    match value:
        case ast.Subscript(value=ast.Attribute(value=owner, attr="shape"), slice=index):
            try:
                return last_name(owner), int(ast.literal_eval(index))
            except (TypeError, ValueError):
                return None
    return None
