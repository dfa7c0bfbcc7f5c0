"""Every row of the store's fault table, fewer times than `make store-faults`; and the table."""

from __future__ import annotations

import importlib
import re
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


@pytest.mark.full
def test_a_lock_that_could_not_be_released_is_given_up_after_one_write(tmp_path: Path) -> None:
    """Regression: SQLite tried to take it for 10 s at each write and each read."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    original = fault_system.filled(tmp_path / "original").parent
    traced, log = shutil.copytree(original, tmp_path / "traced"), tmp_path / "log"
    fault_system._write(traced, "strace", "-f", "-o", log, *fault_system._on(traced))
    calls = re.findall(r"^\d+ +fcntl\(.*", log.read_text(), re.MULTILINE)
    first = re.compile(r"F_WRLCK.*l_start=124,")  # of the first reader: to open, to restart the log
    taken = [number for number, call in enumerate(calls, 1) if first.search(call)]
    if not taken:
        pytest.skip("strace does not work here")
    case = (original, tmp_path / "store", "fcntl", "error=EIO", taken[1] + 1)
    tally = fault_system._injected(case)
    assert (tally.tried, tally.lost, tally.wrong) == (1, 0, []), "13 writes of 10 s are too long"


def test_names_speak() -> None:
    names = [row.name for row in tally.FAULTS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)


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


def test_an_unknown_error_is_wrong(tmp_path, capsys, monkeypatch) -> None:
    row = tally.Fault("row", "what", "expected", 1, 1, lambda place, times: 1 / 0)
    monkeypatch.setattr(table, "FAULTS", [row])
    assert table.main(None, False, []) == 1
    assert "row: ZeroDivisionError" in capsys.readouterr().out


def test_it_runs_as_a_program() -> None:
    names = ["zero-length", "linked", "herd"]  # the last only imports what it needs
    command = [sys.executable, str(FOLDER / "table.py"), "--quick", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("0 lost, 0 wrong\n")
