"""`safetune verify`: what it checks, what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FreshProcess


@pytest.fixture
def overlapping(targets: Path) -> str:
    return str(targets / "overlapping.py")


def verified(safetune: Any, *words: object) -> Any:
    """The JSON of a run that finds something."""
    return safetune.json("verify", *words, code=1)


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
        (finding,) = data["launches"][1]["report"]["findings"]
        assert (finding["kind"], finding["argument"], finding["elements"]) == ("overlap", "x", 1)
        assert finding["places"][0]["index"] == [63]
        assert finding["places"][0]["programs"] == [[0, 0, 0], [1, 0, 0]]
        assert finding["places"][0]["lines"] == ["overlapping.py:26"]
        assert not data["ok"]

    def test_all_is_well(self, safetune: Any, targets: Path) -> None:
        """The same kernels that `safetune tune` is tested with; heuristics, too."""
        words = (targets / "add.py", targets / "heuristics.py")
        data = safetune.json("verify", *words)

        assert data["ok"]
        assert len(data["launches"]) == 2 + 2 * 2 + 2 * 3
        assert {one["verdict"] for one in data["launches"]} == {"ok"}
        assert ": 0 with findings. " in safetune("verify", *words).stdout

    def test_a_kernel_without_a_workload_is_named(self, safetune: Any, targets: Path) -> None:
        """Its silence is not to be taken for a good word."""
        target = targets / "add.py"

        assert safetune.json("verify", target)["no_workload"] == ["kernel"]
        last = safetune("verify", target).stdout.splitlines()[-1]
        assert last == "not checked, because they declare no workload: kernel"

    def test_large_workloads_are_skipped_and_people_see_the_place_once(
        self, safetune: Any, overlapping: str
    ) -> None:
        words = (overlapping, "--dtype", "float32", "--max-elements", 1000)
        data = verified(safetune, *words)
        assert [(one["shape"], one["elements"]) for one in data["skipped"]] == [("large", 10_000)]
        assert [one["verdict"] for one in data["launches"]] == [
            *("ok", "overlap", "ok", "not checked"),
        ]
        assert "AssertionError: a block must be 16" in data["launches"][3]["error"]

        lines = [line.rstrip() for line in safetune("verify", *words).stdout.splitlines()]

        assert (
            "fill  large  float32: skipped, because it has 10000 elements (--max-elements)" in lines
        )
        row = next(line for line in lines if line.startswith("BLOCK=64 STEP=63 "))
        assert row.split()[4:] == ["overlap", "2", "x", "1", "x", "1"]
        assert "    x: 1 element stored by several programs" in lines
        assert "        [63] programs 0, 1 at overlapping.py:26" in lines
        assert not any("x: 12 of 16 elements" in line for line in lines)
        assert lines[-1].startswith("3 launches checked ")
        assert ": 1 with findings; 1 not checked. " in lines[-1]


@pytest.fixture
def unchecked(targets: Path) -> str:
    return str(targets / "unchecked.py")


class TestNotChecked:
    """What a target's own functions raise is that launch's alone; the others are checked."""

    def test_each_launch_that_is_not_checked_has_its_reason(
        self, safetune: Any, unchecked: str
    ) -> None:
        launches = verified(safetune, unchecked)["launches"]
        missing = [one for one in launches if one["verdict"] == "not checked"]
        errors = {(one["shape"], one["config"][:8]): one["error"] for one in missing}

        assert all(one["report"] is None for one in missing)
        reasons = {
            ("hook", "BLOCK=32"): f"RuntimeError: broken hook ({unchecked}:11)",
            ("grid", "BLOCK=64"): f"KeyError: 'COUNT' ({unchecked}:39)",
            ("exit", "BLOCK=64"): f"SystemExit: 0 ({unchecked}:",
            ("prune", "all conf"): f"OSError: broken prune ({unchecked}:16)",
            ("sparse", "BLOCK=64"): "a Tensor of shape (128,) on cpu has no plain storage to copy",
            ("misspelt", "BLOCK=64"): "unknown name m: fill has the parameters y, n, BLOCK,",
            ("unknown", "BLOCK=64"): "outputs=['z'] must be a list of tensor arguments of fill",
            ("allowed", "BLOCK=64"): "allow=['z'] must be a list of tensor arguments of fill",
        }
        for where, reason in reasons.items():
            assert errors[where].startswith(reason), where
        assert ("hook", "BLOCK=64") not in errors

    def test_the_rest_is_checked(self, safetune: Any, unchecked: str) -> None:
        result = safetune("verify", unchecked, "--shape", "hook", "--shape", "prune")

        assert result.exit_code == 1
        lines = [line.rstrip() for line in result.stdout.splitlines()]
        assert lines[-1].startswith("1 launch checked for elements that several programs write")
        assert ": 0 with findings; 2 not checked. Results were not compared" in lines[-1]
        assert f"    OSError: broken prune ({unchecked}:16)" in lines
        row = next(line for line in lines if line.startswith("all configs "))
        assert row.split() == ["all", "configs", "not", "checked"]

    def test_a_hook_that_crashes(self, run: FreshProcess, targets: Path) -> None:
        """It ended the command with SIGSEGV."""
        result = run("verify", f"{targets / 'faulty.py'}:hopeless", "--json", warm=True, ends=1)

        _, crashed = json.loads(result.stdout)["launches"]
        assert crashed["config"].startswith("BLOCK=64")
        assert crashed["error"] == "its process ended with SIGSEGV"


class TestOutputs:
    """An element that is not written is a finding where the workload names the output."""

    def test_workloads(self, safetune: Any, unchecked: str) -> None:
        unwritten = {"whole": 0, "part": 1, "nothing": 128, "undeclared": 0}
        shapes = [word for shape in unwritten for word in ("--shape", shape)]

        launches = verified(safetune, unchecked, *shapes)["launches"]

        of_64 = {one["shape"]: one for one in launches if one["config"].startswith("BLOCK=64")}
        for shape, count in unwritten.items():
            assert of_64[shape]["verdict"] == ("unwritten" if count else "ok")
            findings = of_64[shape]["report"]["findings"]
            assert sum(finding["elements"] for finding in findings) == count


COUNTING = """
import torch, triton, triton.language as tl
from safetune import Workload, safetune

