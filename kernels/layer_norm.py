"""Triton kernels of LayerNorm and RMSNorm over the last dimension, forward and backward.

Operands are contiguous [rows, COLUMNS] matrices. With GROUPS > 1, row i belongs to group
i % GROUPS, and weight and bias are [GROUPS * COLUMNS]: a token's groups are consecutive rows.
Tiles are computed in the dtype of the statistics (fp32; fp64 for fp64 inputs), the variance is of
the centred row, and each result is cast once, when stored.

A tile is as many whole rows as TILE_ELEMENTS hold, or else a slice of one row. The rest of the row
is read twice: for the row's sums, which come first, and for the results.

If the backward pass cuts a row into slices, each has its own program: the grid is that many times
as large, with a row's slices side by side. Each program sums whole rows; the other slices are in
the L2 cache. Pass IN_PLACE if an output shares memory with an input, as dx may with dy: then no row
is cut, and a program has read a whole row before it stores any of it.

No constexpr depends on the number of rows, so another number compiles and tunes nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from safetune import safetune
from safetune.kernels.configs import (
    BACKWARD_CONFIGS,
    FORWARD_CONFIGS,
    is_alone,
    prune_backward_configs,
    prune_configs,
    slice_columns,
    tile_rows,
)
from safetune.kernels.finalize import layer_norm_finalize_kernel as layer_norm_finalize_kernel
from safetune.kernels.tiles import load_as, load_for_all, owned_tiles, sum_columns, tile_start


@triton.jit
def row_moments(x, mask, COLUMNS: tl.constexpr):
    """Return a row's mean and the sum of its centred squares, in one exchange between threads.

    Where more than three quarters of the squares cancel, as in rows far from zero, or are infinite,
    it takes a second one, as for shorter rows.
    """
    totals, sums = tl.split(tl.sum(tl.join(x, x * x), axis=1))
    total, squares = tl.sum(totals, axis=0), tl.sum(sums, axis=0)
    mean = total / COLUMNS
    centred_squares = squares - total * mean
    if not 4 * centred_squares >= squares:
        centred = tl.where(mask, x - mean, 0.0)
        centred_squares = tl.sum(tl.sum(centred * centred, axis=1), axis=0)
    return mean, centred_squares


@safetune(
    configs=FORWARD_CONFIGS,
    key=[
        "COLUMNS",
        "GROUPS",
        "IS_RMS_NORM",
        "HAS_RESIDUAL",
        "STORE_RESIDUAL",
        "HAS_WEIGHT",
        "HAS_BIAS",
    ],
    prune_configs_by={"early_config_prune": prune_configs},
)
@triton.jit(do_not_specialize=["rows"])
def layer_norm_forward_kernel(
    input_pointer,
    residual_pointer,
    weight_pointer,
    bias_pointer,
    output_pointer,
    residual_output_pointer,
    mean_pointer,
    rstd_pointer,
    rows,
    eps: tl.float64,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_RMS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STORE_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
):
    """Normalize one tile of whole rows per program, or one row, a slice at a time.

    Reads input and residual, writes output and residual_output (their sum): [rows, COLUMNS] of any
    float dtype. Writes mean (not for RMS norm) and rstd: [rows], in the dtype of the statistics.
    """
    TILE_ROWS: tl.constexpr = tile_rows(TILE_ELEMENTS, COLUMNS)
    SLICE: tl.constexpr = slice_columns(TILE_ELEMENTS, COLUMNS)
    SLICES: tl.constexpr = triton.cdiv(COLUMNS, SLICE)
    ALONE: tl.constexpr = is_alone(COLUMNS, SLICES)
    EVICTION: tl.constexpr = "evict_last" if ALONE else ""
    compute_type: tl.constexpr = rstd_pointer.dtype.element_ty

    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row_mask = row < rows
    base = row[:, None] * COLUMNS
    column = tl.arange(0, triton.next_power_of_2(SLICE))[None, :]

    mean = tl.zeros((TILE_ROWS,), compute_type)
    squares = tl.zeros((TILE_ROWS,), compute_type)
    for index in tl.static_range(SLICES):
        first = index * SLICE
        columns = min(SLICE, COLUMNS - index * SLICE)
        mask = row_mask[:, None] & (column < columns)
        x = load_as(input_pointer + base + first + column, mask, compute_type)
        if HAS_RESIDUAL:
            x += load_as(residual_pointer + base + first + column, mask, compute_type)
        if IS_RMS_NORM:
            squares += tl.sum(x * x, axis=1)
        elif ALONE and not HAS_RESIDUAL:
            row_mean, centred_squares = row_moments(x, mask, COLUMNS)
            mean += row_mean
            squares += centred_squares
        else:
            # Chan, Golub and LeVeque, "Updating formulae", 1979, (2.1): a set more is united with
            # those before, and each slice's squares are of its own centred elements. In fp64
            # a literal would be rounded to fp32; a square of the mean alone may be infinite.
            share = tl.full((TILE_ROWS,), columns, compute_type) / (first + columns)
            change = tl.sum(x, axis=1) / columns - mean
            centred = tl.where(column < columns, x - (mean + change)[:, None], 0.0)
            squares += tl.sum(centred * centred, axis=1)
            squares += change * (change * (first * share))
            mean += change * share
    rstd = 1.0 / tl.sqrt(squares / COLUMNS + tl.full((TILE_ROWS,), eps, compute_type))
    tl.store(rstd_pointer + row, rstd, mask=row_mask)
    if not IS_RMS_NORM:
        tl.store(mean_pointer + row, mean, mask=row_mask)

    for index in tl.static_range(SLICES):
        first = index * SLICE
        columns = min(SLICE, COLUMNS - index * SLICE)
        mask = row_mask[:, None] & (column < columns)
        if SLICES > 1:
            x = load_as(input_pointer + base + first + column, mask, compute_type)
            if HAS_RESIDUAL:
                x += load_as(residual_pointer + base + first + column, mask, compute_type)
        if STORE_RESIDUAL:
            tl.store(residual_output_pointer + base + first + column, x, mask=mask)
        y = (x if IS_RMS_NORM else x - mean[:, None]) * rstd[:, None]
        parameter = first + column
        if GROUPS > 1:
            parameter += (row % GROUPS)[:, None] * COLUMNS
        if HAS_WEIGHT:
            y *= load_as(weight_pointer + parameter, column < columns, compute_type, EVICTION)
        if HAS_BIAS:
            y += load_as(bias_pointer + parameter, column < columns, compute_type, EVICTION)
        tl.store(output_pointer + base + first + column, y, mask=mask)


@triton.jit
def add_row_sums(
    projection, total, x, dy, IS_RMS_NORM: tl.constexpr, JOINED_SUMS: tl.constexpr = True
):
    """Add each row's sums of x * dy and, for layer norm, of dy: in one exchange, or one each."""
    if IS_RMS_NORM:
        projection += tl.sum(x * dy, axis=1, keep_dims=True)
    elif JOINED_SUMS:
        products, terms = sum_columns(x * dy, dy)
        projection += products
        total += terms
    else:
        projection += tl.sum(x * dy, axis=1, keep_dims=True)
        total += tl.sum(dy, axis=1, keep_dims=True)
    return projection, total


