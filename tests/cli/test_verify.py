"""`safetune verify`: what it checks, what it prints, and its exit codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT

#: The example of `safetune demo`.
FAULTY = ROOT / "docs" / "examples" / "faulty.py"


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

    def test_the_example_of_the_demo(self, safetune: Any) -> None:
        """Its crash ended the command with SIGSEGV, and its hang took 600 seconds."""
        launches = verified(safetune, FAULTY)["launches"]

        assert [one["verdict"] for one in launches] == ["ok"] * 2 + ["not checked"] * 2 + ["ok"]
        assert launches[2]["error"] == f"its process ended with SIGSEGV ({FAULTY}:17)"
        assert launches[3]["error"].startswith(f"no end within run_timeout_s=3 ({FAULTY}:")


#: A kernel of which one function is `culprit`, and one that is fine.
BROKEN = """
import ctypes, os, signal
import torch, triton, triton.language as tl
from safetune import Workload, safetune

CONFIGS = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})]

def culprit(*_, **__):
    FAULT

def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)

def prune(configs, named, **_):
    return configs

def one(meta):
    return 1

def nothing():
    pass

@triton.heuristics({"ABOVE": HEURISTIC_ABOVE})
@safetune(
    configs=CONFIGS, key=["n"], run_timeout_s=1, prune_configs_by={"early_config_prune": PRUNE}
)
@triton.heuristics({"BELOW": HEURISTIC_BELOW})
@triton.jit
def broken(y, n, ABOVE, BELOW, BLOCK: tl.constexpr):
    KERNEL()
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, 1.0, mask=offsets < n)

@safetune(configs=CONFIGS, key=["n"])
@triton.jit
def fine(y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, 1.0, mask=offsets < n)

@broken.fn.workload
def launches(device, dtype):
    yield Workload("only", GRID, (torch.zeros(128, device=device), 128))
    WORKLOAD()

@fine.workload
def launches(device, dtype):
    yield Workload("only", grid, (torch.zeros(128, device=device), 128))