WARPS = (1, 2, 4)
CONFIGS = [triton.Config({"BLOCK": n}, num_warps=warps) for n in (16, 32) for warps in WARPS]

@safetune(configs=CONFIGS, key=["N"])
@triton.jit
def count(x, total, N, BLOCK: tl.constexpr):
    tl.device_print("ran", BLOCK)
    tl.store(x + tl.arange(0, BLOCK), 1.0, mask=tl.arange(0, BLOCK) < N)
    tl.store(total, N)

@count.workload(dtypes=["float32"])
def one(device, dtype):
    x, total = torch.zeros(64, device=device, dtype=dtype), torch.zeros(1, device=device)
    yield Workload("apart", (1,), (x, total, 64))
    yield Workload("twice", (2,), (x, total, 64), allow=ALLOW)
"""


def test_configs_that_the_interpreter_runs_alike_run_once(safetune: Any, tmp_path: Path) -> None:
    file = tmp_path / "counting.py"
    file.write_text(COUNTING.replace("ALLOW", "[]"))
    result = safetune("verify", file, "--shape", "apart", "--json")

    launches = json.loads(result.stdout)["launches"]
    assert [one["verdict"] for one in launches] == ["ok"] * 6
    assert len({one["config"] for one in launches}) == 6
    assert [one["report"]["config"] for one in launches] == [one["config"] for one in launches]
    assert result.stderr.count("ran") == 2


@pytest.mark.parametrize(("allow", "code"), [(["total"], 1), (["total", "x"], 0)])
def test_accesses_that_a_workload_allows_are_notes(
    safetune: Any, tmp_path: Path, allow: list[str], code: int
) -> None:
    file = tmp_path / "allowing.py"
    file.write_text(COUNTING.replace("ALLOW", repr(allow)))

    report = safetune.json("verify", file, "--shape", "twice", code=code)["launches"][0]["report"]

    assert sorted(finding["argument"] for finding in report["allowed"]) == allow
    assert [finding["argument"] for finding in report["findings"]] == ["x"] * code
    shown = safetune("verify", file, "--shape", "twice").stdout
    assert "allowed: total: 1 element stored by several programs" in shown
