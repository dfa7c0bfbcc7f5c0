"""The backward kernel for rows whose sums exceed one program's registers: for an H100.

Several programs share a row. Each reads its slice once and has a part of the row's sums. It
publishes that part, and finishes the row in its next turn, when the other parts are there.

Programs take their numbers as they start, and a row's programs have neighbouring numbers. So a
program waits only for programs that have started or start next. It is enough that the programs of
one row fit on the card together, which `is_long` ensures.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from safetune import safetune
from safetune.kernels.configs import (
    LONG_BACKWARD_CONFIGS,
    LONG_PROGRAMS_PER_SM,
    WIDEST_TILE,
    slice_columns,
    slice_count,
)
from safetune.kernels.grid_policy import GridPlan, plan_grid
from safetune.kernels.launches import Launch, sm_count
from safetune.kernels.layer_norm import input_gradient
from safetune.kernels.tiles import load_as, owned_tiles, sum_columns, tile_start


@triton.jit
def publish(pointer, value):
    """Store a sum and the mark that it is there, in one word of 64 bits: all of it, or nothing."""
    word = value.to(tl.uint32, bitcast=True).to(tl.uint64) | (tl.full((), 1, tl.uint64) << 32)
    tl.atomic_xchg(pointer, word.to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def awaited(pointers):
    """Return the sums at `pointers`, once all of them are published."""
    return tl.inline_asm_elementwise(
        """{
        .reg .pred missing;
        .reg .b32 mark;
        .reg .b64 word;
        again:
        ld.relaxed.gpu.global.b64 word, [$1];
        mov.b64 {$0, mark}, word;
        setp.eq.u32 missing, mark, 0;
        @missing bra again;
        }""",
        "=r,l",
        [pointers],
        dtype=tl.float32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def sum_shares(words, SLICES: tl.constexpr):
    """Return the sum of a row, to which each program that shares it has published a part."""
    share = tl.arange(0, triton.next_power_of_2(SLICES))
    values = awaited(words + tl.minimum(share, SLICES - 1))
    return tl.sum(tl.where(share < SLICES, values, 0.0), axis=0)


@triton.jit
def as_loaded(values, zero):
    """Return the same values. As `zero` is not known to be one, the compiler converts them again,
    where they are used, and keeps no fp32 of before in registers."""
    BITS: tl.constexpr = tl.int16 if values.dtype.primitive_bitwidth == 16 else tl.int32
    return (values.to(BITS, bitcast=True) ^ zero.to(BITS)).to(values.dtype, bitcast=True)


@triton.jit
def weigh(dy, weight, HAS_WEIGHT: tl.constexpr):
    """Return dy as fp32, times the weight if there is one."""
    return dy.to(tl.float32) * weight.to(tl.float32) if HAS_WEIGHT else dy.to(tl.float32)


@triton.jit
def begin_row(
    output_gradient_pointer,
    input_pointer,
    mean_pointer,
    rstd_pointer,
    words,
    weight,
    row,
    column,
    column_mask,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    IS_RMS_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Load a slice of a row and publish its share of the row's sums: (dy, x, mean, rstd)."""
    rstd = tl.load(rstd_pointer + row)
    mean = 0.0
    if not IS_RMS_NORM:
        mean = tl.load(mean_pointer + row)
    offset = row * COLUMNS + column
    dy = tl.load(output_gradient_pointer + offset, mask=column_mask, other=0.0)
    x = tl.load(input_pointer + offset, mask=column_mask, other=0.0)
    weighted = weigh(dy, weight, HAS_WEIGHT)
    products = (x.to(tl.float32) - mean) * rstd * weighted
    if IS_RMS_NORM:
        publish(words, tl.sum(tl.sum(products, axis=1), axis=0))
    else:
        projection, total = sum_columns(products, weighted)
        publish(words, tl.sum(projection))
        publish(words + SLICES, tl.sum(total))
    return dy, x, mean, rstd


