"""Which recorded calls can be tuned, and why others are left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from safetune.offline import replay
from safetune.store.records import RecordedCall

#: Text of a module, and why its calls are left out. A library's own message, as that of
#: transformers, may say nothing of the cause.
CAUSE = "try:\n import nothing\nexcept ImportError as error:\n raise {} from error"
NOTHING = "ModuleNotFoundError: No module named 'nothing'"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (CAUSE.format("ImportError('X')"), NOTHING),
        (CAUSE.format("error"), NOTHING),
        ("raise RuntimeError('first\\nsecond')", "RuntimeError: first second"),
    ],
)
def test_calls_of_a_module_that_cannot_be_imported_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: str
) -> None:
    """Regression: it was imported again for each of its calls, which may take seconds each."""
    (tmp_path / "broken.py").write_text(f"open('imports', 'a').write('x')\n{text}")
    monkeypatch.chdir(tmp_path)
    calls = [RecordedCall(key, "kernel", "broken:kernel", {}, created=0.0) for key in "ab"]
    left_out: list[replay.LeftOut] = []

    assert replay.with_kernels(calls, [], left_out) == []

    assert {(left.words, left.reason) for left in left_out} == {
        ("kernel", f"broken cannot be imported ({error}): name its file as TARGET")
    }
    assert (tmp_path / "imports").read_text() == "x"
