"""What launches pass for a constexpr: whether it can differ, and whether it is a length."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from safetune.frozen import dataclass
from safetune.keys.launch_usage import bindings, followed, sizes_in, texts_of
from safetune.keys.launches import Launch, Scopes
from safetune.keys.run_order import bind
from safetune.keys.source_text import FunctionNode, children, last_name, parameters, walk
from safetune.lint import absent
from safetune.lint.frames import arguments, defaults

#: Attributes of a tensor that Triton's key has, or that a process has one of.
_COVERED = frozenset({"device", "dtype", "element_size", "itemsize"})
_COVERED_CALLS = frozenset({"element_size", "is_complex", "is_floating_point"})

#: Names of what a model has one of, and of what differs from one batch to the next.
_FIXED = re.compile(
    r"^(?:[CDEGHKVW]|H[QKV])$|head|dim|channel|group|expert|hidden|vocab|weight|width|stride|block",
    re.IGNORECASE,
)
_LENGTH = re.compile(  # of what is unpacked from a shape
    r"^(?:[BLMST]|[NT][TQKS]|N_CTX)$|seq|len|token|rows?$|batch", re.IGNORECASE
)
_SURE_LENGTH = re.compile(r"^(?:[BT]|N_CTX)$|seq_?len|length|tokens?$|rows?$|^batch", re.IGNORECASE)

#: Calls whose result has few values.
_FEW = frozenset({"bit_length", "bool", "get", "log2", "min", "next_power_of_2"})

_BOOLEAN = (ast.Compare, ast.BoolOp)


@dataclass(frozen=True)
class Difference:
    """What may differ from launch to launch, as text, and whether it is true or false."""

    boolean: bool
    text: str
    optional: str = ""  # the argument that the value tells to be there or not


class Passed:
    """The arguments that the text shows of a kernel's launches.

    `value` returns what a name stands for where the kernel is; `key` names the kernel's key.
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
        self._tested = {node.id for node in _tests(function)}
        self._value = value

    def names(self) -> set[str]:
        """Return the parameters that some launch passes."""
        return set().union(*(given for _, given in self._shown))

    def is_dtype(self, name: str) -> bool:
        """Whether a launch passes a dtype for a parameter, or something made of one."""
        dtype = "attr='dtype'"
        return any(
            dtype in text
            for launch, _, value in self._passed_for(name)
            for text in texts_of(value, launch.scopes, whole=True)
        )

    def difference(self, name: str, key: Sequence[str]) -> Difference | None:
        """Return what can differ in the values of a parameter where those of the key are equal."""
        constants = set[str]()
        for launch, given, value in self._passed_for(name):
            scopes = launch.scopes
            leaves = self._leaves(value, scopes)
            known = set[str]().union(
                *(texts_of(given[each], scopes, whole=False) for each in key if each in given)
            )
            left = [leaf for leaf in leaves if not texts_of(leaf, scopes, False) & known]
            text = f"{ast.unparse(value)} at {launch.location}"
            if not leaves:
                constants |= _constants(value, scopes)
            elif left:
                passed = set[str]().union(*(texts_of(v, scopes, False) for v in given.values()))
                tensors = [leaf for leaf in left if _is_optional(value, leaf, scopes)]
                optional = [ast.unparse(t) for t in tensors if texts_of(t, scopes, False) & passed]
                boolean = name in self._tested or _is_boolean(value, scopes)
                only = optional[0] if len(optional) == len(left) == 1 else ""
                return Difference(boolean, text, only)
        if len(constants) > 1:
            boolean = name in self._tested or constants <= {"True", "False"}
            return Difference(boolean, f"{' and '.join(sorted(constants))} by different launches")
        return None

    def is_told(self, name: str, tensors: Collection[str]) -> bool:
        """Whether an argument is None by the test that decides a flag, as `absent` says."""
        return absent.is_told(
            ((launch, g) for launch, g, _ in self._passed_for(name)), name, tensors
        )

    def length(self, name: str) -> str:
        """Return the length that launches pass for a parameter, or "": it has many values."""
        if name in self._tested or _FIXED.search(name):
            return ""
        for launch, _, value in self._passed_for(name):
            for leaf in _lengths(value, launch.scopes):
                return f"{ast.unparse(value)}, made of {leaf}, at {launch.location}"
        return ""

    def _passed_for(self, name: str) -> Iterator[tuple[Launch, dict[str, ast.expr], ast.expr]]:
        """Yield the launches that pass a parameter, with all their arguments, and its value."""
        return ((launch, given, given[name]) for launch, given in self._shown if name in given)

    def same(
        self, loaded: frozenset[str], stored: frozenset[str]
    ) -> Iterator[tuple[str, str, str]]:
        """Yield (stored, loaded, location) where a launch passes one tensor for two parameters.

        One that is passed for more stands in for tensors that the kernel does not use.
        """
        for launch, given in self._shown:
            names: dict[str, list[str]] = {}
            for name, value in given.items():
                if isinstance(value, (ast.Name, ast.Attribute)):
                    names.setdefault(ast.dump(value), []).append(name)
            for pair in names.values():
                target, source = (stored.intersection(pair), loaded.intersection(pair))
                if len(pair) == 2 and len(target) == 1 and source - target:
                    yield min(target), min(source - target), launch.location

    def _leaves(self, value: ast.AST, scopes: Scopes) -> list[ast.AST]:
        """Return the run-time values that an expression is made of, those of a test too."""
        found, pending, seen = [], [value], set[str]()
        while pending:
            node = pending.pop()
            if (text := ast.dump(node)) in seen:
                continue
            seen.add(text)
            match node:
                case ast.Name(id=name) if (values := bindings(name, scopes)) and None not in values:
                    pending += [each for each in values if isinstance(each, ast.expr)]
                case ast.Compare() | ast.BoolOp() | ast.UnaryOp() | ast.IfExp():
                    pending += [each for each in children(node) if isinstance(each, ast.expr)]
                case ast.Attribute(attr=attribute) if attribute in _COVERED:
                    pass
                case ast.Call(func=ast.Name(id="bool" | "int"), args=[inner]):
                    pending.append(inner)
                case ast.Call(func=function) if last_name(function) in ("isinstance", "hasattr"):
                    pending += node.args[:1]
                case ast.Call(func=function) if last_name(function) in _COVERED_CALLS:
                    pass
                case ast.Call(func=ast.Name(id=name)) if _tells_dtypes(self._value(name)):
                    pass
                case _:
                    found += sizes_in(node, scopes)
        return found


