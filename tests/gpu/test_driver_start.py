"""A process that has decorated, installed and resolved can still fork workers that use the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import os

import torch
import triton
import triton.language as tl

import safetune
from safetune.both import cuda_driver
from safetune.miss import reporting

safetune.install()
N = 5000


@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (128, 256)], key=["n"])
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, 2 * tl.load(x + offset, mask=offset < n), mask=offset < n)


def grid(meta):
    return (triton.cdiv(N, meta["BLOCK"]),)


def launched():
    x = torch.ones(N, device="cuda")
    double[grid](x, N)
    return bool((x == 2).all())


try:
    print(double.resolve(torch.empty(N, device="meta"), N, grid=grid).provenance)
except safetune.MissingChoice:
    print("missing")
print(cuda_driver.may_start(), torch.cuda.is_initialized(), flush=True)
if (worker := os.fork()) == 0:
    print(launched(), reporting.tunings.begun, flush=True)
    os._exit(0)
assert os.waitpid(worker, 0)[1] == 0
print(launched(), reporting.tunings.begun)
"""


def test_a_fork_after_resolving_can_tune_and_launch(fresh_process: Any, tmp_path: Path) -> None:
    """A choice is found by what another process has told of the device, too."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    first, second = (fresh_process(program) for _ in range(2))

    assert first.stdout.splitlines() == ["missing", "True False", "True 1", "True 0"], first.stderr
    assert second.stdout.splitlines() == ["stored", "True False", "True 0", "True 0"], second.stderr
