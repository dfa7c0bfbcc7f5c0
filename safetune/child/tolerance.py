"""The allowed difference between two right results, and a check for it without torch.

Importing torch takes longer than tuning a small kernel, and most differences come from summation
order.
"""

from __future__ import annotations

import functools
import math
import random
import struct
from collections.abc import Mapping
from typing import Any

from safetune.both.device_bytes import NATIVE_FLOATS, View
from safetune.inputs.spans import REAL

#: How far apart two right results may be, as a share of an element plus the same share of its
#: typical size. Each is a small multiple of the resolution of the type, as split-K sums of 16 to
#: 32 terms kept in it need; float32 allows for tf32 products (10 bits).
_SHARES = {"float64": 1e-6, "float32": 2e-3, "float16": 2e-2, "bfloat16": 8e-2}
_NARROW_SHARE = 0.3  # the types of 8 bits and less
#: How far apart they are where nothing that matters to the result differs, as a share of an element
#: or of its typical size: four units in the last place and, in float32, sums in matrix units.
_FINE_SHARES = {"float64": 1e-9, "float32": 2e-4, "float16": 2.0**-8, "bfloat16": 2.0**-5}

#: The order of a sum of n terms of size 1 changes it by about sqrt(n) times the resolution; the
#: factor covers sums whose partial sums are larger than the result.
_ROUNDING_FACTOR = 32
#: Inputs of a larger size are masks such as -1e9, or memory that nothing has written.
_LARGEST_INPUT = 1e4

#: The most elements of which a typical size is found.
SAMPLES = 4096
_FORMATS = {"float64": "d", "float32": "f", "float16": "e", "bfloat16": "f"}


def shares_of(dtype: str) -> tuple[float, float]:
    """Return the relative tolerance for a dtype, and the stricter one for equal results."""
    kind = REAL.get(dtype, dtype)
    return _SHARES.get(kind, _NARROW_SHARE), _FINE_SHARES.get(kind, _NARROW_SHARE)


def rounding(inputs: Mapping[float, int], elements: int, dtype: str) -> float:
    """Return the difference that rounding alone may cause between two sums over the inputs, however
    small the result.

    Args:
        inputs: the number of elements of the float inputs, by typical size.
        elements: the number of elements of the result.
        dtype: of the result; narrow types are summed in float32.
    """
    sizes = [size for size in inputs if size <= _LARGEST_INPUT]
    terms = max(1.0, sum(inputs.values()) / max(1, elements))
    eps = 2.0 ** (-52 if dtype == "float64" else -23)
    return _ROUNDING_FACTOR * eps * math.sqrt(terms) * max(sizes, default=0.0)


@functools.lru_cache(64)
def numbers_of(total: int, most: int = SAMPLES) -> list[int]:
    """Return at most `most` of `total` element indices: always the same ones."""
    every = range(total)
    return list(every) if total <= most else random.Random(0).choices(every, k=most)


def typical_size(where: Any, view: View, dtype: str) -> float:
    """Return the median magnitude of the finite nonzero elements; 0 if there are none.

    Unlike a mean, it does not change with one huge element.
    """
    if not view.count:
        return 0.0
    values = _floats(where.gather(view, numbers_of(view.count)), dtype)
    sizes = sorted(size for size in map(abs, values) if 0 < size < math.inf)
    return sizes[(len(sizes) - 1) // 2] if sizes else 0.0


def are_near(
    where: Any, mine: View, theirs: View, dtype: str, noise: float, fine: bool = True
) -> bool:
    """Whether all elements are so close that `compare.difference` finds none beyond the tolerance.

    If False, `compare` must check: it also considers the sizes of rows and columns.

    Args:
        where: the memory of both, see `DeviceBytes`.
        fine: use the stricter tolerance of `shares_of`.
    """
    if dtype not in NATIVE_FLOATS:
        return False
    size = min(typical_size(where, mine, dtype), typical_size(where, theirs, dtype))
    share = shares_of(dtype)[fine]
    return bool(where.beyond(dtype, mine, theirs.address, share, share * size + noise) == 0)


def _floats(bits: list[int], dtype: str) -> tuple[float, ...]:
    width = {"float64": 8, "float16": 2}.get(dtype, 4)
    if dtype == "bfloat16":
        bits = [value << 16 for value in bits]
    raw = b"".join(value.to_bytes(width, "little") for value in bits)
    return struct.unpack(f"<{len(bits)}{_FORMATS[dtype]}", raw)
