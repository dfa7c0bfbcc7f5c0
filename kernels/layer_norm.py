"""Triton kernels of LayerNorm and RMSNorm over the last dimension, forward and backward.

Operands are contiguous [rows, COLUMNS] matrices. With GROUPS > 1, row i belongs to group
i % GROUPS, and weight and bias are [GROUPS * COLUMNS]: a token's groups are consecutive rows.
Whatever the dtypes, a tile is computed in the dtype of the statistics (fp32; fp64 for fp64 inputs),
the variance is that of the centred row, and each result is cast once, when stored.

No constexpr depends on the number of rows, so neither does what is compiled or tuned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from safetune import safetune
from safetune.kernels.configs import (
    BACKWARD_CONFIGS,
    FINALIZE_CONFIGS,
    FORWARD_CONFIGS,
    prune_spilling,
    tile_rows,
)


@triton.jit
def load_as(pointers, mask, dtype: tl.constexpr):
    """Load and convert; what is masked is 0, and so adds 0 to every sum."""
    return tl.load(pointers, mask=mask, other=0.0).to(dtype)


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
    prune_configs_by={"early_config_prune": prune_spilling},
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
    eps,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_RMS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STORE_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
):
    """Normalize one tile of whole rows per program.

    Reads input and residual, writes output and residual_output (their sum): [rows, COLUMNS] of any
    float dtype. Writes mean (not for RMS norm) and rstd: [rows], in the dtype of the statistics.
    """
    TILE_ROWS: tl.constexpr = tile_rows(TILE_ELEMENTS, COLUMNS)
    compute_type: tl.constexpr = rstd_pointer.dtype.element_ty

    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, triton.next_power_of_2(COLUMNS))[None, :]
    row_mask = row < rows
    column_mask = column < COLUMNS
    mask = row_mask[:, None] & column_mask
    offset = row[:, None] * COLUMNS + column
    parameter_offset = column
    if GROUPS > 1:
        parameter_offset += (row % GROUPS)[:, None] * COLUMNS

    x = load_as(input_pointer + offset, mask, compute_type)
    if HAS_RESIDUAL:
        x += load_as(residual_pointer + offset, mask, compute_type)
    if STORE_RESIDUAL:
        tl.store(residual_output_pointer + offset, x, mask=mask)

    if not IS_RMS_NORM:
        mean = tl.sum(x, axis=1) / COLUMNS
        tl.store(mean_pointer + row, mean, mask=row_mask)
        x = tl.where(column_mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / COLUMNS + eps)
    tl.store(rstd_pointer + row, rstd, mask=row_mask)

    y = x * rstd[:, None]
    if HAS_WEIGHT:
        y *= load_as(weight_pointer + parameter_offset, column_mask, compute_type)
    if HAS_BIAS:
        y += load_as(bias_pointer + parameter_offset, column_mask, compute_type)
    tl.store(output_pointer + offset, y, mask=mask)


@triton.jit
def owned_rows(index, rows, alignment, programs):
    """Return the first and the end of a program's rows: `GridPlan.owned_rows` on the device."""
    tiles = (rows - 1) // alignment + 1  # rows + alignment may be past 2^31; no program has 0 rows
    share = tiles // programs
    longer = tiles % programs
    first = index * share + tl.minimum(index, longer)
    last = first + share + (index < longer).to(tl.int32)
    return first * alignment, tl.minimum(last * alignment, rows)


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
    ],
    prune_configs_by={"early_config_prune": prune_spilling},
)
@triton.jit(do_not_specialize=["rows", "alignment", "programs_per_group"])
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
    alignment,
    programs_per_group,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_RMS_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL_GRADIENT: tl.constexpr,
    STORE_RESIDUAL_GRADIENT: tl.constexpr,
    RECOMPUTE_OUTPUT: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
    PIPELINE_STAGES: tl.constexpr,
):
    """Walk the rows that the grid plan gives this program; `rows` counts those of one group.

    Reads and writes [rows * GROUPS, COLUMNS] matrices of any float dtype; the input is what was
    normalized, residual included. Writes this program's row of each [programs, COLUMNS] partial
    sum, in the dtype of the statistics.
    """
    TILE_ROWS: tl.constexpr = tile_rows(TILE_ELEMENTS, COLUMNS)
    TILE_COLUMNS: tl.constexpr = triton.next_power_of_2(COLUMNS)
    compute_type: tl.constexpr = rstd_pointer.dtype.element_ty

    program = tl.program_id(0)
    group = program // programs_per_group
    # 64 bits from here on: the last tile may end past 2^31 rows, and offsets get there far earlier.
    index = (program % programs_per_group).to(tl.int64)
    first_row, end_row = owned_rows(index, rows, alignment, programs_per_group)

    row = tl.arange(0, TILE_ROWS)
    column = tl.arange(0, TILE_COLUMNS)[None, :]
    column_mask = column < COLUMNS
    offset = row[:, None] * (GROUPS * COLUMNS) + column
    parameter_offset = group * COLUMNS + column

    # The sums keep one row per tile row: no exchange between threads until the loop is over.
    if HAS_WEIGHT:
        weight = load_as(weight_pointer + parameter_offset, column_mask, compute_type)
        weight_sums = tl.zeros((TILE_ROWS, TILE_COLUMNS), compute_type)
    if HAS_BIAS:
        bias_sums = tl.zeros((TILE_ROWS, TILE_COLUMNS), compute_type)

    for tile in tl.range(first_row, end_row, TILE_ROWS, num_stages=PIPELINE_STAGES):
        row_mask = tile + row < end_row
        mask = row_mask[:, None] & column_mask
        statistic = tile * GROUPS + group + row * GROUPS
        base = (tile * GROUPS + group) * COLUMNS

        x = load_as(input_pointer + base + offset, mask, compute_type)
        dy = load_as(output_gradient_pointer + base + offset, mask, compute_type)
        rstd = load_as(rstd_pointer + statistic, row_mask, compute_type)[:, None]
        if not IS_RMS_NORM:
            x -= load_as(mean_pointer + statistic, row_mask, compute_type)[:, None]
        x *= rstd

        if RECOMPUTE_OUTPUT:
            y = x
            if HAS_WEIGHT:
                y *= weight
            if HAS_BIAS:
                y += load_as(bias_pointer + parameter_offset, column_mask, compute_type)
            tl.store(output_pointer + base + offset, y, mask=mask)

        if HAS_BIAS:
            bias_sums += dy
        if HAS_WEIGHT:
            weight_sums += dy * x
            dy *= weight
        dx = dy - x * (tl.sum(x * dy, axis=1) / COLUMNS)[:, None]
        if not IS_RMS_NORM:
            dx -= (tl.sum(dy, axis=1) / COLUMNS)[:, None]
        dx *= rstd
        if HAS_RESIDUAL_GRADIENT:
            dx += load_as(residual_output_gradient_pointer + base + offset, mask, compute_type)
        if STORE_RESIDUAL_GRADIENT:
            tl.store(residual_gradient_pointer + base + offset, dx, mask=mask)
        tl.store(input_gradient_pointer + base + offset, dx, mask=mask)

    partial = program * COLUMNS + column
    if HAS_WEIGHT:
        sums = tl.sum(weight_sums, axis=0)[None, :]
        tl.store(weight_partials_pointer + partial, sums, mask=column_mask)
    if HAS_BIAS:
        sums = tl.sum(bias_sums, axis=0)[None, :]
        tl.store(bias_partials_pointer + partial, sums, mask=column_mask)


