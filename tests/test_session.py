"""The terminal session that README shows: what it says, and that it can be made again."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def lines_of(picture: Path) -> list[str]:
    """The lines of text in a picture, which needs no other file."""
    text = picture.read_text(encoding="utf-8")
    assert re.findall(r"url\((?!#)|href=", text) == []
    rows: dict[str, str] = {}
    for place, part in re.findall(r'<text [^>]*? y="([\d.]+)"[^>]*>(.*?)</text>', text):
        rows[place] = rows.get(place, "") + html.unescape(part).replace("\xa0", " ")
    return list(rows.values())


def check(lines: list[str]) -> None:
    text = "\n".join(lines)
    first, second = re.split(r"\$ python softmax.py\n", text)[1:]
    assert re.search(r"softmax_kernel ━+[╸╺]?━* \d/6 (1 failed )?best [\d.]+ \wm?s", first), first
    assert "crash" in first
    assert "softmax_kernel tuned for rows=16, columns=1000 (float32) in " in first
    assert "6 of 6 configs measured, failed: 1 died" in " ".join(first.split())
    (result,) = second.splitlines()
    assert result.startswith("right: ROWS: "), "nothing is said, as nothing is measured"
    assert first.splitlines()[-1] == result


def test_the_picture_of_readme() -> None:
    assert "docs/figures/session.svg" in (ROOT / "README.md").read_text(encoding="utf-8")
    check(lines_of(ROOT / "docs" / "figures" / "session.svg"))


@pytest.mark.full
def test_it_can_be_made_from_a_real_run(tmp_path: Path) -> None:
    picture = tmp_path / "session.svg"
    script = ROOT / "benchmarks" / "session.py"
    subprocess.run([sys.executable, str(script), str(picture)], check=True, timeout=300)
    check(lines_of(picture))
