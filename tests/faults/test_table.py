"""The table of faults: every row has its tests, and a result is called what it is."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.selection import COLLECTED

_spec = importlib.util.spec_from_file_location("fault_table", Path(__file__).with_name("table.py"))
assert _spec is not None
assert _spec.loader is not None
table: Any = importlib.util.module_from_spec(_spec)
sys.modules["fault_table"] = table
_spec.loader.exec_module(table)
ROW = table.rows.BY_ID["endless-loop"]


def report(outcome: str, place: str = "CPU", row: str = ROW.id) -> Any:
    return table.Report(f"test_{outcome}", (row,), place, outcome, 1.5, "")


def statuses(*reports: Any) -> dict[str, str]:
    return {cell.place: cell.status for cell in table.cells(ROW, reports)}


def test_every_row_has_its_tests_and_every_marker_names_a_row(
    pytestconfig: pytest.Config,
) -> None:
    """Of all tests: those that this run has collected, where it has collected all."""
    if pytestconfig.args == ["tests"]:
        items = pytestconfig.stash[COLLECTED]
        reports = [table.report_of(item) for item in items if item.get_closest_marker("fault")]
    else:
        reports = table.collect("tests")
    assert table.unknown(reports) == []
    assert table.absent(reports) == []


def test_ids_are_unique_and_speak() -> None:
    ids = [row.id for row in table.rows.ROWS]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in ids)
    assert all(row.places and row.what and row.expected for row in table.rows.ROWS)


def test_a_row_has_a_status_for_cpu_and_for_gpu() -> None:
    assert statuses() == {"CPU": "absent", "GPU": "absent"}
    assert statuses(report("passed")) == {"CPU": "pass", "GPU": "absent"}
    skipped = report("skipped", "GPU")
    assert statuses(report("passed"), skipped) == {"CPU": "pass", "GPU": "needs-GPU"}
    assert statuses(report("passed"), report("failed"), skipped)["CPU"] == "fail"
    assert statuses(report("skipped"), report("passed", "GPU"))["CPU"] == "not here"
    assert statuses(report("skipped", "2 GPUs"))["2 GPUs"] == "needs 2 GPUs"


def test_another_rows_test_is_not_counted() -> None:
    assert statuses(report("passed", row="segfault"))["CPU"] == "absent"


def test_a_marker_that_names_no_row_is_found() -> None:
    assert table.unknown([report("passed"), report("passed", row="sgfault")]) == [
        "test_passed: sgfault"
    ]
    assert ("endless-loop", "GPU") in table.absent([report("passed")])


def test_a_reason_is_printed_once() -> None:
    skipped = replace(report("skipped"), reason="no interpreter here")
    assert table.notes_of([skipped, replace(skipped, rows=("segfault",))]) == [
        "not here: no interpreter here"
    ]
    assert table.notes_of([report("passed")]) == []
