"""The check of write ownership in a process that has a GPU, on kernels made for it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from safetune.verify.overlap import check_overlap

pytestmark = pytest.mark.gpu


@triton.jit
def fill(y, x, n, BLOCK: tl.constexpr, STEP: tl.constexpr):
    offsets = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n, other=0.0)
    tl.store(y + offsets, value - tl.max(value), mask=offsets < n)


def test_tensors_and_launches_are_as_before() -> None:
    """The arguments lie on the device and stay there; the compiler works before and after."""
    x, y = torch.randn(100, device="cuda"), torch.zeros(100, device="cuda")
    fill[(4,)](y, x, 100, 32, 32)
    before = (x.clone(), y.clone())

    good = check_overlap(fill, (4,), y, x, 100, 32, 32, outputs=["y"])
    bad = check_overlap(fill, (4,), y, x, 100, 32, 31, outputs=["y"])

    assert good.ok, str(good)
    assert bad.find("overlap", "y").elements == 3, str(bad)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    y.zero_()
    fill[(4,)](y, x, 100, 32, 32)
    assert torch.equal(y, before[1])
    fill[(2,)](y, x, 100, 64, 64)  # compiles anew
    assert torch.equal(y[:64], x[:64] - x[:64].max())
