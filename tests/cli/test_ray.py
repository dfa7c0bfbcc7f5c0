"""`safetune tune --ray` on a cluster of this machine with two nodes, of which one dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

#: Starts a cluster of two nodes with one CPU each beside its head, and runs the command on it.
CLUSTER = """
import subprocess, sys
from ray.cluster_utils import Cluster

small = {"include_dashboard": False, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
for _ in range(2):
    cluster.add_node(num_cpus=1, **small)
cluster.wait_for_nodes()
command = [sys.executable, "-m", "safetune", "tune", *sys.argv[1:], "--ray", cluster.address]
done = subprocess.run([*command, "--json"], check=False)
cluster.shutdown()
sys.exit(done.returncode)
"""


@pytest.mark.full
def test_a_node_that_dies_loses_its_key_to_the_other(targets: Path, tmp_path: Path) -> None:
    """Two raylets, of which one is killed while its worker tunes the third key."""
    pytest.importorskip("ray", reason="the extra `ray` has ray")
    (tmp_path / "shared").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "SAFETUNE_SHARED": f"file://{tmp_path}/shared",
        "SAFETUNE_CACHE_DIR": str(tmp_path / "store"),
        "TEST_KILL": str(tmp_path / "killed"),
        "TEST_KILLS": "raylet",
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
    assert (tmp_path / "killed").read_text() == "raylet"
    assert "dropped out: its actor or its node died; the others take over its work" in done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    assert sorted(tuning["shape"] for tuning in data["tunings"]) == ["100", "101", "102", "103"]
    assert all(tuning["choice"] for tuning in data["tunings"])
    assert len([*(tmp_path / "shared").rglob("*.json")]) == 4
