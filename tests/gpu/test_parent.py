"""The caller's process launches the chosen binary and does nothing else with any config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from safetune import safetune

pytestmark = pytest.mark.gpu

N = 1 << 16


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def test_the_parent_compiles_and_loads_the_chosen_config_only(
    kernels: Any, device: str, parent: Any, trials: Callable[[], list[Any]]
) -> None:
    """Its one compilation finds the binary that a child left in Triton's disk cache."""
    configs = [
        triton.Config({"BLOCK": block}, num_warps=warps)
        for block in (256, 512, 1024, 2048)
        for warps in (2, 4)
    ]
    kernel = safetune(configs=configs, key=["n"])(kernels.add_kernel)
    x, y = (torch.randn(N, device=device) for _ in range(2))
    out = torch.zeros_like(x)
    kernel[grid](x, y, out, N)
    assert torch.equal(out, x + y)
    assert [trial.verdict for trial in trials()] == ["ok"] * len(configs)

    assert len(parent.compiled) == 1, parent.compiled
    assert parent.loaded == ["add_kernel"]
    assert len(kernels.add_kernel.device_caches[x.device.index][0]) == 1
    (before,) = parent.binaries_before
    assert len(before) == len(configs)  # the children's
    assert parent.binaries() == before

    kernel[grid](x, y, out, N)
    assert len(parent.compiled) == len(parent.loaded) == 1


def test_a_warm_store_starts_no_process(fresh_process: Any, scripts: Path) -> None:
    """The second process finds the choice and the binary: it forks nothing and measures nothing."""
    reports = []
    for _ in range(2):
        result = fresh_process(scripts / "tune_and_report.py")
        reports.append(json.loads(result.stdout.splitlines()[-1]))
    first, second = reports
    assert first["right"]
    assert second["right"]
    assert second["best"] == first["best"]
    assert first["trials"] == second["trials"] == 4
    assert first["newest_trial"] == second["newest_trial"]
    assert first["tuning_processes"] > 0
    assert second["tuning_processes"] == 0
    assert second["forks"] == []
    assert not second["worker_imported"]
    assert not second["new_binaries"]
