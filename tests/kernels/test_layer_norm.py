"""LayerNorm and RMSNorm against their definition in fp64: results, all gradients, every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from safetune.kernels import layer_norm, layer_norm_bwd, layer_norm_fwd, rms_norm

pytestmark = pytest.mark.usefixtures("loops")

SHAPES = [(16, 64), (33, 50), (1, 7), (2, 3, 129)]
AFFINE = {"plain": (False, False), "weight": (True, False), "both": (True, True)}
AFFINE["bias"] = (False, True)
kinds = pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def check_all(
    fixtures: Any, x: Any, weight: Any, bias: Any, slack: float = 1.0, **options: Any
) -> None:
    """Compare y and the gradients of x, weight and bias with those of the definition."""
    reference, close, gradients = fixtures
    y = layer_norm(x, weight, bias, **options)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    dy = torch.randn_like(y)
    exact = reference(x, weight, bias, **options)
    close(y, exact, slack)
    ours = gradients(y, dy, x, weight, bias)
    theirs = gradients(exact, dy.double(), x, weight, bias)
    for mine, right, leaf in zip(ours, theirs, (x, weight, bias), strict=True):
        assert (mine is None) == (leaf is None)
        if leaf is not None:
            assert mine.dtype == leaf.dtype
            assert mine.shape == leaf.shape
            # Theirs was cast to the leaf's dtype as ours was: up to one rounding more.
            close(mine, right, 2 * slack)


@pytest.fixture
def fixtures(reference: Any, close: Any, gradients: Any) -> Any:
    return reference, close, gradients


@kinds
@dtypes
@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_definition(
    fixtures: Any,
    random: Any,
    shape: tuple[int, ...],
    affine: str,
    dtype: torch.dtype,
    is_rms_norm: bool,
) -> None:
    has_weight, has_bias = AFFINE[affine]
    weight = random(shape[-1], dtype=dtype) if has_weight else None
    bias = random(shape[-1], dtype=dtype) if has_bias else None
    check_all(fixtures, random(*shape, dtype=dtype), weight, bias, is_rms_norm=is_rms_norm)


@kinds
def test_mixed_dtypes(fixtures: Any, random: Any, is_rms_norm: bool) -> None:
    weight, bias = random(40), random(40, dtype=torch.float16)
    check_all(fixtures, random(9, 40, dtype=torch.bfloat16), weight, bias, is_rms_norm=is_rms_norm)


def test_rms_norm_is_the_function_of_that_name(random: Any) -> None:
    x, weight = random(5, 24), random(24)
    assert torch.equal(rms_norm(x, weight, None), layer_norm(x, weight, None, is_rms_norm=True))


@kinds
def test_rows_with_a_large_mean(fixtures: Any, random: Any, is_rms_norm: bool) -> None:
    """The variance of the centred row: mean(x^2) - mean(x)^2 in fp32 would lose every digit."""
    x = (random(4, 64, grad=False) + 4096).requires_grad_()
    # One unit in the last place of x is 2^-11: about as much as the mean's own rounding moves y.
    check_all(fixtures, x, random(64), random(64), slack=512.0, is_rms_norm=is_rms_norm)


def test_eps_zero(fixtures: Any, random: Any) -> None:
    check_all(fixtures, random(6, 50), random(50), None, eps=0.0, is_rms_norm=True)


@kinds
@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "permuted"])
def test_any_layout_of_x(fixtures: Any, random: Any, layout: str, is_rms_norm: bool) -> None:
    leaf = random(24, 48)
    x = {
        "transposed": leaf.t(),
        "sliced": leaf[1::2, 3::3],
        "expanded": leaf[:1].expand(7, -1),
        "permuted": leaf.view(24, 6, 8).permute(1, 0, 2),
    }[layout]
    assert not x.is_contiguous()
    weight = random(2 * x.shape[-1])[::2]
    check_all(fixtures, x, weight, None, is_rms_norm=is_rms_norm)


@kinds
def test_gradient_of_a_sum(
    gradients: Any, reference: Any, close: Any, random: Any, is_rms_norm: bool
) -> None:
    """`y.sum().backward()` hands over one element, expanded with stride 0."""
    x, weight, bias = random(33, 50), random(50), random(50)
    y = layer_norm(x, weight, bias, is_rms_norm=is_rms_norm)
    exact = reference(x, weight, bias, is_rms_norm=is_rms_norm)
    ours = gradients(y.sum(), None, x, weight, bias)
    theirs = gradients(exact.sum(), None, x, weight, bias)
    for mine, right in zip(ours, theirs, strict=True):
        close(mine, right, slack=2.0)


@kinds
@pytest.mark.parametrize("shape", [(0, 50), (3, 0, 8), (0,), (4, 0)], ids=str)
def test_nothing_to_normalize(
    gradients: Any, random: Any, shape: tuple[int, ...], is_rms_norm: bool
) -> None:
    x, weight, bias = random(*shape), random(shape[-1]), random(shape[-1])
    y, z = layer_norm(x, weight, bias, prenorm=True, is_rms_norm=is_rms_norm)
    assert y.shape == z.shape == x.shape
    dx, dw, db = gradients((y, z), (torch.ones_like(y), torch.ones_like(z)), x, weight, bias)
    assert dx.shape == x.shape
    assert torch.equal(dw, torch.zeros_like(weight))
    assert torch.equal(db, torch.zeros_like(bias))


RESIDUALS = {
    "none": (torch.bfloat16, None),
    "same": (torch.float32, torch.float32),
    "same16": (torch.bfloat16, torch.bfloat16),
    "wider": (torch.bfloat16, torch.float32),
    "narrower": (torch.float32, torch.float16),
}


@kinds
@pytest.mark.parametrize("residual_in_fp32", [False, True])
@pytest.mark.parametrize("reads", ["y", "residual", "both"])
@pytest.mark.parametrize("dtypes_of", RESIDUALS)
def test_residual_and_prenorm(
    reference: Any,
    close: Any,
    gradients: Any,
    random: Any,
    dtypes_of: str,
    reads: str,
    residual_in_fp32: bool,
    is_rms_norm: bool,
) -> None:
    x_dtype, residual_dtype = RESIDUALS[dtypes_of]
    x, weight, bias = random(17, 40, dtype=x_dtype), random(40), random(40)
    residual = None if residual_dtype is None else random(17, 40, dtype=residual_dtype)
    y, z = layer_norm(
        x,
        weight,
        bias,
        residual,
        prenorm=True,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
    )
    stored = residual_dtype or (torch.float32 if residual_in_fp32 else x_dtype)
    assert (y.dtype, z.dtype) == (x_dtype, stored)
    exact_y = reference(x, weight, bias, residual, is_rms_norm=is_rms_norm)
    exact_z = x.double() if residual is None else x.double() + residual.double()
    # Where the sum is stored in 16 bits, backward normalizes the rounded one.
    slack = 4.0 if stored in (torch.float32, x_dtype) else 4.0 * 2.0**9
    close(y, exact_y)
    close(z, exact_z)
    used = {"y": [0], "residual": [1], "both": [0, 1]}[reads]
    incoming = [torch.randn_like(output) for output in (y, z)]
    leaves = (x, weight, bias, residual)
    ours = gradients([(y, z)[i] for i in used], [incoming[i] for i in used], *leaves)
    theirs = gradients(
        [(exact_y, exact_z)[i] for i in used], [incoming[i].double() for i in used], *leaves
    )
    if stored == torch.bfloat16 and residual is not None:
        slack = 2.0**13
    for mine, right, leaf in zip(ours, theirs, leaves, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            assert mine.dtype == leaf.dtype
            close(mine, right, slack)


def test_residual_without_prenorm_returns_y_alone(reference: Any, close: Any, random: Any) -> None:
    x, residual = random(8, 24), random(8, 24)
    close(layer_norm(x, None, None, residual), reference(x, None, None, residual))


@kinds
@pytest.mark.parametrize("has_residual", [False, True])
def test_gradcheck(random: Any, is_rms_norm: bool, has_residual: bool) -> None:
    x, weight, bias, residual = (
        random(*shape, dtype=torch.float64) for shape in ((3, 5), (5,), (5,), (3, 5))
    )

    def function(*leaves: torch.Tensor) -> Any:
        added = leaves[3] if has_residual else None
        return layer_norm(*leaves[:3], added, prenorm=True, is_rms_norm=is_rms_norm)

    leaves = (x, weight, bias, residual) if has_residual else (x, weight, bias)
    torch.autograd.gradcheck(function, leaves, eps=1e-5, atol=1e-6)


@kinds
@pytest.mark.parametrize("groups", [2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 21])
def test_groups(
    reference: Any,
    close: Any,
    gradients: Any,
    random: Any,
    tokens: int,
    groups: int,
    is_rms_norm: bool,
) -> None:
    """The low-level functions, as FLA's GroupNorm calls them; fewer tokens than groups too."""
    x, weight, bias = random(tokens, groups * 20), random(groups * 20), random(groups * 20)
    exact = reference(x, weight, bias, is_rms_norm=is_rms_norm, num_groups=groups)
    rows = x.detach().view(tokens * groups, 20)
    options = {"is_rms_norm": is_rms_norm, "num_groups": groups}
    y, mean, rstd, normalized = layer_norm_fwd(rows, weight, bias, **options)
    assert normalized.data_ptr() == rows.data_ptr()
    assert (mean is None) == is_rms_norm
    assert rstd.shape == (tokens * groups,)
    close(y.view_as(x), exact)

    dy = torch.randn_like(x)
    dx, dw, db, dres, again = layer_norm_bwd(
        dy.view_as(rows), rows, weight, bias, mean, rstd, recompute_output=True, **options
    )
    theirs = gradients(exact, dy.double(), x, weight, bias)
    for mine, right in zip((dx.view_as(x), dw, db), theirs, strict=True):
        close(mine, right, slack=2.0)
    assert dres is None
    close(again.view_as(x), exact)


def test_same_bits_every_time(gradients: Any, random: Any) -> None:
    x, weight, bias, dy = random(65, 50), random(50), random(50), random(65, 50, grad=False)
    runs = [gradients(layer_norm(x, weight, bias), dy, x, weight, bias) for _ in range(2)]
    assert all(map(torch.equal, *runs))
