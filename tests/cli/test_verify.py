"""`safetune verify`: what it checks, what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def overlapping(targets: Path) -> str:
    return str(targets / "overlapping.py")


def verified(safetune: Any, *words: object) -> Any:
    """The JSON of a run that finds something."""
    result = safetune("verify", *words, "--json")
    assert result.exit_code == 1, result.output
    return json.loads(result.stdout)


class TestKernels:
    def test_every_config_workload_and_dtype(self, safetune: Any, overlapping: str) -> None:
        """But no config that pruning leaves out: it is never launched."""
        data = verified(safetune, f"{overlapping}:fill")

        ran = [(one["shape"], one["dtype"], one["config"][:16]) for one in data["launches"]]
        assert ran == [
            (shape, dtype, config)
            for dtype in ("float32", "float16")
            for shape in ("small", "large")
            for config in ("BLOCK=64 STEP=64", "BLOCK=64 STEP=63")
        ]
        assert [one["verdict"] for one in data["launches"]] == ["ok", "overlap"] * 4

    def test_what_is_found(self, safetune: Any, overlapping: str) -> None:
        data = verified(safetune, f"{overlapping}:fill", "--shape", "small", "--dtype", "float16")

        (finding,) = data["launches"][1]["report"]["findings"]
        assert (finding["kind"], finding["argument"], finding["elements"]) == ("overlap", "x", 1)
        assert finding["places"][0]["index"] == [63]
        assert finding["places"][0]["programs"] == [[0, 0, 0], [1, 0, 0]]
        assert finding["places"][0]["lines"] == ["overlapping.py:26"]
        assert not data["ok"]

    def test_all_is_well(self, safetune: Any, targets: Path) -> None:
        """The same kernels that `safetune tune` is tested with; heuristics, too."""
        data = safetune.json("verify", targets / "add.py", targets / "heuristics.py")

        assert data["ok"]
        assert len(data["launches"]) == 2 + 2 * 2 + 2 * 3
        assert {one["verdict"] for one in data["launches"]} == {"ok"}

    def test_a_config_that_does_not_run(self, safetune: Any, overlapping: str) -> None:
        data = verified(safetune, f"{overlapping}:strict")

        assert [one["verdict"] for one in data["launches"]] == ["ok", "not checked"]
        assert "AssertionError: a block must be 16" in data["launches"][1]["error"]
        assert data["launches"][1]["report"] is None


class TestSize:
    def test_large_workloads_are_skipped(self, safetune: Any, overlapping: str) -> None:
        data = verified(safetune, f"{overlapping}:fill", "--max-elements", 1000)

        assert {one["shape"] for one in data["launches"]} == {"small"}
        assert [one["elements"] for one in data["skipped"]] == [10_000] * 2

    def test_nothing_left(self, safetune: Any, overlapping: str) -> None:
        message = safetune.error("verify", overlapping, "--max-elements", 10)

        assert message == (
            "Error: there is no workload of at most 10 elements: declare one for the interpreter "
            "(its device is cpu), or raise --max-elements"
        )

    def test_no_such_shape(self, safetune: Any, overlapping: str) -> None:
        message = safetune.error("verify", f"{overlapping}:strict", "--shape", "huge")

        assert message == "Error: no workload is named 'huge'; there are: only"


class TestTables:
    def test_people_see_the_place_once(self, safetune: Any, overlapping: str) -> None:
        result = safetune("verify", overlapping, "--dtype", "float32", "--max-elements", 1000)

        assert result.exit_code == 1
        lines = [line.rstrip() for line in result.stdout.splitlines()]
        assert "fill  large  float32: skipped, as it has 10000 elements (--max-elements)" in lines
        row = next(line for line in lines if line.startswith("  BLOCK=64 STEP=63 "))
        assert row.split()[4:] == ["overlap", "2", "x", "1", "x", "1"]
        assert "    x: 1 element stored by several programs" in lines
        assert "        [63] programs 0, 1 at overlapping.py:26" in lines
        assert "x: 12 of 16 elements" not in result.stdout
        assert lines[-1] == "4 launches checked, 2 with findings"

    def test_all_is_well(self, safetune: Any, targets: Path) -> None:
        result = safetune("verify", f"{targets / 'add.py'}:add_one")

        assert result.exit_code == 0
        assert result.stdout.splitlines()[-1] == "4 launches checked, 0 with findings"
