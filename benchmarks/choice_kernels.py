"""What choices are judged on: matrix product, softmax, layer norm backward, attention."""

from __future__ import annotations

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
    stride_bk,
    stride_cm,
    EVEN_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute C = A B for rows without gaps, tiles in groups of eight rows of tiles for the L2."""
    GROUP: tl.constexpr = 8
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    first = tl.program_id(0) // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_n)
    row = (first + within % height) * BM + tl.arange(0, BM)
    column = within // height * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    a = a_pointer + (row % M)[:, None] * stride_am + inner[None, :]
    b = b_pointer + inner[:, None] * stride_bk + (column % N)[None, :]
    accumulator = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        if EVEN_K:
            accumulator = tl.dot(tl.load(a), tl.load(b), accumulator)
        else:
            left = K - start
            a_tile = tl.load(a, mask=inner[None, :] < left, other=0.0)
            b_tile = tl.load(b, mask=inner[:, None] < left, other=0.0)
            accumulator = tl.dot(a_tile, b_tile, accumulator)
        a += BK
        b += BK * stride_bk
    c = c_pointer + row[:, None] * stride_cm + column[None, :]
    mask = (row < M)[:, None] & (column < N)[None, :]
    tl.store(c, accumulator.to(c_pointer.dtype.element_ty), mask=mask)


@triton.jit
def softmax_kernel(x_pointer, y_pointer, columns, BLOCK: tl.constexpr):
    """Normalize one row per program, in two walks over it."""
    row = tl.program_id(0).to(tl.int64) * columns
    within = tl.arange(0, BLOCK)
    largest = float("-inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        mask = start + within < columns
        x = tl.load(x_pointer + row + start + within, mask=mask, other=float("-inf"))
        x = x.to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), axis=0)
        largest = larger
    for start in range(0, columns, BLOCK):
        mask = start + within < columns
        x = tl.load(x_pointer + row + start + within, mask=mask).to(tl.float32)
        y = tl.exp(x - largest) / total
        tl.store(y_pointer + row + start + within, y.to(y_pointer.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_backward_kernel(
    dy_pointer,
    x_pointer,
    weight_pointer,
    mean_pointer,
    rstd_pointer,
    dx_pointer,
    weight_partials_pointer,
    bias_partials_pointer,
    rows,
    COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Walk every PROGRAMS-th tile of ROWS rows; leave one row of partial sums per program.

    A row is a power of two long. How many programs there are is the config's choice, too.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    weight = tl.load(weight_pointer + column).to(tl.float32)
    weight_sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    bias_sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), PROGRAMS):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        mask = row < rows
        offset = row.to(tl.int64) * COLUMNS + column
        dy = tl.load(dy_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_pointer + offset, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_pointer + row, mask=mask, other=0.0)
        x = (x - tl.load(mean_pointer + row, mask=mask, other=0.0)) * rstd
        bias_sums += dy
        weight_sums += dy * x
        dy *= weight
        share = tl.sum(x * dy, axis=1)[:, None] / COLUMNS
        dx = (dy - x * share - tl.sum(dy, axis=1)[:, None] / COLUMNS) * rstd
        tl.store(dx_pointer + offset, dx.to(dx_pointer.dtype.element_ty), mask=mask)
    partial = tl.program_id(0) * COLUMNS + column
    tl.store(weight_partials_pointer + partial, tl.sum(weight_sums, axis=0)[None, :])
    tl.store(bias_partials_pointer + partial, tl.sum(bias_sums, axis=0)[None, :])


@triton.jit
def attention_kernel(
    q_pointer,
    k_pointer,
    v_pointer,
    o_pointer,
    length,
    scale,
    HEAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Attend BM queries of one head to all of its keys, with a running maximum: not causal.

    Operands are [batch * heads, length, HEAD] without gaps; BM and BN divide the length.
    """
    head = tl.program_id(1).to(tl.int64) * length * HEAD
    query = tl.program_id(0) * BM + tl.arange(0, BM)
    key = tl.arange(0, BN)
    lane = tl.arange(0, HEAD)
    tile = head + query[:, None] * HEAD + lane[None, :]
    q = tl.load(q_pointer + tile)
    k = k_pointer + head + key[None, :] * HEAD + lane[:, None]
    v = v_pointer + head + key[:, None] * HEAD + lane[None, :]
    scale *= 1.4426950408889634  # log2(e), for exp2
    largest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    accumulator = tl.zeros((BM, HEAD), tl.float32)
    for _ in range(0, length, BN):
        scores = tl.dot(q, tl.load(k)) * scale
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(weights, axis=1)
        accumulator *= shrink[:, None]
        accumulator = tl.dot(weights.to(q.dtype), tl.load(v), accumulator)
        largest = larger
        k += BN * HEAD
        v += BN * HEAD
    output = accumulator / total[:, None]
    tl.store(o_pointer + tile, output.to(o_pointer.dtype.element_ty))
