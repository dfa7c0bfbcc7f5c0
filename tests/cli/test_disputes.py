"""A choice whose result is not certain stays visible, in every command and in every process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

REASON = "1 of 2 configs have this result"


@pytest.fixture
def target(targets: Path) -> str:
    return str(targets / "disputed.py")


def test_every_command_tells_of_a_disputed_choice(
    safetune: Any, target: str, fresh_process: FreshProcess
) -> None:
    first, again = safetune("tune", target), safetune("tune", target)
    assert (first.exit_code, again.exit_code) == (1, 1), "also where nothing is measured any more"
    assert "1 with a disputed result" in first.stdout
    assert "1 with a disputed result" in again.stdout
    allowed = safetune("tune", target, "--allow-disputed")
    assert allowed.exit_code == 0

    assert safetune("list").stdout.rstrip().endswith("  disputed")
    ((mark,),) = [entry["marks"] for entry in safetune.json("list")]
    assert mark == f"disputed: {REASON}"
    assert f"its result is disputed: {REASON}" in safetune("show", "scale").stdout
    tuned = safetune.json("tune", target, "--allow-disputed")
    assert [tuning["disputed"] for tuning in tuned["tunings"]] == [REASON]
    assert tuned["tunings"][0]["phases"].keys() == {"lookup", "wait", "store"}  # nothing was new
    for _ in range(2):
        program = fresh_process(
            f"import runpy\nrun = runpy.run_path({target!r})['run']\nrun()\nrun()\n", warm=True
        )
        assert program.stderr.count("its configs give different results") == 1