@triton.jit
def finish_row(
    residual_output_gradient_pointer,
    input_gradient_pointer,
    residual_gradient_pointer,
    words,
    dy,
    x,
    weight,
    rstd,
    offset,
    column_mask,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    IS_RMS_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_RESIDUAL_GRADIENT: tl.constexpr,
    STORE_RESIDUAL_GRADIENT: tl.constexpr,
):
    """Store a slice of dx, of dy as it was loaded and the normalized x: (dy, x), both fp32."""
    projection = sum_shares(words, SLICES)
    total = 0.0
    if not IS_RMS_NORM:
        total = sum_shares(words + SLICES, SLICES)
    weighted = weigh(dy, weight, HAS_WEIGHT)
    dx = input_gradient(weighted, x, projection, total, rstd, COLUMNS, IS_RMS_NORM)
    if HAS_RESIDUAL_GRADIENT:
        dx += load_as(residual_output_gradient_pointer + offset, column_mask, tl.float32)
    if STORE_RESIDUAL_GRADIENT:
        tl.store(residual_gradient_pointer + offset, dx, mask=column_mask)
    dx_pointer = input_gradient_pointer + offset
    tl.store(dx_pointer, dx, mask=column_mask, eviction_policy="evict_first")
    return dy.to(tl.float32), x


@safetune(
    configs=LONG_BACKWARD_CONFIGS,
    key=[
        "COLUMNS",
        "GROUPS",
        "IS_RMS_NORM",
        "HAS_WEIGHT",
        "HAS_BIAS",
        "HAS_RESIDUAL_GRADIENT",
        "STORE_RESIDUAL_GRADIENT",
    ],
    scratch=["weight_partials_pointer", "bias_partials_pointer"],
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
    words_pointer,
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
    TILE_ELEMENTS: tl.constexpr,
    PIPELINE_STAGES: tl.constexpr,
):
    """Walk the rows that the grid plan gives to some programs, and store this one's slice of them.

    Arguments are those of `layer_norm_backward_kernel`, except the words, int64 and all zero: each
    row has one per sum and slice, and the last word counts the programs that have started.
    """
    SLICE: tl.constexpr = slice_columns(TILE_ELEMENTS, COLUMNS)
    SLICES: tl.constexpr = triton.cdiv(COLUMNS, SLICE)
    WORDS: tl.constexpr = SLICES if IS_RMS_NORM else 2 * SLICES
    TILE_COLUMNS: tl.constexpr = triton.next_power_of_2(SLICE)
    # 64 bits from here on: offsets get past 2^31.
    number = tl.atomic_add(words_pointer + rows.to(tl.int64) * (GROUPS * WORDS), 1, sem="relaxed")
    program, own_slice = number // SLICES, number % SLICES
    group, index = program // programs_per_group, program % programs_per_group
    turns, first_row, _end = owned_tiles(index, rows, programs_per_group, 1, True)
    local = tl.arange(0, TILE_COLUMNS)[None, :]
    column = own_slice * SLICE + local
    column_mask = (local < SLICE) & (column < COLUMNS)
    weight = 1.0
    if HAS_WEIGHT:
        weight = tl.load(weight_pointer + group * COLUMNS + column, mask=column_mask, other=0.0)
    weight_sums = tl.zeros((1, TILE_COLUMNS), tl.float32)
    bias_sums = tl.zeros((1, TILE_COLUMNS), tl.float32)
    zero = tl.minimum(rows, 0)
    row = tile_start(0, index, programs_per_group, first_row, 1, True) * GROUPS + group
    dy, x, mean, rstd = begin_row(
        output_gradient_pointer,
        input_pointer,
        mean_pointer,
        rstd_pointer,
        words_pointer + row * WORDS + own_slice,
        weight,
        row,
        column,
        column_mask,
        COLUMNS,
        SLICES,
        IS_RMS_NORM,
        HAS_WEIGHT,
    )
    for turn in tl.range(1, turns, num_stages=PIPELINE_STAGES):
        next_row = tile_start(turn, index, programs_per_group, first_row, 1, True) * GROUPS + group
        next_dy, next_x, next_mean, next_rstd = begin_row(
            output_gradient_pointer,
            input_pointer,
            mean_pointer,
            rstd_pointer,
            words_pointer + next_row * WORDS + own_slice,
            weight,
            next_row,
            column,
            column_mask,
            COLUMNS,
            SLICES,
            IS_RMS_NORM,
            HAS_WEIGHT,
        )
        dy, normalized = finish_row(
            residual_output_gradient_pointer,
            input_gradient_pointer,
            residual_gradient_pointer,
            words_pointer + row * WORDS,
            as_loaded(dy, zero),
            (as_loaded(x, zero).to(tl.float32) - mean) * rstd,
            weight,
            rstd,
            row * COLUMNS + column,
            column_mask,
            COLUMNS,
            SLICES,
            IS_RMS_NORM,
            HAS_WEIGHT,
            HAS_RESIDUAL_GRADIENT,
            STORE_RESIDUAL_GRADIENT,
        )
        weight_sums += dy * normalized
        bias_sums += dy
        dy, x, mean, rstd, row = next_dy, next_x, next_mean, next_rstd, next_row
    dy, normalized = finish_row(
        residual_output_gradient_pointer,
        input_gradient_pointer,
        residual_gradient_pointer,
        words_pointer + row * WORDS,
        as_loaded(dy, zero),
        (as_loaded(x, zero).to(tl.float32) - mean) * rstd,
        weight,
        rstd,
        row * COLUMNS + column,
        column_mask,
        COLUMNS,
        SLICES,
        IS_RMS_NORM,
        HAS_WEIGHT,
        HAS_RESIDUAL_GRADIENT,
        STORE_RESIDUAL_GRADIENT,
    )
    partial = program * COLUMNS + column
    if HAS_WEIGHT:
        tl.store(weight_partials_pointer + partial, weight_sums + dy * normalized, column_mask)
    if HAS_BIAS:
        tl.store(bias_partials_pointer + partial, bias_sums + dy, column_mask)


