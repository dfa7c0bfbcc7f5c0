"""How far apart two right results may be, and a first comparison where they are, without torch."""

from __future__ import annotations

import functools
import math
import random
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from safetune.inputs.spans import REAL
from safetune.isolation.device_bytes import NATIVE_FLOATS, View

#: How far apart two right results may be, as a share of an element plus the same share of its
#: typical size. Each is a small multiple of the resolution of the type, as split-K sums of 16 to
#: 32 terms kept in it need; float32 allows for tf32 products (10 bits).
_SHARES = {"float64": 1e-6, "float32": 2e-3, "float16": 2e-2, "bfloat16": 8e-2}
_NARROW_SHARE = 0.3  # the types of 8 bits and less

#: The order of a sum of n terms of size 1 changes it by about sqrt(n) times the resolution; the
#: factor covers sums whose partial sums are larger than the result.
_ROUNDING_FACTOR = 32
#: Inputs of a larger size are masks such as -1e9, or memory that nothing has written.
_LARGEST_INPUT = 1e4

_SAMPLES = 4096
_FORMATS = {"float64": "d", "float32": "f", "float16": "e", "bfloat16": "f"}


class Difference(NamedTuple):
    """How two tensors differ: `excess` beyond the tolerance, over the typical size, and in how many
    `elements`. Both are 0 where they agree.
    """

    excess: float = 0.0
    elements: int = 0


def share_of(dtype: str) -> float:
    """Return the share of an element that does not count."""
    return _SHARES.get(REAL.get(dtype, dtype), _NARROW_SHARE)


def rounding(inputs: Mapping[float, int], elements: int, dtype: str) -> float:
    """Return how far apart two sums over the inputs may be by rounding alone, however small the
    result is.

    Args:
        inputs: the number of elements of the float inputs, by their typical size.
        elements: of the result.
        dtype: of the result; sums of the narrow types are taken in float32.
    """
    sizes = [size for size in inputs if size <= _LARGEST_INPUT]
    terms = max(1.0, sum(inputs.values()) / max(1, elements))
    eps = 2.0 ** (-52 if dtype == "float64" else -23)
    return _ROUNDING_FACTOR * eps * math.sqrt(terms) * max(sizes, default=0.0)


@functools.lru_cache(64)
def places(count: int, most: int = _SAMPLES) -> list[int]:
    """Return the numbers of some of `count` elements: always the same ones."""
    return list(range(count)) if count <= most else random.Random(0).choices(range(count), k=most)


def typical_size(where: Any, view: View, dtype: str) -> float:
    """Return the median magnitude of the finite elements that are not 0; 0 without any.

    Unlike a mean it is the same whether or not one element is huge.
    """
    return _median(_floats(sample(where, view), dtype))


def sample(where: Any, view: View) -> list[int]:
    """Return the bits of some elements."""
    bits: list[int] = where.gather(view, places(view.count))
    return bits


def are_close(where: Any, mine: View, theirs: View, dtype: str, noise: float) -> bool | None:
    """Whether every element is as near as its type allows; None where this does not show it.

    An element may differ by a share of the typical size of its row or column, too, which is not
    looked at here, and is not larger than the largest element.
    """
    if dtype not in NATIVE_FLOATS:
        return None
    size = min(typical_size(where, mine, dtype), typical_size(where, theirs, dtype))
    share = share_of(dtype)

    def beyond(size: float) -> int:
        return where.beyond(dtype, mine, theirs.address, share, share * size + noise)

    if beyond(size) == 0:
        return True
    largest = min(where.peak(dtype, mine), where.peak(dtype, theirs))
    return False if beyond(max(size, largest)) else None


def are_apart(where: Any, mine: View, theirs: Sequence[int], dtype: str, noise: float) -> bool:
    """Whether some elements are further apart than any rule allows, by a sample of the others.

    Where they are not, `are_close` has to look at all.
    """
    if dtype not in NATIVE_FLOATS:
        return False
    ours, others = _floats(sample(where, mine), dtype), _floats(theirs, dtype)
    size = max(min(_median(ours), _median(others)), where.peak(dtype, mine))
    share = share_of(dtype)
    return any(
        a != b and math.isfinite(a) and abs(a - b) > share * (abs(b) + size) + noise
        for a, b in zip(ours, others, strict=True)
    )


def _median(values: Sequence[float]) -> float:
    sizes = sorted(size for size in map(abs, values) if 0 < size < math.inf)
    return sizes[(len(sizes) - 1) // 2] if sizes else 0.0


def _floats(bits: Sequence[int], dtype: str) -> Sequence[float]:
    width = 8 if dtype == "float64" else 4
    if dtype == "bfloat16":
        bits = [value << 16 for value in bits]
    if dtype == "float16":
        width = 2
    raw = b"".join(value.to_bytes(width, "little") for value in bits)
    return struct.unpack(f"<{len(bits)}{_FORMATS[dtype]}", raw)
