"""Where the bytes behind the caller's tensors are, in the memory file and in a child."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: The types in which every float of the kernel languages is kept, and whose copies torch can fill.
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

#: torch's CUDA allocator aligns to 512; more than any instruction asks for.
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
    """A tensor of the caller's that stays there: what a meta tensor in its place has.

    Attributes:
        device: its kind of device, `cpu` or `cuda`.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str


def aligned(size: int) -> int:
    """Return a size in bytes, rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
