"""The backward kernel for rows whose sums exceed one program's registers: for an H100 or an H200.

Several programs of one warp share a row. Each reads its slice once and has a part of the row's
sums. It publishes that part, and finishes the row in its next turn, when the other parts are there.

Programs take their numbers as they start, and a row's programs have neighbouring numbers. So a
program waits only for programs that have started or start next. It is enough that the programs of
one row fit on the card together, which `is_long` ensures.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from safetune import safetune
from safetune.kernels.configs import (
    LIGHT_PROGRAMS_PER_SM,
    LONG_BACKWARD_CONFIGS,
    LONG_PROGRAMS_PER_SM,
    LONG_ROW_OF_FAST_MEMORY,
    WIDEST_TILE,
    has_fast_memory,
    is_light,
    prune_long_configs,
    slice_columns,
    slice_count,
)
from safetune.kernels.grid_policy import GridPlan, plan_grid
from safetune.kernels.launches import Launch, sm_count
from safetune.kernels.layer_norm import input_gradient
from safetune.kernels.tiles import load_as, owned_tiles, tile_start


@triton.jit
def publish(pointers, projection, total):
    """Store two sums in one word of 64 bits: both of them, or nothing."""
    low = projection.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = total.to(tl.uint32, bitcast=True).to(tl.uint64)
    tl.atomic_xchg(pointers, (low | (high << 32)).to(tl.int64, bitcast=True), sem="relaxed")


@triton.jit
def awaited(pointers):
    """Return the two sums of each word, once all of them are published.

    A word has all bits set before: a NaN that no addition returns.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .pred missing;
        .reg .b64 word;
        again:
        ld.relaxed.gpu.global.b64 word, [$2];
        setp.eq.s64 missing, word, -1;
        @missing bra again;
        mov.b64 {$0, $1}, word;
        }""",
        "=r,=r,l",
        [pointers],
        dtype=(tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def sum_words(words, SLICES: tl.constexpr):
    """Return both sums of a row, from the words of all programs that share it, a lane for each."""
    LANES: tl.constexpr = min(32, triton.next_power_of_2(SLICES))
    lane = tl.arange(0, LANES)
    projections, totals = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    for first in tl.static_range(0, SLICES, LANES):
        projection, total = awaited(words + tl.minimum(first + lane, SLICES - 1))
        projections += tl.where(first + lane < SLICES, projection, 0.0)
        totals += tl.where(first + lane < SLICES, total, 0.0)
    return tl.sum(projections, axis=0), tl.sum(totals, axis=0)


@triton.constexpr_function
def packed_values(dtype, columns):
    """Return how many values are loaded as one: two of bf16, where no pair is of two rows."""
    return 2 if dtype == tl.bfloat16 and columns % 2 == 0 else 1


@triton.jit
def load_slice(pointer, row, own_slice, COLUMNS: tl.constexpr, SLICE: tl.constexpr):
    """Load a slice of a row, two values in an int32 or each for itself."""
    PACKED: tl.constexpr = packed_values(pointer.dtype.element_ty, COLUMNS)
    local = tl.arange(0, triton.next_power_of_2(SLICE) // PACKED)[None, :]
    first = own_slice * (SLICE // PACKED)
    mask = (local < SLICE // PACKED) & (first + local < COLUMNS // PACKED)
    if PACKED == 2:
        pointer = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(pointer + (row * (COLUMNS // PACKED) + first + local), mask=mask, other=0)


@triton.jit
def as_loaded(values, zero):
    """Return the same values. As `zero` is not known to be one, the compiler converts them again,
    where they are used, and keeps no fp32 of before in registers."""
    BITS: tl.constexpr = tl.int16 if values.dtype.primitive_bitwidth == 16 else tl.int32
    return (values.to(BITS, bitcast=True) ^ zero.to(BITS)).to(values.dtype, bitcast=True)


@triton.jit
def widen(values):
    """Return loaded values in fp32."""
    if values.dtype == tl.int32:
        low, high = values << 16, values & -65536
        pairs = tl.join(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))
        values = tl.reshape(pairs, (1, 2 * values.shape[1]))
    return values.to(tl.float32)


@triton.jit
def normalize(x, rstd, shift, IS_RMS_NORM: tl.constexpr):
    """Return the normalized x in fp32; shift is -mean * rstd, no less exact than the mean."""
    return widen(x) * rstd if IS_RMS_NORM else widen(x) * rstd + shift


@triton.jit
def weigh(dy, weight, HAS_WEIGHT: tl.constexpr):
    """Return dy in fp32, times the weight if there is one."""
    return widen(dy) * weight if HAS_WEIGHT else widen(dy)


@triton.jit
def begin_row(
    output_gradient_pointer,
    input_pointer,
    mean_pointer,
    rstd_pointer,
    word,
    weight,
    row,
    own_slice,
    COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
    IS_RMS_NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """Load a slice of a row and publish its part of the row's sums: (dy, x, rstd, shift)."""
    rstd = tl.load(rstd_pointer + row)
    shift = 0.0
    if not IS_RMS_NORM:
        shift = -tl.load(mean_pointer + row) * rstd
    dy = load_slice(output_gradient_pointer, row, own_slice, COLUMNS, SLICE)
    x = load_slice(input_pointer, row, own_slice, COLUMNS, SLICE)
    weighted = weigh(dy, weight, HAS_WEIGHT)
    products = normalize(x, rstd, shift, IS_RMS_NORM) * weighted
    projection = tl.sum(products, axis=1)
    total = tl.zeros((1,), tl.float32) if IS_RMS_NORM else tl.sum(weighted, axis=1)
    publish(word + tl.arange(0, 1), projection, total)
    return dy, x, rstd, shift


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
    projection, total = sum_words(words, SLICES)
    weighted = weigh(dy, weight, HAS_WEIGHT)
    dx = input_gradient(weighted, x, projection, total, rstd, COLUMNS, IS_RMS_NORM)
    if HAS_RESIDUAL_GRADIENT:
        dx += load_as(residual_output_gradient_pointer + offset, column_mask, tl.float32)
    if STORE_RESIDUAL_GRADIENT:
        tl.store(residual_gradient_pointer + offset, dx, mask=column_mask)
    dx_pointer = input_gradient_pointer + offset
    tl.store(dx_pointer, dx, mask=column_mask, eviction_policy="evict_first")
    return widen(dy), x


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
    prune_configs_by={"early_config_prune": prune_long_configs},
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

    Arguments are those of `layer_norm_backward_kernel`, except the words, int64 and all -1: each
    row has one per slice, and the last word counts the programs that have started.
    """
    SLICE: tl.constexpr = slice_columns(TILE_ELEMENTS, COLUMNS)
    SLICES: tl.constexpr = triton.cdiv(COLUMNS, SLICE)
    TILE_COLUMNS: tl.constexpr = triton.next_power_of_2(SLICE)
    # 64 bits from here on: offsets get past 2^31.
    last_word = words_pointer + rows.to(tl.int64) * (GROUPS * SLICES)
    number = tl.atomic_add(last_word, 1, sem="relaxed") + 1
    program, own_slice = number // SLICES, number % SLICES
    group, index = program // programs_per_group, program % programs_per_group
    turns, first_row, _end = owned_tiles(index, rows, programs_per_group, 1, True)
    own_words = words_pointer + own_slice
    local = tl.arange(0, TILE_COLUMNS)[None, :]
    column = own_slice * SLICE + local
    column_mask = (local < SLICE) & (column < COLUMNS)
    weight = 1.0
    if HAS_WEIGHT:
        weight = load_as(weight_pointer + group * COLUMNS + column, column_mask, tl.float32)
    weight_sums = tl.zeros((1, TILE_COLUMNS), tl.float32)
    bias_sums = tl.zeros((1, TILE_COLUMNS), tl.float32)
    zero = tl.minimum(rows, 0)
    row = tile_start(0, index, programs_per_group, first_row, 1, True) * GROUPS + group
    dy, x, rstd, shift = begin_row(
        output_gradient_pointer,
        input_pointer,
        mean_pointer,
        rstd_pointer,
        own_words + row * SLICES,
        weight,
        row,
        own_slice,
        COLUMNS,
        SLICE,
        IS_RMS_NORM,
        HAS_WEIGHT,
    )
    for turn in tl.range(1, turns, num_stages=PIPELINE_STAGES):
        next_row = tile_start(turn, index, programs_per_group, first_row, 1, True) * GROUPS + group
        next_dy, next_x, next_rstd, next_shift = begin_row(
            output_gradient_pointer,
            input_pointer,
            mean_pointer,
            rstd_pointer,
            own_words + next_row * SLICES,
            weight,
            next_row,
            own_slice,
            COLUMNS,
            SLICE,
            IS_RMS_NORM,
            HAS_WEIGHT,
        )
        dy, normalized = finish_row(
            residual_output_gradient_pointer,
            input_gradient_pointer,
            residual_gradient_pointer,
            words_pointer + row * SLICES,
            as_loaded(dy, zero),
            normalize(as_loaded(x, zero), rstd, shift, IS_RMS_NORM),
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
        dy, x, rstd, shift, row = next_dy, next_x, next_rstd, next_shift, next_row
    dy, normalized = finish_row(
        residual_output_gradient_pointer,
        input_gradient_pointer,
        residual_gradient_pointer,
        words_pointer + row * SLICES,
        as_loaded(dy, zero),
        normalize(as_loaded(x, zero), rstd, shift, IS_RMS_NORM),
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


def is_long(dy: Tensor, x: Tensor, recompute_output: bool, pinned: bool) -> bool:
    """Return whether `long_rows_launch` is the faster one for a matrix.

    Never where a row's programs would fill more than half of the card: they wait for each other.
    Nor for a view that begins between two words of 16 bytes: pairs of bf16 are read as one value.
    """
    if pinned or recompute_output or x.dtype == torch.float64:
        return False
    if dy.data_ptr() % 16 or x.data_ptr() % 16:
        return False
    columns = x.shape[1]
    fits = 2 * _slices(columns) <= LONG_PROGRAMS_PER_SM * sm_count(x.device)
    return fits and columns >= _long_row(x.device)


@functools.cache
def _long_row(device: torch.device) -> float:
    """Return the number of columns from which rows are long."""
    # Programs that wait for each other: not in the interpreter, which runs one after the other.
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return math.inf
    return LONG_ROW_OF_FAST_MEMORY if has_fast_memory(device.index) else WIDEST_TILE + 1


@functools.cache
def _slices(columns: int) -> int:
    return slice_count(LONG_BACKWARD_CONFIGS[0].kwargs["TILE_ELEMENTS"], columns)


def long_rows_plan(x: Tensor, num_groups: int, has_bias: bool, has_dres: bool) -> GridPlan:
    """Return the grid plan of the kernel for long rows; the programs of a row count as one."""
    rows, columns = x.shape
    light = is_light(columns, x.dtype.itemsize, has_bias, has_dres)
    most = LIGHT_PROGRAMS_PER_SM if light else LONG_PROGRAMS_PER_SM
    return plan_grid(rows // num_groups, num_groups, sm_count(x.device), most / _slices(columns))


def long_rows_launch(launch: Launch) -> Launch:
    """Return the launch of the kernel for long rows in the place of a `backward_launch`."""
    kernel = long_rows_backward_kernel
    kwargs = {name: value for name, value in launch.kwargs.items() if name in kernel.arg_names}
    x, place = launch.args[1], kernel.arg_names.index("words_pointer")
    words = x.new_full((len(x) * _slices(x.shape[1]) + 1,), -1, dtype=torch.int64)
    args = (*launch.args[:place], words, *launch.args[place + 1 :])
    return Launch(kernel, launch.grid, args, kwargs)
