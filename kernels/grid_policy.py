"""Which program owns which rows in a persistent kernel: decided on the host, for every tile height.

The layer-norm backward kernel keeps sums over rows in registers, so it launches a fixed number of
programs and gives each a run of consecutive rows. The rule here makes three things true by
construction, for any number of rows:

- every row belongs to exactly one program, so no two programs store the same element;
- every program owns at least one row, so none is idle and every partial sum is written;
- the number of programs, and so the size of the partial sums, is bounded by the machine.

Proof. With `share, longer = divmod(rows, programs)`, program j of a group gets the rows from
`j * share + min(j, longer)` on, `share + 1` of them if `j < longer` and else `share`. Where the run
of j ends, that of j + 1 begins; the first begins at row 0, and the last ends at
`programs * share + longer = rows`. So the runs partition the rows. As `programs <= rows`, each run
has a row. Groups have no row in common. And `programs * groups` is at most
`max(sm_count * programs_per_sm, groups)`.

A program walks its run in tiles of any height and masks what it loads and stores by the end of its
run: no height is a parameter of the plan. Only the last tile of a run is cut short. That costs idle
lanes and not a byte of traffic; to align runs with tiles would cost balance, up to a whole tile of
the tallest config on each program.

In turns. Runs make each program read far from all others. The other order has all programs side by
side: of the first `rounds = rows // (programs * height)` times that many tiles, tile t is that of
program `t % programs`, and the rows that are left over, fewer than a tile for each program, are
shared out in runs as above. Whole tiles at multiples of the height do not overlap, and end at
`rounds * programs * height`, where the runs begin that partition the rest. Where there is a round,
each program has a tile of it, and where there is none, all rows are shared out in runs. So for any
height each row has one owner, and none is idle. Programs differ by one row at the most.

What this replaces: fla-org/flash-linear-attention#796 and #1249, where a program's rows were
`cdiv(rows, programs)`, unrelated to the tile height, and tiles ran into the next program's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: Partial sums may move this much of what the rows themselves move, where there is a choice.
PARTIALS_SHARE = 0.06


@dataclass(frozen=True)
class GridPlan:
    """A one-dimensional grid of `programs` programs over `groups` x `rows` rows.

    All fields are run-time integers for the kernel: no value of `rows` compiles anything new.

    Attributes:
        rows: rows in each group.
        groups: independent groups; program p works on group `p // programs_per_group`.
        programs_per_group: how many programs share the rows of one group; 0 without rows.
    """

    rows: int
    groups: int
    programs_per_group: int

    @property
    def programs(self) -> int:
        """The number of programs, and so of partial sums."""
        return self.groups * self.programs_per_group

    def owned_rows(self, program: int) -> range:
        """Return the run of rows, counted within its group, that one program owns."""
        return self._run(program, 0)

    def owned_tiles(self, program: int, height: int, in_turns: bool = False) -> Iterator[range]:
        """Yield the rows of each tile that one program walks, in order: all that it owns.

        Those of `owned_rows`, or, with `in_turns`, tiles side by side with the other programs'.
        """
        programs = self.programs_per_group
        rounds = self.rows // (programs * height) if in_turns else 0
        for turn in range(rounds):
            first = (turn * programs + program % programs) * height
            yield range(first, first + height)
        run = self._run(program, rounds * programs * height)
        for first in range(run.start, run.stop, height):
            yield range(first, min(first + height, run.stop))

    def _run(self, program: int, taken: int) -> range:
        """Return one program's share of the rows from `taken` on."""
        index = program % self.programs_per_group
        share, longer = divmod(self.rows - taken, self.programs_per_group)
        first = taken + index * share + min(index, longer)
        return range(first, first + share + (index < longer))


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
        rows: rows in each group, 0 or more.
        groups: independent groups, at least 1.
        sm_count: multiprocessors of the device.
        programs_per_sm: how many programs one multiprocessor is given at most; below 1 where
            several multiprocessors work on one row.
        row_bytes: what is read and written of each row.
        partial_bytes: what is written, and read again, of each program's partial sums. More
            programs than keep the multiprocessors busy are not worth more than `PARTIALS_SHARE`.

    Raises:
        ValueError: a count is out of range.
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
