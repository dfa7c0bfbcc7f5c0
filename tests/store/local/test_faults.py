"""Every row of the store's fault table, fewer times than `make store-faults`; and the table."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "faults"
sys.path.insert(0, str(FOLDER))
table = importlib.import_module("table")
tally = importlib.import_module("tally")
fault_system = importlib.import_module("fault_system")

ROWS = [pytest.param(row, row.quick, id=row.name) for row in tally.FAULTS if row.quick]
ROWS += [
    pytest.param(row, 3, id=f"{row.name} again", marks=pytest.mark.full)
    for row in tally.FAULTS
    if row.name == "first-opens"
]


@pytest.mark.parametrize(("row", "times"), ROWS)
def test_nothing_is_lost_and_nothing_is_wrong(tmp_path: Path, row, times, monkeypatch) -> None:
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path))
    try:
        found = row.run(tmp_path / "place", times)
    except tally.NotHere as reason:
        pytest.skip(str(reason))
    assert (found.wrong, found.lost) == ([], 0)
    assert found.tried >= min(times, 1)


@pytest.mark.parametrize("number", [2, 3])
def test_a_read_that_fails_once_does_not_count_as_damage(tmp_path: Path, number: int) -> None:
    """Regression: SQLite calls it malformed, and the whole store was moved aside."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    fault_system.filled(tmp_path / "original")
    case = (tmp_path / "original", tmp_path / "store", "pread64", "error=EIO", number)
    tally = fault_system._injected(case)
    if any("ptrace" in wrong for wrong in tally.wrong):
        pytest.skip("strace does not work here")
    assert (tally.tried, tally.lost, tally.wrong) == (1, 0, [])


@pytest.mark.parametrize(("lost", "wrong", "code"), [(0, [], 0), (1, [], 1), (0, ["a"], 1)])
def test_the_exit_code_says_what_was_lost_or_wrong(
    tmp_path, capsys, monkeypatch, lost, wrong, code
):
    row = tally.Fault("row", "what", "expected", 1, 2, lambda place, times: found(times))

    def found(times: int):
        return tally.Tally(times, lost, wrong)

    monkeypatch.setattr(table, "FAULTS", [row])
    assert table.main(tmp_path / "out.md", False, []) == code
    assert f"\n{lost} lost, {len(wrong)} wrong\n" in capsys.readouterr().out
    assert f"| row | what | expected | 2 | {lost} | {len(wrong)} |" in (
        tmp_path / "out.md"
    ).read_text(encoding="utf-8")


def test_it_runs_as_a_program() -> None:
    command = [sys.executable, str(FOLDER / "table.py"), "--quick", "zero-length", "linked"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("0 lost, 0 wrong\n")
