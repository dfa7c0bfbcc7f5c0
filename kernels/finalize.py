"""The kernel that adds up the partial sums of the backward kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from safetune import safetune
from safetune.kernels.configs import FINALIZE_CONFIGS
from safetune.kernels.tiles import load_as


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
    # In stages: a tile on its way from the L2 cache does not wait for the one before it.
    for tile in tl.range(0, programs_per_group, TILE_PROGRAMS, num_stages=3):
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
    """Sum the partials of the backward kernel, in a fixed order, into one parameter gradient.

    Reads [programs, COLUMNS] partials, a group's programs together; writes [GROUPS * COLUMNS]
    gradients in the dtype of the parameters. The grid is (tiles of columns, groups, parameters).
    """
    # A condition that is compiled in, and one that is not.
    if HAS_WEIGHT:  # noqa: SIM102
        if tl.program_id(2) == 0:
            sum_partials(
                weight_partials_pointer,
                weight_gradient_pointer,
                programs_per_group,
                COLUMNS,
                TILE_PROGRAMS,
                TILE_COLUMNS,
            )
    if HAS_BIAS:  # noqa: SIM102
        if tl.program_id(2) == tl.num_programs(2) - 1:
            sum_partials(
                bias_partials_pointer,
                bias_gradient_pointer,
                programs_per_group,
                COLUMNS,
                TILE_PROGRAMS,
                TILE_COLUMNS,
            )
