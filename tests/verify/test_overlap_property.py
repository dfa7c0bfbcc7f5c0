"""Random grids, tiles and views, and all short orders of accesses, against a plain count."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from safetune.verify import findings
from safetune.verify.overlap import check_overlap

pytestmark = pytest.mark.internals


@triton.jit
def tiles(
    y,
    stride_row,
    stride_column,
    row_step,
    column_step,
    row_end,
    column_end,
    ATOMIC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (i, j) writes a tile; `ATOMIC` is a set of bits, one for each parity of i + j."""
    i, j = tl.program_id(0), tl.program_id(1)
    row = i * row_step + tl.arange(0, ROWS)
    column = j * column_step + tl.arange(0, COLUMNS)
    pointers = y + row[:, None] * stride_row + column[None, :] * stride_column
    mask = (row < row_end)[:, None] & (column < column_end)[None, :]
    ones = tl.full([ROWS, COLUMNS], 1, tl.float32)
    if (ATOMIC >> ((i + j) % 2)) & 1:
        tl.atomic_add(pointers, ones, mask=mask)
    else:
        tl.store(pointers, ones, mask=mask)


@dataclass(frozen=True)
class Case:
    """A launch of `tiles` on a view of a storage."""

    grid: tuple[int, int]
    tile: tuple[int, int]
    step: tuple[int, int]
    end: tuple[int, int]
    shape: tuple[int, int]
    padding: int
    offset: int
    transposed: bool
    atomic: int

    def view(self) -> torch.Tensor:
        rows, columns = self.shape[::-1] if self.transposed else self.shape
        width = columns + self.padding
        storage = torch.zeros(self.offset + rows * width, dtype=torch.float32)
        whole = storage[self.offset :].view(rows, width)[:, :columns]
        return whole.t() if self.transposed else whole

    def writers(self, y: torch.Tensor) -> dict[int, list[tuple[int, bool]]]:
        """The programs at each element of the storage, by position, and whether atomically."""
        found: dict[int, list[tuple[int, bool]]] = {}
        for i, j in np.ndindex(*self.grid):
            atomic = bool(self.atomic >> ((i + j) % 2) & 1)
            for a, b in np.ndindex(*self.tile):
                row, column = i * self.step[0] + a, j * self.step[1] + b
                if row < self.end[0] and column < self.end[1]:
                    at = self.offset + row * y.stride(0) + column * y.stride(1)
                    writer = (i * self.grid[1] + j, atomic)
                    owners = found.setdefault(at, [])
                    if writer not in owners:
                        owners.append(writer)
        return found


small = st.integers(1, 6)
cases = st.builds(
    Case,
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    tile=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    step=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    end=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    shape=st.tuples(small, small),
    padding=st.integers(0, 3),
    offset=st.integers(0, 3),
    transposed=st.booleans(),
    atomic=st.integers(0, 3),
)


@settings(max_examples=60)
@given(cases)
def test_like_a_count_of_the_writers(case: Case) -> None:
    y = case.view()
    writers = case.writers(y)
    storage = y.untyped_storage().nbytes() // 4
    rows, columns = np.indices(case.shape)
    positions = (case.offset + rows * y.stride(0) + columns * y.stride(1)).ravel().tolist()

    report = check_overlap(
        tiles,
        case.grid,
        y,
        *y.stride(),
        *case.step,
        *case.end,
        case.atomic,
        *case.tile,
        outputs=["y"],
    )

    plain = {at: sum(not atomic for _, atomic in of) for at, of in writers.items()}
    mixed = {at for at, of in writers.items() if 0 < plain[at] < len(of)}
    expected = {
        "overlap": sum(plain.get(at, 0) > 1 for at in positions),
        "mixed": sum(at in mixed for at in positions),
        "unwritten": sum(at not in writers for at in positions),
        "gap": sum(0 <= at < storage and at not in set(positions) for at in writers),
        "outside": sum(  # once for stores, once for atomics
            len({atomic for _, atomic in of})
            for at, of in writers.items()
            if at < 0 or at >= storage
        ),
    }
    found: dict[str, Any] = dict.fromkeys(expected, 0)
    for finding in report.findings:
        found[finding.kind.value] += finding.elements
    assert found == expected
    wrote = {program for of in writers.values() for program, _ in of}
    if wrote:
        everyone = set(range(case.grid[0] * case.grid[1]))
        idle = {i * case.grid[1] + j for i, j, _ in report.idle_programs}
        assert idle == everyone - wrote
    for finding in report.findings:
        if finding.kind.value == "overlap":
            row, column = finding.places[0].index
            at = case.offset + row * y.stride(0) + column * y.stride(1)
            named = [i * case.grid[1] + j for i, j, _ in finding.places[0].programs]
            assert named == [program for program, atomic in writers[at] if not atomic]


@triton.jit
def accesses(y, todo, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Each program makes STEPS accesses to each element: 1 loads it, 2 stores, 3 updates."""
    elements = tl.arange(0, SIZE)
    for step in range(STEPS):
        access = tl.load(todo + (tl.program_id(0) * STEPS + step) * SIZE + elements)
        tl.load(y + elements, mask=access == 1)
        tl.store(y + elements, elements, mask=access == 2)
        tl.atomic_add(y + elements, 1, mask=access == 3)


def test_no_conflict_of_two_programs_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that three programs of two steps can do; two loads, or two updates, do not conflict."""
    programs, steps = 3, 2
    todo = np.array(list(itertools.product(range(4), repeat=programs * steps)), dtype=np.int32)
    size = len(todo)
    conflicts = {
        element
        for element, row in enumerate(todo.reshape(size, programs, steps).tolist())
        for mine, theirs in itertools.combinations(row, 2)
        for one, other in itertools.product(mine, theirs)
        if one and other and (one != other or one == 2)
    }
    monkeypatch.setattr(findings, "_MOST_PLACES", size)
    y = torch.zeros(size, 1, dtype=torch.int32)

    report = check_overlap(accesses, (programs,), y, torch.from_numpy(todo.T.copy()), size, steps)

    assert {place.index[0] for found in report.findings for place in found.places} == conflicts