@triton.jit
def sum_partials(
    partials_pointer,
    gradient_pointer,
    programs_per_group,
    COLUMNS: tl.constexpr,
    TILE_PROGRAMS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Sum the [programs_per_group, COLUMNS] partials of one group for one tile of columns."""
    group = tl.program_id(1)
    row = tl.arange(0, TILE_PROGRAMS)[:, None]
    column = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    column_mask = column < COLUMNS
    compute_type: tl.constexpr = partials_pointer.dtype.element_ty

    partials_pointer += group * programs_per_group * COLUMNS
    sums = tl.zeros((TILE_PROGRAMS, TILE_COLUMNS), compute_type)
    for tile in tl.range(0, programs_per_group, TILE_PROGRAMS):
        mask = (tile + row < programs_per_group) & column_mask
        sums += load_as(partials_pointer + (tile + row) * COLUMNS + column, mask, compute_type)
    total = tl.sum(sums, axis=0)[None, :]
    tl.store(gradient_pointer + group * COLUMNS + column, total, mask=column_mask)


@safetune(configs=FINALIZE_CONFIGS, key=["COLUMNS", "HAS_WEIGHT", "HAS_BIAS"])
@triton.jit(do_not_specialize=["programs_per_group"])
def layer_norm_finalize_kernel(
    weight_partials_pointer,
    bias_partials_pointer,
    weight_gradient_pointer,
    bias_gradient_pointer,
    programs_per_group,
    COLUMNS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_PROGRAMS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Sum the partials of the backward kernel, in a fixed order, into both parameter gradients.

    Reads [programs, COLUMNS] partials, a group's programs together; writes [GROUPS * COLUMNS]
    gradients in the dtype of the parameters. The grid is (tiles of columns, groups).
    """
    if HAS_WEIGHT:
        sum_partials(
            weight_partials_pointer,
            weight_gradient_pointer,
            programs_per_group,
            COLUMNS,
            TILE_PROGRAMS,
            TILE_COLUMNS,
        )
    if HAS_BIAS:
        sum_partials(
            bias_partials_pointer,
            bias_gradient_pointer,
            programs_per_group,
            COLUMNS,
            TILE_PROGRAMS,
            TILE_COLUMNS,
        )
