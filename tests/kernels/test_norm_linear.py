"""A norm and a linear map in one: results and all gradients against fp64, and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from safetune import TracingError
from safetune.kernels import (
    GroupNormLinear,
    LayerNormLinear,
    RMSNormLinear,
    group_norm_linear,
    layer_norm_linear,
    rms_norm_linear,
)

pytestmark = pytest.mark.usefixtures("loops")

Tensor = torch.Tensor
kinds = pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])

#: The share of the result's length by which it may be off. In fp32, products of a few hundred terms
#: are off by a few 2^-24 of their length. In 16 bits the norm, the output and what goes back from
#: it are each rounded once before a sum averages over them, 2^-9 or 2^-12 each; twice their sum is
#: allowed, and twice that for bf16 in the interpreter, which truncates.
LENGTH = {
    torch.float64: 2.0**-40,
    torch.float32: 2.0**-19,
    torch.float16: 2.0**-9,
    torch.bfloat16: 2.0**-6,
}


def assert_near(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Compare as vectors: an element of a product of rounded factors has no digits of its own."""
    actual, exact = actual.detach().double(), exact.detach().double()
    off = float((actual - exact).norm())
    assert off <= LENGTH[dtype] * max(float(exact.norm()), 1e-3), (off, float(exact.norm()))


class Problem:
    """The leaves of one call, in FLA's order, and their exact counterparts."""

    def __init__(
        self,
        random: Any,
        exact_leaves: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        *,
        affine: bool = True,
        bias: bool = True,
        residual: torch.dtype | None = None,
    ) -> None:
        channels = shape[-1]
        self.leaves = [
            random(*shape, dtype=dtype),
            random(channels) if affine else None,
            random(channels) if affine and bias else None,
            random(24, channels),
            random(24) if bias else None,
            None if residual is None else random(*shape, dtype=residual),
        ]
        self.exact = exact_leaves(*self.leaves)

    def right(self, reference: Any, **options: Any) -> Tensor:
        x, weight, bias, linear_weight, linear_bias, residual = self.exact
        y = reference(x, weight, bias, residual, **options)
        return nn.functional.linear(y, linear_weight, linear_bias)

    def compare_gradients(
        self, gradients: Any, ours: Any, right: Any, incoming: Any, dtype: torch.dtype
    ) -> None:
        mine = gradients(ours, incoming, *self.leaves)
        exact_incoming = [gradient.double() for gradient in incoming]
        theirs = gradients(right, exact_incoming, *self.exact)
        for gradient, exact, leaf in zip(mine, theirs, self.leaves, strict=True):
            assert (gradient is None) == (exact is None)
            if gradient is not None:
                assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)
                assert_near(gradient, exact, dtype)


@kinds
@pytest.mark.parametrize("tokens", [1, 16, 128])
@pytest.mark.parametrize(("channels", "groups"), [(50, 1), (64, 4), (128, 1), (512, 4)])
def test_table_of_fla(
    random: Any,
    exact_leaves: Any,
    gradients: Any,
    reference: Any,
    tokens: int,
    channels: int,
    groups: int,
    is_rms_norm: bool,
) -> None:
    problem = Problem(random, exact_leaves, (tokens, channels))
    options = {"is_rms_norm": is_rms_norm, "num_groups": groups}
    ours = group_norm_linear(*problem.leaves, **options)
    right = problem.right(reference, **options)
    assert_near(ours, right, torch.float32)
    incoming = [torch.ones((), device=ours.device).expand_as(ours)]
    problem.compare_gradients(gradients, [ours], [right], incoming, torch.float32)


