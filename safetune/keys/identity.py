"""The identity of a value: one rule for kernels, configs and keys.

Plain values, dtypes, enums and containers count by content; a set has a fixed order. A function
counts by its text, its references, its closure and its defaults, an object of Python or the
toolchain by its pickle, any other object by its class's text and its attributes. Line numbers,
module paths and addresses do not count.

A value that cannot be pickled (an open file, a generator, a lock) has no identity in another
process; nor has a tensor in a config. Within this process they are distinct: see `in_process`.

A digest reads a kernel's globals when it is computed, not when the kernel is defined: compute it at
the first launch, when the module's later helpers exist.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import enum
import functools
import inspect
import itertools
import math
import os
import reprlib
import struct
import sys
import typing
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from safetune.errors import InvalidSetting, SettingWarning
from safetune.frozen import dataclass
from safetune.keys import encoding
from safetune.keys.source_text import (
    MISSING,
    Scope,
    code_record,
    definition_line,
    file_of,
    is_foreign,
    is_foreign_class,
    is_heap_class,
    nodes_of,
    source_of,
)
from safetune.keys.text_facts import facts_of_function
from safetune.keys.written_kernel import KNOWN
from safetune.messages import warn

#: The options of `@triton.jit` that change the code which is generated.
_CODE_OPTIONS = ("do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")

#: The most values that an identity covers, so that a hook of an object that holds a data set ends.
MOST_VALUES = 50_000

#: The deepest nesting of lists, tuples and dictionaries that it covers.
_DEEPEST = 60

#: Triton's classes of functions, and of objects that may stand between a tuner and a function.
LAYERS = frozenset(
    {"ConstexprFunction", "GluonJITFunction", "Heuristics", "InterpretedFunction", "JITFunction"}
)

#: Equal values of these classes are the same value.
PLAIN = frozenset({int, bool, str, type(None)})

_CONTENTS = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset)


@dataclass(frozen=True)
class KernelIdentity:
    """A kernel, identified by its computation; `source`, `file` and `line` are for people."""

    name: str
    digest: str  # over the sources of the kernel and of everything it calls or reads
    source: str = ""
    file: str = ""
    line: int = 0


def option_of(jit: Any, name: str) -> Any:
    """Return an option of `@triton.jit`, compiled or interpreted."""
    if hasattr(jit, "rewriter"):
        return jit.kwargs.get(name)
    return getattr(jit, "_repr" if name == "repr" else name, None)


def encode(value: Any, *, of_call: bool = False) -> Any:
    """Return the identity of a value in a config or a key, as plain JSON data with its type.

    Args:
        of_call: the value is an argument: a tensor counts by its dtype alone, because a choice may
            depend on the element type, never on the address or contents.
    """
    kind = type(value)
    if kind in PLAIN or (kind is float and math.isfinite(value)):
        return value
    graph = Graph(whole=False, of_call=of_call)
    try:
        described = graph.described(value)
    except Exception:  # of the value's own code
        graph.nameless, described = [value], None
    if graph.is_cut:
        graph.nameless.append(value)
    if graph.nameless:
        tokens = list(map(_token, graph.nameless))
        return {
            "object": shown(value),
            "process": [_process(), tokens, encoding.digest(described)],
        }
    if isinstance(value, type) or not graph.parts:
        return described
    return {"object": shown(value), "digest": encoding.digest(described)}


def in_process(data: Any) -> bool:
    """Whether encoded data contains a value whose identity exists only in this process."""
    if isinstance(data, (list, tuple)):
        return any(map(in_process, data))
    return isinstance(data, dict) and ("process" in data or any(map(in_process, data.values())))


def code_of(value: Any) -> Any:
    """Return the identity of the functions that an argument contains, as JSON data; None without
    any.

    They are part of the kernel's code, like functions that its text names.
    """
    return None if type(value) in PLAIN else _code(value, {})


def _code(value: Any, met: dict[int, Any]) -> Any:
    """Return the functions of a value, each visited once: `met` has their ids."""
    kind: Any = type(value)
    if kind in PLAIN or kind is float or hasattr(value, "data_ptr") or encoding.is_dtype(value):
        return None
    if isinstance(value, (encoding.TensorType, encoding.DescriptorType, ModuleType)):
        return None
    if id(value) in met or len(met) > MOST_VALUES:
        return None
    met[id(value)] = value
    is_class = isinstance(value, type)
    if inspect.isfunction(value) or is_layer(value) or is_class:
        return None if is_class and is_foreign_class(value) else _code_of_leaf(value)
    if isinstance(value, (set, frozenset)):
        parts = sorted((_code(item, met) for item in value), key=encoding.dumps)
    else:
        parts = [_code(item, met) for item in _parts(value)]
    if any(part is not None for part in parts):
        return parts if is_foreign_class(kind) else [_code_of_leaf(kind), parts]
    is_own = _has_functions(kind) if isinstance(value, enum.Enum) else not is_foreign_class(kind)
    return [_code_of_leaf(kind), None] if is_own else None


def _parts(value: Any) -> Iterable[Any]:
    """Return the parts of a value, in an order that is the same in each process."""
    if type(value).__name__ == "constexpr" or isinstance(value, enum.Enum):
        return [value.value]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    contents = value.values() if isinstance(value, dict) else value
    own = contents if isinstance(value, (dict, tuple, list)) else ()
    return [*own, *(item for _, item in _held(value))]


def _code_of_leaf(value: Any, of_call: bool = True) -> Any:
    data, nameless = _leaf(value, of_call)
    return {**data, "process": [_process(), list(map(_token, nameless))]} if nameless else data


def hook_identity(hook: Any) -> Any:
    """Return the digest of a config's hook at its first use, or an identity valid only in this
    process if its closure has no other.

    Launches may change the closure, which must not change the config's identity.
    """
    data = _code_of_leaf(hook, of_call=False)
    return data if "process" in data else data["digest"]


def is_layer(value: Any) -> bool:
    """Whether a value is a function below `@triton.jit`, or a Triton decorator around one."""
    return hasattr(value, "fn") and (
        type(value) in KNOWN
        or any(
            base.__module__.startswith("triton.") and base.__name__ in {*LAYERS, "Autotuner"}
            for base in type(value).__mro__
        )
    )


class _ByObject:
    """A value for each object, stored by the object's identity until the object is freed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], Any], Any]] = {}

    def get(self, owner: Any) -> Any:
        """Return what was put for an object; None if nothing was."""
        reference, found = self._known.get(id(owner), (None, None))
        return found if reference is not None and reference() is owner else None

    def put(self, owner: Any, found: Any) -> None:
        """Keep something about an object."""
        reference: Callable[[], Any]
        try:
            reference = weakref.ref(owner, functools.partial(self._forget, id(owner)))
        except TypeError:  # it cannot be referred to weakly, and is kept
            reference = functools.partial(_same, owner)
        self._known[id(owner)] = reference, found

    def _forget(self, number: int, reference: Any) -> None:
        if number in self._known and self._known[number][0] is reference:
            del self._known[number]


