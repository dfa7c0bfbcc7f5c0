"""Do two tensors hold the same result, given that configs may add in another order?

Every function works in slices, so that comparing takes little memory beside the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from safetune.inputs.spans import FLOATS

#: How far apart two right results may be, as a share of an element plus the same share of the
#: tensor's root mean square. Each is a small multiple of the resolution of the type, as split-K
#: sums of 16 to 32 terms kept in it need; float32 allows for tf32 products (10 bits).
TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 2e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 8e-2,
}
_NARROW_TOLERANCE = 0.3  # the types of 8 bits and less

#: Two results may differ by this many times the difference between two runs of one config.
_SPREAD_FACTOR = 4.0
_SLICE = 1 << 22
#: The types of 1, 2, 4 and 8 bytes first.
_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.int8, torch.bool)


@dataclass(frozen=True)
class Scale:
    """The `rms` of a result, and the largest difference between two runs of one config."""

    rms: float = 0.0
    spread: float = 0.0


def rms(tensor: torch.Tensor, slice_size: int = _SLICE) -> float:
    """Return the root mean square of a float tensor's finite elements; 0 if it has none."""
    total, count = 0.0, 0
    for part in _slices(tensor, slice_size):
        values = _real(part)
        if not values.is_floating_point():
            return 0.0
        values = values[torch.isfinite(values)]
        total += float(values.square().sum(dtype=torch.float64))
        count += values.numel()
    return (total / count) ** 0.5 if count else 0.0


def spread(one: torch.Tensor, other: torch.Tensor, slice_size: int = _SLICE) -> float:
    """Return the largest difference between elements of two tensors of the same shape.

    Infinite where one of them is NaN or infinite and the other is not equal to it.
    """
    largest = 0.0
    parts = (_slices(tensor, slice_size) for tensor in (one, other))
    for mine, theirs in zip(*parts, strict=True):
        a, b = _real(mine), _real(theirs.to(mine.device))
        if not a.is_floating_point():  # whose differences may be too large for their own type
            a, b = a.double(), b.double()
        difference = torch.where(_same(a, b), torch.zeros_like(a), (a - b).abs())
        largest = max(largest, float(difference.nan_to_num(float("inf")).max()))
    return largest


def agree(
    mine: torch.Tensor,
    theirs: torch.Tensor,
    scale: Scale,
    any_order: bool = False,
    slice_size: int = _SLICE,
) -> bool:
    """Whether two tensors of the same shape hold the same result.

    Args:
        theirs: may be on another device.
        scale: the size of `theirs`, and how badly either repeats.
        any_order: the same values in another order are the same result: an atomic counter hands
            out slots in the order in which programs come.
    """
    if scale.spread and not mine.dtype.is_floating_point and not mine.dtype.is_complex:
        return True  # it differs from run to run, so it cannot be compared
    parts = zip(_slices(mine, slice_size), _slices(theirs, slice_size), strict=True)
    if all(_close(_real(a), _real(b.to(a.device)), mine.dtype, scale) for a, b in parts):
        return True
    if not any_order or mine.numel() > slice_size:
        return False
    a, b = (torch.sort(_real(tensor).flatten()).values for tensor in (mine, theirs.to(mine.device)))
    return _close(a, b, mine.dtype, scale)


def _close(mine: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, scale: Scale) -> bool:
    close = _same(mine, theirs)
    if dtype in (torch.int8, torch.uint8):
        close |= (mine - theirs).abs() <= 1  # a quantised value may round the other way
    elif mine.dtype.is_floating_point:
        share = TOLERANCE.get(dtype.to_real() if dtype.is_complex else dtype, _NARROW_TOLERANCE)
        limit = share * (theirs.abs() + scale.rms) + _SPREAD_FACTOR * scale.spread
        difference = (mine - theirs).abs()
        close |= torch.isfinite(difference) & (difference <= limit)
    return bool(close.all())


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    same = mine == theirs
    if mine.dtype.is_floating_point:
        same |= torch.isnan(mine) & torch.isnan(theirs)
    return same


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as one that can be subtracted: complex as pairs, narrow types widened, types
    that torch cannot convert as their bits.
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
