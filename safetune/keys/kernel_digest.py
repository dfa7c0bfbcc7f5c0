"""A kernel's identity: a digest of its text, and of the text and values that it refers to.

The digest is made of source text and plain values only, so it is the same with the compiler and in
the interpreter, in every supported Triton and Python. Line numbers, module paths and decorators do
not enter it. Globals are read when the digest is computed, not when the kernel is defined: compute
it at the first launch, when the module's later helpers exist.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

from safetune.errors import InvalidSetting
from safetune.keys import encoding
from safetune.keys.source_text import (
    MISSING,
    Scope,
    dotted,
    free_names,
    module_text,
    nodes_of,
    tree_of,
)
from safetune.keys.tuning_key import KernelIdentity

#: Packages whose functions enter a digest by name, not by text; the toolchain has their versions.
_FOREIGN = frozenset(sys.stdlib_module_names) | {"triton", "torch", "numpy", "jax"}

#: Triton's classes of functions, and of what may be between a tuner and a function.
_LAYERS = frozenset(
    {"ConstexprFunction", "GluonJITFunction", "Heuristics", "InterpretedFunction", "JITFunction"}
)

_DEF = re.compile(r"^def\s+\w+\s*\(", re.MULTILINE)


def base_function(kernel: Any) -> tuple[Any, FunctionType]:
    """Return the innermost jit object of `kernel` and its Python function, or raise."""
    inner = kernel
    while not inspect.isfunction(getattr(inner, "fn", None)):
        inner = getattr(inner, "fn", None)
        if inner is None:
            raise InvalidSetting(
                f"{kernel!r} is not a Triton kernel: decorate it with @triton.jit first"
            )
    return inner, inner.fn


def is_own(layer: Any) -> bool:
    """Whether the class of a layer of a kernel is one of Triton's own, whose `run` is known.

    A class of the user's that is made from one of these may read any argument, and so may a `run`
    that is set on the object.
    """
    kind = type(layer)
    is_tritons = kind.__module__.startswith("triton.") and kind.__name__ in _LAYERS
    return is_tritons and "run" not in getattr(layer, "__dict__", ())


def is_interpreted(kernel: Any) -> bool:
    """Return whether a kernel, or what it decorates, runs in Triton's interpreter."""
    interpreter = sys.modules.get("triton.runtime.interpreter")  # what is not imported ran nothing
    return interpreter is not None and isinstance(
        base_function(kernel)[0], interpreter.InterpretedFunction
    )


def source_of(jit: Any) -> str | None:
    """Return the text of a jit or constexpr function from `def` on, or None where it has none."""
    text = getattr(jit, "_src", None) or getattr(jit, "src", None)
    if text is None:
        text = textwrap.dedent("".join(source_lines(jit)[0]))
    start = _DEF.search(text)
    if start is None:
        return None
    return "\n".join(line.rstrip() for line in text[start.start() :].splitlines()).rstrip() + "\n"


def source_lines(jit: Any) -> tuple[list[str], int]:
    """Return the lines in the file, with decorators, and the first one's number; or no lines."""
    if hasattr(jit, "raw_src"):
        return list(jit.raw_src), jit.starting_line_number
    try:
        return inspect.getsourcelines(jit.fn)
    except (OSError, TypeError):
        return [], 0