def _same(value: Any) -> Any:
    return value


#: What was found out of an object at its first use, by `of_call`.
_first_uses = {True: _ByObject(), False: _ByObject()}


def _leaf(value: Any, of_call: bool) -> tuple[Any, list[Any]]:
    """Return a function or a class as JSON data, and its contents that have no identity."""
    described: tuple[Any, list[Any]] | None = _first_uses[of_call].get(value)
    if described is None:
        graph = Graph(of_call=of_call)
        kind = "class" if isinstance(value, type) else "function"
        data = {kind: shown(value), "digest": encoding.digest(graph.described(value))}
        described = data, [*graph.nameless, *([value] if graph.is_cut else [])]
        _first_uses[of_call].put(value, described)
    return described


def shown(value: Any) -> str:
    """Return the name of a function or class, or of an object's class, for people."""
    inner = value
    while is_layer(inner):
        inner = inner.fn
    name = getattr(inner, "__name__", None)
    return name if isinstance(name, str) else type(value).__name__


#: A number for each object without an identity that was met.
_tokens = _ByObject()
_numbers = itertools.count()

_STARTED = uuid.uuid4().hex


def _process() -> str:
    """Return a name of this process that no other one has."""
    return f"{_STARTED} {os.getpid()}"


def _token(value: Any) -> int:
    number: int | None = _tokens.get(value)
    if number is None:
        number = next(_numbers)
        _tokens.put(value, number)
    return number