@pytest.mark.parametrize("reads", ["output", "residual", "both"])
@pytest.mark.parametrize("residual", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_residual_and_prenorm(
    random: Any,
    exact_leaves: Any,
    gradients: Any,
    reference: Any,
    dtype: torch.dtype,
    residual: torch.dtype | None,
    reads: str,
) -> None:
    problem = Problem(random, exact_leaves, (3, 5, 40), dtype, residual=residual)
    outputs = rms_norm_linear(*problem.leaves, prenorm=True, residual_in_fp32=True)
    assert [output.dtype for output in outputs] == [dtype, residual or torch.float32]
    exact_x, *_, exact_residual = problem.exact
    exact_sum = exact_x if exact_residual is None else exact_x + exact_residual
    right = (problem.right(reference, is_rms_norm=True), exact_sum)
    lowest = torch.bfloat16 if torch.bfloat16 in (dtype, residual) else torch.float32
    assert_near(outputs[0], right[0], lowest)
    assert_near(outputs[1], right[1], lowest)
    read = {"output": [0], "residual": [1], "both": [0, 1]}[reads]
    incoming = [torch.randn_like(outputs[i]) for i in read]
    mine, theirs = [outputs[i] for i in read], [right[i] for i in read]
    problem.compare_gradients(gradients, mine, theirs, incoming, lowest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(
    random: Any, exact_leaves: Any, gradients: Any, reference: Any, dtype: torch.dtype
) -> None:
    """fp32 in, autocast's dtype out; gradients in the dtypes of what they are gradients of."""
    problem = Problem(random, exact_leaves, (9, 64))
    with torch.autocast(problem.leaves[0].device.type, dtype=dtype):
        outputs = layer_norm_linear(*problem.leaves, prenorm=True)
    assert [output.dtype for output in outputs] == [dtype, torch.float32]
    right = (problem.right(reference), problem.exact[0])
    assert_near(outputs[0], right[0], dtype)
    incoming = [torch.randn_like(output) for output in outputs]
    problem.compare_gradients(gradients, outputs, right, incoming, dtype)


def test_modules_pass_their_state_on(random: Any, device: str) -> None:
    x, residual, weight, bias = random(4, 24), random(4, 24), random(7, 24), random(7)
    norm = (random(24), random(24))
    cases = [
        (LayerNormLinear(24, bias=True), layer_norm_linear, {}),
        (RMSNormLinear(24, bias=True, eps=1.0), rms_norm_linear, {"eps": 1.0}),
        (GroupNormLinear(3, 24, bias=True), group_norm_linear, {"num_groups": 3}),
        (
            GroupNormLinear(3, 24, bias=True, is_rms_norm=True, weight_offset=1.0),
            layer_norm_linear,
            {"num_groups": 3, "is_rms_norm": True, "weight_offset": 1.0},
        ),
    ]
    for module, function, options in cases:
        module.to(device)
        module.weight, module.bias = map(nn.Parameter, norm)
        found = module(x, weight, bias, residual, prenorm=True, residual_in_fp32=True)
        right = function(x, *norm, weight, bias, residual, prenorm=True, **options)
        assert all(map(torch.equal, found, right))
        assert torch.equal(module(x, weight, None), function(x, *norm, weight, None, **options))


def test_a_frozen_linear_weight_costs_no_recomputation(
    monkeypatch: pytest.MonkeyPatch, random: Any
) -> None:
    from safetune.kernels import ops

    recomputed = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        recomputed.append(args[10])
        return backward(*args, **kwargs)

    backward = ops.layer_norm_bwd
    monkeypatch.setattr(ops, "layer_norm_bwd", noting)
    x, weight = random(4, 24), random(7, 24)
    for linear_weight in (weight, weight.detach()):
        layer_norm_linear(x, None, None, linear_weight, None).sum().backward()
    assert recomputed == [True, False]


@pytest.mark.parametrize("shape", [(0, 24), (3, 0, 24)], ids=str)
def test_no_tokens(random: Any, gradients: Any, shape: tuple[int, ...]) -> None:
    leaves = (random(*shape), random(24), random(24), random(7, 24), random(7))
    y = layer_norm_linear(*leaves)
    assert y.shape == (*shape[:-1], 7)
    for gradient, leaf in zip(gradients(y, torch.ones_like(y), *leaves), leaves, strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@kinds
def test_gradcheck(random: Any, is_rms_norm: bool) -> None:
    shapes = ((2, 4), (4,), (4,), (2, 4), (2,), (2, 4))
    leaves = tuple(random(*shape, dtype=torch.float64) for shape in shapes)

    def function(*leaves: Tensor) -> Any:
        return group_norm_linear(*leaves, prenorm=True, is_rms_norm=is_rms_norm, num_groups=2)

    torch.autograd.gradcheck(function, leaves, eps=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", [0, 3], ids=["x", "linear_weight"])
def test_tangents_are_refused_and_not_lost(device: str, place: int) -> None:
    """An operator of torch.library says nothing, and its results have none."""
    operands = [torch.randn(4, 8), torch.ones(8), None, torch.randn(3, 8), None]
    given = [None if each is None else each.to(device) for each in operands]
    with forward_ad.dual_level():
        plain = rms_norm_linear(*given)
        dual = forward_ad.make_dual(given[place], torch.ones_like(given[place]))
        with pytest.raises(TracingError, match="do not support forward-mode AD"):
            rms_norm_linear(*given[:place], dual, *given[place + 1 :])
    assert torch.equal(plain, rms_norm_linear(*given))
