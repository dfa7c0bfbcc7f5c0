"""Which parameters of a kernel its body reads.

A parameter is read when its value can reach anything. It is not read when it is only passed to a
callee that ignores it, or assigned before it is used. Code that cannot be followed reads all of its
arguments. What is found is what the text shows: a value may decide something in other ways, as the
size that another argument was computed from does (see `launch_usage`).
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from safetune.frozen import dataclass
from safetune.keys.kernel_digest import (
    base_function,
    definition_line,
    is_own,
    source_of,
)
from safetune.keys.source_text import (
    MISSING,
    FunctionNode,
    RunOrder,
    Scope,
    body_of,
    children,
    dotted,
    free_names,
    is_foreign,
    parameters,
    stores,
    tree_of,
)

#: Builtins that see every local variable.
FRAME_READERS = frozenset({"locals", "vars", "eval", "exec", "dir"})

#: Calls that use the matrix units; those with `mma` in their name are Gluon's.
_MATRIX_PRODUCT = re.compile(r"\b(?:dot|dot_scaled|\w*mma\w*)\s*\(")


class Usage:
    """The first reader of each name, as text with file and line, and one that may read any name."""

    def __init__(self, names: dict[str, str] | None = None, everything: str = "") -> None:
        self.names = names or {}
        self.everything = everything

    def reader_of(self, name: str) -> str:
        """Return what reads `name`, or "" where nothing does."""
        return self.names.get(name) or self.everything

    def add(self, other: Usage) -> None:
        """Add the readers in `other`; the first reader of a name stays."""
        self.names = {**other.names, **self.names}
        self.everything = self.everything or other.everything


@dataclass(frozen=True)
class _Use:
    """One use of a parameter: it is read, or passed to what `callee` names, at `slot`."""

    parameter: str
    line: int
    callee: str = ""
    slot: int | str = 0


def usage_in_body(kernel: Any) -> Usage:
    """Return the parameters that a kernel reads, through every jit function that it calls."""
    jit, function = base_function(kernel)
    lines = _jit_lines(jit, {})
    if lines is None:
        return Usage(everything="the body, whose source is missing")
    file = Path(function.__code__.co_filename).name
    offset = max(definition_line(jit) - 1, 0)
    return Usage({name: f"the body ({file}:{line + offset})" for name, line in lines.items()})


def calls_followed(kernel: Any) -> Iterator[tuple[FunctionType, str, Any]]:
    """Yield (caller, name, callee) for each callee that is asked whether it reads a parameter."""
    pending, seen = [base_function(kernel)[0]], set[FunctionType]()
    while pending:
        jit = pending.pop()
        if jit.fn in seen or not can_be_followed(jit):
            continue
        seen.add(jit.fn)
        scope = Scope(jit.fn)
        for name in {use.callee for use in _summary(source_of(jit) or "") or () if use.callee}:
            callee = scope.value_of(name)
            if can_be_followed(callee):
                yield jit.fn, name, callee
                pending.append(callee)


def multiplies_matrices(kernel: Any) -> bool:
    """Whether a kernel, or anything that it may call, has a `tl.dot` or `tl.dot_scaled`."""
    pending, seen = [base_function(kernel)[0]], set()
    while pending:
        jit = pending.pop()
        if jit.fn in seen:
            continue
        seen.add(jit.fn)
        text = source_of(jit) or ""
        if not can_be_followed(jit) or _MATRIX_PRODUCT.search(text):
            return True
        tree, scope = tree_of(text), Scope(jit.fn)
        stored = {name for _, name in stores(tree)}
        names = {str(dotted(node)) for node in free_names(tree)} - stored
        values = {name: scope.value_of(name) for name in names - set(dir(builtins))}
        if MISSING in values.values():
            return True
        pending += [v for v in values.values() if hasattr(v, "fn") and not is_foreign(v.fn)]
    return False


def can_be_followed(callee: Any) -> bool:
    """Whether a callee runs its text as it is written, so that the text tells what it reads."""
    return (
        is_own(callee)
        and inspect.isfunction(callee.fn)
        and not is_foreign(callee.fn)
        # Python shows the text of the function that is wrapped, and runs the wrapper.
        and not hasattr(callee.fn, "__wrapped__")
    )


def _jit_lines(jit: Any, known: dict[Any, dict[str, int] | None]) -> dict[str, int] | None:
    """Return the first line that reads each parameter; None where anything may be read."""
    function = jit.fn
    if function in known:
        return known[function]
    known[function] = None  # a function that calls itself reads all of its arguments
    summary = _summary(source_of(jit) or "") if can_be_followed(jit) else None
    if summary is None:
        return None
    scope, lines = Scope(function), dict[str, int]()
    for use in summary:
        if use.parameter not in lines and _reaches(use, scope, known):
            lines[use.parameter] = use.line
    known[function] = lines
    return lines


def _reaches(use: _Use, scope: Scope, known: dict[Any, dict[str, int] | None]) -> bool:
    """Whether a use reads the parameter; it does not if the callee ignores what it is passed."""
    if not use.callee:
        return True
    owner, callee = scope.value_of(use.callee.rpartition(".")[0]), scope.value_of(use.callee)
    is_method = owner is not MISSING and not isinstance(owner, (type, ModuleType))
    if is_method or not can_be_followed(callee):
        return True
    lines, code = _jit_lines(callee, known), callee.fn.__code__
    accepted = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if isinstance(use.slot, int):
        name = "".join(accepted[: code.co_argcount][use.slot : use.slot + 1])
    else:
        name, accepted = use.slot, accepted[code.co_posonlyargcount :]
    return lines is None or name not in accepted or name in lines


@functools.lru_cache(maxsize=4096)
def _summary(text: str) -> tuple[_Use, ...] | None:
    """Return how a function uses its parameters, in the order in which its text runs.

    None where the text is not a function's. A library calls the same small functions from many
    kernels, so this is kept; no tree is.
    """
    try:
        (node,) = tree_of(text).body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(node, ast.FunctionDef):
        return None
    visitor = _ParameterUse(node)
    visitor.visit_all(body_of(node))
    return tuple(visitor.uses)


def bind(call: ast.Call, names: Sequence[str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield (parameter, argument) of a call, as far as its text shows which is which."""
    for slot, value in _slots(call):
        if isinstance(slot, str) and slot in names:
            yield slot, value
        elif isinstance(slot, int) and slot < len(names):
            yield names[slot], value


