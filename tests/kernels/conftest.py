"""Kernels here run untuned, and against fp64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune.kernels import launches

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    """The first config, no process and no store: `cache_dir` comes first, as it unsets this."""
    monkeypatch.setenv("SAFETUNE_MODE", "off")


@pytest.fixture
def most_few_rows() -> int:
    """No rows are few, or small tests would test no other kernels; tests of those override this."""
    return 0


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch, most_few_rows: int) -> None:
    monkeypatch.setattr(launches, "FEW_ROWS", most_few_rows)


@triton.jit
def _loop_kernel(count):
    for _ in tl.range(0, count):
        pass


@pytest.fixture(scope="session")
def loops(device: str) -> None:
    """Skip where the interpreter cannot run a loop whose length is an argument.

    Triton 3.6's turns an array of one element into an int, which NumPy 2.4 refuses.
    """
    if device == "cpu":
        try:
            _loop_kernel[(1,)](1)
        except triton.runtime.errors.InterpreterError as error:
            pytest.skip(f"Triton {triton.__version__}'s interpreter has no loops here: {error}")


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Tensor:
    """The definition; differentiable."""
    z = (x if residual is None else x + residual).unflatten(-1, (num_groups, -1))
    if not is_rms_norm:
        z = z - z.mean(-1, keepdim=True)
    z = (z / torch.sqrt((z * z).mean(-1, keepdim=True) + eps)).flatten(-2)
    z = z if weight is None else z * weight
    return z if bias is None else z + bias


def in_fp64(*leaves: Tensor | None) -> list[Tensor | None]:
    """Return new leaves with the same values: gradients are not rounded on their way to them."""
    return [leaf if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]


#: Inputs are exact in fp64 and all is computed in fp32, so a result in 16 bits is off by its one
#: rounding: half a unit in the last place, at most 2^-9 of a bf16 and 2^-12 of an fp16. Twice that
#: is allowed; four times for bf16 in the interpreter, which truncates. fp32 results differ by how
#: sums of a few hundred terms round: a few units of 2^-23 of the largest; 16 are allowed.
ROUNDING = {
    torch.float32: 2.0**-19,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float64: 2.0**-19,
}


def assert_close(actual: Tensor, exact: Tensor, slack: float = 1.0) -> None:
    """Compare with the exact result, of each element and, by fp32's measure, of the largest."""
    truncated = actual.dtype == torch.bfloat16 and not actual.is_cuda
    relative = ROUNDING[actual.dtype] * slack * (2 if truncated else 1)
    actual, exact = actual.detach().double(), exact.detach().double()
    largest = max(1.0, float(exact.abs().max())) if exact.numel() else 1.0
    absolute = ROUNDING[torch.float32] * slack * largest
    torch.testing.assert_close(actual, exact, rtol=relative, atol=absolute)


@pytest.fixture
def reference() -> Callable[..., Tensor]:
    return normalize


@pytest.fixture
def exact_leaves() -> Callable[..., list[Any]]:
    return in_fp64


@pytest.fixture
def close() -> Callable[..., None]:
    return assert_close


@pytest.fixture
def random(device: str) -> Callable[..., Tensor]:
    """A function that makes leaf tensors of normal numbers, the same in every run."""
    generator = torch.Generator(device).manual_seed(0)

    def make(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
        values = torch.randn(*shape, device=device, generator=generator).to(dtype)
        return values.requires_grad_(grad)

    return make


@pytest.fixture
def gradients() -> Callable[..., list[Any]]:
    """A function that returns the gradients of some tensors, and None for those without."""

    def compute(outputs: Any, incoming: Any, *leaves: Tensor | None) -> list[Tensor | None]:
        wanted = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(outputs, wanted, incoming, allow_unused=True))
        return [None if leaf is None else next(found) for leaf in leaves]

    return compute
