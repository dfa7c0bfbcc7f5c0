"""What the quick suite leaves out runs with SAFETUNE_TEST_FULL=1, and in exactly one tenth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.selection import LONGEST, longest_first, select, wanted_tenth

HERE = Path(__file__).parent


class Item:
    """As much of a test as decides whether it runs."""

    def __init__(self, nodeid: str, full: bool = False) -> None:
        self.nodeid = nodeid
        self._full = full

    def get_closest_marker(self, name: str) -> Any:
        return name if self._full and name == "full" else None


QUICK = [Item(f"tests/test_a.py::test_quick[{number}]") for number in range(3)]
REST = [Item(f"tests/test_a.py::test_more[{number}]", full=True) for number in range(200)]
ITEMS: Any = [*QUICK, *REST]


def test_the_quick_suite_leaves_out_what_is_marked_full() -> None:
    assert select(ITEMS, full=False, tenth=None) == (QUICK, REST)


def test_the_full_suite_leaves_nothing_out() -> None:
    assert select(ITEMS, full=True, tenth=None) == (ITEMS, [])


def test_each_test_marked_full_is_in_exactly_one_tenth() -> None:
    seen: list[Any] = []
    for tenth in range(10):
        runs, left_out = select(ITEMS, full=False, tenth=tenth)
        assert runs[: len(QUICK)] == QUICK
        assert len(runs) + len(left_out) == len(ITEMS)
        assert len(runs) > len(QUICK), "a tenth of 200 is not empty"
        seen += runs[len(QUICK) :]
    assert sorted(item.nodeid for item in seen) == sorted(item.nodeid for item in REST)


@pytest.mark.parametrize("text", ["10", "x", "-1"])
def test_a_tenth_that_is_not_a_digit_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"SAFETUNE_TEST_TENTH='{text}' is not a digit"):
        wanted_tenth(text)


def test_the_longest_files_exist_and_come_first() -> None:
    assert [name for name in LONGEST if not (HERE / name).exists()] == []
    items: Any = [Item("tests/a.py::t"), Item(f"tests/{LONGEST[1]}::t"), Item("tests/b.py::t")]
    assert longest_first(items) == [items[1], items[0], items[2]]


def test_tests_have_the_folders_of_the_product() -> None:
    """So that the tests of a folder are found by its name; some cross all folders."""
    root = HERE.parent
    product = {path.parent.relative_to(root / "safetune") for path in root.glob("safetune/**/*.py")}
    product |= {Path("kernels"), Path("gpu"), Path("faults"), Path("fuzz")}
    folders = {path.parent.relative_to(HERE) for path in HERE.glob("**/test_*.py")}
    assert folders <= product, sorted(map(str, folders - product))


def test_what_the_quick_suite_leaves_out_is_marked_full() -> None:
    """Else no tenth would run it."""
    files = [path for path in HERE.glob("**/test_*.py") if path.name != "test_selection.py"]
    skipped = [str(path) for path in files if "not FULL" in path.read_text(encoding="utf-8")]
    assert not skipped
