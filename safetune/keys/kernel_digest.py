"""A kernel's identity: a digest of its text, and of the text and values that it refers to.

The digest is made of source text and plain values only, so it is the same with the compiler and in
the interpreter, in every supported Triton and Python. Line numbers, module paths and addresses do
not enter it. Globals are read when the digest is computed, not when the kernel is defined: compute
it at the first launch, when the module's later helpers exist.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from safetune.errors import InvalidSetting, SettingWarning
from safetune.keys import encoding
from safetune.keys.source_text import (
    MISSING,
    Scope,
    code_record,
    definition_line,
    file_of,
    is_foreign,
    is_foreign_class,
    nodes_of,
    source_of,
)
from safetune.keys.text_facts import facts_of, text_of
from safetune.keys.tuning_key import KernelIdentity
from safetune.keys.written_kernel import KNOWN
from safetune.messages import warn

#: The options of `@triton.jit` that change the code which is generated.
_CODE_OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")

#: The most values that a digest covers, so that a hook of an object that holds a data set ends.
MOST_VALUES = 50_000

#: Triton's classes of functions, and of what may be between a tuner and a function.
_LAYERS = frozenset(
    {"ConstexprFunction", "GluonJITFunction", "Heuristics", "InterpretedFunction", "JITFunction"}
)


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
    is_tritons = is_tritons or kind in KNOWN
    return is_tritons and "run" not in getattr(layer, "__dict__", ())


def is_interpreted(kernel: Any) -> bool:
    """Return whether a kernel, or what it decorates, runs in Triton's interpreter."""
    interpreter = sys.modules.get("triton.runtime.interpreter")  # what is not imported ran nothing
    return interpreter is not None and isinstance(
        base_function(kernel)[0], interpreter.InterpretedFunction
    )


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
    graph, everything = _whole(kernel, around)
    if graph.is_cut:
        warn(
            f"{function.__name__} and its hooks refer to more than {MOST_VALUES:,} values; the "
            "rest does not count in its identity, so a stored choice stays in use after a change "
            "of them. Use a hook or heuristic that holds less",
            SettingWarning,
        )
    return KernelIdentity(
        name=function.__name__,
        digest=encoding.digest(everything),
        source=source_of(jit) or "",
        file=file_of(function),
        line=definition_line(jit),
    )


def whole_digest(kernel: Any, around: Sequence[Any]) -> str | None:
    """Return the digest of the same; None if it has too many values to count them all."""
    graph, everything = _whole(kernel, around)
    return None if graph.is_cut else encoding.digest(everything)


def _whole(kernel: Any, around: Sequence[Any]) -> tuple[_Graph, list[Any]]:
    from triton.runtime.autotuner import Autotuner  # `install` comes before the import of Triton

    jit, function = base_function(kernel)
    graph = _Graph()
    root = graph.of_kernel(jit, function)  # never by name alone, wherever its file lies
    others = [
        graph.describe([type(jit), vars(jit).get("run")])
        if layer is jit
        else graph.of_object(layer)
        for layer in layers(kernel)
        if not (is_own(layer) or isinstance(layer, Autotuner))
    ]
    heuristics = [[[n, graph.describe(f)] for n, f in d.items()] for d in heuristics_below(kernel)]
    surroundings = [[graph.describe(item) for item in around]] if any(around) else []
    return graph, [function.__name__, root, heuristics, others, *surroundings, graph.parts]


def function_digest(function: Any) -> str:
    """Return a digest of a Python function: its text, and the values that it refers to."""
    graph = _Graph()
    return encoding.digest([graph.describe(function), graph.parts])


