"""The matrix products that tuning time is measured on.

`matmul_kernel` has 72 configs; `grouped_matmul_kernel` has the 1,920 that SGLang tries for a fused
mixture of experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(
    a_pointer,
    b_pointer,
    c_pointer,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute C = A B, one BM x BN tile per program; BK divides K."""
    programs_n = tl.cdiv(N, BN)
    program_m = tl.program_id(0) // programs_n
    program_n = tl.program_id(0) % programs_n
    row = program_m * BM + tl.arange(0, BM)
    column = program_n * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a = a_pointer + (row % M)[:, None] * stride_am + inner[None, :] * stride_ak
    b = b_pointer + inner[:, None] * stride_bk + (column % N)[None, :] * stride_bn
    accumulator = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(tl.cdiv(K, BK)):
        accumulator = tl.dot(tl.load(a), tl.load(b), accumulator)
        a += BK * stride_ak
        b += BK * stride_bk
    c = c_pointer + row[:, None] * stride_cm + column[None, :] * stride_cn
    mask = (row < M)[:, None] & (column < N)[None, :]
    tl.store(c, accumulator.to(c_pointer.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])  # one compilation serves all batch sizes
def grouped_matmul_kernel(
    a_pointer,
    b_pointer,
    c_pointer,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GM: tl.constexpr,
):
    """Compute C = A B, one BM x BN tile per program, GM rows of tiles together; BK divides K."""
    programs_m, programs_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first_m = tl.program_id(0) // (GM * programs_n) * GM
    rows = tl.minimum(programs_m - first_m, GM)
    within = tl.program_id(0) % (GM * programs_n)
    row = (first_m + within % rows) * BM + tl.arange(0, BM)
    column = within // rows * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a = a_pointer + (row % M)[:, None] * stride_am + inner[None, :] * stride_ak
    b = b_pointer + inner[:, None] * stride_bk + (column % N)[None, :] * stride_bn
    accumulator = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(tl.cdiv(K, BK)):
        accumulator = tl.dot(tl.load(a), tl.load(b), accumulator)
        a += BK * stride_ak
        b += BK * stride_bk
    c = c_pointer + row[:, None] * stride_cm + column[None, :] * stride_cn
    mask = (row < M)[:, None] & (column < N)[None, :]
    tl.store(c, accumulator.to(c_pointer.dtype.element_ty), mask=mask)


KEY = ["M", "N", "K"]
#: The batch sizes that SGLang tunes.
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)


def configs(most: int | None = None) -> list[triton.Config]:
    """Return the 72 configs, or `most` of them, evenly spread."""
    every = [
        triton.Config({"BM": bm, "BN": bn, "BK": bk}, num_warps=warps, num_stages=stages)
        for bm, bn, bk, warps, stages in itertools.product(
            (64, 128, 256), (64, 128, 256), (32, 64), (4, 8), (3, 4)
        )
    ]
    return spread(every, most)


def grouped_configs(most: int | None = None) -> list[triton.Config]:
    """Return the 1,920 configs, or `most` of them, evenly spread."""
    every = [
        triton.Config({"BM": bm, "BN": bn, "BK": bk, "GM": gm}, num_warps=warps, num_stages=stages)
        for bm, bn, bk, gm, warps, stages in itertools.product(
            (16, 32, 64, 128, 256),
            (32, 64, 128, 256),
            (64, 128, 256),
            (1, 16, 32, 64),
            (4, 8),
            (2, 3, 4, 5),
        )
    ]
    return spread(every, most)


def spread(every: Sequence[Any], most: int | None) -> Any:
    """Return `most` of a list, evenly spread, or all of it."""
    return every[:: -(-len(every) // (most or len(every)))]


def operands(
    m: int, n: int, k: int, device: str, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random A and B, and a C full of NaN: an element that is not written shows."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(*shape, device=device, generator=generator).to(dtype)
        for shape in ((m, k), (k, n))
    )
    return a, b, torch.full((m, n), float("nan"), device=device, dtype=a.dtype)


def grouped_operands(
    m: int, size: int, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return those of the grouped product; Triton cannot interpret bfloat16."""
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    return operands(m, size, size, device, dtype)


def grid(meta: dict[str, Any]) -> tuple[int]:
    """Return one program for each tile of C."""
    return (triton.cdiv(meta["M"], meta["BM"]) * triton.cdiv(meta["N"], meta["BN"]),)


def launch(kernel: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **options: Any) -> None:
    """Launch a kernel, tuned or not, on these operands."""
    sizes = (a.shape[0], b.shape[1], a.shape[1])
    kernel[grid](a, b, c, *sizes, *a.stride(), *b.stride(), *c.stride(), **options)


def relative_error(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> float:
    """Return ||C - A B|| / ||A B||, the product taken in fp32; NaN where C has one."""
    right = a.float() @ b.float()
    return float((c.float() - right).norm() / right.norm())
