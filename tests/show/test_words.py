"""Stored records as text for people."""

from __future__ import annotations

from pathlib import Path

import pytest

from safetune.show.words import place


def test_a_path_is_short_in_a_library_and_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert place(f"{tmp_path}/models/norm.py", 3) == "models/norm.py:3"
    assert place("/env/lib/python3.11/site-packages/fla/ops/chunk.py", 37) == "fla/ops/chunk.py:37"
    assert place(f"{tmp_path}s/norm.py", 3) == f"{tmp_path}s/norm.py:3"
    assert place("", 0) == "(file not known)"
