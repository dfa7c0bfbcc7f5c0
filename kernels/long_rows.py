"""The backward kernel for rows of two slices, and sums of one parameter: for an H100.

As `layer_norm_backward_kernel` in turns, with two programs to a row, but an own slice stays in
registers, as it was loaded. With the sums of a second parameter there would be no room for it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from safetune import safetune
from safetune.kernels.configs import LONG_BACKWARD_CONFIGS, slice_columns
from safetune.kernels.layer_norm import add_row_sums, input_gradient
from safetune.kernels.tiles import load_as, owned_tiles, tile_start


@triton.jit
def as_loaded(values, zero):
    """Return the same values. As `zero` is not known to be one, the compiler converts them again,
    where they are used, and keeps no fp32 of before in registers."""
    BITS: tl.constexpr = tl.int16 if values.dtype.primitive_bitwidth == 16 else tl.int32
    return (values.to(BITS, bitcast=True) ^ zero.to(BITS)).to(values.dtype, bitcast=True)


@safetune(
    configs=LONG_BACKWARD_CONFIGS,
    key=[
        "COLUMNS",
        "GROUPS",
        "IS_RMS_NORM",
        "HAS_RESIDUAL_GRADIENT",
        "STORE_RESIDUAL_GRADIENT",
    ],
    scratch=["weight_partials_pointer"],
)
@triton.jit(do_not_specialize=["rows", "programs_per_group"])
def long_rows_backward_kernel(
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
    HAS_RESIDUAL_GRADIENT: tl.constexpr,
    STORE_RESIDUAL_GRADIENT: tl.constexpr,
    TILE_ELEMENTS: tl.constexpr,
):
    """Walk the rows that the grid plan gives this pair of programs, and store its own slice."""
    SLICE: tl.constexpr = slice_columns(TILE_ELEMENTS, COLUMNS)
    tl.static_assert(triton.cdiv(COLUMNS, SLICE) == 2, "two programs share a row")
    TILE_COLUMNS: tl.constexpr = triton.next_power_of_2(SLICE)
    compute_type: tl.constexpr = rstd_pointer.dtype.element_ty

    program, own_slice = tl.program_id(0) // 2, tl.program_id(0) % 2
    group = program // programs_per_group
    index = (program % programs_per_group).to(tl.int64)
    turns, first_row, _end = owned_tiles(index, rows, programs_per_group, 1, True)
    local = tl.arange(0, TILE_COLUMNS)[None, :]
    column, other = own_slice * SLICE + local, (1 - own_slice) * SLICE + local
    column_mask = (local < SLICE) & (column < COLUMNS)
    other_mask = (local < SLICE) & (other < COLUMNS)
    weight_pointer += group * COLUMNS
    weight_sums = tl.zeros((1, TILE_COLUMNS), compute_type)
    zero = tl.minimum(rows, 0)
    for turn in tl.range(0, turns, num_stages=1):
        tile = tile_start(turn, index, programs_per_group, first_row, 1, True)
        statistic = tile * GROUPS + group
        base = statistic * COLUMNS
        dy_pointer, x_pointer = output_gradient_pointer + base, input_pointer + base
        rstd = tl.load(rstd_pointer + statistic)
        mean = 0.0
        if not IS_RMS_NORM:
            mean = tl.load(mean_pointer + statistic)

        # The own slice first: the other program of the row asks for the other one.
        own_dy = tl.load(dy_pointer + column, mask=column_mask, other=0.0)
        own_x = tl.load(x_pointer + column, mask=column_mask, other=0.0)
        projection = tl.zeros((1, 1), compute_type)
        total = tl.zeros((1, 1), compute_type)
        dy = load_as(dy_pointer + other, other_mask, compute_type)
        x = (load_as(x_pointer + other, other_mask, compute_type) - mean) * rstd
        dy *= load_as(weight_pointer + other, other_mask, compute_type, "evict_last")
        projection, total = add_row_sums(projection, total, x, dy, IS_RMS_NORM)

        x = (own_x.to(compute_type) - mean) * rstd
        weight = load_as(weight_pointer + column, column_mask, compute_type, "evict_last")
        weighted = own_dy.to(compute_type) * weight
        projection, total = add_row_sums(projection, total, x, weighted, IS_RMS_NORM)

        dy = as_loaded(own_dy, zero).to(compute_type)
        x = (as_loaded(own_x, zero).to(compute_type) - mean) * rstd
        weighted = dy * load_as(weight_pointer + column, column_mask, compute_type)
        weight_sums += dy * x
        dx = input_gradient(weighted, x, projection, total, rstd, COLUMNS, IS_RMS_NORM)
        offset = base + column
        if HAS_RESIDUAL_GRADIENT:
            dx += load_as(residual_output_gradient_pointer + offset, column_mask, compute_type)
        if STORE_RESIDUAL_GRADIENT:
            tl.store(residual_gradient_pointer + offset, dx, mask=column_mask)
        tl.store(
            input_gradient_pointer + offset, dx, mask=column_mask, eviction_policy="evict_first"
        )
    partial = program * COLUMNS + column
    tl.store(weight_partials_pointer + partial, weight_sums, column_mask)
