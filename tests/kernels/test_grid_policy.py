"""Every row has one owner, no program is idle, and the machine is busy, for any number of rows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safetune.kernels.configs import (
    BACKWARD_CONFIGS,
    programs_per_sm,
    prune_backward_configs,
    slice_count,
)
from safetune.kernels.grid_policy import PARTIALS_SHARE, GridPlan, plan_grid
from tests.kernels.owned import owned_rows, owned_tiles

#: bf16: a row of dy, x and dx; a weight's and a bias's sums in fp32, written and read.
ROW_BYTES, PARTIAL_BYTES = 6, 16

#: (group, rows stored) for each program of a grid.
Stores = Iterable[tuple[int, range]]


def violations(rows: int, groups: int, stores: Stores) -> list[str]:
    """Return how the stores break the contract; takes time in programs, not in rows."""
    found = []
    by_group: dict[int, list[range]] = {group: [] for group in range(groups)}
    for program, (group, owned) in enumerate(stores):
        by_group[group].append(owned)
        if not owned:
            found.append(f"program {program} is idle")
    for group, ranges in by_group.items():
        end = 0
        for owned in sorted((r for r in ranges if r), key=lambda r: r.start):
            if owned.start > end:
                found.append(f"rows {end} to {owned.start} of group {group} have no owner")
            if owned.start < end:
                found.append(f"row {owned.start} of group {group} has two owners")
            end = max(end, owned.stop)
        if end != rows:
            found.append(f"the rows of group {group} end at {end}, not at {rows}")
    return found


def planned_stores(plan: GridPlan) -> Iterator[tuple[int, range]]:
    for program in range(plan.programs):
        yield program // plan.programs_per_group, owned_rows(plan, program)


def check(plan: GridPlan, sm_count: int, programs_per_sm: float) -> None:
    assert violations(plan.rows, plan.groups, planned_stores(plan)) == []
    assert plan.programs <= max(programs_per_sm * sm_count, plan.groups)
    owned = [len(rows) for _, rows in planned_stores(plan)]
    assert not owned or max(owned) - min(owned) <= 1


@given(
    rows=st.one_of(st.integers(0, 1024), st.integers(0, 2**31)),
    groups=st.integers(1, 64),
    sm_count=st.integers(1, 256),
    programs_per_sm=st.sampled_from([0.25, 0.5, 1, 2, 3, 8]),
    partial_bytes=st.sampled_from([0, PARTIAL_BYTES, 1000]),
)
def test_any_plan_keeps_the_contract(
    rows: int, groups: int, sm_count: int, programs_per_sm: float, partial_bytes: int
) -> None:
    """For all tile heights: a plan has none, and programs mask what is not their own."""
    plan = plan_grid(rows, groups, sm_count, programs_per_sm, ROW_BYTES, partial_bytes)
    check(plan, sm_count, programs_per_sm)


@given(
    rows=st.one_of(st.integers(0, 512), st.integers(0, 2**15)),
    groups=st.integers(1, 64),
    sm_count=st.integers(1, 256),
    programs_per_sm=st.sampled_from([0.5, 1, 4]),
    height=st.integers(1, 128),
    in_turns=st.booleans(),
)
def test_tiles_of_any_height_store_the_same_rows(
    rows: int, groups: int, sm_count: int, programs_per_sm: float, height: int, in_turns: bool
) -> None:
    """In both orders: each row once, by programs of which none is idle or has two rows more."""
    plan = plan_grid(rows, groups, sm_count, programs_per_sm)
    tiles = [
        (program, tile)
        for program in range(plan.programs)
        for tile in owned_tiles(plan, program, height, in_turns)
    ]
    stores = ((program // plan.programs_per_group, tile) for program, tile in tiles)
    assert violations(rows, groups, stores) == []
    assert all(len(tile) <= height for _, tile in tiles)
    owned = Counter[int]()
    for program, tile in tiles:
        owned[program] += len(tile)
    assert len(owned) == plan.programs
    assert not owned or max(owned.values()) - min(owned.values()) <= 1


NAMED = [
    *((rows, 1, 188) for rows in (*range(33), 129, 189, 191, 257, 450, 5000, 24000, 24100)),
    *((3, groups, sm_count) for groups in (4, 16, 64) for sm_count in (1, 4, 188)),
    (450, 400, 188),
    (0, 300, 188),
    (2**31, 1, 132),
]


@pytest.mark.parametrize(("rows", "groups", "sm_count"), NAMED)
def test_named_cases(rows: int, groups: int, sm_count: int) -> None:
    """The cases of fla-org/flash-linear-attention#796, few rows, and more groups than SMs."""
    check(plan_grid(rows, groups, sm_count, 4), sm_count, 4)