def is_long(x: Tensor, recompute_output: bool, pinned: bool) -> bool:
    """Return whether `long_rows_launch` is the faster one for a matrix, as it is on an H100.

    Never where a row's programs would fill more than half of the card: they wait for each other.
    """
    if pinned or recompute_output or x.dtype == torch.float64:
        return False
    columns = x.shape[1]
    return (
        columns > WIDEST_TILE
        and _has_long_rows(x.device)
        and _slices(columns) <= sm_count(x.device)
    )


@functools.cache
def _has_long_rows(device: torch.device) -> bool:
    # Programs that wait for each other: not in the interpreter, which runs one after the other.
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _slices(columns: int) -> int:
    (config,) = LONG_BACKWARD_CONFIGS
    return slice_count(config.kwargs["TILE_ELEMENTS"], columns)


def long_rows_plan(x: Tensor, num_groups: int) -> GridPlan:
    """Return the grid plan of the kernel for long rows; the programs of a row count as one."""
    rows, columns = x.shape
    per_sm = LONG_PROGRAMS_PER_SM / _slices(columns)
    return plan_grid(rows // num_groups, num_groups, sm_count(x.device), per_sm)


def long_rows_launch(launch: Launch) -> Launch:
    """Return the launch of the kernel for long rows in the place of a `backward_launch`."""
    kernel = long_rows_backward_kernel
    kwargs = {name: value for name, value in launch.kwargs.items() if name in kernel.arg_names}
    x, place = launch.args[1], kernel.arg_names.index("words_pointer")
    sums = 1 if kwargs["IS_RMS_NORM"] else 2
    words = x.new_zeros(len(x) * _slices(x.shape[1]) * sums + 1, dtype=torch.int64)
    args = (*launch.args[:place], words, *launch.args[place + 1 :])
    return Launch(kernel, launch.grid, args, kwargs)
