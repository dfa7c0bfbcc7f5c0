"""Compares two tensors, given that configs may sum in different orders.

All functions work in slices, so that a comparison needs little extra memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from safetune.child import tolerance
from safetune.inputs.spans import FLOATS
from safetune.outcome import Difference

#: A quantised value may round the other way: 1 apart, in one of this many elements at most, and in
#: a tensor whose values span more than this range. A mask of 0 and 1 is not quantised.
_QUANTISED = (torch.int8, torch.uint8)
_ROUNDED_SHARE = 16
_ROUNDED_RANGE = 8

_SLICE = 1 << 22
_LINE_SAMPLES = 16
_SHORT_LINE = 8
#: The types of 1, 2, 4 and 8 bytes first.
_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.int8)


def typical_size(tensor: torch.Tensor) -> float:
    """Return the median magnitude of the finite nonzero elements; 0 if there are none.

    Unlike a mean, it does not change with one huge element.
    """
    return float(_median(_picked(tensor, tolerance.SAMPLES), 0).item()) if tensor.numel() else 0.0


def difference(
    mine: torch.Tensor,
    theirs: torch.Tensor,
    noise: float = 0.0,
    any_order: bool = False,
    hole: int | None = None,
    slice_size: int = _SLICE,
) -> Difference:
    """Return the difference of two tensors of the same shape beyond rounding."""
    found = _difference(mine, theirs, noise, hole, slice_size)
    if not (any_order and found.elements and mine.numel() <= slice_size):
        return found
    a, b = _sorted(mine), _sorted(theirs.to(mine.device))
    return min(found, _difference(a, b, noise, hole, slice_size, mine.dtype))


def _difference(
    mine: torch.Tensor,
    theirs: torch.Tensor,
    noise: float,
    hole: int | None,
    slice_size: int,
    dtype: torch.dtype | None = None,
) -> Difference:
    dtype = dtype or mine.dtype
    name = str(dtype).removeprefix("torch.")
    share, fine_share = tolerance.shares_of(name)
    largest, elements, common, fine, rounded, typical = 0.0, 0, 0, 0, 0, math.nan
    for a, b in _pairs(mine, theirs, slice_size):
        distance = _distance(a, b)
        if not bool(distance.any()):
            continue
        if math.isnan(typical):
            # Of one that is nearly all zeros, the few others would decide: the smaller size counts.
            typical = min(typical_size(mine), typical_size(theirs))
        limit = fine_limit = torch.zeros((), device=a.device)
        if a.is_floating_point():
            size = limit + typical
            if bool(_beyond(distance, fine_share * b.abs().clamp(min=typical) + noise).any()):
                # A row or a column may have a scale of its own.
                lines = [_line_sizes(part, tensor) for part, tensor in ((a, mine), (b, theirs))]
                size = torch.minimum(*lines).clamp(min=typical)
            limit = share * (b.abs() + size) + noise
            fine_limit = fine_share * torch.maximum(b.abs(), size) + noise
        elif dtype in _QUANTISED:
            rounded += int((distance == 1).sum())
        beyond = _beyond(distance, limit)
        both = _written(a, hole) & _written(b, hole)
        fine += int((both & _beyond(distance, fine_limit)).sum())
        if bool(beyond.any()):
            elements += int(beyond.sum())
            common += int((both & beyond).sum())
            over = (distance - limit)[beyond].double().nan_to_num(math.inf, math.inf)
            largest = max(largest, float(over.max()))
    if rounded == elements and _is_rounding(theirs, rounded, dtype):
        return Difference()
    excess = largest / typical if typical else math.inf
    return Difference(elements, common, fine, excess if elements else 0.0)


def _written(values: torch.Tensor, hole: int | None) -> torch.Tensor:
    return ~torch.isnan(values) if values.is_floating_point() else values != hole


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not a.is_floating_point():  # whose differences may be too large for their own type
        return (a.double() - b.double()).abs().clamp(min=1).masked_fill(a == b, 0)
    return (a - b).abs().masked_fill(_same(a, b), 0)


def _beyond(distance: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    return ~((distance == 0) | ((distance <= limit) & torch.isfinite(distance)))


def _is_rounding(theirs: torch.Tensor, rounded: int, dtype: torch.dtype) -> bool:
    """Whether the elements that are 1 apart are few, in a tensor of quantised values."""
    if dtype not in _QUANTISED or rounded > max(1, theirs.numel() // _ROUNDED_SHARE):
        return False
    return rounded > 0 and int(theirs.max()) - int(theirs.min()) > _ROUNDED_RANGE


def _column_sizes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the typical size for each index of the last dimension; None for a few short ones."""
    tensor = torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor
    if tensor.dim() < 2 or not tensor.numel() or tensor[..., 0].numel() < _SHORT_LINE:
        return None
    lines = _picked(tensor, _LINE_SAMPLES, dimensions=tensor.dim() - 1)
    return _median(lines, 0)


