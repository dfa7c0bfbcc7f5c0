"""The kernel of the store's first launch; importing it imports Triton and nothing of safetune."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr):
    """Write x + 1 to y."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n)
    tl.store(y + offsets, value + 1, mask=offsets < n)


def configs() -> list[triton.Config]:
    """Return what to choose from."""
    return [triton.Config({"BLOCK": block}, num_warps=4) for block in (256, 1024, 4096)]
