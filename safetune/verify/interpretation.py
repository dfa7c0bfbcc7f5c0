"""Runs any kernel in Triton's interpreter, in any process, and undoes every change afterwards.

Triton decides at decoration whether a kernel is compiled or interpreted, and decides for its own
library functions (`tl.sum`) at import. This module takes the plain function under the decorator,
with every function that it calls, so neither matters. Triton's interpreter replaces functions in
`triton.language`, in its types, and in the globals of the kernel's module. The first two are always
restored; the last is a copy.

While a kernel runs here, other threads must not compile or interpret a kernel, because
`triton.language` is changed. Checks in different threads wait for each other.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton.experimental.gluon  # imports the language when it is first needed: too late here
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from safetune.errors import NotInterpretable
from safetune.keys.source_text import MISSING, Scope
from safetune.verify import __file__ as verify_file

_LOCK = threading.RLock()

_LANGUAGE = "triton.language"

#: A function of the interpreter's builder that returns replacements for its methods.
Instruments = Callable[[Any], Mapping[str, Callable[..., Any]]]


def interpret(
    function: FunctionType,
    arguments: Mapping[str, Any],
    grid: tuple[int, int, int],
    instruments: Instruments,
) -> None:
    """Run a kernel's Python function once for each program of the grid, in order.

    Args:
        arguments: by name. Objects with `data_ptr()` and `dtype` become pointers.

    Raises:
        NotInterpretable: the interpreter raised, or the kernel itself did.
    """
    functions = _Functions()
    builder = interpreter.interpreter_builder
    with _LOCK, _restored([*_language(), builder]), np.errstate(all="ignore"):
        _speak_interpreted(functions)
        vars(builder).update(instruments(builder))
        given = {name: functions.convert(value) for name, value in arguments.items()}
        try:
            _run(functions.interpreted(function).rewritten, given, grid)
        except NotInterpretable:
            raise
        except Exception as error:
            raise NotInterpretable(
                f"{function.__name__} does not run in Triton's interpreter: "
                f"{type(error).__name__}: {error}{_location(error)}"
            ) from error


def _run(kernel: Callable[..., Any], given: Mapping[str, Any], grid: tuple[int, int, int]) -> None:
    """Run Triton's loop over programs."""
    names = list(inspect.signature(kernel).parameters)
    constants = interpreter.GridExecutor(kernel, names, grid).constexprs
    options = {name: value for name, value in given.items() if name in names}
    arguments = {
        name: value if name in constants else _argument(value)
        for name, value in inspect.getcallargs(kernel, **options).items()
    }
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(*grid)
    columns, rows, layers = map(range, grid)  # not `itertools.product`: it makes lists of them
    for program in ((x, y, z) for x in columns for y in rows for z in layers):
        builder.set_grid_idx(*program)
        kernel(**arguments)


def _argument(value: Any) -> Any:
    """Return an argument as a compiled kernel has it: numbers are tensors, floats have 32 bits.

    Triton's interpreter leaves floats as they are, without `to`; Triton 3.6 refuses bools.
    """
    if isinstance(value, (bool, float)):
        number, kind = (bool, tl.int1) if isinstance(value, bool) else (np.float32, tl.float32)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=number), kind), kind)
    if isinstance(value, tuple):
        return interpreter._tuple_create(value, map(_argument, value))
    return interpreter._implicit_cvt(value)


class _Interpreted:
    """Replaces a jit function while kernels run here: a call runs it. Made at the first call."""

    def __init__(self, function: FunctionType, functions: _Functions) -> None:
        self.__name__ = function.__name__
        self._function = function
        self._functions = functions

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.rewritten(*args, **kwargs)

    @functools.cached_property
    def fn(self) -> FunctionType:
        """The plain function, with globals in which every kernel is interpreted."""
        function = self._function
        names, scope = set(_names(function.__code__)), Scope(function)
        nonlocals = {name: scope.lookup(name) for name in function.__code__.co_freevars}
        bound = {name: value for name, value in nonlocals.items() if value is not MISSING}
        space = {**function.__globals__, **bound}
        for name in names & space.keys():
            space[name] = self._functions.convert(space[name])
        space["__triton_language__"] = tl  # the interpreter looks for it under any name
        space.setdefault("range", _range)
        defaults = tuple(map(self._functions.convert, function.__defaults__ or ()))
        code = function.__code__
        copied = FunctionType(code, space, function.__name__, defaults, function.__closure__)
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__annotations__ = function.__annotations__
        copied.__module__ = function.__module__
        return copied

    @functools.cached_property
    def rewritten(self) -> Callable[..., Any]:
        """The function as the interpreter runs it, with the lines of the source file."""
        rewritten = interpreter.FunctionRewriter(self.fn).rewrite_ast()
        for name in ("__defaults__", "__kwdefaults__", "__annotations__"):
            setattr(rewritten, name, getattr(self.fn, name))
        return rewritten


