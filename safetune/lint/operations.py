"""Calculates with values of which some are not known."""

from __future__ import annotations

import ast
import builtins
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safetune.lint.values import UNKNOWN, Items

#: What calculates, by the class of the operator in a tree.
_OPERATIONS: dict[type, Callable[..., Any]] = {
    getattr(ast, kind): getattr(operator, name)
    for kind, name in (
        *(("Add", "add"), ("Sub", "sub"), ("Mult", "mul"), ("Div", "truediv"), ("Mod", "mod")),
        *(("FloorDiv", "floordiv"), ("Pow", "pow"), ("LShift", "lshift"), ("RShift", "rshift")),
        *(("BitAnd", "and_"), ("BitOr", "or_"), ("BitXor", "xor"), ("Invert", "invert")),
        *(("USub", "neg"), ("UAdd", "pos"), ("Not", "not_"), ("Eq", "eq"), ("NotEq", "ne")),
        *(("Lt", "lt"), ("LtE", "le"), ("Gt", "gt"), ("GtE", "ge"), ("Is", "is_")),
        ("IsNot", "is_not"),
    )
}

#: Builtins that are called where all arguments are known.
_PURE = {
    name: getattr(builtins, name)
    for name in ("abs", "bool", "float", "int", "len", "max", "min", "round", "str", "sum")
}
_LISTS = {"list", "tuple", "set", "frozenset", "sorted", "reversed", "copy", "deepcopy"}

#: The most that a number may be, and that a list may hold.
_LARGEST, LONGEST = 1 << 64, 20_000


def truth(value: Any) -> bool:
    """Whether a known value counts as true."""
    return bool(value) if isinstance(value, (int, float, str, list, dict, type(None))) else True


def either(values: Sequence[Any]) -> Any:
    """Return the value that is one of several; for lists, one that has the items of all."""
    first = values[0]
    if all(value is first for value in values):
        return first
    lists = [value for value in values if isinstance(value, Items)]
    if lists:
        return Items(itertools.chain.from_iterable(lists), complete=False)
    known = (int, float, str, bool, type(None))
    same = isinstance(first, known) and all(type(v) is type(first) and v == first for v in values)
    return first if same else UNKNOWN


def extend(items: Items, others: Items) -> None:
    """Add items to a list."""
    items.extend(others)
    items.complete = items.complete and others.complete


def operate(operation: ast.AST, *sides: Any) -> Any:
    """Return what an operator gives, or `UNKNOWN`."""
    lists = [side for side in sides if isinstance(side, Items)]
    if isinstance(operation, ast.Add) and lists:
        complete = len(lists) == len(sides) and all(each.complete for each in lists)
        return Items(itertools.chain.from_iterable(lists), complete)
    plain = (int, float, str, bool, type(None))
    inside = isinstance(operation, (ast.In, ast.NotIn)) and isinstance(sides[-1], (Items, dict))
    if inside and (UNKNOWN in sides[-1] or not getattr(sides[-1], "complete", True)):
        return UNKNOWN
    if any(not isinstance(side, plain) for side in (sides[:-1] if inside else sides)):
        return UNKNOWN
    if inside:
        return (sides[0] in sides[1]) is isinstance(operation, ast.In)
    if isinstance(operation, (ast.Pow, ast.LShift, ast.Mult)) and any(
        isinstance(side, str) or (isinstance(side, (int, float)) and abs(side) > 1 << 32)
        for side in sides
    ):
        return UNKNOWN
    if isinstance(operation, (ast.Pow, ast.LShift)) and abs(sides[1]) > 64:
        return UNKNOWN
    return attempt(_OPERATIONS.get(type(operation)), *sides)


def attempt(function: Any, *args: Any) -> Any:
    """Return what a function gives; `UNKNOWN` where it fails, or is too large."""
    try:
        found = function(*args)
    except Exception:
        return UNKNOWN
    return UNKNOWN if isinstance(found, int) and abs(found) > _LARGEST else found


def all_or_any(operation: ast.boolop, values: Sequence[Any]) -> Any:
    """Return what `and` or `or` gives; unknown only where the known values do not decide it."""
    decides = isinstance(operation, ast.Or)
    for value in values:
        if value is not UNKNOWN and truth(value) is decides:
            return value if UNKNOWN not in values[: values.index(value)] else decides
    return UNKNOWN if UNKNOWN in values else values[-1]


def entry(owner: Any, key: Any) -> Any:
    """Return an item of a list or dict, or `UNKNOWN`."""
    if isinstance(owner, dict) and isinstance(key, (str, int)):
        return owner.get(key, UNKNOWN)
    if isinstance(owner, Items) and isinstance(key, int) and owner.complete:
        return owner[key] if -len(owner) <= key < len(owner) else UNKNOWN
    return UNKNOWN


def items_of(value: Any) -> Items:
    """Return the items of a value that is iterated over."""
    if isinstance(value, Items):
        return value
    if isinstance(value, (range, dict, str)):
        return Items(value) if len(value) <= LONGEST else Items((), complete=False)
    return Items((), complete=False)


def known_call(name: str, args: list[Any], keywords: dict[str, Any]) -> Any:
    """Return what a function of Python or Triton gives for known values, or `UNKNOWN`."""
    if name in _LISTS and args:
        return Items(items := items_of(args[0]), items.complete)
    if name in ("filter", "map") and len(args) == 2:
        return Items(items_of(args[1]) if name == "filter" else (), complete=False)
    if name in ("product", "zip", "enumerate") and args:
        return _combined(name, list(map(items_of, args)), keywords)
    if name == "dict":
        return {**(args[0] if args and isinstance(args[0], Mapping) else {}), **keywords}
    if UNKNOWN in args or keywords:
        return UNKNOWN
    if name == "range":
        return attempt(range, *args)
    if name in ("cdiv", "next_power_of_2") and all(isinstance(a, int) for a in args):
        import triton

        return attempt(getattr(triton, name), *args)
    return attempt(_PURE[name], *args) if name in _PURE else UNKNOWN


def _combined(name: str, lists: list[Items], keywords: dict[str, Any]) -> Items:
    make: Any = {"product": itertools.product, "zip": zip, "enumerate": enumerate}[name]
    complete = all(each.complete for each in lists) and not keywords
    if name == "enumerate":
        lists = lists[:1]  # a number to begin with makes it incomplete
    found = itertools.islice(make(*lists), LONGEST)
    return Items(map(Items, found), complete)


def method(owner: Any, name: str, args: list[Any], unsure: bool) -> Any:
    """Return what a method of a list or dict gives, which it may change; perhaps `unsure`."""
    if isinstance(owner, Items):
        if name in ("append", "extend", "add", "update", "insert"):
            one = name in ("append", "add", "insert")
            extend(owner, Items(args[-1:]) if one else items_of(args[-1]))
            owner.complete = owner.complete and not unsure
            return None
        if name == "copy":
            return Items(owner, owner.complete)
        owner.complete = False  # it may have been changed
        return UNKNOWN
    if name == "items":
        return Items(Items(pair) for pair in owner.items())
    if name in ("keys", "values"):
        return Items(getattr(owner, name)())
    if name == "copy":
        return dict(owner)
    if name == "get" and args and isinstance(args[0], str):
        return owner.get(args[0], args[1] if args[1:] else None)
    if name == "update" and args and isinstance(args[0], dict):
        owner.update(args[0])
    return UNKNOWN
