"""A kernel and its call as bytes that another process can rebuild.

A jit function travels by value: its Python function through cloudpickle, with its source lines, so
that the child's copy has the same text at the same lines and therefore the same cache key. The
child does not import the user's modules: a script without a main guard, a notebook cell and a
closure work like a module, and a module with side effects does not run twice. References of a
kernel, a hook or a heuristic to a module are imported by name, as in pickle.

Tensors are not pickled. Each becomes its number in a `TensorTable`; their storages go through a
memory file (see `snapshot`).
"""

from __future__ import annotations

import ast
import importlib
import io
import linecache
import pickle
import sys
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle
import triton.language
from triton.runtime.jit import JITCallable, JITFunction

from safetune.errors import KernelNotTransferable
from safetune.keys.source_text import file_of, is_foreign, source_lines, tree_of

if TYPE_CHECKING:
    import torch


def pack(
    value: Any,
    what: str,
    tensors: TensorTable | None = None,
    by_value: Iterable[Any] = (),
) -> bytes:
    """Return `value` as bytes for `unpack` in another process; raises `KernelNotTransferable`.

    Args:
        what: the name of `value` in an error, e.g. `the arguments of add_kernel`.
        tensors: collects every tensor; without it, a tensor is an error.
        by_value: functions whose modules the other process need not import.
    """
    modules = _own_modules(by_value)
    try:
        return _dump(value, what, tensors, modules)
    except KernelNotTransferable:
        if not modules:
            raise
        return _dump(value, what, tensors)  # the module's contents may still be importable


def unpack(
    data: bytes,
    tensors: Sequence[Any] = (),
    size: Callable[[tuple[int, ...]], Any] | None = None,
) -> Any:
    """Rebuild the output of `pack`, with `tensors` in place of the table's.

    `size` creates the shape of a tensor; without it, torch does.
    """
    return _Unpacker(io.BytesIO(data), tensors, size).load()


#: In place of a line of a file that was not sent; unlike a blank line it ends a function's block.
_UNKNOWN_LINE = "pass\n"


def _dump(
    value: Any, what: str, tensors: TensorTable | None, modules: frozenset[str] = frozenset()
) -> bytes:
    buffer = io.BytesIO()
    try:
        _Packer(buffer, tensors, modules).dump(value)
    except KernelNotTransferable:
        raise
    except Exception as error:  # pickling runs the reducers of arbitrary objects
        raise KernelNotTransferable(
            f"{what} cannot be sent to a tuning process: {type(error).__name__}: {error}. Keep it "
            "out of the kernel's globals, closures and hooks, or tune this kernel with "
            'isolation="inline"'
        ) from error
    return buffer.getvalue()


def _own_modules(functions: Iterable[Any]) -> frozenset[str]:
    names = {getattr(function, "__module__", None) for function in functions}
    modules = (sys.modules.get(name) for name in names if name and name != "__main__")
    return frozenset(m.__name__ for m in modules if m is not None and not is_foreign(m))


class TensorTable:
    """The tensors of one call, in the order of packing."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """Return the tensor's number, the same for the same object."""
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return number


_reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]
_reduce_class = cloudpickle.cloudpickle._dynamic_class_reduce


def _named_code(build: Callable[..., CodeType], parts: tuple[Any, ...], filename: str) -> CodeType:
    return build(*parts).replace(co_filename=filename)


