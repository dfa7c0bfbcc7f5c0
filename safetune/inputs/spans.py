"""The bytes behind tensors: their places in memory, in a memory file and in a child.

A child without torch reads layouts, so only functions that need tensors import torch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from safetune.both import backend
from safetune.errors import KernelNotTransferable

if TYPE_CHECKING:
    import torch

#: The float types that torch can fill.
FLOATS = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
)

#: The float type of both parts of each complex type.
REAL = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}

#: torch's CUDA allocator aligns to 512 bytes; no instruction needs more.
ALIGNMENT = 512


#: A block on `pinned:0` is memory of the host that kernels on device 0 read and write.
PINNED = "pinned"


@dataclass(frozen=True)
class Noise:
    """The random values of a block: normal values of a real dtype, clipped to [low, high].

    A seed gives the same bits in all processes that draw on the same kind of device.
    """

    dtype: str
    mean: float
    std: float
    low: float
    high: float
    seed: int


@dataclass(frozen=True)
class Place:
    """`size` bytes at `offset` in a numbered piece of a layout's shared memory."""

    memory: int
    offset: int
    size: int


@dataclass(frozen=True)
class BlockSpec:
    """One run of bytes: `size` bytes at `offset` in the memory file, to be placed on `device` at an
    address that is `misalignment` past a multiple of 512. With `noise` they are drawn instead. If
    the first of them are at a `place` on the device, the file has only the rest.
    """

    device: str
    offset: int
    size: int
    misalignment: int
    noise: Noise | None = None
    place: Place | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether it is host memory that a device reads."""
        return self.device.startswith(PINNED)

    @property
    def head(self) -> int:
        """The number of bytes that are on the device."""
        return self.place.size if self.place else 0


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as a view of a block: dtype name, shape, strides (in elements), byte offset."""

    block: int
    byte_offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, data: dict[str, Any]) -> TensorSpec:
        """Return the view from plain JSON data, which has no tuples."""
        return cls(**{**data, "shape": tuple(data["shape"]), "stride": tuple(data["stride"])})

    def is_dense(self) -> bool:
        """Whether the elements are contiguous in memory, in any order."""
        return are_packed(sorted(zip(self.shape, self.stride, strict=True), key=itemgetter(1)))


@dataclass(frozen=True)
class Absent:
    """A tensor of the caller that is not copied: the properties of the meta tensor that replaces
    it.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Absent:
        """Return the properties of a tensor."""
        dtype = dtype_name(tensor)
        return cls(dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.device.type)


@dataclass(frozen=True)
class Layout:
    """The places of a call's tensors in a memory file, and the tensors that are not copied, by
    number.
    """

    blocks: tuple[BlockSpec, ...]
    tensors: tuple[TensorSpec, ...]
    absent: dict[int, Absent] = field(default_factory=dict)
    shared: tuple[tuple[str, int], ...] = ()  # device and size of each piece of shared memory
    fds: tuple[int, ...] = ()  # in a child, the descriptors of these


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's type in `torch`."""
    return str(tensor.dtype).removeprefix("torch.")


def itemsize(dtype: str) -> int:
    """Return the bytes per element of a type, by its torch name."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def are_packed(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether each dimension (size, stride), innermost first, begins where the previous one ends;
    always true for tensors without elements.
    """
    expected = 1
    for size, step in dims:
        if size != 1 and step != expected:
            return any(size == 0 for size, _ in dims)
        expected *= size
    return True


def aligned(size: int) -> int:
    """Return a size in bytes, rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, order=True)
class Span:
    """A range of addresses on one device."""

    device: str
    start: int
    end: int

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.end - self.start


def span_of(tensor: torch.Tensor) -> Span:
    """Return the address range of a tensor's storage.

    Raises `KernelNotTransferable` unless the tensor is plain (not sparse, fake, or a wrapper
    subclass).
    """
    found = backend.current()
    with contextlib.suppress(RuntimeError, NotImplementedError):
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if tensor.device.type == "cpu" or (found and tensor.device.type == found.torch_type):
            return Span(str(tensor.device), start, start + storage.nbytes())
    raise KernelNotTransferable(
        f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} on {tensor.device} has no plain "
        'storage to copy; pass its plain tensor, or tune this kernel with isolation="inline"'
    )


def merged_spans(tensors: Sequence[torch.Tensor]) -> list[Span]:
    """Return the storages of tensors, with overlapping storages merged."""
    merged: list[Span] = []
    for span in sorted({span_of(tensor) for tensor in tensors}):
        if merged and merged[-1].device == span.device and span.start < merged[-1].end:
            merged[-1] = replace(merged[-1], end=max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def block_of(span: Span, merged: Sequence[Span]) -> int:
    """Return the index of the merged span that contains `span`."""
    return next(
        index
        for index, block in enumerate(merged)
        if block.device == span.device and block.start <= span.start and span.end <= block.end
    )


def tensor_spec(tensor: torch.Tensor, merged: Sequence[Span]) -> TensorSpec:
    """Return a tensor as a view of the merged span that contains it."""
    span = span_of(tensor)
    block = block_of(span, merged)
    begin = span.start + tensor.storage_offset() * tensor.element_size()
    return TensorSpec(
        block=block,
        byte_offset=begin - merged[block].start,
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def view_of(block_bytes: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor from its spec, as a view of a block's bytes."""
    import torch

    view = torch.empty(0, dtype=getattr(torch, spec.dtype), device=block_bytes.device)
    offset, rest = divmod(block_bytes.storage_offset() + spec.byte_offset, view.itemsize)
    if rest:
        raise ValueError(f"a {spec.dtype} tensor at a byte offset of {spec.byte_offset}")
    return view.set_(block_bytes.untyped_storage(), offset, spec.shape, spec.stride)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage behind a tensor as bytes, without a copy."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def reading(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Copy from a device to the host in the body, see `Backend.reading`."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    return backend.required().reading(device.index)
