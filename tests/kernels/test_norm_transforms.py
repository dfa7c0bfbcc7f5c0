"""What torch does to a call: views, torch.func, batched gradients and traces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from safetune.errors import TracingError
from safetune.kernels import layer_norm, layer_norm_linear

pytestmark = pytest.mark.usefixtures("loops")

Norm = Callable[[torch.Tensor], torch.Tensor]


def ours(x: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, None, None)


def torchs(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


@pytest.fixture
def x(device: str) -> torch.Tensor:
    return torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.fixture(autouse=True)
def no_rule_for_batches() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def assert_same(run: Callable[[Norm], torch.Tensor]) -> None:
    torch.testing.assert_close(run(ours), run(torchs), rtol=1e-5, atol=1e-5)


def test_an_output_may_be_changed_in_place(x: torch.Tensor) -> None:
    def run(norm: Norm) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        norm(leaf).relu_().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert_same(run)


def test_a_residual_sum_may_be_changed_in_place_unless_backward_needs_it(x: torch.Tensor) -> None:
    leaf = x.clone().requires_grad_()
    y, added = layer_norm(leaf, None, None, x.clone(), prenorm=True)
    added.add_(1)
    assert torch.equal(added, x + x + 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_vmap(x: torch.Tensor) -> None:
    assert_same(lambda norm: torch.vmap(norm)(x))
    weight = torch.ones(4, 16, device=x.device)
    linear = torch.vmap(lambda x: layer_norm_linear(x, None, None, weight, None))(x)
    torch.testing.assert_close(linear, torchs(x) @ weight.t(), rtol=1e-5, atol=1e-5)


def test_gradients_of_a_batch_of_losses(x: torch.Tensor) -> None:
    def run(norm: Norm) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        y = norm(leaf)
        losses = torch.stack([torch.ones_like(y), torch.ones_like(y).cumsum(-1)])
        (gradients,) = torch.autograd.grad(y, leaf, losses, is_grads_batched=True)
        return gradients

    assert_same(run)


def test_a_jit_trace(x: torch.Tensor) -> None:
    assert_same(lambda norm: torch.jit.trace(norm, x)(x + 1))


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: torch.func.grad(lambda x: ours(x).sum())(x),
        lambda x: torch.func.vjp(ours, x),
        lambda x: torch.func.jacrev(ours)(x),
        lambda x: torch.vmap(torch.func.grad(lambda x: ours(x).sum()))(x),
        lambda x: torch.func.grad(
            lambda x: layer_norm_linear(x, None, None, torch.eye(16).to(x), None).sum()
        )(x),
    ],
    ids=["grad", "vjp", "jacrev", "vmap-of-grad", "grad-of-linear"],
)
def test_gradients_by_torch_func_are_refused(x: torch.Tensor, transform: Any) -> None:
    with pytest.raises(TracingError, match=r"do not support torch\.func\.grad"):
        transform(x)
