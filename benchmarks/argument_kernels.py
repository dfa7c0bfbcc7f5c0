"""Three kernels whose arguments can have any size: they read and write each byte once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

COLUMNS = 4096


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """Add two vectors."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    total = tl.load(x + place, mask=mask) + tl.load(y + place, mask=mask)
    tl.store(out + place, total, mask=mask)


@triton.jit
def softmax_kernel(x, out, n, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Take the softmax of some rows; its last bits depend on the number of warps."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = rows[:, None] < n
    held = tl.load(x + place, mask=mask, other=0.0)
    powers = tl.exp(held - tl.max(held, 1)[:, None])
    tl.store(out + place, powers / tl.sum(powers, 1)[:, None], mask=mask)


@triton.jit
def scale_kernel(x, n, BLOCK: tl.constexpr):
    """Change a vector in place."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < n
    tl.store(x + place, tl.load(x + place, mask=mask) * 0.5 + 1.0, mask=mask)


@dataclass(frozen=True)
class Problem:
    """A kernel, its 8 configs, and how many of its tensors share the bytes of a size."""

    kernel: Any
    configs: list[triton.Config]
    tensors: int
    width: int = 1

    def call(self, size: int, device: str) -> Callable[[Any], None]:
        """Return a function that launches a tuner on `size` bytes of arguments."""
        n = max(1, size // (4 * self.tensors * self.width))
        shape = (n * self.width,)
        tensors = [torch.full(shape, 0.5, device=device) for _ in range(self.tensors)]
        if self.width > 1:
            tensors[0].view(n, -1).copy_(torch.rand(1, self.width, device=device))
        extra = {"COLUMNS": self.width} if self.width > 1 else {}
        step = "ROWS" if self.width > 1 else "BLOCK"

        def launch(tuner: Any) -> None:
            tuner[lambda meta: (triton.cdiv(n, meta[step]),)](*tensors, n, **extra)

        return launch


_BLOCKS = [
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block in (512, 1024, 2048, 4096)
    for warps in (4, 8)
]
_ROWS = [
    triton.Config({"ROWS": rows}, num_warps=warps) for rows in (1, 2) for warps in (4, 8, 16, 32)
]
PROBLEMS = {
    "add": Problem(add_kernel, _BLOCKS, 3),
    "softmax": Problem(softmax_kernel, _ROWS, 2, COLUMNS),
    "in_place": Problem(scale_kernel, _BLOCKS, 1),
}