class _Graph:
    """Values as plain data, with functions and objects by number, so that cycles end.

    Module paths and addresses do not enter, as they differ between processes.
    """

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is only unique while its object lives
        self._values = 0

    def describe(self, value: Any) -> Any:
        """Return `value` as plain data, functions and objects as numbers into `parts`."""
        self._values += 1
        if self._values > MOST_VALUES:
            return {"cut": type(value).__name__}
        while type(value).__name__ == "constexpr":
            value = value.value
        if isinstance(value, enum.Enum):
            return {"enum": [type(value).__name__, value.name, self.describe(value.value)]}
        if isinstance(value, (tuple, list)):
            return {"items": [self.describe(item) for item in value]}
        if isinstance(value, (set, frozenset)):
            items = [self.describe(item) for item in value]
            return {"set": sorted(items, key=encoding.dumps)}
        if isinstance(value, type(os.environ)):  # it differs between any two processes
            return {"object": "environ"}
        if isinstance(value, Mapping):
            return {"pairs": [[self.describe(k), self.describe(v)] for k, v in value.items()]}
        if isinstance(value, ModuleType):
            whole = is_foreign(value)
            return {"module": value.__name__ if whole else value.__name__.rpartition(".")[2]}
        if isinstance(value, CodeType):
            return {"code": code_record(value)}
        if encoding.is_dtype(value) or not (callable(value) or hasattr(value, "fn")):
            return self._plain(value)
        return self._callable(value)

    def of_kernel(self, jit: Any, function: FunctionType) -> Any:
        """Describe the kernel itself, or a function that it calls, by its text."""
        return {"function": self._number(function, lambda: self._function(jit, function))}

    def of_object(self, value: Any) -> Any:
        """Describe an object by its class and by the values that it holds."""
        return {"instance": self._number(value, lambda: self._instance(value))}

    @property
    def is_cut(self) -> bool:
        """Whether there were too many values to count them all."""
        return self._values > MOST_VALUES

    def _plain(self, value: Any) -> Any:
        encoded = encoding.encode(value)
        if not (isinstance(encoded, dict) and "object" in encoded):
            return encoded
        name = type(value).__name__
        if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # its repr leaves elements out
            contents = encoding.digest(value.tobytes().hex())
            return {"array": [encoding.dtype_name(value.dtype), list(value.shape), contents]}
        if not is_foreign_class(type(value)):
            return self.of_object(value)
        if (
            inspect.getattr_static(type(value), "__repr__") is vars(object)["__repr__"]
        ):  # an address
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
            return self._without_text(value)
        if is_foreign(function):
            return {"foreign": [function.__module__, function.__qualname__]}
        return self.of_kernel(value, function)

    def _without_text(self, value: Any) -> Any:
        """Describe an instance with `__call__`, or a function that is not written in Python."""
        if not is_foreign_class(type(value)):
            return self.of_object(value)
        if hasattr(value, "__wrapped__"):  # functools.cache
            return {"wraps": self.describe(value.__wrapped__)}
        if state := _attributes(value):  # numpy.vectorize
            return {"callable": type(value).__name__, "state": self.describe(state)}
        owner = getattr(value, "__self__", None)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        if name is None:
            return {"callable": type(value).__name__, "repr": encoding.encode(value)["repr"]}
        module = getattr(value, "__module__", None) or type(value).__module__
        of = [] if owner is None or isinstance(owner, ModuleType) else [self.describe(owner)]
        return {"callable": [module, name, *of]}

    def _instance(self, value: Any) -> Any:
        slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
        held = {**{name: getattr(value, name, None) for name in slots}, **_attributes(value)}
        state = [[name, self.describe(item)] for name, item in sorted(held.items())]
        return {"class": self._class(type(value)), "state": state}

    def _class(self, cls: type) -> Any:
        if is_foreign_class(cls):
            return {"class": cls.__name__}
        return {"class": self._number(cls, lambda: self._own_class(cls))}

    def _own_class(self, cls: type) -> Any:
        written: Any = cls
        if getattr(cls, "__triton_aggregate__", False):
            # The class as it was written is only left in Triton's closure.
            constructor: Any = cls.__new__
            found = Scope(constructor).lookup("cls")
            written = cls if found is MISSING else found
        return {
            "name": cls.__name__,
            "bases": [self._class(base) for base in written.__bases__],
            "fields": {
                name: self.describe(kind) if isinstance(kind, type) else str(kind)
                for name, kind in inspect.get_annotations(written).items()
            },
            "members": {
                name: self.describe(member)
                for name, member in sorted(_members(written).items())
                if not name.startswith("__") or _is_written(member)
            },
        }

    def _number(self, value: Any, describe: Any) -> int:
        if id(value) not in self._numbers:
            number = self._numbers[id(value)] = len(self.parts)
            self._alive.append(value)
            self.parts.append(None)
            self.parts[number] = describe()
        return self._numbers[id(value)]

    def _function(self, jit: Any, function: FunctionType) -> Any:
        scope, text = Scope(function), text_of(jit, function)
        if text is None:
            # Only the compiled code identifies it, and that depends on the Python version.
            code = function.__code__
            text = encoding.dumps(code_record(code))
            references = {n: scope.lookup(n) for n in (*code.co_names, *code.co_freevars)}
        else:
            references = {name: _resolve(name, scope) for name in facts_of(text).names}
        references["__wrapped__"] = getattr(function, "__wrapped__", MISSING)
        return {
            "name": function.__name__,
            "text": text,
            "options": _code_options(jit, function),
            "defaults": self.describe([function.__defaults__, function.__kwdefaults__]),
            "references": [
                [name, self.describe(value)]
                for name, value in sorted(references.items())
                if value is not MISSING
            ],
        }


def _code_options(jit: Any, function: FunctionType) -> dict[str, Any]:
    """Return the options of `@triton.jit` that change the code and are set, parameters by name."""
    options = {name: option_of(jit, name) for name in _CODE_OPTIONS if jit is not function}
    names = list(inspect.signature(function).parameters) if any(options.values()) else []
    return {
        option: True
        if value is True or not isinstance(value, (list, tuple))
        else sorted(names[item] if isinstance(item, int) else str(item) for item in value)
        for option, value in options.items()
        if value
    }


def _attributes(value: Any) -> dict[str, Any]:
    """Return the values in an object, without the kernel that a decorator holds."""
    return {name: item for name, item in getattr(value, "__dict__", {}).items() if name != "fn"}


def _members(cls: type) -> dict[str, Any]:
    """Return what a class defines, with the functions of properties and static methods."""
    parts = ("fget", "func", "__func__")
    return {
        name: next((getattr(member, part) for part in parts if hasattr(member, part)), member)
        for name, member in vars(cls).items()
    }


def _is_written(member: Any) -> bool:
    """Whether a special method stands in a file; those of a dataclass are generated."""
    return inspect.isfunction(member) and bool(nodes_of(member))


def _resolve(name: str, scope: Scope) -> Any:
    """Return the value of a dotted name; for one of the toolchain, the module that it begins with.

    `tl.load` is another object in the interpreter, and the text has its name.
    """
    first, *attributes = name.split(".")
    value = scope.lookup(first)
    for attribute in attributes:
        if value is MISSING or (isinstance(value, ModuleType) and is_foreign(value)):
            return value
        value = getattr(value, attribute, MISSING)
    return value
