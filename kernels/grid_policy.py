"""Which program owns which rows in a persistent kernel: decided on the host, for every tile height.

The layer-norm backward kernel keeps sums over rows in registers, so it launches a fixed number of
programs and gives each a run of consecutive rows. The rule here makes three things true by
construction, for any number of rows:

- every row belongs to exactly one program, so no two programs store the same element;
- every program owns at least one row, so none is idle and every partial sum is written;
- the number of programs, and so the size of the partial sums, is bounded by the machine.

Proof. The rows of a group are cut into `tiles = ceil(rows / alignment)` tiles of `alignment` rows,
the last one possibly shorter. With `share, longer = divmod(tiles, programs)`, program j gets the
tiles from `j * share + min(j, longer)` on, `share + 1` of them if `j < longer` and else `share`.
Where the run of j ends, that of j + 1 begins; the first begins at tile 0, and the last ends at
`programs * share + longer = tiles`. So the runs partition the tiles, and, each clipped to the rows
there are, the rows. As `programs <= tiles`, each run has a tile; as `(tiles - 1) * alignment <
rows`, each tile has a row. Groups have no row in common. And `programs * groups` is at most
`max(sm_count * programs_per_sm, groups)`.

A program may walk its rows in tiles of any height, if it masks what it loads and stores by the rows
it owns: ownership does not depend on the height that the tuner picks. The alignment only saves
work. It is the least common multiple of tile heights where there are rows enough for that, and then
no such tile is cut short before the last row.

What this replaces: fla-org/flash-linear-attention#796 and #1249, where a program's rows were
`cdiv(rows, programs)`, unrelated to the tile height, and tiles ran into the next program's rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class GridPlan:
    """A one-dimensional grid of `programs` programs over `groups` x `rows` rows.

    All fields are run-time integers for the kernel: no value of `rows` compiles anything new.

    Attributes:
        rows: rows in each group.
        groups: independent groups; program p works on group `p // programs_per_group`.
        alignment: every program's first row is a multiple of this.
        programs_per_group: how many programs share the rows of one group; 0 without rows.
    """

    rows: int
    groups: int
    alignment: int
    programs_per_group: int

    @property
    def programs(self) -> int:
        """The size of the grid, and the number of partial sums."""
        return self.groups * self.programs_per_group

    def owned_rows(self, program: int) -> range:
        """Return the rows, counted within its group, that one program of the grid owns."""
        index = program % self.programs_per_group
        share, longer = divmod(-(-self.rows // self.alignment), self.programs_per_group)
        first = index * share + min(index, longer)
        last = first + share + (index < longer)
        return range(first * self.alignment, min(last * self.alignment, self.rows))


def plan_grid(
    rows: int,
    groups: int,
    sm_count: int,
    tile_heights: Iterable[int],
    programs_per_sm: int = 4,
    tiles_per_sm: int = 4,
) -> GridPlan:
    """Return the plan for `rows` rows in each of `groups` groups; pure, the same everywhere.

    Args:
        rows: rows in each group, 0 or more.
        groups: independent groups, at least 1.
        sm_count: multiprocessors of the device.
        tile_heights: the rows per tile of every config that the tuner may pick.
        programs_per_sm: how many programs one multiprocessor is given at most.
        tiles_per_sm: the alignment stays so small that there are this many tiles for each.

    Raises:
        ValueError: a count is out of range, or there are no tile heights.
    """
    heights = sorted(set(tile_heights))
    if rows < 0 or groups < 1 or sm_count < 1 or programs_per_sm < 1 or tiles_per_sm < 1:
        raise ValueError(
            f"rows={rows} must be at least 0, and groups={groups}, sm_count={sm_count}, "
            f"programs_per_sm={programs_per_sm}, tiles_per_sm={tiles_per_sm} at least 1"
        )
    if not heights or heights[0] < 1:
        raise ValueError(f"tile_heights={heights} must name at least one height, each at least 1")
    alignment = _alignment(rows, groups, heights, wanted_tiles=tiles_per_sm * sm_count)
    tiles = -(-rows // alignment)
    programs_per_group = min(max(1, programs_per_sm * sm_count // groups), tiles)
    return GridPlan(rows, groups, alignment, programs_per_group)


def _alignment(rows: int, groups: int, heights: list[int], wanted_tiles: int) -> int:
    """Return the lcm of the longest run of smallest heights that leaves the wanted tiles."""
    alignment = heights[0]
    for multiple in (math.lcm(*heights[:count]) for count in range(2, len(heights) + 1)):
        if -(-rows // multiple) * groups < wanted_tiles:
            break
        alignment = multiple
    return alignment
