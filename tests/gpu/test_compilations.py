"""Configs are compiled by compile children: not by the measuring child, nor by the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from safetune import safetune
from safetune.tuning import tuner
from safetune.tuning.bench import LaunchBench

pytestmark = pytest.mark.gpu


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> list[LaunchBench]:
    """Every bench that a tuning of this test has used."""
    made: list[LaunchBench] = []

    class Noted(LaunchBench):
        def __enter__(self) -> LaunchBench:
            made.append(self)
            return super().__enter__()

    monkeypatch.setattr(tuner, "LaunchBench", Noted)
    return made


@pytest.mark.parametrize("hooks", [False, True], ids=["resolved by the caller", "by the child"])
def test_nothing_is_compiled_where_it_is_measured(
    kernels: Any, device: str, parent: Any, benches: list[LaunchBench], hooks: bool
) -> None:
    def hook(arguments: Any) -> None:
        pass

    configs = [
        triton.Config({"BT": rows}, num_warps=warps, pre_hook=hook if hooks else None)
        for rows in (8, 32)
        for warps in (2, 4)
    ]
    kernel = safetune(configs=configs, key=["D"])(kernels.row_norm_kernel)
    x = torch.randn(256, 64, device=device)
    out = torch.empty_like(x)
    kernel[lambda meta: (triton.cdiv(256, meta["BT"]),)](x, out, 256, D=64, NB=1)
    torch.cuda.synchronize()

    (bench,) = benches
    assert bench.compilations == 0
    assert bench.facts.keys() == set(range(len(configs)))
    assert len(parent.compiled) == 1, "what was chosen, found in the disk cache"
    assert parent.binaries_before == [parent.binaries()]
    assert {"transfer", "resolve", "compile", "start"} <= bench.phases.keys()