"""

#: The functions of BROKEN, and what stands there where they are not the culprit.
FUNCTIONS = {
    "HEURISTIC_ABOVE": "one",
    "PRUNE": "prune",
    "HEURISTIC_BELOW": "one",
    "KERNEL": "nothing",
    "GRID": "grid",
    "WORKLOAD": "nothing",
}


@pytest.fixture
def broken(tmp_path: Path) -> Callable[..., Path]:
    """A file of BROKEN, with a fault in the functions named."""

    def write(fault: str, *functions: str) -> Path:
        text = BROKEN.replace("FAULT", fault)
        for name, instead in FUNCTIONS.items():
            text = text.replace(name, "culprit" if name in functions else instead)
        file = tmp_path / "broken.py"
        file.write_text(text)
        return file

    return write


#: For each function of BROKEN, the launches of its kernel.
COSTS = {
    "HEURISTIC_ABOVE": ["all configs"],
    "PRUNE": ["all configs"],
    "HEURISTIC_BELOW": ["BLOCK=64", "BLOCK=128"],
    "KERNEL": ["BLOCK=64", "BLOCK=128"],
    "GRID": ["BLOCK=64", "BLOCK=128"],
    "WORKLOAD": ["BLOCK=64", "BLOCK=128", "all workloads"],
}


#: A kernel whose parameters are called like options of `check_overlap`.
NAMED = """
@safetune(configs=CONFIGS, key=["config"])
@triton.jit
def named(outputs, allow, config, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(outputs + offsets, config, mask=offsets < allow)

@named.workload
def launches(device, dtype):
    outputs = torch.zeros(64, device=device)
    yield Workload("only", (1,), (), {"outputs": outputs, "allow": 64, "config": 1})
"""

CRASHED = "its process ended with SIGSEGV ({file}:9)"


class TestFunctionsOfATarget:
    """They cost the launches that need them; the other kernel is checked."""

    @pytest.mark.parametrize(
        ("function", "fault", "reason"),
        [
            *((name, "ctypes.string_at(0)", CRASHED) for name in COSTS),
            ("GRID", "os._exit(0)", "its process ended with exit code 0"),
            ("HEURISTIC_BELOW", "raise ValueError('no')", "ValueError: no ({file}:9)"),
            ("WORKLOAD", "raise ValueError('no')", "raised ValueError: no ({file}:9)"),
        ],
    )
    def test_a_fault(
        self, safetune: Any, broken: Any, function: str, fault: str, reason: str
    ) -> None:
        """A crash or an exit ended the command, and a workload that raised hid all results."""
        file = broken(fault, function)

        launches = verified(safetune, file)["launches"]

        rows = [one for one in launches if one["kernel"] == "broken"]
        assert [one["config"].partition(" num_warps")[0] for one in rows] == COSTS[function]
        lost = rows[-1:] if function == "WORKLOAD" else rows
        assert {one["verdict"] for one in lost} == {"not checked"}
        assert all(reason.format(file=file) in one["error"] for one in lost), lost
        rest = [one for one in launches if one not in lost]
        assert [one["verdict"] for one in rest if one["kernel"] == "fine"] == ["ok", "ok"]
        assert {one["verdict"] for one in rest} == {"ok"}

    @pytest.mark.parametrize(
        ("function", "wait"),
        [("KERNEL", "while True: pass"), ("GRID", "signal.pause()"), ("PRUNE", "signal.pause()")],
    )
    def test_a_hang(self, safetune: Any, broken: Any, function: str, wait: str) -> None:
        """A hook that hung was never stopped, and a kernel after 600 seconds."""
        file = broken(wait, function)

        launches = verified(safetune, file)["launches"]

        rows = [one for one in launches if one["kernel"] == "broken"]
        assert [one["config"].partition(" num_warps")[0] for one in rows] == COSTS[function]
        for row in rows:
            assert row["error"].startswith(f"no end within run_timeout_s=1 ({file}:9). ")
        assert [one["verdict"] for one in launches if one["kernel"] == "fine"] == ["ok", "ok"]

    def test_the_limit_begins_again_with_each_program(self, safetune: Any, broken: Any) -> None:
        """A launch of many programs is slow in the interpreter, and does not hang."""
        file = broken(
            "assert signal.getitimer(signal.ITIMER_REAL)[0]; "
            "signal.setitimer(signal.ITIMER_REAL, 0)",
            "KERNEL",
        )

        assert safetune.json("verify", file)["ok"]

    @pytest.mark.parametrize("fault", ["raise ValueError('no')", "ctypes.string_at(0)"])
    def test_a_shape_beside_a_workload_function_that_fails(
        self, safetune: Any, broken: Any, fault: str
    ) -> None:
        """It said that there is no such shape."""
        launches = verified(safetune, broken(fault, "WORKLOAD"), "--shape", "only")["launches"]

        assert [one["verdict"] for one in launches] == ["ok", "ok", "not checked", "ok", "ok"]

    def test_no_workload(self, safetune: Any, broken: Any) -> None:
        file = broken("pass")
        file.write_text(file.read_text().replace("    yield ", "    return []; "))

        assert safetune.error("verify", file) == (
            f"Error: the workload functions of {file} yield nothing"
        )

    def test_arguments_named_like_what_a_workload_declares(
        self, safetune: Any, tmp_path: Path
    ) -> None:
        file = tmp_path / "named.py"
        file.write_text(BROKEN.partition("@triton.heuristics")[0].replace("FAULT", "pass") + NAMED)

        assert safetune.json("verify", file)["ok"]

    def test_a_crash_in_the_import(self, safetune: Any, tmp_path: Path) -> None:
        file = tmp_path / "crashing.py"
        file.write_text("import ctypes\nctypes.string_at(0)\n")

        assert safetune.error("verify", file) == (
            f"Error: its process ended with SIGSEGV ({file}:2)"
        )

    def test_this_process_leaves_the_gpu_to_the_others(
        self, fresh_process: Any, broken: Any
    ) -> None:
        """CUDA does not work in a fork of a process that has used it."""
        file = broken("ctypes.string_at(0)", "GRID")
        code = (
            "import sys\nfrom safetune.cli import main\n"
            f"try: main(['verify', {str(file)!r}])\n"
            "finally: print('torch' in sys.modules, file=sys.stderr)\n"
        )

        assert fresh_process(code, ends=1).stderr.endswith("False\n")


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
from pathlib import Path
import torch, triton, triton.language as tl
from safetune import Workload, safetune

WARPS = (1, 2, 4)
CONFIGS = [triton.Config({"BLOCK": n}, num_warps=warps) for n in (16, 32) for warps in WARPS]

def note(block):
    with Path(__file__).with_suffix(".ran").open("a") as ran:
        ran.write(f"{int(block)} ")

@safetune(configs=CONFIGS, key=["N"])
@triton.jit
def count(x, total, N, BLOCK: tl.constexpr):
    note(BLOCK)
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

    launches = safetune.json("verify", file, "--shape", "apart")["launches"]

    assert [one["verdict"] for one in launches] == ["ok"] * 6
    assert len({one["config"] for one in launches}) == 6
    assert [one["report"]["config"] for one in launches] == [one["config"] for one in launches]
    assert file.with_suffix(".ran").read_text() == "16 32 "


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
