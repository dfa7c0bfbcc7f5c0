"""`safetune tune --dry-run`: what a sweep would measure, and how long that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def left(data: dict[str, Any]) -> dict[str, int]:
    return {f"{each['kernel']} {each['shape']}": each["to_measure"] for each in data["tunings"]}


def test_a_plan_names_every_key_and_stores_nothing(
    safetune: Any, targets: Path, cache_dir: Path
) -> None:
    result = safetune("tune", targets / "add.py", "--dry-run")

    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert lines[1][:3] == ["kernel", "shape", "dtype"]
    assert ["add_one", "large", "float32", "2", "0", "2"] in lines
    last = result.stdout.splitlines()[-1]
    assert last == "3 tunings of 2 kernels; 6 configs, 0 stored, 6 to measure"
    assert not cache_dir.exists()


def test_what_is_stored_is_not_planned_again_and_says_how_long_the_rest_takes(
    safetune: Any, targets: Path
) -> None:
    add, small = str(targets / "add.py"), ("--shape", "small")
    safetune.json("tune", f"{add}:add_one", *small)

    data = safetune.json("tune", add, "--dry-run")

    assert left(data) == {"kernel small": 2, "add_one small": 0, "add_one large": 2}
    estimates = [each["estimate_s"] for each in data["tunings"]]
    assert estimates[:2] == [None, 0], "no trial of the first kernel is stored"
    assert estimates[2] == data["estimate_s"] > 0
    shown = safetune("tune", add, "--dry-run").stdout.splitlines()[-1]
    assert "6 configs, 2 stored, 4 to measure; at least about " in shown
    forced = safetune.json("tune", f"{add}:add_one", *small, "--force", "--dry-run")
    assert left(forced) == {"add_one small": 2}


def test_two_shapes_of_one_key_are_measured_once(safetune: Any, targets: Path) -> None:
    data = safetune.json("tune", targets / "heuristics.py", "--dry-run")

    assert [each["to_measure"] for each in data["tunings"]] == [2, 0, 2]
    assert data["stored"] == 0, "what another key of the plan measures is not stored yet"
    measured = safetune.json("tune", targets / "heuristics.py")["tunings"]
    assert [tuning["measured"] for tuning in measured] == [2, 0, 2], "as planned"
    keys = [entry["call"]["values"] for entry in safetune.json("list")]
    assert sorted(keys, key=str) == [{"EVEN": False}, {"EVEN": True}]


def test_a_choice_that_was_imported_has_no_outcomes_here(
    safetune: Any, targets: Path, tmp_path: Path
) -> None:
    """It said that all configs have a stored outcome, of which none was measured here."""
    command = ("tune", targets / "add.py:add_one", "--shape", "small")
    safetune.json(*command)
    safetune.json("export", tmp_path / "packs")
    safetune.use_store("elsewhere")
    safetune.json("import", tmp_path / "packs")

    data = safetune.json(*command, "--dry-run")

    assert (data["configs"], data["stored"], data["to_measure"]) == (2, 0, 0)
