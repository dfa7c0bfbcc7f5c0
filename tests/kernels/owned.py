"""Which rows the programs of a grid plan own, as docs/kernels.md says; what kernels compute."""

from __future__ import annotations

from collections.abc import Iterator

from safetune.kernels.grid_policy import GridPlan


def owned_rows(plan: GridPlan, program: int, taken: int = 0) -> range:
    """Return a program's run within its group, of the rows from `taken` on."""
    index = program % plan.programs_per_group
    share, longer = divmod(plan.rows - taken, plan.programs_per_group)
    first = taken + index * share + min(index, longer)
    return range(first, first + share + (index < longer))


def owned_tiles(plan: GridPlan, program: int, height: int, in_turns: bool) -> Iterator[range]:
    """Yield the rows of each tile of a program, in order.

    They are tiles of `owned_rows`, or, with `in_turns`, tiles beside the other programs' tiles.
    """
    programs = plan.programs_per_group
    rounds = plan.rows // (programs * height) if in_turns else 0
    for turn in range(rounds):
        first = (turn * programs + program % programs) * height
        yield range(first, first + height)
    run = owned_rows(plan, program, rounds * programs * height)
    for first in range(run.start, run.stop, height):
        yield range(first, min(first + height, run.stop))