class Graph:
    """Values as plain data; functions and objects are numbered, so that cycles end.

    Args:
        whole: describe functions and classes with all their references; otherwise by the digest
            from their first use.
        of_call: describe a tensor by its dtype alone.
    """

    def __init__(self, *, whole: bool = True, of_call: bool = True) -> None:
        self.parts: list[Any] = []
        self.nameless: list[Any] = []  # what was met and has no identity
        self._whole, self._of_call = whole, of_call
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is only unique while its object lives
        self._pending: deque[tuple[int, Callable[[], Any]]] = deque()
        self._depth = 0  # of the containers that a value is in
        self._values = 0

    @property
    def is_cut(self) -> bool:
        """Whether there were too many values to include them all."""
        return self._values > MOST_VALUES

    def described(self, value: Any) -> Any:
        """Return the full identity of a value, as plain data."""
        data = self.describe(value)
        self.finish()
        return [data, self.parts] if self.parts else data

    def finish(self) -> None:
        """Describe the functions and objects found so far, and those that they refer to."""
        while self._pending:
            number, describe = self._pending.popleft()
            self.parts[number] = describe()

    def describe(self, value: Any) -> Any:
        """Return `value` as plain data, with functions and objects as numbers into `parts`."""
        self._values += 1
        if self.is_cut:
            return {"cut": type(value).__name__}
        while type(value).__name__ == "constexpr":
            value = value.value
        kind: Any = type(value)
        if kind in PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, enum.Enum):
            written = [self._class(kind)] if _has_functions(kind) else []
            return {"enum": [kind.__name__, value.name, self.describe(value.value), *written]}
        if encoding.is_dtype(value):
            name, owner = encoding.dtype_name(value), kind.__module__.partition(".")[0]
            # A kernel that takes Triton's may not take torch's; of an argument they say the same.
            is_tritons = self._of_call or owner == "triton"
            return {"dtype": name} if is_tritons else {"dtype": name, "of": owner}
        is_foreign_tuple = isinstance(value, tuple) and is_foreign_class(kind)  # such as torch.Size
        if kind in _NESTED or (is_foreign_tuple and not hasattr(kind, "_fields")):
            return self._nested(value)
        if isinstance(value, ModuleType):
            whole = is_foreign(value)
            return {"module": value.__name__ if whole else value.__name__.rpartition(".")[2]}
        if isinstance(value, CodeType):
            return {"code": code_record(value)}
        if callable(value) or hasattr(value, "fn"):
            return self._callable(value)
        return self._object(value)

    def of_kernel(self, jit: Any, function: FunctionType) -> Any:
        """Describe the kernel, or a function that it calls, by its text."""
        return {"function": self._number(function, lambda: self._function(jit, function))}

    def of_object(self, value: Any) -> Any:
        """Describe an object by its class and the values that it holds."""
        return {"instance": self._number(value, lambda: self._instance(value))}

    def _number(self, value: Any, describe: Callable[[], Any]) -> int:
        if id(value) not in self._numbers:
            number = self._numbers[id(value)] = len(self.parts)
            self._alive.append(value)
            self.parts.append(None)
            self._pending.append((number, describe))
        return self._numbers[id(value)]

    def _unnamed(self, value: Any) -> Any:
        self.nameless.append(value)
        return {"object": type(value).__name__}

    def _nested(self, value: Any) -> Any:
        if self._depth == _DEEPEST:  # one may be in itself
            self._values = MOST_VALUES + 1
            return {"cut": type(value).__name__}
        self._depth += 1
        try:
            return self._contents(value)
        finally:
            self._depth -= 1

    def _contents(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {"dict": [[self.describe(k), self.describe(v)] for k, v in value.items()]}
        if isinstance(value, (set, frozenset)):
            return {"set": sorted(map(self._apart, value), key=encoding.dumps)}
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [self.describe(item) for item in value]}

    def _apart(self, value: Any) -> Any:
        """Describe a value without numbers, which depend on the values met before."""
        graph = Graph(whole=self._whole, of_call=self._of_call)
        graph._depth, graph._values = self._depth, self._values
        data = graph.described(value)
        self._values = graph._values
        self.nameless += graph.nameless
        self._alive.append(graph)
        return data

    def _object(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, encoding.TensorType) or hasattr(value, "data_ptr"):
            if not self._of_call:
                self.nameless.append(value)
            return {"tensor": encoding.dtype_name(getattr(value, "dtype", kind))}
        if encoding.is_descriptor(value):
            return {"descriptor": [self.describe(value.base), self.describe([*value.block_shape])]}
        if isinstance(value, type(os.environ)):  # it differs between any two processes
            return {"object": "environ"}
        if kind is bytes:
            return {"bytes": value.hex()}
        if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # numpy
            held = value.tolist() if value.dtype.hasobject else value.tobytes()
            shape = list(getattr(value, "shape", ()))
            return {"array": [encoding.dtype_name(value.dtype), shape, self.describe(held)]}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return self._named_tuple(value)
        if hasattr(kind, "__next__") or kind.__module__ == "weakref":  # generators and files, too
            return self._unnamed(value)
        return self._foreign(value) if is_foreign_class(kind) else self.of_object(value)

    def _named_tuple(self, value: Any) -> Any:
        kind = type(value)
        classes = (cls for cls in reversed(kind.__mro__) if not is_foreign_class(cls))
        members = {name: member for cls in classes for name, member in _members(cls).items()}
        written = {
            name: self._referred(member)
            for name, member in sorted(members.items())
            if name not in kind._fields and _is_of_the_user(name, member)
        }
        fields = [list(pair) for pair in zip(kind._fields, map(self.describe, value), strict=False)]
        held = sorted((name, self.describe(item)) for name, item in _held(value))
        return {"namedtuple": [kind.__name__, fields, written, *([held] if held else [])]}

    def _foreign(self, value: Any) -> Any:
        """Describe an object of Python or the toolchain by its fields, or as pickle would."""
        kind = type(value)
        if isinstance(value, Mapping) and not isinstance(value, dict):
            return {"object": kind.__name__, "contents": self._nested(dict(value))}
        if dataclasses.is_dataclass(kind):
            return {"instance": self._number(value, lambda: self._instance(value))}
        reduced = _reduced(value)
        if reduced is None:
            return self._unnamed(value)
        return {"instance": self._number(value, lambda: self._of_pickle(kind, reduced))}

    def _of_pickle(self, kind: type, reduced: Any) -> Any:
        if isinstance(reduced, str):
            return {"class": kind.__name__, "name": reduced}
        parts = [*reduced[:3], *(None if items is None else [*items] for items in reduced[3:5])]
        return {"class": kind.__name__, "reduced": [self.describe(part) for part in parts]}

    def _callable(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return {"partial": self._nested([value.func, value.args, value.keywords])}
        if isinstance(value, MethodType) or hasattr(value, "__func__"):
            return {"method": self._nested([value.__func__, getattr(value, "__self__", None)])}
        if isinstance(value, type):
            return self._class(value)
        inner = value
        while is_layer(inner):
            value, inner = inner, inner.fn
        if not inspect.isfunction(inner):
            return self._without_text(inner)
        if not is_foreign(inner):
            return self.of_kernel(value, inner) if self._whole else self._at_first_use(value)
        free = inner.__code__.co_freevars if "<locals>" in inner.__qualname__ else ()
        made = [self._nested([Scope(inner).lookup(name) for name in free])] if free else []
        return {"foreign": [inner.__module__, inner.__qualname__, *made]}

    def _at_first_use(self, value: Any) -> Any:
        data, nameless = _leaf(value, self._of_call)
        self.nameless += nameless
        return data

    def _without_text(self, value: Any) -> Any:
        """Describe an instance with `__call__`, or a function that is not written in Python."""
        kind = type(value)
        if not is_foreign_class(kind):
            return self.of_object(value)
        if hasattr(value, "__wrapped__"):  # functools.cache
            return {"wraps": self.describe(value.__wrapped__)}
        if state := getattr(value, "__dict__", {}):  # numpy.vectorize
            return {"callable": kind.__name__, "state": self._nested(dict(state))}
        owner = getattr(value, "__self__", None)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        if name is None:
            return self._object(value)
        module = getattr(value, "__module__", None) or kind.__module__
        of = [] if owner is None or isinstance(owner, ModuleType) else [self.describe(owner)]
        return {"callable": [module, name, *of]}

    def _instance(self, value: Any) -> Any:
        of_call, self._of_call = self._of_call, False  # its tensors are no arguments
        try:
            return self._of_class(value)
        finally:
            self._of_call = of_call

    def _of_class(self, value: Any) -> Any:
        kind = type(value)
        held = dict(_held(value))
        if dataclasses.is_dataclass(kind):
            held |= {f.name: getattr(value, f.name, None) for f in dataclasses.fields(kind)}
        state = [[name, self.describe(item)] for name, item in sorted(held.items())]
        description = {"class": self._class(kind), "state": state}
        base: Any = next(base_class for base_class in kind.__mro__ if _has_own_state(base_class))
        if base in _CONTENTS:
            description["contents"] = self.describe(base(value))
        elif base is not object:
            reduced = _reduced(value)
            of_c = self._unnamed(value) if reduced is None else self._of_pickle(kind, reduced)
            description["reduced"] = of_c
        return description

    def _class(self, cls: type) -> Any:
        if is_foreign_class(cls):
            return {"class": cls.__name__}
        if not self._whole:
            return self._at_first_use(cls)
        return {"class": self._number(cls, lambda: self._own_class(cls))}

    def _own_class(self, cls: type) -> Any:
        written: Any = cls
        if getattr(cls, "__triton_aggregate__", False):
            # The class as it was written is only left in Triton's closure.
            constructor: Any = cls.__new__
            original_class = Scope(constructor).lookup("cls")
            written = cls if original_class is MISSING else original_class
        if issubclass(cls, enum.Enum):
            members = {name: member_value.value for name, member_value in cls.__members__.items()}
            members |= {n: m for n, m in _members(cls).items() if _is_enum_function(n, m)}
            if "__new_member__" in members:  # Python 3.10 has no `_new_member_`
                members["_new_member_"] = members.pop("__new_member__")
        else:
            members = {
                name: member
                for name, member in _members(written).items()
                if name != "_abc_impl" and (not name.startswith("__") or _is_written(member))
            }
        return {
            "name": cls.__name__,
            "bases": [self._class(base) for base in written.__bases__],
            "fields": {
                name: self.describe(kind) if isinstance(kind, type) else str(kind)
                for name, kind in _annotations(written).items()
            },
            "members": {
                name: self._referred(member_value) for name, member_value in sorted(members.items())
            },
        }

    def _referred(self, value: Any) -> Any:
        """Describe the references of a text, which need not have an identity."""
        if isinstance(value, MemberDescriptorType):
            return {"slot": value.__name__}
        before = len(self.nameless)
        data = self.describe(value)
        self._alive += self.nameless[before:]
        del self.nameless[before:]
        return data

    def _function(self, jit: Any, function: FunctionType) -> Any:
        scope, facts = Scope(function), facts_of_function(jit, function)
        code = function.__code__
        if facts is None:  # only the compiled code identifies it: that depends on Python's version
            text = encoding.dumps(code_record(code))
            references = {n: scope.lookup(n) for n in (*code.co_names, *code.co_freevars)}
        else:
            text = facts.text
            # Not into the toolchain: `tl.load` is another object in the interpreter.
            references = {name: scope.value_of(name, into_foreign=False) for name in facts.names}
        references["__wrapped__"] = getattr(function, "__wrapped__", MISSING)
        held = {*code.co_freevars}
        return {
            "name": function.__name__,
            "text": text,
            "options": _code_options(jit, function),
            "defaults": self.describe([function.__defaults__, function.__kwdefaults__]),
            "references": [
                [name, self.describe(value) if name in held else self._referred(value)]
                for name, value in sorted(references.items())
                if value is not MISSING
            ],
        }


def _annotations(cls: type) -> dict[str, Any]:
    """Return the annotations of a class.

    Python 3.14 evaluates them here; one with a name that only a type checker has is its text.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        values = inspect.get_annotations(cls, format=Format.FORWARDREF)
        text = inspect.get_annotations(cls, format=Format.STRING)
        return {n: text[n] if "ForwardRef(" in str(value) else value for n, value in values.items()}
    return inspect.get_annotations(cls)


_NESTED = frozenset({tuple, list, dict, set, frozenset})


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


def _reduced(value: Any) -> Any:
    """Return the pickled state of an object; None for one that cannot be pickled."""
    how = copyreg.dispatch_table.get(type(value))
    try:
        return value.__reduce_ex__(2) if how is None else how(value)
    except Exception:
        return None


def _has_own_state(cls: type) -> bool:
    """Whether objects hold more by this class than slots and a dictionary: it is written in C."""
    if not is_heap_class(cls) or cls.__base__ is None:
        return True
    slots = sum(isinstance(member, MemberDescriptorType) for member in vars(cls).values())
    words = slots + ("__dict__" in vars(cls)) + ("__weakref__" in vars(cls))
    own = cls.__basicsize__ - cls.__base__.__basicsize__
    return own > words * struct.calcsize("P") or cls.__itemsize__ != cls.__base__.__itemsize__


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes by name, without values that it computed from them."""
    kind = type(value)
    for name, item in getattr(value, "__dict__", {}).items():
        if "cached_property" not in type(inspect.getattr_static(kind, name, None)).__name__:
            yield name, item
    for cls in kind.__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, MemberDescriptorType) and is_heap_class(cls):
                with contextlib.suppress(AttributeError):
                    yield f"{cls.__name__}.{name}", member.__get__(value)


