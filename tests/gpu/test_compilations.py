"""Configs are compiled by compile children: not by the measuring child, nor by the caller."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from safetune import safetune
from safetune.outcome import Mark
from safetune.settings import Settings
from safetune.store.lookup import open_lookup

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("hooks", [False, True], ids=["resolved by the caller", "by the child"])
def test_nothing_is_compiled_where_it_is_measured(
    kernels: Any, device: str, parent: Any, tmp_path: Path, hooks: bool
) -> None:
    log = tmp_path / "compilations of the measuring child"

    def hook(arguments: Any) -> None:
        pass

    def listen(arguments: Any) -> dict[str, Any]:
        """As `reference=`, this runs in the measuring child before its first config."""
        from triton import knobs

        def note(*, cache_hit: bool, **_: Any) -> None:
            with open(log, "a") as file:
                file.write(f"{os.getpid()} {cache_hit}\n")

        knobs.compilation.listener = note
        return {}

    configs = [
        triton.Config({"BT": rows}, num_warps=warps, pre_hook=hook if hooks else None)
        for rows in (8, 32)
        for warps in (2, 4)
    ]
    kernel = safetune(configs=configs, key=["D"], reference=listen)(kernels.row_norm_kernel)
    x = torch.randn(256, 64, device=device)
    out = torch.empty_like(x)
    kernel[lambda meta: (triton.cdiv(256, meta["BT"]),)](x, out, 256, D=64, NB=1)
    torch.cuda.synchronize()

    launched = [line.split() for line in log.read_text().splitlines()]
    assert len(launched) >= len(configs)
    assert {pid for pid, _ in launched}.isdisjoint({str(os.getpid())})
    assert {found for _, found in launched} == {"True"}, "all in the disk cache"
    assert len(parent.compiled) == 1, "what was chosen, found in the disk cache"
    assert parent.binaries_before == [parent.binaries()]
    assert {"transfer", "resolve", "compile", "torch"} <= kernel.tuning_phases.keys()


def test_configs_that_compile_to_the_same_code_are_run_once(
    kernels: Any, device: str, trials: Callable[[], list[Any]]
) -> None:
    """Stages change nothing where there is no loop: one outcome is that of both."""
    configs = [triton.Config({"BLOCK": 256}, num_stages=stages) for stages in (2, 3)]
    kernel = safetune(configs=configs, key=["n"])(kernels.add_kernel)
    x, y = torch.randn(2, 5000, device=device)
    out = torch.empty_like(x)
    kernel[lambda meta: (triton.cdiv(5000, meta["BLOCK"]),)](x, y, out, 5000)
    assert torch.equal(out, x + y)
    assert [trial.verdict for trial in trials()] == ["ok", "ok"]
    assert kernel.best_config.num_stages == 2, "declared first"
    (outcomes,) = (found for _, found in open_lookup(Settings.current()).store.trials_of())
    marked = [each.outcome for each in outcomes if each.outcome.marked(Mark.SAME_AS)]
    assert len(marked) == 1
    assert outcomes[0].outcome.timing == outcomes[1].outcome.timing
