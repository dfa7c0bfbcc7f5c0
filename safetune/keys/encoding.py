"""Plain data as canonical JSON text, its digest, and the names of dtypes.

`identity` turns other values into plain data.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from safetune.frozen import dataclass

#: Triton's short dtype names, spelled as torch and numpy spell them.
_TRITON_DTYPES = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8e4nv": "float8_e4m3fn",
    "fp8e4b8": "float8_e4m3fnuz",
    "fp8e5": "float8_e5m2",
    "fp8e5b16": "float8_e5m2fnuz",
    "int1": "bool",
}


@dataclass(frozen=True)
class TensorType:
    """Stands in for a tensor if only its dtype is known, as while a compiler traces."""

    dtype: Any


@dataclass(frozen=True)
class DescriptorType:
    """Stands in for a tensor descriptor if only its `element_type` is known."""

    element_type: Any


def dtype_name(dtype: Any) -> str:
    """Return a common name for a dtype of torch, Triton, numpy or JAX: `bfloat16` for
    `torch.bfloat16` and for `tl.bfloat16`.
    """
    name = str(getattr(dtype, "name", dtype))
    name = name.rpartition(".")[2]
    return _TRITON_DTYPES.get(name, name)


def element_type(value: Any) -> Any:
    """Return the element properties of an argument that a config may depend on, hashable.

    The dtype of a tensor. For a tensor descriptor, also the memory order of its dimensions and of
    its tensor's dimensions. For a tuple that contains any of these, the properties of its parts.
    None for any other value.
    """
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        return dtype if is_dtype(dtype) else dtype_name(dtype)
    if isinstance(value, (tuple, list)):
        parts = tuple(map(element_type, value))
        return parts if any(part is not None for part in parts) else None
    if is_descriptor(value):
        base = value.base.stride() if hasattr(value.base, "stride") else ()
        return "descriptor", element_type(value.base), _order(value.strides), _order(base)
    return value.element_type if isinstance(value, DescriptorType) else None


def is_descriptor(value: Any) -> bool:
    """Whether an argument is a tensor descriptor, of Triton or of a compiler that traces one."""
    return hasattr(value, "block_shape") and hasattr(value, "strides") and hasattr(value, "base")


def _order(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions from the one with the longest stride to that with the shortest."""
    return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))


def type_name(kind: Any) -> str:
    """Return an `element_type` as text.

    A descriptor of a row-major float32 matrix is `float32[01]`, of a column-major one with swapped
    dimensions `float32[01 of 10]`.
    """
    if not isinstance(kind, tuple):
        return dtype_name(kind)
    if kind[0] == "descriptor":
        own, base = ("".join(map(str, order)) for order in kind[2:])
        return f"{dtype_name(kind[1])}[{own if own == base else f'{own} of {base}'}]"
    return f"({','.join(map(type_name, kind))})"


def is_dtype(value: Any) -> bool:
    """Whether `value` is a dtype object of torch, Triton or numpy (by class, importing none)."""
    cls = type(value)
    return cls.__name__ == "dtype" or any(base.__name__ == "dtype" for base in cls.__mro__)


def visible(text: str) -> str:
    """Return a text with all unprintable characters except newlines escaped."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def dumps(data: Any) -> str:
    """Return plain data as canonical JSON: sorted keys, no spaces, ASCII, finite numbers."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def loads(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the plain data of a JSON text; raises `ValueError` for numbers that are not finite.

    `pairs` replaces `dict` in making an object from its names and values.
    """
    return json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=pairs)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def digest(data: Any) -> str:
    """Return a 128-bit digest of plain data, as 32 hexadecimal digits."""
    return hashlib.blake2b(dumps(data).encode(), digest_size=16).hexdigest()
