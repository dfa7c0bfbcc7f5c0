"""Shared parts of the norm kernels: loads that convert, and the rows that a program owns."""

from __future__ import annotations

import triton
import triton.language as tl

ANY_EVICTION = tl.constexpr("")


@triton.jit
def load_as(pointers, mask, dtype: tl.constexpr, EVICTION: tl.constexpr = ANY_EVICTION):
    """Load and convert; masked elements are 0, so they add 0 to every sum."""
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICTION).to(dtype)


@triton.jit
def load_for_all(pointer, row, column, column_mask, dtype: tl.constexpr):
    """Load one row for all rows of a tile, each thread for the rows that it holds.

    A load of [1, columns] has a layout of its own, all warps side by side in that row. Triton
    gives half of the tile's arithmetic that layout, with each row's sums across all warps. To load
    it once and send it to the others would have each program wait before its first tile.
    """
    row = row[:, None]
    return load_as(pointer + (column + 0 * row), column_mask & (row >= 0), dtype)


@triton.jit
def sum_columns(a, b):
    """Return both sums over the columns, [rows, 1] each, in one exchange between warps, not two."""
    return tl.split(tl.sum(tl.join(a, b), axis=1, keep_dims=True))


@triton.jit
def owned_rows(index, rows, programs):
    """Return the first and the end of a program's run, as `grid_policy` divides the rows."""
    share = rows // programs
    longer = rows % programs
    first = index * share + tl.minimum(index, longer)
    return first, first + share + (index < longer).to(tl.int32)


@triton.jit
def owned_tiles(index, rows, programs, TILE_ROWS: tl.constexpr, IN_TURNS: tl.constexpr):
    """Return how many tiles a program has, the first row of its last rows, and their end.

    IN_TURNS: as long as there is a whole tile for each program they take one each, side by side,
    and then the rest is shared out in runs, of a tile at most. Otherwise everything is.
    """
    rounds = rows // (programs * TILE_ROWS) * IN_TURNS
    taken = rounds * programs * TILE_ROWS
    first, end = owned_rows(index, rows - taken, programs)
    return rounds + tl.cdiv(end - first, TILE_ROWS), taken + first, taken + end


@triton.jit
def tile_start(turn, index, programs, first, TILE_ROWS: tl.constexpr, IN_TURNS: tl.constexpr):
    """Return the first row of a program's tile: its place in a round, or in the last rows."""
    if IN_TURNS:
        # In the last turn, the rest begins no later than a whole tile of this program would.
        return tl.minimum((turn * programs + index) * TILE_ROWS, first)
    return first + turn * TILE_ROWS
