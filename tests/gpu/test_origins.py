"""Kernels from where nothing can be imported again: scripts, closures, notebooks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune

pytestmark = pytest.mark.gpu


def test_a_script_without_a_main_guard(
    fresh_process: Any, scripts: Path, tmp_path: Path, trials: Callable[[], list[Any]]
) -> None:
    """Its body runs once: no child runs it again."""
    journal = tmp_path / "journal"
    result = fresh_process(scripts / "without_main_guard.py", journal)
    assert result.returncode == 0, result.stderr
    assert "is not tuned" not in result.stderr
    assert result.stdout.splitlines()[-1] == "right"
    assert journal.read_text().splitlines() == ["the body ran"]
    assert [trial.verdict for trial in trials()] == ["ok"] * 3


@pytest.mark.parametrize("factor", [3.0, 5.0])
def test_a_closure(device: str, trials: Callable[[], list[Any]], factor: float) -> None:
    """A kernel that reads a value of the function that made it; each value is another kernel."""
    kernel = _make_scaling_kernel(tl.constexpr(factor))
    n = 3000
    x = torch.randn(n, device=device)
    out = torch.zeros_like(x)
    kernel[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, out, n)
    assert torch.equal(out, x * factor)
    assert [trial.verdict for trial in trials()] == ["ok"] * 3


def _make_scaling_kernel(FACTOR: tl.constexpr) -> Any:
    @triton.jit
    def helper(value):
        return value * FACTOR

    @safetune(configs=[triton.Config({"BLOCK": b}) for b in (256, 512, 1024)], key=["n"])
    @triton.jit
    def scaling_kernel(x, out, n, BLOCK: tl.constexpr):
        offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offset < n
        tl.store(out + offset, helper(tl.load(x + offset, mask=mask)), mask=mask)

    return scaling_kernel


def test_a_notebook(fresh_process: Any, scripts: Path, trials: Callable[[], list[Any]]) -> None:
    """Cells run by IPython; one is run again with another body under the same name."""
    pytest.importorskip("IPython", reason="needs IPython")
    result = fresh_process(scripts / "notebook_cells.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "is not tuned" not in result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report == {"first": True, "again": True, "edited": True}
    assert [trial.verdict for trial in trials()] == ["ok"] * 6
    assert len({trial.key for trial in trials()}) == 2
