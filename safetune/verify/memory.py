"""The memory of a checked kernel: copies of its arguments, at made-up addresses.

A kernel does not get the addresses of the copies. Each storage has an address range far from all
others, so an address that is out of bounds by less than 8 TiB still identifies its storage, and a
stray address never hits another argument. The kernel's loads and stores are translated; an access
without a translation is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from safetune.frozen import dataclass
from safetune.inputs.spans import (
    Span,
    TensorSpec,
    merged_spans,
    reading,
    span_of,
    storage_bytes,
    tensor_spec,
    view_of,
)

#: Made-up addresses begin above all real ones, and stay positive as int64.
_FIRST = 1 << 56
_SPACING = 1 << 44

#: The largest alignment that a copy and its made-up address share with the tensor itself.
_ALIGNMENT = 4096


@dataclass(frozen=True)
class View:
    """An argument, or a part of one, as a strided array of bytes in a region."""

    name: str  # the argument; for a part of a tuple `name[0]`
    region: int
    offset: int  # in bytes, as the strides
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def elements(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Region:
    """The copy of one storage, or of several that overlap."""

    address: int  # made up, of its first byte
    real: int  # of the copy's first byte
    nbytes: int


@dataclass(frozen=True)
class Address:
    """A made-up address that a kernel gets in place of a tensor."""

    address: int
    dtype: Any

    def data_ptr(self) -> int:
        """Return the address, like a tensor's method."""
        return self.address


class Memory:
    """Copies of all storages behind the arguments, whose originals are only read."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        leaves = [leaf for argument in arguments.items() for leaf in _tensors(*argument)]
        tensors = [tensor for _, tensor in leaves]
        self._spans = merged_spans(tensors)
        self._copies: list[torch.Tensor] = []
        self.regions: list[Region] = []
        for span in self._spans:
            self._add(span)
        specs = [tensor_spec(tensor, self._spans) for tensor in tensors]
        for tensor in {span_of(tensor): tensor for tensor in tensors}.values():
            self._fill(tensor)
        self.views = [_view(name, spec) for (name, _), spec in zip(leaves, specs, strict=True)]

    def _add(self, span: Span) -> None:
        buffer = torch.zeros(span.size + _ALIGNMENT, dtype=torch.uint8)
        begin = (span.start - buffer.data_ptr()) % _ALIGNMENT
        copy = buffer[begin : begin + span.size]
        # Aligned as the caller's memory is.
        address = _FIRST + len(self.regions) * _SPACING + span.start % _ALIGNMENT
        self._copies.append(copy)
        self.regions.append(Region(address, buffer.data_ptr() + begin, span.size))

    def _fill(self, tensor: torch.Tensor) -> None:
        spec = tensor_spec(tensor, self._spans)
        begin = spec.byte_offset - tensor.storage_offset() * tensor.element_size()
        with reading(tensor.device):
            stored = storage_bytes(tensor).cpu()
        self._copies[spec.block][begin : begin + len(stored)] = stored

    def copied(self, value: Any) -> Any:
        """Return an argument with its tensors replaced by CPU tensors over the copies."""
        return _mapped(value, self._copied_tensor)

    def _copied_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        spec = tensor_spec(tensor, self._spans)
        return view_of(self._copies[spec.block], spec)

    def addressed(self, value: Any) -> Any:
        """Return an argument of `copied` with its tensors replaced by made-up addresses."""
        return _mapped(value, self._address_of)

    def _address_of(self, tensor: torch.Tensor) -> Address:
        # Not `data_ptr()`, which is 0 for a tensor without elements.
        begin = tensor.storage_offset() * tensor.element_size()
        inside = tensor.untyped_storage().data_ptr() + begin
        region = next(r for r in self.regions if r.real <= inside <= r.real + r.nbytes)
        return Address(region.address + inside - region.real, tensor.dtype)

    def locate(self, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each address's region, or -1, and its byte offset there, which may be outside."""
        ranges = (addresses - np.uint64(_FIRST - _SPACING // 2)) >> np.uint64(44)
        numbers = ranges.astype(np.int64)
        numbers[(numbers < 0) | (numbers >= len(self.regions))] = -1
        starts = np.array([*(region.address for region in self.regions), 0], dtype=np.int64)
        return numbers, addresses.astype(np.int64) - starts[numbers]


def _tensors(name: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if isinstance(value, (tuple, list)):
        parts = (_tensors(f"{name}[{index}]", part) for index, part in enumerate(value))
        return [leaf for part in parts for leaf in part]
    if _is_wrapper(value):
        return _tensors(name, value.base)
    return []


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        parts = [_mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, TensorDescriptor):
        return replace(value, base=_mapped(value.base, change))
    if _is_wrapper(value):  # triton.reinterpret
        base = _mapped(value.base, change)
        if isinstance(base, Address):
            return Address(base.address, value.dtype)
        return type(value)(base, value.dtype)
    return value


def _is_wrapper(value: Any) -> bool:
    """Whether a value is a host tensor descriptor, or a result of `triton.reinterpret`.

    A NumPy array over a tensor's memory has a base, too, but is not an argument of a kernel.
    """
    known = isinstance(getattr(value, "base", None), torch.Tensor)
    return known and not isinstance(value, np.ndarray)


def _view(name: str, spec: TensorSpec) -> View:
    itemsize = getattr(torch, spec.dtype).itemsize
    strides = tuple(stride * itemsize for stride in spec.stride)
    return View(name, spec.block, spec.byte_offset, tuple(spec.shape), strides, itemsize)
