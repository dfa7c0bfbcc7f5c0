"""Kernels that the GPU tests tune, undecorated: each test gives its own configs.

They run on a GPU and in Triton's interpreter alike, but for `wild_kernel` and `hanging_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask) + tl.load(y + offset, mask=mask)
    tl.store(out + offset, value, mask=mask)


@triton.jit
def wild_kernel(x, y, out, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """`add_kernel` storing SHIFT elements away."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask) + tl.load(y + offset, mask=mask)
    tl.store(out + offset + SHIFT, value, mask=mask)


@triton.jit
def hanging_kernel(x, y, out, n, HANGS: tl.constexpr, BLOCK: tl.constexpr):
    """`add_kernel`, after waiting for a word that is 0 to change."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    if HANGS:
        word = tl.load(out, volatile=True)
        while word == 0.0:
            word = tl.load(out, volatile=True)
    value = tl.load(x + offset, mask=mask) + tl.load(y + offset, mask=mask)
    tl.store(out + offset, value, mask=mask)


@triton.jit
def product_kernel(a, b, c, K, SIZE: tl.constexpr, BK: tl.constexpr):
    """C = A B with one tile of SIZE x SIZE: its stages times its tiles are its shared memory."""
    row = tl.arange(0, SIZE)
    inner = tl.arange(0, BK)
    a += row[:, None] * K + inner[None, :]
    b += inner[:, None] * SIZE + row[None, :]
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for _ in range(0, K, BK):
        total = tl.dot(tl.load(a), tl.load(b), total)
        a += BK
        b += BK * SIZE
    tl.store(c + row[:, None] * SIZE + row[None, :], total)


@triton.jit
def strided_kernel(x, y, out, n, stride_x, stride_y, stride_out, BLOCK: tl.constexpr):
    """out += x + y in fp32, element by element, each with its own stride; out may be x or y."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(out + offset * stride_out, mask=mask).to(tl.float32)
    value += tl.load(x + offset * stride_x, mask=mask).to(tl.float32)
    value += tl.load(y + offset * stride_y, mask=mask).to(tl.float32)
    tl.store(out + offset * stride_out, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def row_norm_kernel(x, out, T, D: tl.constexpr, NB: tl.constexpr, BT: tl.constexpr):
    """RMS norm of rows. NB is what FLA's norm kernels have: a bucket of T that nothing reads."""
    row = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    column = tl.arange(0, D)
    mask = (row < T)[:, None] & (column < D)[None, :]
    offset = row[:, None] * D + column[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / D + 1e-6)
    tl.store(out + offset, value * rstd[:, None], mask=mask)
