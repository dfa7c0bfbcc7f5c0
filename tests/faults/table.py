"""Run the fault tests and print every named row as pass, fail, needs-GPU or not here.

    python tests/faults/table.py [--out FILE] [pytest arguments]

Two runs of pytest: one in Triton's interpreter, and on a machine with a GPU one on that. The exit
code is 1 when a row fails or is absent (has no test). `--out` writes the table as Markdown, with
where and when it was made.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def _load(path: Path) -> ModuleType:
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(f"fault_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


rows = _load(Path(__file__).with_name("rows.py"))

_INTERPRETER_PROBE = """
import torch, triton, triton.language as tl
@triton.jit
def kernel(x, n, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    for i in range(tl.program_id(0), n):
        tl.store(x + offset, tl.load(x + offset) + i, mask=offset < n)
x = torch.zeros(16)
kernel[(1,)](x, 16, BLOCK=16)
assert x.sum() == 16 * 120
"""


@dataclass(frozen=True)
class Report:
    """What became of one test.

    Attributes:
        rows: the ids that it is marked with.
        place: the `Place` that it needs, as text.
        outcome: `passed`, `failed`, `skipped`, or `collected` where nothing was run.
        reason: why it was skipped.
    """

    test: str
    rows: tuple[str, ...]
    place: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Cell:
    """One row in one place."""

    place: str
    status: str
    reason: str
    tests: int
    seconds: float


class Recorder:
    """A pytest plugin that writes a line of JSON for each fault test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._items: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}
        self._worst: dict[str, tuple[str, str]] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        self._items = {item.nodeid: item for item in session.items}
        if session.config.option.collectonly:
            for test in self._items:
                self._write(test, "collected", "")

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if report.outcome != "passed" and self._worst.get(test, ("",))[0] != "failed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self._worst[test] = (report.outcome, reason.removeprefix("Skipped: "))
        if report.when == "teardown":
            self._write(test, *self._worst.get(test, ("passed", "")))

    def _write(self, test: str, outcome: str, reason: str) -> None:
        seconds = round(self._seconds.get(test, 0.0), 2)
        report = replace(
            report_of(self._items[test]), outcome=outcome, seconds=seconds, reason=reason
        )
        with open(self._path, "a") as file:
            file.write(json.dumps(asdict(report)) + "\n")


def report_of(item: Any) -> Report:
    """Return what is known of a test that has been collected, and not run."""
    ids = tuple(str(marker.args[0]) for marker in item.iter_markers("fault"))
    place = rows.Place.CPU
    if item.get_closest_marker("two_gpus"):
        place = rows.Place.TWO_GPUS
    elif item.get_closest_marker("gpu"):
        place = rows.Place.GPU
    return Report(item.nodeid, ids, place.value, "collected")


def run_pytest(arguments: Sequence[str], interpret: bool) -> list[Report]:
    """Run pytest in a process of its own and return what became of the fault tests.

    Raises:
        SystemExit: tests cannot be collected, or pytest itself came to an end of another kind.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    if not interpret:
        del environment["TRITON_INTERPRET"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reports"
        path.touch()
        done = subprocess.run(
            [sys.executable, __file__, "--record", str(path), *arguments],
            cwd=ROOT,
            env=environment,
            check=False,
        )
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    if done.returncode not in (0, 1, 5):  # all passed, some failed, none was selected
        raise SystemExit(f"pytest ended with {done.returncode}: {' '.join(arguments)}")
    return [Report(**{**line, "rows": tuple(line["rows"])}) for line in lines]


def collect(*arguments: str) -> list[Report]:
    """Return every fault test, without running any."""
    return run_pytest(["--collect-only", "-qq", "-m", "fault", *arguments], interpret=True)


def unknown(reports: Iterable[Report]) -> list[str]:
    """Return the tests whose marker names no row."""
    return [f"{r.test}: {i}" for r in reports for i in r.rows if i not in rows.BY_ID]


def absent(reports: Iterable[Report]) -> list[tuple[str, str]]:
    """Return (row, place) for every place of a row in which it has no test."""
    present = {(name, report.place) for report in reports for name in report.rows}
    wanted = [(row.id, place.value) for row in rows.ROWS for place in row.places]
    return [pair for pair in wanted if pair not in present]


def cells(row: Any, reports: Sequence[Report]) -> list[Cell]:
    """Return what became of a row in each place where it has, or should have, a test."""
    mine = [report for report in reports if row.id in report.rows]
    found = []
    for place in rows.Place:
        here = [report for report in mine if report.place == place.value]
        if here or place in row.places:
            seconds = sum(report.seconds for report in here)
            found.append(Cell(place.value, *_status(place, here), len(here), seconds))
    return found


def _status(place: Any, reports: Sequence[Report]) -> tuple[str, str]:
    outcomes = {report.outcome for report in reports}
    if not outcomes:
        return "absent", ""
    if "failed" in outcomes:
        return "fail", ""
    if "passed" in outcomes:
        return "pass", ""
    if place is rows.Place.CPU:
        return "not here", reports[0].reason
    return ("needs-GPU" if place is rows.Place.GPU else "needs 2 GPUs"), ""


def lines_of(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Return the table, a line for each row and place."""
    return [
        {
            "fault": row.id,
            "side": row.side.value,
            "what happens": row.what,
            "expected": row.expected,
            "where": cell.place,
            "result": cell.status,
            "tests": cell.tests,
            "seconds": round(cell.seconds, 1),
        }
        for row in rows.ROWS
        for cell in cells(row, reports)
    ]