def _line_sizes(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the typical size of each element's row or column, whichever is larger."""
    columns = _column_sizes(whole)
    sizes = torch.zeros((), device=part.device)
    if part.dim() > 1 and part.shape[-1] >= _SHORT_LINE:
        step = max(1, part.shape[-1] // _LINE_SAMPLES)
        sizes = _median(part[..., ::step], -1).unsqueeze(-1)
    if columns is not None and part.dim() and part.shape[-1] == len(columns):
        sizes = torch.maximum(sizes, columns.to(part.device))
    return sizes


def _median(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the median magnitude along a dimension of those that are finite and not 0, or 0."""
    sizes = values.abs().double() if values.dtype is torch.int64 else values.abs()
    unknown = ~torch.isfinite(sizes) | (sizes == 0)
    return sizes.masked_fill(unknown, math.nan).nanmedian(dim).values.nan_to_num(0.0)


def _picked(tensor: torch.Tensor, count: int, dimensions: int | None = None) -> torch.Tensor:
    """Return some elements, or some of what the first dimensions index: always the same ones."""
    tensor = torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor
    bits = tensor.detach().view(_INTEGERS[tensor.itemsize.bit_length() - 1])
    shape = tuple(tensor.shape if dimensions is None else tensor.shape[:dimensions]) or (1,)
    picked = bits.view(bits.shape or (1,))[_places(shape, count, bits.device)]
    return _real(picked.view(tensor.dtype))


@functools.lru_cache(64)
def _places(shape: tuple[int, ...], count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the indices of at most this many elements, in no order.

    `torch.unravel_index` imports sympy, which takes seconds in a child on a slow disk.
    """
    flat = torch.tensor(tolerance.numbers_of(math.prod(shape), count), device=device)
    indices: list[torch.Tensor] = []
    for size in reversed(shape):
        indices.insert(0, flat % size)
        flat = flat // size
    return tuple(indices)


def _sorted(tensor: torch.Tensor) -> torch.Tensor:
    return torch.sort(_real(tensor).flatten()).values


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    same = mine == theirs
    if mine.dtype.is_floating_point:
        same |= torch.isnan(mine) & torch.isnan(theirs)
    return same


def _pairs(
    mine: torch.Tensor, theirs: torch.Tensor, slice_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for a, b in zip(_slices(mine, slice_size), _slices(theirs, slice_size), strict=True):
        yield _real(a), _real(b.to(a.device))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as one that can be subtracted: complex as pairs, narrow types widened, types
    that torch cannot convert as their bits, and bool too, which may hold other bytes than 0 and 1.
    """
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    if str(tensor.dtype).removeprefix("torch.") in FLOATS:
        return tensor if tensor.dtype is torch.float64 else tensor.float()
    if tensor.dtype not in _INTEGERS:
        tensor = tensor.view(_INTEGERS[tensor.itemsize.bit_length() - 1])
    return tensor.long()


def _slices(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Cut a tensor along its dimensions into parts of a bounded number of elements."""
    if tensor.numel() <= size or not tensor.dim():
        if tensor.numel():
            yield tensor
        return
    for part in tensor.split(max(1, tensor.shape[0] * size // tensor.numel())):
        if len(part) == 1 and part.numel() > size:
            yield from _slices(part[0], size)
        else:
            yield part
