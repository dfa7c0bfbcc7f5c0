"""`safetune tune --ray` on a cluster of this machine with two workers, of which one dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

#: Starts a cluster of two CPUs, and runs the command that tunes on it.
CLUSTER = """
import subprocess, sys
import ray

ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
address = ray.get_runtime_context().gcs_address
command = [sys.executable, "-m", "safetune", "tune", *sys.argv[1:], "--ray", address, "--json"]
sys.exit(subprocess.run(command, check=False).returncode)
"""


@pytest.mark.full
@pytest.mark.parametrize("killed", ["worker", "actor"])
def test_a_worker_that_dies_leaves_its_keys_to_the_other(
    targets: Path, tmp_path: Path, killed: str
) -> None:
    pytest.importorskip("ray", reason="the extra `ray` has ray")
    (tmp_path / "shared").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "SAFETUNE_SHARED": f"file://{tmp_path}/shared",
        "SAFETUNE_CACHE_DIR": str(tmp_path / "store"),
        "TEST_KILL": str(tmp_path / "killed"),
        "TEST_KILLS": killed,
        "TRITON_INTERPRET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER, str(targets / "fleet.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert "drops out" in done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    assert sorted(tuning["shape"] for tuning in data["tunings"]) == ["100", "101", "102", "103"]
    assert all(tuning["choice"] for tuning in data["tunings"])
    assert len([*(tmp_path / "shared").rglob("*.json")]) == 4


def test_it_needs_a_store_that_all_nodes_reach(safetune: Any, targets: Path) -> None:
    line = safetune.error("tune", targets / "fleet.py", "--ray", "auto")
    assert line.startswith("Error: --ray needs SAFETUNE_SHARED")


def test_ray_chooses_the_devices(safetune: Any, targets: Path) -> None:
    result = safetune("tune", targets / "fleet.py", "--ray", "auto", "--shard", "1/2")
    assert result.exit_code == 2
    assert "give no device and no shard" in result.stderr
