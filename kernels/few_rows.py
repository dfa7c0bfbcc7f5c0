"""Triton kernels of the norms for few rows: what counts there is latency, not bandwidth.

Operands and results are those of the kernels in `layer_norm`, without groups. All that a program
reads is asked for before the first sum. The backward pass is one launch: some programs compute dx,
a tile of rows each, others dw and db, a tile of columns each, and read all rows for it. Neither
needs the other's sums, so no program waits, and each element has one writer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from safetune import safetune
from safetune.kernels.configs import (
    FEW_BACKWARD_CONFIGS,
    FEW_FORWARD_CONFIGS,
    prune_few_configs,
    sum_programs,
    tile_rows,
)
from safetune.kernels.layer_norm import add_row_sums, input_gradient
from safetune.kernels.tiles import load_as


@safetune(
    configs=FEW_FORWARD_CONFIGS,
    key=["COLUMNS", "IS_RMS_NORM", "HAS_RESIDUAL", "STORE_RESIDUAL", "HAS_WEIGHT", "HAS_BIAS"],
    prune_configs_by={"early_config_prune": prune_few_configs},
)
@triton.jit(do_not_specialize=["rows"])
def few_rows_forward_kernel(
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
    IS_RMS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STORE_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
):
    """Normalize one tile of whole rows per program."""
    TILE_ROWS: tl.constexpr = tile_rows(TILE_ELEMENTS, COLUMNS)
    compute_type: tl.constexpr = rstd_pointer.dtype.element_ty

    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = tl.arange(0, triton.next_power_of_2(COLUMNS))[None, :]
    offset = row * COLUMNS + column
    row_mask, column_mask = row < rows, column < COLUMNS
    mask = row_mask & column_mask

    x = load_as(input_pointer + offset, mask, compute_type)
    if HAS_RESIDUAL:
        x += load_as(residual_pointer + offset, mask, compute_type)
    if HAS_WEIGHT:
        weight = load_as(weight_pointer + column, column_mask, compute_type)
    if HAS_BIAS:
        bias = load_as(bias_pointer + column, column_mask, compute_type)
    if STORE_RESIDUAL:
        tl.store(residual_output_pointer + offset, x, mask=mask)

    if not IS_RMS_NORM:
        mean = tl.sum(x, axis=1, keep_dims=True) / COLUMNS
        tl.store(mean_pointer + row, mean, mask=row_mask)
        x = tl.where(column_mask, x - mean, 0.0)
    squares = tl.sum(x * x, axis=1, keep_dims=True) / COLUMNS
    rstd = 1.0 / tl.sqrt(squares + tl.full((TILE_ROWS, 1), eps, compute_type))
    tl.store(rstd_pointer + row, rstd, mask=row_mask)
    y = x * rstd
    if HAS_WEIGHT:
        y *= weight
    if HAS_BIAS:
        y += bias
    tl.store(output_pointer + offset, y, mask=mask)


@triton.jit
def sum_over_rows(
    program,
    output_gradient_pointer,
    input_pointer,
    mean_pointer,
    rstd_pointer,
    weight_gradient_pointer,
    bias_gradient_pointer,
    rows,
    COLUMNS: tl.constexpr,
    IS_RMS_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
):
    """Compute dw and db of one tile of columns: the sums over all rows of dy * x and of dy."""
    compute_type: tl.constexpr = rstd_pointer.dtype.element_ty
    row = tl.arange(0, SUM_ROWS)[:, None]
    column = program * SUM_COLUMNS + tl.arange(0, SUM_COLUMNS)[None, :]
    column_mask = column < COLUMNS
    weight_sums = tl.zeros((SUM_ROWS, SUM_COLUMNS), compute_type)
    bias_sums = tl.zeros((SUM_ROWS, SUM_COLUMNS), compute_type)
    for first in tl.range(0, rows, SUM_ROWS):
        row_mask = first + row < rows
        offset, mask = (first + row) * COLUMNS + column, row_mask & column_mask
        dy = load_as(output_gradient_pointer + offset, mask, compute_type)
        if HAS_WEIGHT:
            x = load_as(input_pointer + offset, mask, compute_type)
            if not IS_RMS_NORM:
                x -= load_as(mean_pointer + first + row, row_mask, compute_type)
            x *= load_as(rstd_pointer + first + row, row_mask, compute_type)
            weight_sums += dy * x
        if HAS_BIAS:
            bias_sums += dy
    if HAS_WEIGHT:
        total = tl.sum(weight_sums, axis=0)[None, :]
        tl.store(weight_gradient_pointer + column, total, mask=column_mask)
    if HAS_BIAS:
        total = tl.sum(bias_sums, axis=0)[None, :]
        tl.store(bias_gradient_pointer + column, total, mask=column_mask)


@safetune(
    configs=FEW_BACKWARD_CONFIGS,
    key=[
        "COLUMNS",
        "IS_RMS_NORM",
        "HAS_WEIGHT",
        "HAS_BIAS",
        "HAS_RESIDUAL_GRADIENT",
        "STORE_RESIDUAL_GRADIENT",
    ],
    prune_configs_by={"early_config_prune": prune_few_configs},
)
@triton.jit(do_not_specialize=["rows"])
def few_rows_backward_kernel(
    output_gradient_pointer,
    input_pointer,
    weight_pointer,
    mean_pointer,
    rstd_pointer,
    residual_output_gradient_pointer,
    input_gradient_pointer,
    residual_gradient_pointer,
    weight_gradient_pointer,
    bias_gradient_pointer,
    rows,
    COLUMNS: tl.constexpr,
    IS_RMS_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL_GRADIENT: tl.constexpr,
    STORE_RESIDUAL_GRADIENT: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_COLUMNS: tl.constexpr,
):
    """Compute dw and db of a tile of columns in the first programs, dx of a tile of rows after."""
    SUM_PROGRAMS: tl.constexpr = sum_programs(HAS_WEIGHT, HAS_BIAS, COLUMNS, SUM_COLUMNS)
    program = tl.program_id(0)
    if program < SUM_PROGRAMS:
        sum_over_rows(
            program,
            output_gradient_pointer,
            input_pointer,
            mean_pointer,
            rstd_pointer,
            weight_gradient_pointer,
            bias_gradient_pointer,
            rows,
            COLUMNS,
            IS_RMS_NORM,
            HAS_WEIGHT,
            HAS_BIAS,
            SUM_ROWS,
            SUM_COLUMNS,
        )
    else:
        TILE_ROWS: tl.constexpr = tile_rows(TILE_ELEMENTS, COLUMNS)
        compute_type: tl.constexpr = rstd_pointer.dtype.element_ty
        row = (program - SUM_PROGRAMS) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
        column = tl.arange(0, triton.next_power_of_2(COLUMNS))[None, :]
        row_mask, column_mask = row < rows, column < COLUMNS
        offset, mask = row * COLUMNS + column, row_mask & column_mask
        dy = load_as(output_gradient_pointer + offset, mask, compute_type)
        x = load_as(input_pointer + offset, mask, compute_type)
        rstd = load_as(rstd_pointer + row, row_mask, compute_type)
        if not IS_RMS_NORM:
            x -= load_as(mean_pointer + row, row_mask, compute_type)
        if HAS_WEIGHT:
            dy *= load_as(weight_pointer + column, column_mask, compute_type)
        if HAS_RESIDUAL_GRADIENT:
            dres = load_as(residual_output_gradient_pointer + offset, mask, compute_type)
        x *= rstd
        projection = tl.zeros((TILE_ROWS, 1), compute_type)
        total = tl.zeros((TILE_ROWS, 1), compute_type)
        projection, total = add_row_sums(projection, total, x, dy, IS_RMS_NORM)
        dx = input_gradient(dy, x, projection, total, rstd, COLUMNS, IS_RMS_NORM)
        if HAS_RESIDUAL_GRADIENT:
            dx += dres
        if STORE_RESIDUAL_GRADIENT:
            tl.store(residual_gradient_pointer + offset, dx, mask=mask)
        tl.store(input_gradient_pointer + offset, dx, mask=mask)
