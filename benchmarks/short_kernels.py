"""Kernels of a few microseconds, as a decoder launches them hundreds of times for a token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x_pointer, weight_pointer, y_pointer, columns, BLOCK: tl.constexpr):
    """Normalize one row per program, in two walks over it."""
    row = tl.program_id(0).to(tl.int64) * columns
    within = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        mask = start + within < columns
        x = tl.load(x_pointer + row + start + within, mask=mask, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=0) / columns + 1e-6)
    for start in range(0, columns, BLOCK):
        mask = start + within < columns
        x = tl.load(x_pointer + row + start + within, mask=mask).to(tl.float32)
        weight = tl.load(weight_pointer + start + within, mask=mask).to(tl.float32)
        y = x * scale * weight
        tl.store(y_pointer + row + start + within, y.to(y_pointer.dtype.element_ty), mask=mask)


@triton.jit
def rope_kernel(
    x_pointer, cos_pointer, sin_pointer, y_pointer, heads, HALF: tl.constexpr, ROWS: tl.constexpr
):
    """Rotate ROWS heads of one token by its position."""
    token = tl.program_id(0)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    within = tl.arange(0, HALF)[None, :]
    mask = head < heads
    place = (token * heads + head) * (2 * HALF) + within
    cos = tl.load(cos_pointer + token * HALF + within)
    sin = tl.load(sin_pointer + token * HALF + within)
    first = tl.load(x_pointer + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_pointer + place + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = y_pointer.dtype.element_ty
    tl.store(y_pointer + place, (first * cos - second * sin).to(kind), mask=mask)
    tl.store(y_pointer + place + HALF, (second * cos + first * sin).to(kind), mask=mask)


@triton.jit
def quantize_kernel(x_pointer, y_pointer, scale_pointer, columns, BLOCK: tl.constexpr):
    """Write one row per program as int8, and its scale, in two walks over it."""
    row = tl.program_id(0).to(tl.int64) * columns
    within = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        mask = start + within < columns
        x = tl.load(x_pointer + row + start + within, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale = tl.max(largest, axis=0) / 127.0
    tl.store(scale_pointer + tl.program_id(0), scale)
    for start in range(0, columns, BLOCK):
        mask = start + within < columns
        x = tl.load(x_pointer + row + start + within, mask=mask).to(tl.float32)
        nearest = tl.floor(x / scale + 0.5)
        tl.store(y_pointer + row + start + within, nearest.to(tl.int8), mask=mask)


@triton.jit
def decode_attention_kernel(
    q_pointer, k_pointer, v_pointer, o_pointer, length, scale, HEAD: tl.constexpr, BN: tl.constexpr
):
    """Attend from one query of one head to all keys of it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HEAD)
    q = tl.load(q_pointer + row * HEAD + column).to(tl.float32) * scale
    largest = float("-inf")
    total = 0.0
    sums = tl.zeros((HEAD,), tl.float32)
    for start in range(0, length, BN):
        key = start + tl.arange(0, BN)
        mask = key < length
        place = (row * length + key)[:, None] * HEAD + column[None, :]
        k = tl.load(k_pointer + place, mask=mask[:, None], other=0.0).to(tl.float32)
        scores = tl.where(mask, tl.sum(k * q[None, :], axis=1), float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=0))
        weights = tl.exp(scores - larger)
        v = tl.load(v_pointer + place, mask=mask[:, None], other=0.0).to(tl.float32)
        before = tl.exp(largest - larger)
        sums = sums * before + tl.sum(v * weights[:, None], axis=0)
        total = total * before + tl.sum(weights, axis=0)
        largest = larger
    tl.store(o_pointer + row * HEAD + column, (sums / total).to(o_pointer.dtype.element_ty))
