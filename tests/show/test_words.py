"""Stored records as text for people."""

from __future__ import annotations

from pathlib import Path

import pytest

from safetune.show.words import call_words, place, readable_calls


def test_a_path_is_short_in_a_library_and_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert place(f"{tmp_path}/models/norm.py", 3) == "models/norm.py:3"
    assert place("/env/lib/python3.11/site-packages/fla/ops/chunk.py", 37) == "fla/ops/chunk.py:37"
    assert place(f"{tmp_path}s/norm.py", 3) == f"{tmp_path}s/norm.py:3"
    assert place("", 0) == "(unknown file)"


def test_keys_that_differ_look_different() -> None:
    """Regression: two rows of `list` and `show` were equal but for their times."""
    half, single = [["x", "float16"], ["y", "float32"]], [["x", "float32"], ["y", "float32"]]
    options = [["debug", True]]
    calls = [
        {"values": [["n", 100]], "dtypes": dtypes, "options": given}
        for dtypes, given in ((half, []), (single, []), (single, options))
    ]
    assert readable_calls(calls) == [
        {"n": "100", "dtype": "float16/float32"},
        {"n": "100", "dtype": "float32"},
        {"n": "100", "debug": "True", "dtype": "float32"},
    ]
    assert call_words(calls[2]) == "n=100 debug=True float32"

    z = [
        {**call, "dtypes": [*call["dtypes"], ["z", kind]]}
        for call in calls[:1]
        for kind in ("float16", "float32")
    ]
    assert readable_calls(z) == [
        {"n": "100", "x": "float16", "y": "float32", "z": "float16"},
        {"n": "100", "x": "float16", "y": "float32", "z": "float32"},
    ]