def _reduce_code_of_a_file(code: CodeType) -> tuple[Any, ...]:
    """cloudpickle 3.1.3 gives all code one file name, but lines are looked up by file."""
    return _named_code, (*_reduce_code(code), code.co_filename)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar = ChainMap(
        {CodeType: _reduce_code_of_a_file}, cloudpickle.Pickler.dispatch_table
    )

    def __init__(
        self, buffer: io.BytesIO, tensors: TensorTable | None, modules: frozenset[str]
    ) -> None:
        super().__init__(buffer)
        self._tensors, self._modules = tensors, modules

    def persistent_id(self, obj: Any) -> int | tuple[int, ...] | None:
        if _is_instance(obj, "torch", "Size"):  # of a descriptor's tensor
            return tuple(obj)
        if not _is_instance(obj, "torch", "Tensor"):  # a compile child imports no torch for this
            return None
        if self._tensors is None:
            raise KernelNotTransferable(
                f"a tensor of shape {tuple(obj.shape)} is captured by a function: "
                "pass it to the kernel as an argument"
            )
        return self._tensors.number(obj)

    def reducer_override(self, obj: Any) -> Any:
        state: tuple[Any, ...]
        if isinstance(obj, (FunctionType, type)) and self._modules.intersection(_homes(obj)):
            is_class = isinstance(obj, type)
            return _reduce_class(obj) if is_class else self._dynamic_function_reduce(obj)
        if _is_own_kind_of_module(obj):
            return importlib.import_module, (obj.__name__,)
        if _is_instance(obj, "triton.runtime.interpreter", "InterpretedFunction"):
            source = _source_lines(obj)
            # The interpreter needs one of the names of `triton.language`.
            languages = (triton.language, triton.language.core)
            names = {n: v for n, v in obj.fn.__globals__.items() if any(v is m for m in languages)}
            names |= _signature_globals(obj.fn, source)
            state = (obj.fn, dict(obj.kwargs), file_of(obj.fn), source, None, names)
        elif isinstance(obj, JITCallable):
            source = ("".join(obj.raw_src), obj.starting_line_number)
            names = _signature_globals(obj.fn, source)
            text = (obj._src, obj.cache_key)
            state = (obj.fn, _jit_options(obj), file_of(obj.fn), source, text, names)
        else:
            return super().reducer_override(obj)
        return _new, (type(obj),), state, None, None, _init


class _Unpacker(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: Sequence[Any], size: Any) -> None:
        super().__init__(buffer)
        self._tensors, self._size = tensors, size

    def persistent_load(self, pid: Any) -> Any:
        if not isinstance(pid, tuple):
            return self._tensors[pid]
        if self._size is None:
            import torch

            self._size = torch.Size
        return self._size(pid)


def _homes(obj: Any) -> list[str]:
    """Return the names of the module of a function or class, and of the packages around it."""
    parts = (getattr(obj, "__module__", None) or "").split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _is_own_kind_of_module(obj: Any) -> bool:
    """Whether an object is an importable module of a class of its own, as torch.backends is."""
    is_other = isinstance(obj, ModuleType) and type(obj) is not ModuleType
    return is_other and sys.modules.get(obj.__name__) is obj


def _is_instance(obj: Any, module: str, name: str) -> bool:
    """Whether an object is of a class in a module that may not have been imported."""
    return module in sys.modules and isinstance(obj, getattr(sys.modules[module], name))


def _jit_options(jit: JITCallable) -> dict[str, Any]:
    if not isinstance(jit, JITFunction):
        return {}
    same = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")
    options = {name: getattr(jit, name) for name in same}
    return {**options, "repr": jit._repr, "launch_metadata": jit.launch_metadata}


def _source_lines(interpreted: Any) -> tuple[str, int] | None:
    lines, start = source_lines(interpreted)
    return ("".join(lines), start) if lines else None


def _signature_globals(
    function: Callable[..., Any], source: tuple[str, int] | None
) -> dict[str, Any]:
    """Return the globals that only the signature names, in defaults and annotations: Triton reads
    them when it parses the source again, and pickling by value does not send them.
    """
    if source is None:
        return {}
    (definition,) = tree_of(textwrap.dedent(source[0])).body
    assert isinstance(definition, ast.FunctionDef)
    names = {n.id for n in ast.walk(definition.args) if isinstance(n, ast.Name)}
    return {name: function.__globals__[name] for name in names if name in function.__globals__}


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


def _init(obj: Any, state: tuple[Any, ...]) -> None:
    """Build the jit function in place; in a second step because its globals may refer to it."""
    function, options, file, source, text, signature_globals = state
    function.__globals__.update(signature_globals)
    function.__code__ = function.__code__.replace(co_filename=file)
    if source is not None:
        _remember_source(file, *source)
    else:  # Python 3.13 keeps there, as `<string>`, the text of the `-c` that started this process
        linecache.cache.pop(file, None)
    obj.__init__(function, **options)
    if text is not None:
        # The cache key is sent as well: Triton 3.6 computes another one for the same functions,
        # depending on the functions that it has seen before.
        obj._src, obj.hash = text


def _remember_source(filename: str, text: str, start: int) -> None:
    """Put the lines where `inspect` looks first, so that the file need not exist."""
    entry = linecache.cache.get(filename)
    lines = list(entry[2]) if entry and len(entry) == 4 and entry[1] is None else []
    new = text.splitlines(keepends=True)
    end = start - 1 + len(new)
    lines.extend(_UNKNOWN_LINE for _ in range(end - len(lines)))
    lines[start - 1 : end] = new
    linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