def definition_line(jit: Any) -> int:
    """Return the line of the `def` itself, below the decorators; 0 where the source is missing."""
    lines, first = source_lines(jit)
    return next((first + i for i, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)


def option_of(jit: Any, name: str) -> Any:
    """Return an option of `@triton.jit`, compiled or interpreted."""
    if hasattr(jit, "rewriter"):
        return jit.kwargs.get(name)
    return getattr(jit, "_repr" if name == "repr" else name, None)


def inner_heuristics(kernel: Any) -> dict[str, Any]:
    """Return the heuristics between `kernel` and its jit function, by the name that each sets."""
    return {name: found for values in heuristics_below(kernel) for name, found in values.items()}


def heuristics_below(kernel: Any) -> list[dict[str, Any]]:
    """Return the values of each `@triton.heuristics` between `kernel` and its jit function."""
    found = [getattr(layer, "values", None) for layer in layers(kernel)[:-1]]
    return [values for values in found if isinstance(values, dict)]


def layers(kernel: Any) -> list[Any]:
    """Return `kernel` and everything that it decorates, down to the jit object."""
    jit, _ = base_function(kernel)
    found = [kernel]
    while found[-1] is not jit:
        found.append(found[-1].fn)
    return found


def kernel_identity(kernel: Any, around: Sequence[Any] = ()) -> KernelIdentity:
    """Return the identity of a kernel: a digest over everything that decides what it computes.

    `around` are the hooks and settings around each launch, None for a hook that is not there.
    """
    jit, function = base_function(kernel)
    graph = _Graph()
    root = graph.describe(jit)
    heuristics = [[n, graph.describe(f)] for n, f in sorted(inner_heuristics(kernel).items())]
    surroundings = [[graph.describe(item) for item in around]] if any(around) else []
    everything = [function.__name__, root, heuristics, *surroundings, graph.functions]
    return KernelIdentity(
        name=function.__name__,
        digest=encoding.digest(everything),
        source=source_of(jit) or "",
        file=function.__code__.co_filename,
        line=definition_line(jit),
        atomics="atomic" in encoding.dumps(everything),
    )


def function_digest(function: Any) -> str:
    """Return a digest of a Python function: its text, and the values that it refers to."""
    graph = _Graph()
    return encoding.digest([graph.describe(function), graph.functions])


class _Graph:
    """Values as plain data, with functions by number: cycles end, module paths do not enter."""

    def __init__(self) -> None:
        self.functions: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is only unique while its object lives

    def describe(self, value: Any) -> Any:
        """Return `value` as plain data, functions as numbers into `functions`."""
        while type(value).__name__ == "constexpr":
            value = value.value
        if isinstance(value, enum.Enum):
            return {"enum": [type(value).__name__, value.name, self.describe(value.value)]}
        if isinstance(value, (tuple, list)):
            return {"items": [self.describe(item) for item in value]}
        if isinstance(value, (set, frozenset)):
            items = [self.describe(item) for item in value]
            return {"set": sorted(items, key=encoding.dumps)}
        if isinstance(value, dict):
            return {"pairs": [[self.describe(k), self.describe(v)] for k, v in value.items()]}
        if isinstance(value, ModuleType):
            return {"module": value.__name__.rpartition(".")[2]}
        if encoding.is_dtype(value) or not (callable(value) or hasattr(value, "fn")):
            return self._plain(value)
        return self._callable(value)

    def _plain(self, value: Any) -> Any:
        encoded = encoding.encode(value)
        if not (isinstance(encoded, dict) and "object" in encoded):
            return encoded
        name = type(value).__name__
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
            return {"object": name, "fields": self.describe(fields)}
        if encoding.ADDRESS.search(repr(value)):  # the default repr: its module and its address
            return {"object": name}
        return {"object": name, "repr": encoded["repr"]}

    def _callable(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return {"partial": self.describe([value.func, value.args, value.keywords])}
        if isinstance(value, MethodType) or hasattr(value, "__func__"):
            return {"method": self.describe([value.__func__, getattr(value, "__self__", None)])}
        if isinstance(value, type):
            return self._class(value)
        function = value if inspect.isfunction(value) else getattr(value, "fn", None)
        while function is not None and not inspect.isfunction(function):
            value, function = function, getattr(function, "fn", None)
        if function is None:
            call = type(value).__call__
            if not inspect.isfunction(call):
                return {"callable": getattr(value, "__name__", type(value).__name__)}
            return {"callable": type(value).__name__, "call": self.describe(call)}
        if is_foreign(function.__module__):
            return {"foreign": function.__name__}
        return {"function": self._number(value, function)}

    def _class(self, cls: type) -> Any:
        if not getattr(cls, "__triton_aggregate__", False):
            return {"class": cls.__name__}
        # The class as it was written is only left in Triton's closure.
        constructor: Any = cls.__new__
        written = Scope(constructor).lookup("cls")
        written = cls if written is MISSING else written
        return {
            "aggregate": cls.__name__,
            "bases": [self._class(base) for base in written.__bases__],
            "fields": {
                name: self.describe(kind) if isinstance(kind, type) else str(kind)
                for name, kind in inspect.get_annotations(written).items()
            },
            "methods": {
                name: self.describe(member)
                for name, member in vars(written).items()
                if inspect.isfunction(member) or hasattr(member, "fn")
            },
        }

    def _number(self, jit: Any, function: FunctionType) -> int:
        if id(function) not in self._numbers:
            number = self._numbers[id(function)] = len(self.functions)
            self._alive.append(function)
            self.functions.append(None)
            self.functions[number] = self._function(jit, function)
        return self._numbers[id(function)]

    def _function(self, jit: Any, function: FunctionType) -> Any:
        text, scope = _text_of(jit, function), Scope(function)
        if text is None:
            # Only the compiled code identifies it, and that depends on the Python version.
            code = function.__code__
            constants = encoding.ADDRESS.sub("", repr(code.co_consts))
            text = f"{code.co_code.hex()} {code.co_names} {constants}"
            references = {name: scope.lookup(name) for name in code.co_names}
        else:
            tree = tree_of(text if not text.startswith("lambda") else f"({text})")
            references = {str(dotted(node)): _resolve(node, scope) for node in free_names(tree)}
        return {
            "name": function.__name__,
            "text": text,
            "noinline": bool(option_of(jit, "noinline")),
            "defaults": self.describe([function.__defaults__, function.__kwdefaults__]),
            "references": [
                [name, self.describe(value)]
                for name, value in sorted(references.items())
                if value is not MISSING
            ],
        }


def _text_of(jit: Any, function: FunctionType) -> str | None:
    if jit is not function:
        return source_of(jit)
    module, nodes = module_text(function), nodes_of(function)
    return "\n".join(module.segment(node) for node in nodes) if module and nodes else None


def _resolve(node: ast.AST, scope: Scope) -> Any:
    """Return the value of a dotted name, or `MISSING` for one of the toolchain."""
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, scope)
        # `tl.load` is another object in the interpreter, and may move between Triton's modules.
        if owner is MISSING or (isinstance(owner, ModuleType) and is_foreign(owner.__name__)):
            return MISSING
        return getattr(owner, node.attr, MISSING)
    return scope.value_of(dotted(node) or "")


def is_foreign(module: str | None) -> bool:
    """Whether a module belongs to the toolchain or to Python."""
    return (module or "").partition(".")[0] in _FOREIGN