@triton.jit
def input_gradient(
    dy, x, projection, total, rstd, COLUMNS: tl.constexpr, IS_RMS_NORM: tl.constexpr
):
    """Return dx: dy without the components that the normalized x cannot follow."""
    scale = rstd / COLUMNS
    removed = x * (projection * scale)
    if not IS_RMS_NORM:
        removed += total * scale
    return dy * rstd - removed


@safetune(
    configs=BACKWARD_CONFIGS,
    key=[
        "COLUMNS",
        "GROUPS",
        "IS_RMS_NORM",
        "HAS_WEIGHT",
        "HAS_BIAS",
        "HAS_RESIDUAL_GRADIENT",
        "STORE_RESIDUAL_GRADIENT",
        "RECOMPUTE_OUTPUT",
        "IN_PLACE",
    ],
    prune_configs_by={"early_config_prune": prune_backward_configs},
    scratch=["weight_partials_pointer", "bias_partials_pointer"],
)
@triton.jit(do_not_specialize=["rows", "programs_per_group"])
def layer_norm_backward_kernel(
    output_gradient_pointer,
    input_pointer,
    weight_pointer,
    bias_pointer,
    mean_pointer,
    rstd_pointer,
    residual_output_gradient_pointer,
    input_gradient_pointer,
    residual_gradient_pointer,
    output_pointer,
    weight_partials_pointer,
    bias_partials_pointer,
    rows,
    programs_per_group,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_RMS_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL_GRADIENT: tl.constexpr,
    STORE_RESIDUAL_GRADIENT: tl.constexpr,
    RECOMPUTE_OUTPUT: tl.constexpr,
    IN_PLACE: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
    PIPELINE_STAGES: tl.constexpr,
    LOAD_AGAIN: tl.constexpr,
    IN_TURNS: tl.constexpr,
    JOINED_SUMS: tl.constexpr,
):
    """Walk the tiles that the grid plan gives this program; `rows` counts those of one group.

    Matrices are [rows * GROUPS, COLUMNS], of any float dtype; the input is what was normalized,
    residual included. Partial sums are [programs, COLUMNS], in the dtype of the statistics.
    """
    TILE_ROWS: tl.constexpr = tile_rows(TILE_ELEMENTS, COLUMNS)
    SLICE: tl.constexpr = slice_columns(TILE_ELEMENTS, COLUMNS)
    SLICES: tl.constexpr = triton.cdiv(COLUMNS, SLICE)
    tl.static_assert(SLICES == 1 or not IN_PLACE, "a row in slices has several readers")
    TILE_COLUMNS: tl.constexpr = triton.next_power_of_2(SLICE)
    # Of the same policy, the compiler would make the two loads of a slice one.
    FIRST: tl.constexpr = "evict_last" if LOAD_AGAIN else ""
    LAST: tl.constexpr = "evict_first" if LOAD_AGAIN else ""
    compute_type: tl.constexpr = rstd_pointer.dtype.element_ty

    program, own_slice = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    group = program // programs_per_group
    # 64 bits from here on: the last tile may end past 2^31 rows, and offsets get there far earlier.
    index = (program % programs_per_group).to(tl.int64)
    turns, first_row, end_row = owned_tiles(index, rows, programs_per_group, TILE_ROWS, IN_TURNS)
    row = tl.arange(0, TILE_ROWS)
    local = tl.arange(0, TILE_COLUMNS)[None, :]
    column = own_slice * SLICE + local
    column_mask = (local < SLICE) & (column < COLUMNS)
    row_offset = row[:, None] * (GROUPS * COLUMNS)
    # The sums keep one row per tile row: no exchange between threads until the loop is over.
    if HAS_WEIGHT:
        weight_pointer += group * COLUMNS
        weight_sums = tl.zeros((TILE_ROWS, TILE_COLUMNS), compute_type)
        if not LOAD_AGAIN:
            weight = load_for_all(weight_pointer, row, column, column_mask, compute_type)
    if HAS_BIAS:
        bias_pointer += group * COLUMNS
        bias_sums = tl.zeros((TILE_ROWS, TILE_COLUMNS), compute_type)
        if RECOMPUTE_OUTPUT and not LOAD_AGAIN:
            bias = load_for_all(bias_pointer, row, column, column_mask, compute_type)
    for turn in tl.range(0, turns, num_stages=PIPELINE_STAGES):
        tile = tile_start(turn, index, programs_per_group, first_row, TILE_ROWS, IN_TURNS)
        row_mask = tile + row < end_row
        statistic = tile * GROUPS + group + row * GROUPS
        base = (tile * GROUPS + group) * COLUMNS
        dy_pointer, x_pointer = output_gradient_pointer + base, input_pointer + base
        rstd = load_as(rstd_pointer + statistic, row_mask, compute_type)[:, None]
        mean = 0.0
        if not IS_RMS_NORM:
            mean = load_as(mean_pointer + statistic, row_mask, compute_type)[:, None]

        projection = tl.zeros((TILE_ROWS, 1), compute_type)
        total = tl.zeros((TILE_ROWS, 1), compute_type)
        for step in tl.range(1, SLICES + LOAD_AGAIN, num_stages=PIPELINE_STAGES):
            other = (own_slice + step) % SLICES * SLICE + local
            other_mask = (local < SLICE) & (other < COLUMNS)
            mask = row_mask[:, None] & other_mask
            dy = load_as(dy_pointer + row_offset + other, mask, compute_type, FIRST)
            x = (load_as(x_pointer + row_offset + other, mask, compute_type, FIRST) - mean) * rstd
            if HAS_WEIGHT:
                dy *= load_as(weight_pointer + other, other_mask, compute_type, FIRST)
            projection, total = add_row_sums(projection, total, x, dy, IS_RMS_NORM, JOINED_SUMS)

        offset, mask = row_offset + column, row_mask[:, None] & column_mask
        dy = load_as(dy_pointer + offset, mask, compute_type, LAST)
        x = (load_as(x_pointer + offset, mask, compute_type, LAST) - mean) * rstd
        weighted = dy
        if HAS_WEIGHT:
            if LOAD_AGAIN:
                weight = load_as(weight_pointer + column, column_mask, compute_type, LAST)
            weighted = dy * weight
        if not LOAD_AGAIN:
            projection, total = add_row_sums(
                projection, total, x, weighted, IS_RMS_NORM, JOINED_SUMS
            )
        if RECOMPUTE_OUTPUT:
            y = x * weight if HAS_WEIGHT else x
            if HAS_BIAS:
                if LOAD_AGAIN:
                    bias = load_as(bias_pointer + column, column_mask, compute_type, LAST)
                y += bias
            tl.store(output_pointer + base + offset, y, mask=mask)
        if HAS_WEIGHT:
            weight_sums += dy * x
        if HAS_BIAS:
            bias_sums += dy
        dx = input_gradient(weighted, x, projection, total, rstd, COLUMNS, IS_RMS_NORM)
        if HAS_RESIDUAL_GRADIENT:
            dx += load_as(residual_output_gradient_pointer + base + offset, mask, compute_type)
        if STORE_RESIDUAL_GRADIENT:
            tl.store(residual_gradient_pointer + base + offset, dx, mask=mask)
        # dx leaves the L2 cache before rows that are still to be read: up to 1 % on an H100.
        tl.store(input_gradient_pointer + base + offset, dx, mask, eviction_policy="evict_first")

    partial = program * COLUMNS + column
    if HAS_WEIGHT:
        tl.store(weight_partials_pointer + partial, tl.sum(weight_sums, 0)[None, :], column_mask)
    if HAS_BIAS:
        tl.store(bias_partials_pointer + partial, tl.sum(bias_sums, 0)[None, :], column_mask)
