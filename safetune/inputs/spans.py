"""The bytes behind tensors: where they are in memory, in a memory file and in a child."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from safetune.errors import KernelNotTransferable
from safetune.isolation import backend

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

#: torch's CUDA allocator aligns to 512 bytes; no instruction needs more.
ALIGNMENT = 512


@dataclass(frozen=True)
class Noise:
    """How the bytes of a block are drawn: normal values of a real dtype, cut to [low, high].

    Attributes:
        seed: the same bits for every process that draws on the same kind of device.
    """

    dtype: str
    mean: float
    std: float
    low: float
    high: float
    seed: int


@dataclass(frozen=True)
class BlockSpec:
    """One run of bytes: `size` bytes at `offset` in the memory file, to be placed on `device` at
    an address that is `misalignment` past a multiple of 512.

    Attributes:
        noise: the fields of the `Noise` to draw the bytes from; they are then not in the file.
    """

    device: str
    offset: int
    size: int
    misalignment: int
    noise: dict[str, Any] | None = None


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
        """Return the view in plain JSON data, which has no tuples."""
        return cls(**{**data, "shape": tuple(data["shape"]), "stride": tuple(data["stride"])})


@dataclass(frozen=True)
class Absent:
    """A tensor of the caller that is not copied: the properties of a meta tensor in its place.

    Attributes:
        device: its type of device, such as `cpu` or `cuda`.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str


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
        """Its bytes."""
        return self.end - self.start


def span_of(tensor: torch.Tensor) -> Span:
    """Return where a tensor's storage is.

    Raises:
        KernelNotTransferable: it has no plain storage (sparse, fake, a wrapper subclass).
    """
    try:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
    except (RuntimeError, NotImplementedError) as error:
        raise _not_plain(tensor) from error
    if tensor.device.type != "cpu" and tensor.device.type != _device_type():
        raise _not_plain(tensor)
    return Span(str(tensor.device), start, start + storage.nbytes())


def _device_type() -> str | None:
    found = backend.current()
    return None if found is None else found.torch_type


def merged_spans(tensors: Sequence[torch.Tensor]) -> list[Span]:
    """Return the storages of tensors; storages that overlap are merged."""
    merged: list[Span] = []
    for span in sorted({span_of(tensor) for tensor in tensors}):
        last = merged[-1] if merged else None
        if last is not None and last.device == span.device and span.start < last.end:
            merged[-1] = Span(last.device, last.start, max(last.end, span.end))
        else:
            merged.append(span)
    return merged


def block_of(span: Span, merged: Sequence[Span]) -> int:
    """Return the index of the merged span that contains this one."""
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
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def view_of(block_bytes: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a tensor as its view of a block's bytes."""
    dtype = getattr(torch, spec.dtype)
    offset = block_bytes.storage_offset() + spec.byte_offset
    itemsize = dtype.itemsize
    if offset % itemsize:
        raise ValueError(f"a {spec.dtype} tensor at a byte offset of {offset}")
    view = torch.empty(0, dtype=dtype, device=block_bytes.device)
    return view.set_(block_bytes.untyped_storage(), offset // itemsize, spec.shape, spec.stride)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage behind a tensor, as bytes; no copy."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


@contextlib.contextmanager
def reading(device: torch.device) -> Iterator[None]:
    """Copy from `device` to the host in here, beside a graph that another thread captures.

    What the current stream has queued is waited for; nothing is put on that stream.
    """
    if device.type == "cpu":
        yield
        return
    with backend.required().reading(device.index):
        yield


def _not_plain(tensor: torch.Tensor) -> KernelNotTransferable:
    return KernelNotTransferable(
        f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} on {tensor.device} has no plain "
        'storage to copy; pass its plain tensor, or tune this kernel with isolation="inline"'
    )