def _slots(call: ast.Call) -> Iterator[tuple[int | str, ast.expr]]:
    """Yield (position or keyword, argument) of a call, up to a starred argument."""
    for position, argument in enumerate(call.args):
        if isinstance(argument, ast.Starred):
            break
        yield position, argument
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)


def parameter_lines(node: FunctionNode) -> dict[str, int]:
    """Return the first line that reads each parameter of `node`."""
    visitor = _ParameterUse(node)
    visitor.visit_all(body_of(node))
    lines: dict[str, int] = {}
    for use in visitor.uses:
        lines.setdefault(use.parameter, use.line)
    return lines


#: What may run never, or more than once.
_UNCERTAIN = (
    *(ast.ClassDef, ast.For, ast.Match, ast.NamedExpr, ast.Try, ast.While, ast.With),
    *filter(None, [getattr(ast, "TryStar", None)]),
)


class _ParameterUse(RunOrder):
    """Follows one function, and notes how it uses its parameters."""

    SPECIAL = RunOrder.SPECIAL.union(
        _UNCERTAIN, [ast.Call, ast.FunctionDef, ast.Global, ast.If, ast.Nonlocal]
    )

    def __init__(self, function: FunctionNode) -> None:
        super().__init__()
        self.uses: list[_Use] = []
        self._tracked = frozenset(parameters(function))
        self._stores = stores(function)
        #: What these names call is not known.
        self._local = frozenset(name for _, name in self._stores)

    def _read(self, names: Iterable[str], line: int) -> None:
        self.uses += [_Use(name, line) for name in self._tracked.intersection(names) - self.bound]

    def read(self, name: ast.Name) -> None:
        self._read(self._tracked if name.id in FRAME_READERS else [name.id], name.lineno)

    def visit(self, node: ast.AST) -> None:
        if node.__class__ is ast.Name or node.__class__ not in self.SPECIAL:
            super().visit(node)
            return
        if isinstance(node, _UNCERTAIN):
            self._visit_uncertain(node)
            return
        match node:
            case ast.Call():
                self._visit_call(node)
            case ast.AnnAssign(value=None):
                pass
            case ast.If():
                self._visit_branches(node)
            case ast.Nonlocal() | ast.Global():
                self._read(node.names, node.lineno)
            case ast.FunctionDef():
                self.visit_all(node.decorator_list)
                super().visit(node)
            case _:
                super().visit(node)

    def _visit_call(self, node: ast.Call) -> None:
        self.visit(node.func)
        callee = dotted(node.func) or ""
        if callee.partition(".")[0] in self._local:
            callee = ""
        slots = {id(value): slot for slot, value in _slots(node)}
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            if (
                isinstance(value, ast.Name)
                and value.id in self._tracked - self.bound - FRAME_READERS
                and id(value) in slots
            ):
                self.uses.append(_Use(value.id, value.lineno, callee, slots[id(value)]))
            else:
                self.visit(value)

    def _visit_branches(self, node: ast.If) -> None:
        self.visit(node.test)
        before = self.bound
        self.visit_all(node.body)
        in_body, self.bound = self.bound, before
        self.visit_all(node.orelse)
        in_else, self.bound = self.bound, before
        # Where one branch keeps the old value, the compiler merges it with the new one.
        self._read(in_body ^ in_else, node.lineno)
        self.bound = in_body & in_else

    def _visit_uncertain(self, node: Any) -> None:
        """A loop carries what it assigns; so may anything else that may run never or twice."""
        last = node.end_lineno or node.lineno
        self._read((name for n, name in self._stores if node.lineno <= n <= last), node.lineno)
        before = self.bound
        self.visit_all(children(node))
        self.bound = before
