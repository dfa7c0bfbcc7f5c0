"""The configs that the layer-norm kernels are tuned over, and how tall a tile each of them makes.

A config fixes how many elements a tile has, not how many rows, so that every config is valid for
every number of columns: a tile is as many whole rows as fit, and at least one. 16 elements per
thread, `512 * num_warps` per tile, stay in registers; the backward pass needs up to eight per
element, so no more than 8192 elements fit the 65536 that a program can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
from triton import Config

#: Above this, the fp32 copies of one thread's share of a tile no longer fit its 255 registers.
MAX_ELEMENTS_PER_THREAD = 32


def _forward_config(num_warps: int, elements_per_thread: int = 16) -> Config:
    return Config({"TILE_ELEMENTS": 32 * num_warps * elements_per_thread}, num_warps=num_warps)


def _backward_config(num_warps: int, pipeline_stages: int) -> Config:
    tile_elements = min(512 * num_warps, 8192)
    return Config(
        {"TILE_ELEMENTS": tile_elements, "PIPELINE_STAGES": pipeline_stages}, num_warps=num_warps
    )


def _finalize_config(tile_programs: int, tile_columns: int, num_warps: int) -> Config:
    return Config(
        {"TILE_PROGRAMS": tile_programs, "TILE_COLUMNS": tile_columns}, num_warps=num_warps
    )


# The first config of each list runs when nothing is tuned, so it works for any columns and dtypes:
# with one stage the backward kernel needs next to no shared memory, however long the rows are.
FORWARD_CONFIGS = [
    _forward_config(num_warps=8),
    _forward_config(num_warps=1),
    _forward_config(num_warps=2),
    _forward_config(num_warps=4),
    _forward_config(num_warps=4, elements_per_thread=32),
    _forward_config(num_warps=8, elements_per_thread=32),
    _forward_config(num_warps=16),
    _forward_config(num_warps=32),
]

BACKWARD_CONFIGS = [
    _backward_config(num_warps=8, pipeline_stages=1),
    _backward_config(num_warps=2, pipeline_stages=2),
    _backward_config(num_warps=4, pipeline_stages=2),
    _backward_config(num_warps=4, pipeline_stages=3),
    _backward_config(num_warps=8, pipeline_stages=2),
    _backward_config(num_warps=16, pipeline_stages=2),
    _backward_config(num_warps=32, pipeline_stages=1),
    _backward_config(num_warps=32, pipeline_stages=2),
]

FINALIZE_CONFIGS = [
    _finalize_config(64, 32, num_warps=4),
    _finalize_config(32, 32, num_warps=4),
    _finalize_config(32, 64, num_warps=4),
    _finalize_config(32, 128, num_warps=8),
    _finalize_config(64, 64, num_warps=8),
    _finalize_config(128, 32, num_warps=8),
]


@triton.constexpr_function
def tile_rows(tile_elements, columns):
    """Return how many whole rows a tile has; called by kernels, their grids and the grid policy."""
    return max(1, tile_elements // triton.next_power_of_2(columns))


def backward_tile_heights(columns: int) -> list[int]:
    """Return the tile heights that the backward configs make of rows of this length."""
    return [tile_rows(config.kwargs["TILE_ELEMENTS"], columns) for config in BACKWARD_CONFIGS]


def prune_spilling(
    configs: Sequence[Config], named_args: dict[str, Any], *, COLUMNS: int, **kwargs: Any
) -> list[Config]:
    """Return the configs whose threads can hold their share of a row, or those closest to it."""
    shares = [
        max(config.kwargs["TILE_ELEMENTS"], triton.next_power_of_2(COLUMNS))
        // (32 * config.num_warps)
        for config in configs
    ]
    limit = max(MAX_ELEMENTS_PER_THREAD, min(shares))
    return [config for config, share in zip(configs, shares, strict=True) if share <= limit]
