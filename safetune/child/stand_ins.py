"""Tensors without torch, sufficient for Triton, heuristics and simple hooks.

Importing torch takes longer than tuning a small kernel. A stand-in answers like the GPU tensor. If
user code asks for more, that is noted, and a child with torch rebuilds the call.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from safetune.both.device_bytes import Run
from safetune.child.arguments import Arguments
from safetune.inputs.spans import Layout, TensorSpec, are_packed, itemsize

#: What stand-ins have been asked for in vain, in this process.
asked: list[str] = []

#: The types whose names say how large they are.
_PLAIN = re.compile(r"(float|bfloat|int|uint|complex)(8|16|32|64|128)(_e\dm\d(fn|fnuz|fnu)?)?|bool")

#: Special attributes by which code recognises a tensor.
_OF_TENSORS = re.compile(r"__(torch_\w+|cuda_array_interface|array_(interface|priority))__")

#: Packages whose code is not the user's.
_OURS = {"safetune", "triton", *sys.stdlib_module_names}

_OPERATORS = """
add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv rfloordiv ifloordiv
mod rmod pow rpow matmul rmatmul and rand iand or ror ior xor rxor ixor lshift rshift neg pos abs
invert lt le gt ge eq ne getitem setitem delitem len iter reversed contains bool int float complex
index round array dlpack dlpack_device deepcopy copy reduce_ex format
"""


class TorchNeeded(BaseException):
    """User code needs a real torch tensor; not an `Exception`, which user code might catch."""


def _more(what: str) -> NoReturn:
    asked.append(what)
    raise TorchNeeded(f"{what} needs torch")


def lacks_torch() -> bool:
    """Whether torch is not imported in this process."""
    return "torch" not in sys.modules


def need_torch(what: str) -> None:
    """If this process lacks torch, note that `what` needs it and raise `TorchNeeded`."""
    if lacks_torch():
        _more(what)


class _Limited:
    """Records requests for missing attributes, and cannot be changed."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        # Python and Triton look for special methods that a tensor does not have either.
        if name.startswith("__") and not _OF_TENSORS.fullmatch(name):
            raise AttributeError(name)
        return _more(f"{type(self).__name__}.{name}")

    def __setattr__(self, name: str, value: object) -> None:
        _more(f"{type(self).__name__}.{name} = ...")


class DType(_Limited):
    """An element type; one object per name, as in torch."""

    def __init__(self, name: str) -> None:
        super().__init__(
            _name=name,
            itemsize=itemsize(name),
            is_floating_point="float" in name,
        )

    def __repr__(self) -> str:
        return f"torch.{self._name}"

    def __reduce__(self) -> NoReturn:
        _more("pickling a dtype")


@functools.cache
def dtype_of(name: str) -> DType:
    """Return the element type with this torch name."""
    return DType(name)


class Device(_Limited):
    """A GPU, by its kind and index; one object for each (see `device_of`)."""

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    def __repr__(self) -> str:
        return f"device(type={self.type!r}, index={self.index})"


@functools.cache
def device_of(kind: str, index: int | None) -> Device:
    """Return the device of a kind with this index."""
    return Device(type=kind, index=index)


class Shape(tuple[int, ...]):
    """The sizes of a tensor."""

    __slots__ = ()

    def numel(self) -> int:
        """Return the number of elements."""
        return functools.reduce(int.__mul__, self, 1)

    def __repr__(self) -> str:
        return f"torch.Size({[*self]})"

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Shape(found) if isinstance(index, slice) else found

    def __getattr__(self, name: str) -> Any:
        return _more(f"shape.{name}")


