"""Flags that Triton's key tells: the test that decides one decides whether a tensor is None, too.

That key has the dtypes of the arguments that have one: an argument that is None makes it shorter.
Where another tensor of its kind may be None, the dtypes do not say which of them is.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping

from safetune.keys.launch_usage import bindings
from safetune.keys.launches import Launch, Scopes
from safetune.keys.source_text import KEPT_TREES, walk
from safetune.lint.frames import arguments, defaults

#: Names of tensors of integers: their dtypes are not those of other tensors.
INTEGERS = re.compile(r"idx|index|indices|offset|seq_?len|length|table|slot|count", re.IGNORECASE)

#: A condition, and the values with and without it.
_Choice = tuple[ast.expr, tuple[ast.AST, ast.AST]]


def is_told(
    launches: Iterable[tuple[Launch, Mapping[str, ast.expr]]],
    name: str,
    tensors: Collection[str],
) -> bool:
    """Whether in each launch a flag's test decides of a tensor, and of no other, if it is None.

    Args:
        launches: those that pass the flag, with all their arguments.
        name: of the flag.
        tensors: the parameters that the kernel loads from or stores to.
    """
    return all(_is_told(given, name, tensors, launch.scopes) for launch, given in launches)


def _is_told(
    given: Mapping[str, ast.expr], name: str, tensors: Collection[str], scopes: Scopes
) -> bool:
    deciding = _tests(given[name], scopes)
    values = {each: value for each, value in given.items() if each in tensors}
    tied = {each for each, value in values.items() if deciding & _absences(value, scopes)}
    unclear = {
        _is_of_integers(value)
        for each, value in values.items()
        if each not in tied and _may_be_none(value, scopes)
    }
    return any(_is_of_integers(values[each]) not in unclear for each in tied)


def _is_of_integers(value: ast.AST) -> bool:
    return INTEGERS.search(ast.unparse(value)) is not None


def _tests(value: ast.AST, scopes: Scopes) -> set[Hashable]:
    """Return the tests that decide a true-or-false value: those that are equal are the same."""
    match value:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _tests(operand, scopes)
        case ast.Compare(
            left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]
        ):
            return {("None", ast.dump(left))}
        case ast.IfExp(test=test, body=ast.Constant(), orelse=ast.Constant()):
            return _tests(test, scopes)
        case ast.Name(id=name):
            found: set[Hashable] = {ast.dump(value)}
            known = bindings(name, scopes)
            if len(known) == 1 and isinstance(known[0], (ast.Compare, ast.IfExp, ast.UnaryOp)):
                found |= _tests(known[0], scopes)
            for test, sides in _branches(name, scopes):
                if all(isinstance(side, ast.Constant) for side in sides):
                    found |= _tests(test, scopes)
            return found
    return set()


def _absences(value: ast.AST, scopes: Scopes) -> set[Hashable]:
    """Return the tests by which an argument is None."""
    found: set[Hashable] = {("None", ast.dump(value))}
    for test, sides in _choices(value, scopes):
        if sum(map(_is_none, sides)) == 1:
            found |= _tests(test, scopes)
    return found


def _may_be_none(value: ast.AST, scopes: Scopes) -> bool:
    if any(_is_none(side) for _, sides in _choices(value, scopes) for side in sides):
        return True
    if not isinstance(value, ast.Name):
        return False
    if any(map(_is_none, bindings(value.id, scopes))):
        return True
    for scope in scopes:
        if isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
            argument = arguments(scope).get(value.id)
            if argument is not None:
                written = ast.unparse(argument.annotation) if argument.annotation else ""
                says = "Optional" in written or "None" in written
                return says or _is_none(defaults(scope).get(value.id))
    return False


def _choices(value: ast.AST, scopes: Scopes) -> Iterator[_Choice]:
    """Yield the conditions that choose what an argument is."""
    expressions = [value]
    if isinstance(value, ast.Name):
        expressions = [each for each in bindings(value.id, scopes) if each is not None]
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
    found: dict[str, list[_Choice]] = {}
    for node in walk(scope) if isinstance(scope, ast.FunctionDef) else ():
        if isinstance(node, ast.If) and node.orelse:
            first, second = _set_in(node.body), _set_in(node.orelse)
            for name in first.keys() & second.keys():
                found.setdefault(name, []).append((node.test, (first[name], second[name])))
    return found


def _set_in(body: Iterable[ast.stmt]) -> dict[str, ast.AST]:
    """Return what the statements of a branch set names to in the end."""
    found: dict[str, ast.AST] = {}
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
    return found


def _is_none(value: ast.AST | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
