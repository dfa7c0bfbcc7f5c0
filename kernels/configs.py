"""The configs of the layer-norm kernels, and the tiles and grids that follow from them.

A config sets the number of elements of a tile, not the number of rows, so that every config is
valid for every number of columns: a tile is as many whole rows as fit, or else a slice of one row.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import triton
from triton import Config

#: Rows are cut at multiples of this, so that slices begin on 16-byte boundaries.
SLICE_ALIGNMENT = 128

#: The most elements in a tile of several rows: above it, each thread would need its own columns.
TALL_TILE = 4096

#: The least length of a slice in the forward pass; a row of at most this length is never cut.
LONG_SLICE = 8192

#: Rows of this length are cut in two in the backward pass, with a program for each half: 3 % faster
#: on an H100, except for sums of two parameters with a residual's gradient. With slightly shorter
#: rows each program would have less work in a turn.
HALVED_ROW = 8192

#: The most elements of a matrix that the programs of a multiprocessor take in turns, 8 KiB in bf16,
#: or else one row. On an H100 a config with more looks fastest when a launch is timed alone, but is
#: up to 4 % slower in repeated backward passes.
MOST_IN_A_TURN = 4096

#: The same where memory is fast. An H200 has the multiprocessors of an H100 and 1.4 times its
#: bandwidth: there the configs that take 16 KiB are up to 9 % faster.
MOST_IN_A_TURN_OF_FAST_MEMORY = 8192

#: Memory is fast above this bandwidth per multiprocessor, in GB/s: an H100 has 25, an H200 37. Only
#: these two are measured. A GH200 has 31 or 37 and a B200 54, so they get the rules of an H200; an
#: A100 has 19 and gets those of an H100.
FAST_MEMORY_GB_S = 30

#: The most elements in a tile of the backward kernel: a program keeps sums of its columns.
WIDEST_TILE = 16384


def _forward_config(num_warps: int, elements_per_thread: int = 16) -> Config:
    return Config({"TILE_ELEMENTS": 32 * num_warps * elements_per_thread}, num_warps=num_warps)


def _backward_config(
    num_warps: int,
    stages: int,
    elements_per_thread: int = 16,
    load_again: bool = False,
    most_registers: int | None = None,
    in_turns: bool = False,
    joined_sums: bool = True,
) -> Config:
    return Config(
        {
            "TILE_ELEMENTS": 32 * num_warps * elements_per_thread,
            "PIPELINE_STAGES": stages,
            "LOAD_AGAIN": load_again,
            "IN_TURNS": in_turns,
            "JOINED_SUMS": joined_sums,
        },
        num_warps=num_warps,
        maxnreg=most_registers,
    )


def _finalize_config(tile_programs: int, tile_columns: int, num_warps: int) -> Config:
    return Config(
        {"TILE_PROGRAMS": tile_programs, "TILE_COLUMNS": tile_columns}, num_warps=num_warps
    )


#: Only where memory is fast: on an H200 the first takes 13 % less time than any other for layer
#: norm of 512 columns, the second 3 % less for RMS norm of 32768.
FORWARD_CONFIGS_OF_FAST_MEMORY = [
    _forward_config(num_warps=2, elements_per_thread=64),
    _forward_config(num_warps=32),
]

# For every number of columns and both norms, each list has the fastest config on an H100 or a
# config within 1 % of it, and two configs that any card can launch.
# The first config that pruning leaves runs when nothing is tuned and when a call is pinned, so it
# fits every card for any columns and dtypes. The backward pass needs eight values for each element:
# with 16 elements per thread they stay in registers, with 32 they do if the elements are loaded
# again.
FORWARD_CONFIGS = [
    _forward_config(num_warps=8),
    _forward_config(num_warps=4, elements_per_thread=8),
    _forward_config(num_warps=8, elements_per_thread=8),
    _forward_config(num_warps=4),
    _forward_config(num_warps=4, elements_per_thread=32),
    _forward_config(num_warps=16),
    _forward_config(num_warps=8, elements_per_thread=32),
    _forward_config(num_warps=16, elements_per_thread=32),
    _forward_config(num_warps=32, elements_per_thread=32),
    *FORWARD_CONFIGS_OF_FAST_MEMORY,
]

# Stages are rows in shared memory, and not all cards have enough of it for long rows. Configs with
# one stage need almost none; they come first, and pruning always leaves one of them. With 128
# registers for 256 threads, two programs fit on a multiprocessor. The last five are the fastest for
# rows of 256 to 8192 columns on an H100.
BACKWARD_CONFIGS = [
    _backward_config(num_warps=8, stages=1),
    _backward_config(8, 1, elements_per_thread=32, load_again=True, most_registers=128),
    _backward_config(16, 1, elements_per_thread=32, load_again=True),
    _backward_config(num_warps=4, stages=2, elements_per_thread=8),
    _backward_config(num_warps=4, stages=1),
    _backward_config(num_warps=4, stages=2),
    _backward_config(num_warps=4, stages=3),
    _backward_config(num_warps=8, stages=4),
    _backward_config(num_warps=16, stages=3),
    _backward_config(4, 1, in_turns=True),
    _backward_config(8, 3, elements_per_thread=8, most_registers=64, in_turns=True),
    _backward_config(8, 1, most_registers=128, in_turns=True),
    _backward_config(8, 4, most_registers=128, in_turns=True),
    _backward_config(16, 3, in_turns=True),
    _backward_config(4, 3, elements_per_thread=8, most_registers=64, in_turns=True),
    _backward_config(4, 3, most_registers=128, in_turns=True),
    _backward_config(8, 3, most_registers=128, in_turns=True, joined_sums=False),
    _backward_config(8, 4, in_turns=True, joined_sums=False),
    _backward_config(
        16, 4, elements_per_thread=8, most_registers=64, in_turns=True, joined_sums=False
    ),
]

#: For rows that several programs share: see `long_rows`. The second is for `is_light` rows, which
#: need at most 168 registers a thread: 12 programs fit on a multiprocessor, not 8.
LONG_BACKWARD_CONFIGS = [
    Config({"TILE_ELEMENTS": 1024, "PIPELINE_STAGES": 3}, num_warps=1),
    Config({"TILE_ELEMENTS": 1024, "PIPELINE_STAGES": 4}, num_warps=1, maxnreg=168),
]
LONG_PROGRAMS_PER_SM = 8
LIGHT_PROGRAMS_PER_SM = 12

#: Rows of at least this length are long where memory is fast: the exchange between programs costs
#: less there than reading half of a row twice from the L2 cache. On other cards a row is long above
#: `WIDEST_TILE` columns.
LONG_ROW_OF_FAST_MEMORY = 8192

FINALIZE_CONFIGS = [
    _finalize_config(128, 16, num_warps=4),
    _finalize_config(256, 8, num_warps=4),
    _finalize_config(64, 32, num_warps=4),
    _finalize_config(64, 64, num_warps=8),
]


def _few_backward_config(
    num_warps: int, elements_per_thread: int, sum_rows: int, sum_columns: int
) -> Config:
    tile = {"TILE_ELEMENTS": 32 * num_warps * elements_per_thread}
    sums = {"SUM_ROWS": sum_rows, "SUM_COLUMNS": sum_columns}
    return Config({**tile, **sums}, num_warps=num_warps)


# For few rows, in the order of tiles: the first that has a whole row is launched. None is tuned: a
# launch takes microseconds with any of them, a tuning seconds. Each is within 10 % of the fastest
# of 30 for both norms on an H100, at 450 x 256, 64 x 1024, 1 x 4096 and 64 x 4096.
FEW_FORWARD_CONFIGS = [
    _forward_config(num_warps=1, elements_per_thread=8),
    _forward_config(num_warps=2, elements_per_thread=8),
    _forward_config(num_warps=4),
    _forward_config(num_warps=16, elements_per_thread=8),
    _forward_config(num_warps=16),
]

FEW_BACKWARD_CONFIGS = [
    _few_backward_config(4, elements_per_thread=8, sum_rows=64, sum_columns=16),
    _few_backward_config(4, elements_per_thread=16, sum_rows=64, sum_columns=16),
    _few_backward_config(4, elements_per_thread=32, sum_rows=32, sum_columns=32),
    _few_backward_config(8, elements_per_thread=32, sum_rows=64, sum_columns=32),
]


@triton.constexpr_function
def sum_programs(has_weight, has_bias, columns, sum_columns):
    """Return how many programs of the backward kernel for few rows add up columns."""
    return triton.cdiv(columns, sum_columns) if has_weight or has_bias else 0


def prune_few_configs(
    configs: Sequence[Config], named_args: dict[str, Any], *, COLUMNS: int, **kwargs: Any
) -> list[Config]:
    """Return the config with the smallest tile that has a whole row."""
    return [next(config for config in configs if config.kwargs["TILE_ELEMENTS"] >= COLUMNS)]


@triton.constexpr_function
def tile_rows(tile_elements, columns):
    """Return how many whole rows a tile has, or 1 where it is a slice of a row."""
    return max(1, tile_elements // triton.next_power_of_2(columns))


@triton.constexpr_function
def slice_columns(tile_elements, columns):
    """Return how many columns of a row a tile has: all, or the least that needs no more slices."""
    slices = triton.cdiv(columns, tile_elements)
    if slices == 1:
        return columns
    return triton.cdiv(triton.cdiv(columns, slices), SLICE_ALIGNMENT) * SLICE_ALIGNMENT


@triton.constexpr_function
def is_alone(columns, slices):
    """Return whether a program of the forward kernel has a multiprocessor to itself: nothing else
    runs while it waits."""
    return columns > WIDEST_TILE and slices == 1


def slice_count(tile_elements: int, columns: int) -> int:
    """Return the number of tiles of a row; 1 if a tile has whole rows."""
    return triton.cdiv(columns, slice_columns(tile_elements, columns))


#: By columns and sums: half as many programs per multiprocessor as for rows a little shorter.
_FEWER_PROGRAMS = {(2048, 2): 1, (HALVED_ROW, 1): 0.5}


def programs_per_sm(columns: int, sums: int, pinned: bool = False) -> float:
    """Return the number of programs of the backward kernel per multiprocessor; slices count once.

    Enough programs keep the memory busy, but each has partial sums of its own: long rows get
    few. Up to 8192 columns the numbers are the fastest on an H100, each with its fastest config
    (benchmarks/norms.py --sweep).

    Args:
        sums: of how many parameters a program has partial sums; two take registers and time from
            the rows.
        pinned: the first config runs. It has no stages, and needs more programs in their place.
    """
    if columns > LONG_SLICE:
        return 1 / max(2, triton.cdiv(columns, WIDEST_TILE))
    padded = triton.next_power_of_2(columns)
    if padded in (512, 1024):
        return 4
    if not pinned and (columns, sums) in _FEWER_PROGRAMS:
        return _FEWER_PROGRAMS[columns, sums]
    return max(1, min(2, 4096 // padded))


def prune_configs(
    configs: Sequence[Config], named_args: dict[str, Any], *, COLUMNS: int, **kwargs: Any
) -> list[Config]:
    """Return those that `forward_configs` leaves on the current device."""
    return forward_configs(configs, COLUMNS, has_fast_memory())


def forward_configs(configs: Sequence[Config], columns: int, fast_memory: bool) -> list[Config]:
    """Return the configs that cut no row, or long ones into long slices, with no tile too tall."""
    left = _with_few_slices(configs, columns, triton.cdiv(columns, LONG_SLICE))
    return [c for c in left if fast_memory or c not in FORWARD_CONFIGS_OF_FAST_MEMORY]


def prune_long_configs(
    configs: Sequence[Config],
    named_args: dict[str, Any],
    *,
    COLUMNS: int,
    HAS_BIAS: bool,
    HAS_RESIDUAL_GRADIENT: bool,
    **kwargs: Any,
) -> list[Config]:
    """Return the config for such rows; none is tuned."""
    itemsize = named_args["input_pointer"].dtype.itemsize
    return [configs[is_light(COLUMNS, itemsize, HAS_BIAS, HAS_RESIDUAL_GRADIENT)]]


def is_light(columns: int, itemsize: int, has_bias: bool, has_residual_gradient: bool) -> bool:
    """Return whether the second of the `LONG_BACKWARD_CONFIGS` is launched: for sums of one
    parameter, on rows of 16-bit values that begin at 16 bytes."""
    return columns % 8 == 0 and itemsize == 2 and not (has_bias or has_residual_gradient)


def _with_few_slices(configs: Sequence[Config], COLUMNS: int, enough: int) -> list[Config]:
    """Return the configs with at most `enough` slices, or as few as any of them has."""
    slices = [slice_count(config.kwargs["TILE_ELEMENTS"], COLUMNS) for config in configs]
    most = max(min(slices), enough)
    return [
        config
        for config, count in zip(configs, slices, strict=True)
        if count <= most
        and (
            config.kwargs["TILE_ELEMENTS"] <= TALL_TILE
            or tile_rows(config.kwargs["TILE_ELEMENTS"], COLUMNS) == 1
        )
    ]


def prune_backward_configs(
    configs: Sequence[Config], named_args: dict[str, Any], **kwargs: Any
) -> list[Config]:
    """Return those that `backward_configs` leaves on the current device."""
    return backward_configs(configs, has_fast_memory(), **kwargs)


def has_fast_memory(device: int | None = None) -> bool:
    """Return whether a device, by default the current one, has fast memory.

    False where torch uses no GPU, as in the interpreter and in compiles for another machine.
    """
    torch = sys.modules.get("torch")
    if not (torch and torch.cuda.is_initialized()):
        return False
    return _has_fast_memory(torch.cuda.current_device() if device is None else device)


@functools.cache
def _has_fast_memory(device: int) -> bool:
    facts = triton.runtime.driver.active.utils.get_device_properties(device)
    # In kHz and bits; data comes twice in a clock.
    gb_per_s = 2 * facts["mem_clock_rate"] * facts["mem_bus_width"] / 8 / 1e6
    return gb_per_s / facts["multiprocessor_count"] > FAST_MEMORY_GB_S


def backward_configs(
    configs: Sequence[Config],
    fast_memory: bool,
    *,
    COLUMNS: int,
    IN_PLACE: bool,
    HAS_WEIGHT: bool,
    HAS_BIAS: bool,
    HAS_RESIDUAL_GRADIENT: bool,
    **kwargs: Any,
) -> list[Config]:
    """Return the configs that give every multiprocessor a program, or that cut no row in place.

    And that take no more in a turn than is good there. The first of them, which runs when a call is
    pinned, is the same on all devices.
    """
    sums = HAS_WEIGHT + HAS_BIAS
    is_halved = COLUMNS == HALVED_ROW and not (IN_PLACE or (sums > 1 and HAS_RESIDUAL_GRADIENT))
    left = _with_few_slices(configs, COLUMNS, 2 if is_halved else triton.cdiv(COLUMNS, LONG_SLICE))
    slices = [slice_count(config.kwargs["TILE_ELEMENTS"], COLUMNS) for config in left]
    if IN_PLACE and min(slices) > 1:
        raise ValueError(
            f"IN_PLACE=True with COLUMNS={COLUMNS} cannot work: several programs share a row of "
            f"more than {WIDEST_TILE} columns, and each would read what the others have already "
            "overwritten. Give the outputs their own memory"
        )
    per_sm = programs_per_sm(COLUMNS, sums)
    most = MOST_IN_A_TURN_OF_FAST_MEMORY if fast_memory else MOST_IN_A_TURN
    most = max(most, triton.next_power_of_2(COLUMNS))
    return [
        config
        for config, count in zip(left, slices, strict=True)
        if (count == 1 if IN_PLACE else count == 2 if is_halved else count * per_sm >= 1)
        and (count > 1 or not _takes_too_much(config, per_sm, most))
    ]


def _takes_too_much(config: Config, per_sm: float, most: int) -> bool:
    return config.kwargs["IN_TURNS"] and config.kwargs["TILE_ELEMENTS"] * per_sm > most