def _arguments(
    launch: Launch, names: Sequence[str], key: Sequence[str]
) -> dict[str, ast.expr] | None:
    """Return the arguments of a launch; with a starred one, those that have their names.

    None where the text does not show those of the key.
    """
    if (shown := launch.arguments(names)) is not None or launch.call is None:
        return shown
    given = dict(bind(launch.call, names)) if launch.target is not launch.call else {}
    return given if given and set(key) <= given.keys() else None


def _tells_dtypes(function: Any) -> bool:
    """Whether what a function of the tree returns is made of the dtypes of its arguments."""
    node = function.text[0] if hasattr(function, "text") else None
    if not isinstance(node, ast.FunctionDef):
        return False
    results = [each.value for each in walk(node) if isinstance(each, ast.Return) and each.value]
    names = parameters(node)
    pending, seen = [*results], set[str]()
    while pending:
        part = pending.pop()
        if isinstance(part, ast.Attribute) and part.attr in _COVERED:
            continue
        if isinstance(part, ast.Name) and part.id in names:
            return False
        if isinstance(part, ast.Name) and part.id not in seen:
            seen.add(part.id)
            pending += [v for v in bindings(part.id, (node,)) if isinstance(v, ast.expr)]
        pending += [each for each in children(part) if isinstance(each, ast.expr)]
    return bool(results)


def _tests(function: FunctionNode) -> Iterator[ast.Name]:
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
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Constant(value=bool()):
            return True
        case ast.Call(func=ast.Name(id="bool" | "isinstance" | "hasattr")):
            return True
        case ast.IfExp():
            return _is_boolean(value.body, scopes, depth) and _is_boolean(
                value.orelse, scopes, depth
            )
        case ast.Name(id=name) if depth:
            if (declared := _declared(name, scopes)) is not None:
                return declared
            values = [each for each in bindings(name, scopes) if each is not None]
            return bool(values) and all(_is_boolean(each, scopes, depth - 1) for each in values)
    return False


def _declared(name: str, scopes: Scopes) -> bool | None:
    """Whether a parameter of a function around is a bool; None where it is not a parameter."""
    for scope in scopes:
        if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if arg := arguments(scope).get(name):
            default = defaults(scope).get(name)
            is_bool = isinstance(default, ast.Constant) and isinstance(default.value, bool)
            return is_bool or last_name(arg.annotation or scope) == "bool"
    return None


def _is_optional(value: ast.AST, leaf: ast.AST, scopes: Scopes) -> bool:
    """Whether a value tells no more of a run-time value than whether it is None."""
    if isinstance(value, ast.Name):
        values = [each for each in bindings(value.id, scopes) if each is not None]
        return bool(values) and all(_is_optional(each, leaf, scopes) for each in values)
    match value:
        case ast.Compare(
            left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]
        ):
            return ast.dump(left) == ast.dump(leaf)
        case ast.IfExp(test=test, body=ast.Constant(), orelse=ast.Constant()):
            return _is_optional(test, leaf, scopes)
    return False


def _lengths(value: ast.AST, scopes: Scopes) -> Iterator[str]:
    """Yield the lengths in an expression: leading sizes of a tensor, as texts."""
    pending, seen = [value], set[str]()
    while pending:
        node = pending.pop()
        if (text := ast.dump(node)) in seen or isinstance(node, _BOOLEAN):
            continue
        seen.add(text)
        match node:
            case ast.Name(id=name):
                if not _FIXED.search(name):
                    values = followed(node, scopes)
                    sizes = [each for each in values if each is not None]
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
                pending += [each for each in children(node) if isinstance(each, ast.expr)]


def _is_leading(values: Sequence[Any], name: str) -> bool:
    """Whether expressions are one size of a tensor, and not of its last dimensions."""
    places = [_place(value) for value in values]
    if not places or None in places:
        return False
    indices = [place[1] for place in places if place]
    owner = places[0][0] if places[0] else ""
    if _is_weight(owner):
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
