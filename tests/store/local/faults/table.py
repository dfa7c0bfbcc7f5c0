"""Make every fault of the store as often as its row says, and print what came of it.

    python tests/store/local/faults/table.py [--out FILE] [--quick] [NAME ...]

Ends with how many rows were lost and how many things were wrong; the exit code is 0 if both are
zero, else 1. `--out` writes the table as Markdown, or as JSON where the name ends in `.json`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fault_file  # noqa: F401 - each enters its rows
import fault_others  # noqa: F401
import fault_processes  # noqa: F401
import fault_system  # noqa: F401
from tally import FAULTS, ROOT, Fault, NotHere, Tally

HEAD = ("fault", "what happens", "what holds", "tried", "lost", "wrong", "seconds")


def line_of(row: Fault, place: Path, quick: bool) -> tuple[dict[str, Any], list[str]]:
    """Make one fault; return its line, and what was wrong."""
    begin = time.monotonic()
    line: dict[str, Any] = dict(zip(HEAD, (row.name, row.what, row.expected), strict=False))
    try:
        tally = row.run(place / row.name, row.quick if quick else row.full)
    except NotHere as error:
        return {**line, "tried": f"not here: {error}", "lost": 0, "wrong": 0, "seconds": 0}, []
    except Exception as error:
        tally = Tally(wrong=[f"{type(error).__name__}: {error}"])
    seconds = round(time.monotonic() - begin, 1)
    numbers = {"tried": tally.tried, "lost": tally.lost, "wrong": len(tally.wrong)}
    return {**line, **numbers, "seconds": seconds}, tally.wrong + tally.where


def main(out: Path | None, quick: bool, names: list[str]) -> int:
    """Run, print, write; return the exit code."""
    lines, reasons = [], []
    logging.getLogger("safetune").addHandler(logging.NullHandler())
    with tempfile.TemporaryDirectory(prefix="store-faults-") as folder:
        for row in [row for row in FAULTS if not names or row.name in names]:
            line, wrong = line_of(row, Path(folder), quick)
            lines.append(line)
            reasons += [f"{row.name}: {reason}" for reason in wrong[:10]]
            print(
                f"{line['fault']:20} {line['tried']!s:>8} tried  {line['lost']:4} lost  "
                f"{line['wrong']:4} wrong  {line['seconds']:7.1f} s  {line['what holds']}",
                flush=True,
            )
    lost, wrong = (sum(line[name] for line in lines) for name in ("lost", "wrong"))
    summary = f"{lost} lost, {wrong} wrong"
    print("\n".join([*reasons, summary]))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(_page(lines, reasons, summary, out.suffix == ".json"), encoding="utf-8")
    return 1 if lost or wrong else 0


def _page(lines: list[dict[str, Any]], reasons: list[str], summary: str, as_json: bool) -> str:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import platform
    import sqlite3

    import recording

    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    system = f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, "
    origin = f"{system}{platform.platform()}; commit {recording.commit()}, {date}"
    if as_json:
        return json.dumps({"origin": origin, "rows": lines, "summary": summary}, indent=1) + "\n"
    cells = [HEAD, ["---"] * len(HEAD), *([str(line[name]) for name in HEAD] for line in lines)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    return "\n\n".join(["# Faults of the store", origin, table, *reasons, summary]) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make every fault of the store.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table")
    parser.add_argument("--quick", action="store_true", help="as often as the tests do")
    parser.add_argument("names", nargs="*", metavar="NAME", help="these rows only")
    known = parser.parse_args()
    sys.exit(main(known.out, known.quick, known.names))