def _members(cls: type) -> dict[str, Any]:
    """Return the definitions of a class, with the functions of properties and static methods."""
    parts = ("fget", "func", "__func__")
    return {
        name: next((getattr(member, part) for part in parts if hasattr(member, part)), member)
        for name, member in vars(cls).items()
    }


def _is_own_function(member: Any) -> bool:
    return inspect.isfunction(member) and not is_foreign(member)


def _is_enum_function(name: str, member: Any) -> bool:
    """Whether the user wrote this function; each version of Python generates others."""
    return _is_own_function(member) and (not name.startswith("_") or _is_written(member))


@functools.lru_cache(maxsize=256)
def _has_functions(cls: type) -> bool:
    """Whether a class, or one below it, has functions of the user's."""
    own = (base for base in cls.__mro__ if not is_foreign_class(base))
    return any(_is_enum_function(*each) for base in own for each in _members(base).items())


def _is_of_the_user(name: str, member: Any) -> bool:
    """Whether a member of a named tuple's class is neither generated nor inherited from Python."""
    if name.startswith("__"):
        return _is_own_function(member) and _is_written(member)
    generated = name in ("_fields", "_field_defaults", "_abc_impl")
    return _is_own_function(member) if inspect.isfunction(member) else not generated


def _is_written(member: Any) -> bool:
    """Whether a special method is written in a file; a dataclass's are generated."""
    if not inspect.isfunction(member):
        return False
    if any(member.__globals__ is vars(module) for module in (dataclasses, reprlib, typing)):
        return _is_written(getattr(member, "__wrapped__", None))  # a `__repr__`
    return bool(nodes_of(member))


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
    """Whether the class of a kernel's layer is Triton's own, with a known `run`.

    A user's subclass may read any argument, and so may a `run` that is set on the object.
    """
    kind = type(layer)
    is_tritons = kind.__module__.startswith("triton.") and kind.__name__ in LAYERS
    is_tritons = is_tritons or kind in KNOWN
    return is_tritons and "run" not in getattr(layer, "__dict__", ())


def is_interpreted(kernel: Any) -> bool:
    """Return whether a kernel, or the function it decorates, runs in Triton's interpreter."""
    interpreter = sys.modules.get("triton.runtime.interpreter")  # what is not imported ran nothing
    return interpreter is not None and isinstance(
        base_function(kernel)[0], interpreter.InterpretedFunction
    )


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
    """Return the identity of a kernel: a digest over everything that affects its result.

    `around` has the hooks and settings around each launch, None for a missing hook.
    """
    from triton.runtime.autotuner import Autotuner  # `install` comes before the import of Triton

    jit, function = base_function(kernel)
    graph = Graph()
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
    graph.finish()
    if graph.is_cut:
        warn(
            f"{function.__name__} and its hooks refer to more than {MOST_VALUES:,} values; the "
            "rest is ignored, so changing it won't trigger re-tuning. Make the hook or heuristic "
            "refer to less data",
            SettingWarning,
        )
    return KernelIdentity(
        name=function.__name__,
        digest=encoding.digest(
            [function.__name__, root, heuristics, others, *surroundings, graph.parts]
        ),
        source=source_of(jit) or "",
        file=file_of(function),
        line=definition_line(jit),
    )