class _Functions:
    """Jit functions and their replacements: one replacement for each function."""

    def __init__(self) -> None:
        self._made: dict[FunctionType, _Interpreted] = {}

    def interpreted(self, function: FunctionType) -> _Interpreted:
        """Return the replacement for the jit function around a plain function."""
        if function not in self._made:
            self._made[function] = _Interpreted(function, self)
        return self._made[function]

    def convert(self, value: Any) -> Any:
        """Return the value that a global, or an argument, of a kernel has in the interpreter."""
        if is_jit(value):
            return self.interpreted(value.fn)
        if isinstance(value, ModuleType) and not _is_language(value.__name__):
            return _View(value, self)
        if inspect.isfunction(value) and tl.core.is_builtin(value):
            return functools.partial(_call_builtin, value)
        if isinstance(value, tl.constexpr) and is_jit(value.value):
            return tl.constexpr(self.convert(value.value))
        return value


class _View(ModuleType):
    """A module of the user, with its jit functions replaced."""

    def __init__(self, module: ModuleType, functions: _Functions) -> None:
        super().__init__(module.__name__)
        self._module, self._functions = module, functions

    def __getattr__(self, name: str) -> Any:
        return self._functions.convert(getattr(self._module, name))


def is_jit(value: Any) -> bool:
    """Whether a value is a function under `@triton.jit`, for the compiler or the interpreter."""
    kinds = (JITFunction, interpreter.InterpretedFunction)
    return isinstance(value, kinds) and inspect.isfunction(value.fn)


def _call_builtin(builtin: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of the language that a module, or a library, has imported by name."""
    kwargs.pop("_semantic", None)
    return builtin(*args, **kwargs, _semantic=interpreter.interpreter_semantic)


def _speak_interpreted(functions: _Functions) -> None:
    """Put the interpreter's functions into `triton.language`."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    for thing in _language():
        if isinstance(thing, ModuleType):
            for name, value in list(vars(thing).items()):
                if is_jit(value):
                    setattr(thing, name, functions.convert(value))
    tl.range = _range
    # Triton 3.6 converts an array of one element to an int, which NumPy 2.4 refuses.
    tl.tensor.__index__ = lambda self: int(self.handle.data.item())


def _range(start: Any, end: Any = None, step: Any = 1, **_: Any) -> Iterator[Any]:
    """`range` and `tl.range` with the counters of a compiled kernel: tensors of 32 or 64 bits.

    Triton's interpreter counts in Python's integers, which have no `to` and never overflow.
    """
    bounds = (0, start, step) if end is None else (start, end, step)
    wide = any(isinstance(bound, tl.tensor) and bound.dtype.int_bitwidth > 32 for bound in bounds)
    number, kind = (np.int64, tl.int64) if wide else (np.int32, tl.int32)
    for value in range(*bounds):
        yield tl.tensor(interpreter.TensorHandle(np.array([value], dtype=number), kind), kind)


def _language() -> list[Any]:
    """Return the modules of `triton.language` and the classes defined in them."""
    modules = [module for name, module in list(sys.modules.items()) if _is_language(name)]
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and _is_language(value.__module__)
    }
    return [*modules, *classes]


def _is_language(name: str) -> bool:
    return name == _LANGUAGE or name.startswith(_LANGUAGE + ".")


@contextlib.contextmanager
def _restored(things: list[Any]) -> Iterator[None]:
    """Restore every attribute of some modules, classes and objects at the end."""
    before = [dict(vars(thing)) for thing in things]
    try:
        yield
    finally:
        for thing, old in zip(things, before, strict=True):
            for name, value in list(vars(thing).items()):
                if name not in old:
                    delattr(thing, name)
                elif value is not old[name]:
                    setattr(thing, name, old[name])
            for name in old.keys() - vars(thing).keys():
                setattr(thing, name, old[name])


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _location(error: BaseException) -> str:
    """Return the line of the kernel that raised an exception, as ` (file:line)`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_machinery(frame.filename)]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


_MACHINERY = tuple(
    str(file).rpartition("__init__.py")[0] for file in (triton.__file__, np.__file__, verify_file)
)


def is_machinery(filename: str) -> bool:
    """Whether a file belongs to Triton, NumPy or this check, and not to the kernel."""
    return filename.startswith(_MACHINERY)
