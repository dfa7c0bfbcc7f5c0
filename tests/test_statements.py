"""The table in docs/statements.md names tests that exist, and has a row for each statement."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs/statements.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)))


def test_the_named_tests_exist() -> None:
    gone = [
        f"{path}::{name}"
        for path, name in NAMED
        if not (ROOT / path).exists()
        or f"def {name or 'test_'}{'(' * bool(name)}" not in (ROOT / path).read_text("utf-8")
    ]
    assert not gone, "\n".join(gone)


def test_every_statement_has_its_row():
    wanted = [f"{group}{n}" for group, n in (("A", 8), ("B", 7), ("C", 10), ("D", 5), ("E", 8))]
    listed: set[str] = set()
    for cell in re.findall(r"^\| ([A-E][\w, -]*) \|", TEXT, re.MULTILINE):
        for part in cell.split(", "):
            first, _, last = part.partition("-")
            numbers = range(int(first[1:]), int((last or first)[1:]) + 1)
            listed.update(f"{first[0]}{number}" for number in numbers)
    for last in wanted:
        assert {f"{last[0]}{n}" for n in range(1, int(last[1:]) + 1)} <= listed
