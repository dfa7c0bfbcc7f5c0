"""What happens on an AMD GPU, where safetune's isolation is an experiment that none has run.

    python benchmarks/rocm.py

runs a tuning with configs that fail, the GPU tests that need nothing of NVIDIA's, and a few
benchmarks, each in a process of its own under SAFETUNE_EXPERIMENTAL_HIP=1. A failure is a finding,
not an error of this script. It writes OUT/<device>/rocm.json, and beside that the files of the
benchmarks: about half an hour. It installs nothing. It needs torch for ROCm, which brings a Triton
of its own, and for that reason this checkout without what it depends on:

    pip install --no-deps -e .
    pip install click cloudpickle msgspec platformdirs rich sqlite-utils pytest
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import recording
from recording import ROOT, Figures, Row

#: Of tests/gpu; the others call NVIDIA's driver, or need PTX, torch.compile, JAX or several GPUs.
#: The last one has a kernel that never ends, which a driver may answer by resetting the device.
GPU_TESTS = ("tensors_unchanged", "inputs", "modes", "record", "packs", "parent", "origins")
GPU_TESTS += ("threads", "silent_faults", "faults")
TESTS = [
    *(f"tests/kernels/test_{name}_gpu.py" for name in ("layer_norm", "norm")),
    *(f"tests/gpu/test_{name}.py" for name in GPU_TESTS),
]
BENCHMARKS = ("launch_overhead", "tuning_time", "first_tuning")
#: Without the working directory, whose folder `safetune` is not the whole package.
PYTEST = [sys.executable, *["-P"] * (sys.version_info >= (3, 11)), "-m", "pytest"]
#: The most seconds for one process.
LIMIT_S = 600
_TAIL = 2000


def why_not_here() -> str:
    """Return why there is nothing to find out on this machine; empty where there is."""
    import torch

    if not torch.version.hip:
        return f"torch {torch.__version__} is not built for ROCm"
    if not torch.cuda.is_available():
        return "torch finds no GPU (see rocminfo, /dev/kfd)"
    missing = [name for name in ("safetune.kernels", "pytest") if not importable(name)]
    words = f"{' and '.join(missing)} cannot be imported: this script's first lines say how to"
    return f"{words} install what it needs" if missing else ""


def importable(name: str) -> bool:
    """Whether a module is installed."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return False


def environment(scratch: Path) -> dict[str, str]:
    """Return the environment of what is run: with a store and a compile cache of its own."""
    from safetune import triton_launch

    unset = ("SAFETUNE_", "TRITON_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    return {
        **kept,
        "SAFETUNE_EXPERIMENTAL_HIP": "1",
        "SAFETUNE_CACHE_DIR": str(scratch / "store"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TRITON_LIBHIP_PATH": triton_launch.hip_library(),  # by this tests know that there is a GPU
    }


def run(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, str, str, float]:
    """Return the exit code of a process (-1: it was stopped), what it printed, and its seconds."""
    print("+", *command, flush=True)
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        try:
            options = {"env": dict(env), "cwd": ROOT, "timeout": LIMIT_S}
            code = subprocess.run(command, stdout=out, stderr=errors, check=False, **options)
            status = code.returncode
        except subprocess.TimeoutExpired:
            status = -1
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read())
    return status, texts[0], texts[1], round(time.monotonic() - began, 1)


def isolation(env: Mapping[str, str]) -> Iterator[Row]:
    """Tune a kernel with configs that fail."""
    code, out, errors, _ = run([sys.executable, "benchmarks/rocm_isolation.py"], env)
    try:
        yield from json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        seen = f"exit code {code}: {errors[-_TAIL:]}"
        yield {"kind": "isolation", "check": "a tuning", "ok": False, "seen": seen}


def tests(env: Mapping[str, str]) -> Iterator[Row]:
    """Run test files one after the other."""
    for file in TESTS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            options = ["-q", "-rf", "-p", "no:cacheprovider", "-m", "gpu", f"--junitxml={report}"]
            code, out, errors, seconds = run([*PYTEST, *options, file], env)
            row = {"kind": "tests", "file": file, "exit_code": code, "seconds": seconds}
            if report.exists():
                yield {**row, **counts(report.read_text(encoding="utf-8"))}
            else:
                yield {**row, "seen": (out + errors)[-_TAIL:]}


def counts(report: str) -> Row:
    """Return how many tests of a JUnit report passed, failed and were skipped, and why."""
    passed, failures, skipped = 0, {}, 0
    for case in ElementTree.fromstring(report).iter("testcase"):
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        if bad is not None:
            text = (bad.get("message") or "").strip()
            failures[str(case.get("name"))] = (text.splitlines() or [""])[0][:300]
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "failed": len(failures), "skipped": skipped, "failures": failures}


def benchmarks(env: Mapping[str, str], out: Path) -> Iterator[Row]:
    """Run benchmarks, each of which writes a file of its own."""
    for name in BENCHMARKS:
        budget = () if name == "launch_overhead" else ("--budget", str(LIMIT_S // 2))
        command = [sys.executable, f"benchmarks/{name}.py", "--out", str(out), *budget]
        code, _, errors, seconds = run(command, env)
        seen = errors[-_TAIL:] if code else ""
        yield {"kind": "benchmark", "name": name, "exit_code": code, "seconds": seconds} | (
            {"seen": seen} if seen else {}
        )


def figures(rows: Sequence[Row]) -> Figures:
    """Count what was as it should be."""
    checks = [row for row in rows if row["kind"] == "isolation"]
    files = [row for row in rows if row["kind"] == "tests"]
    found = {
        "checks": len(checks),
        "checks_ok": sum(row["ok"] for row in checks),
        "files_without_a_report": sum("passed" not in row for row in files),
        "benchmarks_run": sum(r["kind"] == "benchmark" and not r["exit_code"] for r in rows),
    }
    for name in ("passed", "failed", "skipped"):
        found[f"tests_{name}"] = sum(row.get(name, 0) for row in files)
    return {name: float(value) for name, value in found.items()}


def issues() -> str:
    """Return the address where findings are collected."""
    found = re.search(r'^Issues = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    return found[1] if found else ""


def main() -> None:
    """Run everything, and save what is known after each step."""
    parser = recording.arguments(str(__doc__).splitlines()[0])
    parser.add_argument(
        "--only", choices=["isolation", "tests", "benchmarks"], help="one step; default: all"
    )
    parsed: argparse.Namespace = parser.parse_args()
    if reason := why_not_here():
        sys.exit(f"this script is for an AMD GPU: {reason}")
    result = recording.begin("rocm")
    with tempfile.TemporaryDirectory() as scratch:
        env = environment(Path(scratch))
        out = parsed.out.resolve()
        steps = {"isolation": isolation(env), "tests": tests(env)}
        for name, rows in {**steps, "benchmarks": benchmarks(env, out)}.items():
            for row in rows if parsed.only in (None, name) else ():
                result.rows.append(row)
                print(json.dumps(row), flush=True)
                path = result.save(out, figures)
    print(json.dumps(result.figures, indent=1))
    print(f"Please attach {path}, and the files beside it, to an issue: {issues()}")


if __name__ == "__main__":
    main()
