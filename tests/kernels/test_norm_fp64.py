"""fp64 inputs are computed in fp64, and the sums of rows stay finite where the definition does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from safetune.kernels import layer_norm, rms_norm
from tests.kernels.conftest import normalize

#: Some 50 rounding errors of fp64; one constant in fp32 costs 1e-9 and more.
ALLOWED = 1e-14


def relative(found: torch.Tensor, right: torch.Tensor) -> float:
    return float(((found - right).abs().max() / right.abs().max()).detach())


@pytest.mark.parametrize("columns", [50, 4097, pytest.param(9000, marks=pytest.mark.full)])
@pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
def test_every_sum_and_constant_is_fp64(
    device: str, gradients: Any, columns: int, is_rms_norm: bool, loops: None
) -> None:
    """Rows are cut in slices that differ by far more than a rounding error."""
    draw = torch.Generator().manual_seed(columns)
    shapes = ((3, columns), (columns,), (columns,), (3, columns), (3, columns))
    made = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    x, weight, bias, residual, dy = (tensor.to(device) for tensor in made)
    x[:, columns // 2 :] += 1e3
    leaves = [leaf.requires_grad_() for leaf in (x, weight, bias, residual)]
    norm = rms_norm if is_rms_norm else layer_norm
    y = norm(*leaves)
    right = normalize(*leaves, is_rms_norm=is_rms_norm)
    found, expected = gradients(y, dy, *leaves), gradients(right, dy, *leaves)
    assert relative(y, right) < ALLOWED
    for mine, exact in zip(found, expected, strict=True):
        assert relative(mine, exact) < 10 * ALLOWED, "sums of signs that cancel"


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # masked rows
@pytest.mark.parametrize("eps", [1e-5, 1e-7, 1e-60, 0.0])
def test_eps_is_not_rounded(device: str, eps: float) -> None:
    x = torch.randn(3, 18, dtype=torch.float64, device=device) * max(eps, 1e-9) ** 0.5
    assert relative(layer_norm(x, None, None, eps=eps), normalize(x, None, None, eps=eps)) < ALLOWED


def test_an_fp64_residual_makes_the_sum_fp64(device: str) -> None:
    x = torch.randn(3, 50, device=device)
    residual = torch.randn(3, 50, dtype=torch.float64, device=device)
    _, added = layer_norm(x, None, None, residual, prenorm=True)
    assert torch.equal(added, x.double() + residual)


@pytest.mark.parametrize("columns", [4, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_square_of_a_mean_may_be_more_than_fp32_has(
    device: str, columns: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(1)
    x = (3e19 * (1 + torch.randn(3, columns, generator=draw) / 300)).to(dtype).to(device)
    y, right = layer_norm(x, None, None), normalize(x.double(), None, None)
    # fp32 has 2^-24 of the mean, 300 times the spread; the interpreter cuts bf16 off.
    assert relative(y.double(), right) < (2**-14 if dtype == torch.float32 else 2**-7)