def test_no_rows_no_programs() -> None:
    plan = plan_grid(0, 4, 132)
    assert plan.programs == 0


def test_partials_are_bounded_by_the_machine() -> None:
    assert {plan_grid(2**k, 1, 132, 4).programs for k in range(20, 32)} == {4 * 132}


@given(rows=st.integers(0, 2**20), sm_count=st.integers(1, 256), most=st.integers(1, 8))
def test_partials_cost_little_where_there_is_a_choice(rows: int, sm_count: int, most: int) -> None:
    plan = plan_grid(rows, 1, sm_count, most, ROW_BYTES, PARTIAL_BYTES)
    share = plan.programs * PARTIAL_BYTES / max(1, rows * ROW_BYTES)
    assert plan.programs <= sm_count or share <= PARTIALS_SHARE
    assert plan.programs <= sm_count or plan.programs % sm_count == 0
    assert plan.programs >= min(rows, sm_count)


def busy_share_and_balance(plan: GridPlan, sm_count: int, slices: int) -> tuple[float, float]:
    """Return the share of SMs with work, and an SM's mean rows over those of the busiest."""
    load: Counter[int] = Counter()
    for program in range(plan.programs):
        for part in range(slices):
            load[(program * slices + part) % sm_count] += len(owned_rows(plan, program))
    total = plan.rows * plan.groups * slices
    return len(load) / sm_count, total / sm_count / max(load.values())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("columns", [128, 256, 1024, 4096, 8192, 16384, 32768])
def test_the_machine_is_busy(columns: int, has_bias: bool) -> None:
    """For each number of slices that a config may cut rows into."""
    keys = {
        "COLUMNS": columns,
        "IN_PLACE": False,
        "HAS_WEIGHT": True,
        "HAS_BIAS": has_bias,
        "HAS_RESIDUAL_GRADIENT": False,
    }
    left = prune_backward_configs(BACKWARD_CONFIGS, {}, **keys)
    per_sm = programs_per_sm(columns, 1 + has_bias)
    slices = {slice_count(config.kwargs["TILE_ELEMENTS"], columns) for config in left}
    measured = [
        busy_share_and_balance(
            plan_grid(rows, 1, sm_count, per_sm, ROW_BYTES, PARTIAL_BYTES),
            sm_count,
            count,
        )
        for count in slices
        for sm_count in (108, 114, 132, 144, 148, 160, 188)
        for rows in range(2048, 32769, 499)
    ]
    assert min(busy for busy, _ in measured) == 1.0
    assert statistics.mean(balance for _, balance in measured) >= 0.85


def historic_stores(rows: int, sm_count: int, height: int) -> Iterator[tuple[int, range]]:
    """What FLA's policy stored before #1249: tiles from each start on, masked by the end of all."""
    programs = min(sm_count, rows)
    per_program = -(-rows // programs)
    for program in range(programs):
        start = program * per_program
        stop = start + -(-per_program // height) * height if start < rows else start
        yield 0, range(start, min(stop, rows))


@pytest.mark.parametrize("height", [32, 64])
@pytest.mark.parametrize(
    ("rows", "shared", "idle"), [(129, 128, 0), (257, 255, 59), (450, 447, 38), (24000, 0, 0)]
)
def test_the_checker_sees_what_was_wrong(rows: int, height: int, shared: int, idle: int) -> None:
    """The historic policy: rows of several writers and idle programs on 188 SMs (seeds.md, 3)."""
    stores = list(historic_stores(rows, 188, height))
    writers = Counter(row for _, owned in stores for row in owned)
    assert sum(count > 1 for count in writers.values()) == shared
    found = violations(rows, 1, stores)
    assert any("two owners" in text for text in found) == (shared > 0)
    assert sum("idle" in text for text in found) == idle


@pytest.mark.parametrize(
    ("stores", "message"),
    [
        ([(0, range(5)), (0, range(4, 9))], "row 4 of group 0 has two owners"),
        ([(0, range(4)), (0, range(5, 9))], "rows 4 to 5 of group 0 have no owner"),
        ([(0, range(8))], "end at 8, not at 9"),
        ([(0, range(10))], "end at 10, not at 9"),
        ([(0, range(9)), (0, range(9, 9))], "program 1 is idle"),
    ],
)
def test_the_checker_sees_one_row(stores: Stores, message: str) -> None:
    assert [text for text in violations(9, 1, stores) if message in text]


@pytest.mark.parametrize("arguments", [(-1, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1, 0)], ids=str)
def test_impossible_counts_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least"):
        plan_grid(*arguments)