def notes_of(reports: Sequence[Report]) -> list[str]:
    """Return why something did not run here, each reason once."""
    reasons = {cell.reason for row in rows.ROWS for cell in cells(row, reports)}
    return sorted(f"not here: {reason}" for reason in reasons if reason)


def run_all(arguments: Sequence[str]) -> list[Report]:
    """Run the fault tests wherever they can run on this machine."""
    why_not = _why_no_interpreter()
    only = "fault and not gpu"
    reports = run_pytest(["-m", f"{only} and internals" if why_not else only, *arguments], True)
    if why_not:
        ran = {report.test for report in reports}
        rest = [r for r in collect(*arguments) if r.test not in ran and r.place == rows.Place.CPU]
        reports += [replace(report, outcome="skipped", reason=why_not) for report in rest]
    return reports + run_pytest(["-m", "fault and gpu", *arguments], False)


def _why_no_interpreter() -> str:
    """Return why Triton's interpreter cannot run a kernel here, or nothing when it can."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "probe.py"
        script.write_text(_INTERPRETER_PROBE)
        probe = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if probe.returncode == 0:
        return ""
    return f"Triton's interpreter fails: {(probe.stderr.strip().splitlines() or ['?'])[-1]}"


def markdown(lines: Sequence[dict[str, Any]], notes: Sequence[str], origin: str) -> str:
    """Return the table as a page."""
    head = list(lines[0])
    body = [[str(line[name]) for name in head] for line in lines]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *body])
    return "\n\n".join(["# Faults", origin, table, *notes]) + "\n"


def _origin() -> str:
    """Say where, when and from what the table was made, as every benchmark does."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import recording
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    made = recording.begin("faults")
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    return f"{made.device}, {versions}; commit {made.commit}, {date}; `{made.command}`"


def main(out: Path | None, arguments: Sequence[str]) -> int:
    """Run, print, write; return the exit code."""
    reports = run_all(arguments)
    lines, notes = lines_of(reports), notes_of(reports)
    width = {name: max(len(str(line[name])) for line in lines) for name in lines[0]}
    shown = ("fault", "where", "expected", "result", "tests", "seconds")
    for line in lines:
        print("  ".join(str(line[name]).ljust(width[name]) for name in shown).rstrip())
    counts = Counter(line["result"] for line in lines)
    summary = ", ".join(f"{number} {result}" for result, number in sorted(counts.items()))
    strangers = [f"no such row: {stranger}" for stranger in unknown(reports)]
    print("\n".join(["", *notes, *strangers, summary]))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(markdown(lines, [*notes, summary], _origin()), encoding="utf-8")
    return 1 if strangers or counts["fail"] or counts["absent"] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        import pytest

        sys.exit(pytest.main(sys.argv[3:], plugins=[Recorder(Path(sys.argv[2]))]))
    parser = argparse.ArgumentParser(description="Run the fault tests and print the table.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as Markdown")
    known, rest = parser.parse_known_args()
    sys.exit(main(known.out, rest))
