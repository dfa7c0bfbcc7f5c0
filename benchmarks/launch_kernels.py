"""Trivial kernels with 3, 13 and 24 parameters, each of which is read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kernel_3(out, n, BLOCK: tl.constexpr):
    """A pointer, an integer, a constexpr."""
    offset = tl.arange(0, BLOCK)
    tl.store(out + offset, offset.to(tl.float32), mask=offset < n)


@triton.jit
def kernel_13(
    out,
    x,
    weight,
    bias,
    half,
    n,
    stride_x,
    stride_out,
    eps,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """5 pointers, 3 integers, a float, 4 constexprs."""
    offset = tl.arange(0, BLOCK)
    mask = (offset < n) & (offset < stride_x) & (offset < stride_out) & (offset < D)
    value = tl.load(x + offset, mask=mask) * tl.load(weight + offset, mask=mask) + eps
    value += tl.load(half + offset, mask=mask).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + offset, mask=mask)
    if ACTIVATION == "relu":
        value = tl.maximum(value, 0.0)
    tl.store(out + offset, value, mask=mask)


@triton.jit
def kernel_24(
    out,
    x,
    weight,
    bias,
    residual,
    scale,
    mean,
    rstd,
    half,
    gate,
    n,
    stride_x,
    stride_y,
    stride_out,
    rows,
    group,
    eps,
    alpha,
    D: tl.constexpr,
    G: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """10 pointers, 6 integers, 2 floats, 6 constexprs."""
    offset = tl.arange(0, BLOCK)
    limit = (n + stride_x + stride_y + stride_out + rows + group) // G
    mask = (offset < limit) & (offset < D)
    value = tl.load(x + offset, mask=mask) * tl.load(weight + offset, mask=mask) + eps
    value = (value - tl.load(mean + offset, mask=mask)) * tl.load(rstd + offset, mask=mask)
    value += tl.load(half + offset, mask=mask).to(tl.float32) * alpha
    value += tl.load(gate + offset, mask=mask).to(tl.float32)
    value *= tl.load(scale + offset, mask=mask)
    if HAS_BIAS:
        value += tl.load(bias + offset, mask=mask)
    if HAS_RESIDUAL:
        value += tl.load(residual + offset, mask=mask)
    if ACTIVATION == "relu":
        value = tl.maximum(value, 0.0)
    tl.store(out + offset, value, mask=mask)
