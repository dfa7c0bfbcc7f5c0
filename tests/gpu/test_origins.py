"""A kernel of a script, which cannot be imported again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def test_a_script_without_a_main_guard(
    fresh_process: Any, scripts: Path, tmp_path: Path, trials: Callable[[], list[Any]]
) -> None:
    """Its body runs once: no child runs it again."""
    journal = tmp_path / "journal"
    result = fresh_process(scripts / "without_main_guard.py", journal)
    assert "is not tuned" not in result.stderr
    assert result.stdout.splitlines()[-1] == "right"
    assert journal.read_text().splitlines() == ["the body ran"]
    assert [trial.verdict for trial in trials()] == ["ok"] * 3
