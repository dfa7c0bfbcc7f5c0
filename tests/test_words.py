"""The texts of the product, its tests and its docs avoid shapes that are not plain English.

Code, docstrings, comments and messages alike: a reader meets all of them. CONTRIBUTING says what
to write instead.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TEXTS = sorted(
    {
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "cache").glob("*.md"),
        *(ROOT / "safetune").rglob("*.py"),
        *(ROOT / "kernels").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
    }
    - {Path(__file__)}  # it quotes all of them
)

#: (shape, what to write instead). "There is no …" is plain English, and "is no longer" too.
SHAPES = {
    "is no": (r"(?<!here\s)\b(?:is|are)\s+no\s+(?!longer\b)[A-Za-z]", "is not a, does not have"),
    "is none": (r"(?<!here\s)\b(?:is|are)\s+none\b", "is not a, does not exist"),
    "so many": (r"\bso\s+(?:many|long)\b", "the number, or the noun"),
    "nobody": (r"\b(?:[Nn]obody|[Ss]omebody|[Ww]hoever)\b", "the process, thread or user meant"),
    "metaphor": (r"\b(?:courier|errand|witness|kin|companion)s?\b", "the field's term"),
}

#: (file, shape) where the shape is right: CONTRIBUTING quotes the shapes to name them.
QUOTED = {
    ("CONTRIBUTING.md", "is no"),
    ("CONTRIBUTING.md", "is none"),
    ("CONTRIBUTING.md", "so many"),
    ("benchmarks/fleet.py", "nobody"),  # a Unix user
    ("benchmarks/store_shared.py", "nobody"),
    ("tests/isolation/test_parent_side.py", "nobody"),
    ("tests/store/shared/test_postgres.py", "nobody"),
}


def unfortunate(text: str) -> list[tuple[int, str, str]]:
    """Return (line, name of the shape, the text found) for each shape in a text.

    A line break counts as a space: prose is wrapped, and comments go on after `#` or `#:`.
    """
    flat = re.sub(r"\n[ \t]*(?:#:? )?", lambda match: "\n" + " " * (len(match[0]) - 1), text)
    found = []
    for name, (shape, _) in SHAPES.items():
        for match in re.finditer(shape, flat):
            found.append((flat.count("\n", 0, match.start()) + 1, name, match[0]))
    return found


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_text_is_plain_english(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    wrong = [
        f"{name}:{line}: {' '.join(text.split())!r}; write {SHAPES[shape][1]}"
        for line, shape, text in unfortunate(path.read_text(encoding="utf-8"))
        if (name, shape) not in QUOTED
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("grid=5.0 is none: give up to three integers", ["is none"]),
        ("'many' is no size", ["is no"]),
        ("    # a file that is\n    # no database", ["is no"]),
        ("it waits for so\nlong and no longer", ["so many"]),
        ("There is no choice, and it is no longer needed", []),
        ("the value is None", []),
        ("names that are not arguments", []),
        ("an errand of nobody's", ["nobody", "metaphor"]),
    ],
)
def test_a_shape_is_found_across_lines_and_only_that(text: str, shapes: list[str]) -> None:
    assert [shape for _, shape, _ in unfortunate(text)] == shapes