class StandIn(_Limited):
    """A tensor at a device address, with some methods of `torch.Tensor`."""

    def __init__(
        self, spec: TensorSpec, address: int, device: Device, where: Any, memory: Any = None
    ) -> None:
        super().__init__(
            dtype=dtype_of(spec.dtype),
            itemsize=dtype_of(spec.dtype).itemsize,
            shape=Shape(spec.shape),
            ndim=len(spec.shape),
            device=device,
            is_cuda=device.index is not None,
            _spec=spec,
            _address=address if 0 not in spec.shape else 0,  # as torch says of one without elements
            _where=where,
            _memory=memory,  # freed with this
        )

    def __repr__(self) -> str:
        return f"<{self.dtype!r} tensor of shape {tuple(self.shape)} on {self.device}>"

    def data_ptr(self) -> int:
        return int(self._address)

    def stride(self, dim: int | None = None) -> Any:
        return self._spec.stride if dim is None else self._spec.stride[dim]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return int(self.shape.numel())

    def dim(self) -> int:
        return int(self.ndim)

    def element_size(self) -> int:
        return int(self.itemsize)

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    def is_contiguous(self, **options: Any) -> bool:
        if options:
            _more("is_contiguous(memory_format)")
        return are_packed([*zip(self.shape, self._spec.stride, strict=True)][::-1])

    def zero_(self) -> StandIn:
        self._check_dense("zero_")
        self._where.set_bytes(Run(self._address, self.nbytes), 0)
        return self

    def clone(self, *, memory_format: Any = None) -> StandIn:
        if memory_format is not None:
            _more("clone(memory_format)")
        self._check_dense("clone")
        memory = self._where.allocate(self.nbytes)
        copied = StandIn(self._spec, memory.address, self.device, self._where, memory)
        return copied.copy_(self)

    def copy_(self, src: StandIn, non_blocking: bool = False) -> StandIn:
        """Copy the elements of a tensor of the same shape, strides and type."""
        self._check_dense("copy_")
        mine, theirs = self._spec, src._spec if isinstance(src, StandIn) else None
        if theirs is None or (mine.dtype, mine.shape, mine.stride) != (
            (theirs.dtype, theirs.shape, theirs.stride)
        ):
            _more("copy_ from another kind of tensor")
        self._where.copy(self._address, src._address, self.nbytes)
        return self

    def is_dense(self) -> bool:
        """Whether the elements are contiguous in memory, in any order."""
        return bool(self._spec.is_dense())

    def _check_dense(self, what: str) -> None:
        if not self.is_dense():
            _more(f"{what} of elements that are apart")


def _refusing(operator: str) -> Any:
    return lambda self, *args, **kwargs: _more(f"the operator {operator} of a tensor")


for _operator in _OPERATORS.split():
    setattr(StandIn, f"__{_operator}__", _refusing(_operator))
StandIn.__hash__ = object.__hash__  # type: ignore[method-assign]  # by identity, as torch's
for _class, _name in ((StandIn, "Tensor"), (Shape, "Size"), (DType, "dtype"), (Device, "device")):
    _class.__name__ = _class.__qualname__ = _name
    _class.__module__ = "torch"


@contextlib.contextmanager
def noting_torch() -> Iterator[None]:
    """In the body, note imports of torch, which does not work on stand-ins, and errors of user
    code, which real tensors might not cause.
    """
    before = "torch" in sys.modules
    try:
        yield
    except BaseException as error:
        if not before and _is_of_user(error):
            asked.append(f"code that raised {type(error).__name__}")
        raise
    finally:
        if not before and "torch" in sys.modules:
            asked.append("an import of torch")


def _is_of_user(error: BaseException) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    names = (frame.f_globals.get("__name__") for frame in frames)
    return any(name and name.partition(".")[0] not in _OURS for name in names)


def can_stand_in(layout: Layout) -> bool:
    """Whether all tensors of a call are on a GPU and have types known here."""
    on_gpu = all(":" in block.device for block in layout.blocks)
    known = all(_PLAIN.fullmatch(view.dtype) for view in layout.tensors)
    return on_gpu and known and not layout.absent


def of(arguments: Arguments) -> list[StandIn]:
    """Return stand-ins for the tensors of a call."""
    made = []
    for number, view in enumerate(arguments.views):
        block = arguments.blocks[view.block]
        kind, _, index = block.spec.device.partition(":")
        device = device_of("cpu", None) if block.spec.is_pinned else device_of(kind, int(index))
        made.append(StandIn(view, arguments.elements(number).address, device, block.bytes))
    return made
