"""The grid plan of a persistent kernel: which program owns which rows, for every tile height.

The layer-norm backward kernel keeps sums over rows in registers, so it launches a fixed number of
programs and gives each a run of consecutive rows. For any number of rows

- every row belongs to exactly one program, so no two programs store the same element;
- every program owns at least one row, so every partial sum is written;
- the device bounds the number of programs, and so the size of the partial sums.

With `share, longer = divmod(rows, programs)`, the run of program j begins at row
`j * share + min(j, longer)`. It ends where the run of j + 1 begins; the first begins at 0, and the
last ends at `programs * share + longer`, which is `rows`. A program masks its loads and stores
with the end of its run, and only the last tile of a run is cut short. That wastes lanes but no
bytes; runs aligned with tiles would differ by up to a whole tile of the tallest config.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

#: The bytes that partial sums may move, relative to those of the rows, above one program per SM.
PARTIALS_SHARE = 0.06


@dataclass(frozen=True)
class GridPlan:
    """A one-dimensional grid of `programs` programs over `groups` x `rows` rows.

    Program p works on group `p // programs_per_group`. All fields are run-time integers for the
    kernel: no value of `rows` compiles anything new.
    """

    rows: int
    groups: int
    programs_per_group: int

    @property
    def programs(self) -> int:
        """The number of programs, and so of partial sums."""
        return self.groups * self.programs_per_group


@functools.lru_cache(maxsize=1024)
def plan_grid(
    rows: int,
    groups: int,
    sm_count: int,
    programs_per_sm: float = 2,
    row_bytes: int = 0,
    partial_bytes: int = 0,
) -> GridPlan:
    """Return the plan for `rows` rows in each of `groups` groups; pure, the same everywhere.

    Args:
        programs_per_sm: the most programs on a multiprocessor; below 1 if several multiprocessors
            work on one row.
        row_bytes: bytes read and written per row.
        partial_bytes: bytes written and read again per program for its partial sums. More than
            one program per multiprocessor may cost at most `PARTIALS_SHARE`.
    """
    if rows < 0 or groups < 1 or sm_count < 1 or programs_per_sm <= 0:
        raise ValueError(
            f"rows={rows} must be at least 0, groups={groups} and sm_count={sm_count} at least 1, "
            f"and programs_per_sm={programs_per_sm} more than 0"
        )
    most = int(programs_per_sm * sm_count)
    if partial_bytes:
        worthwhile = int(PARTIALS_SHARE * rows * groups * row_bytes / partial_bytes)
        most = min(most, max(1, worthwhile // sm_count) * sm_count)
    return GridPlan(rows, groups, min(rows, max(1, most // groups)))
