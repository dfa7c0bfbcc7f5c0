"""Libraries' tests in three ways: what is compared, and that the copies have the shim."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("proofs")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def row(way: str, state: str = "all", **outcomes: str) -> dict[str, Any]:
    found = {"part": f"GLA {way} {state}", "proof": "GLA", "way": way, "state": state}
    return {**found, "first_s": 7.5, "process_s": 12.0, "tunings": 3, "outcomes": outcomes}


def test_a_test_that_ends_otherwise_than_under_stock_is_named(proofs: ModuleType) -> None:
    rows = [
        row("stock", a="passed", b="failed", c="skipped"),
        row("run", a="passed", b="failed", c="skipped"),
        row("shim", a="failed", b="failed"),
        row("run", "cold", a="passed"),
        {**row("run", a="passed"), "proof": "KDA", "ended": False},
        {**row("stock", a="passed", b="passed"), "proof": "KDA"},
    ]
    assert proofs.differences(rows) == {
        "GLA, run": [],
        "GLA, shim": ["a: failed, stock passed", "c: None, stock skipped"],
    }
    figures = proofs.figures(rows)
    assert figures["differences"] == 2.0
    assert figures["passed GLA, run"] == 2.0
    assert figures["tests GLA, shim"] == 2.0
    assert figures["first_step_s GLA, run cold"] == 7.5
    assert not any("KDA, run" in name for name in figures), "it ran out of time"
    assert "first_step_s GLA, run all" not in figures, "not alone on the machine"


def test_every_tuner_of_a_copy_is_the_shims(proofs: ModuleType, tmp_path: Path) -> None:
    text = (
        "import torch\nimport triton\nimport triton.language as tl\n"
        "@triton.autotune([triton.Config({})], key=[])\n@triton.jit\ndef a(x): pass\n"
        "@fla_cache_autotune([triton.Config({})], key=[])\n@triton.jit\ndef b(x): pass\n"
    )
    package = tmp_path / "library"
    package.mkdir()
    (package / "ops.py").write_text(text)
    (package / "plain.py").write_text("import triton\n")
    proofs.vendor(package, "library.autotune_shim")
    code = "import library.ops as o; print(type(o.a).__module__, type(o.b).__module__)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["safetune.frontend.autotuner"] * 2
    assert (package / "plain.py").read_text() == "import triton\n"
    changed = (package / "ops.py").read_text().splitlines()
    assert changed.index("def a(x): pass") == text.splitlines().index("def a(x): pass"), (
        "Triton finds the kernel that it has compiled"
    )


def test_each_test_has_one_line_with_its_outcome(proofs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.xfail\ndef test_expected(): assert False\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_setup(broken): pass\n"
        "@pytest.fixture\ndef leaves():\n    yield\n    raise OSError\n"
        "def test_teardown(leaves): pass\n"
    )
    report = tmp_path / "report.jsonl"
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "PROOF_REPORT": str(report)}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "proof_report", "-c", os.devnull]
    subprocess.run([*command, str(tmp_path)], env=env, capture_output=True, check=False)
    outcomes, first_s = proofs.read(report)
    assert outcomes == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_expected": "expected",
        "test_skipped": "skipped",
        "test_setup": "failed",
        "test_teardown": "failed",
    }
    assert first_s is not None
    assert first_s < 5
    assert proofs.read(tmp_path / "none") == ({}, None)


def test_a_process_that_does_not_end_is_killed(proofs: ModuleType, tmp_path: Path) -> None:
    code = "import threading; threading.Event().wait()"
    ended, _ = proofs._output([sys.executable, "-c", code], dict(os.environ), tmp_path, -1.0)
    assert not ended


def test_a_stored_step_comes_after_its_cold_one_and_the_next_cold_one(proofs: ModuleType) -> None:
    """Two processes at a time: one imports, and waits until the other one's tests have ended."""
    first, second = proofs.PROOFS[:2]
    order = proofs._order([first, second], ["cold", "stored"])
    assert order == [(first, "cold"), (second, "cold"), (first, "stored"), (second, "stored")]


def test_a_stored_step_waits_for_its_cold_one(proofs: ModuleType) -> None:
    stored = threading.Event()

    class Bench:
        def run(self, proof: Any, way: str, state: str) -> dict[str, Any]:
            if state == "stored":
                stored.set()
            elif stored.wait(0.1):
                raise AssertionError("the stored step ran beside the cold one")
            return {**row(way, state, a="passed"), "ended": True}

    options = argparse.Namespace(only="GLA", first_steps=True, ways=["run"], workers=1)
    found = proofs.run(Bench(), options, set())
    assert [each["state"] for each in found] == ["cold", "stored"]


def test_the_tests_of_each_proof_have_its_first_step(proofs: ModuleType) -> None:
    names = [proof.name for proof in proofs.PROOFS]
    assert len(set(names)) == len(names) == 13
    for proof in proofs.PROOFS:
        assert proof.first.partition("::")[0] == proof.tests[0].partition("::")[0]
        # What loads a plugin is for the first step, too.
        assert "-p" not in proof.tests
        assert proof.arguments("cold") == (proof.first, *proof.options)
        assert proof.arguments("all") == (*proof.tests, *proof.options)
        assert proof.folder in json.dumps(proofs.VERSIONS)
