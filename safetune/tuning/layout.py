"""Where the bytes behind the caller's tensors are, in the memory file and in a child."""

from __future__ import annotations

from dataclasses import dataclass

#: torch's CUDA allocator aligns to 512; more than any instruction asks for.
ALIGNMENT = 512


@dataclass(frozen=True)
class BlockSpec:
    """One run of bytes: `size` bytes at `offset` in the memory file, to be placed on `device` at
    an address that is `misalignment` past a multiple of 512.
    """

    device: str
    offset: int
    size: int
    misalignment: int


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as a view of a block: dtype name, shape, strides (in elements), byte offset."""

    block: int
    byte_offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def aligned(size: int) -> int:
    """Return a size in bytes, rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
