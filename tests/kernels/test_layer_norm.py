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


class Check:
    """The helpers of conftest.py that every comparison needs."""

    def __init__(self, reference: Any, exact_leaves: Any, gradients: Any, close: Any) -> None:
        self.reference = reference
        self.exact_leaves = exact_leaves
        self.gradients = gradients
        self.close = close

    def __call__(
        self, x: Any, weight: Any, bias: Any, dy: Any = None, slack: float = 1.0, **options: Any
    ) -> None:
        """Compare y and the gradients of x, weight and bias with those of the definition."""
        leaves = (x, weight, bias)
        exact_leaves = self.exact_leaves(*leaves)
        y = layer_norm(*leaves, **options)
        exact = self.reference(*exact_leaves, **options)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        self.close(y, exact, slack)
        dy = torch.randn_like(y) if dy is None else dy.to(y.dtype).expand_as(y)
        ours = self.gradients(y, dy, *leaves)
        self.compare(ours, self.gradients(exact, dy.double(), *exact_leaves), leaves, slack)

    def compare(self, ours: Any, theirs: Any, leaves: Any, slack: float = 1.0) -> None:
        """Compare gradients, None among them, and their dtypes with the leaves'."""
        for mine, right, leaf in zip(ours, theirs, leaves, strict=True):
            assert (mine is None) == (right is None)
            if mine is not None:
                assert (mine.shape, mine.dtype) == (leaf.shape, leaf.dtype)
                self.close(mine, right, slack)


@pytest.fixture
def check(reference: Any, exact_leaves: Any, gradients: Any, close: Any) -> Check:
    return Check(reference, exact_leaves, gradients, close)


@kinds
@dtypes
@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_definition(
    check: Check,
    random: Any,
    shape: tuple[int, ...],
    affine: str,
    dtype: torch.dtype,
    is_rms_norm: bool,
) -> None:
    has_weight, has_bias = AFFINE[affine]
    weight = random(shape[-1], dtype=dtype) if has_weight else None
    bias = random(shape[-1], dtype=dtype) if has_bias else None
    check(random(*shape, dtype=dtype), weight, bias, is_rms_norm=is_rms_norm)


@kinds
def test_mixed_dtypes(check: Check, random: Any, is_rms_norm: bool) -> None:
    weight, bias = random(40), random(40, dtype=torch.float16)
    check(random(9, 40, dtype=torch.bfloat16), weight, bias, is_rms_norm=is_rms_norm)


def test_rms_norm_is_the_function_of_that_name(random: Any) -> None:
    x, weight = random(5, 24), random(24)
    assert torch.equal(rms_norm(x, weight, None), layer_norm(x, weight, None, is_rms_norm=True))


@kinds
def test_rows_with_a_large_mean(check: Check, random: Any, is_rms_norm: bool) -> None:
    """The variance of the centred row: mean(x^2) - mean(x)^2 in fp32 would lose every digit."""
    x = (random(4, 64, grad=False) + 4096).requires_grad_()
    # One unit in the last place of x is 2^-11: about as much as the mean's own rounding moves y.
    check(x, random(64), random(64), slack=512.0, is_rms_norm=is_rms_norm)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of masked rows in the interpreter
def test_eps_zero(check: Check, random: Any) -> None:
    check(random(6, 50), random(50), None, eps=0.0, is_rms_norm=True)


@kinds
@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "permuted"])
def test_any_layout_of_x(check: Check, random: Any, layout: str, is_rms_norm: bool) -> None:
    leaf = random(24, 48)
    x = {
        "transposed": leaf.t(),
        "sliced": leaf[1::2, 3::3],
        "expanded": leaf[:1].expand(7, -1),
        "permuted": leaf.view(24, 6, 8).permute(1, 0, 2),
    }[layout]
    assert not x.is_contiguous()
    weight = random(2 * x.shape[-1])[::2]
    check(x, weight, None, is_rms_norm=is_rms_norm)


@kinds
@pytest.mark.parametrize("stride", ["0", "transposed"])
def test_any_layout_of_dy(check: Check, random: Any, stride: str, is_rms_norm: bool) -> None:
    """`y.sum().backward()` hands over one element, expanded with stride 0."""
    dy = (
        torch.ones((), device=random(1).device) if stride == "0" else random(50, 33, grad=False).t()
    )
    check(random(33, 50), random(50), random(50), dy, is_rms_norm=is_rms_norm)


def test_any_layout_of_the_statistics(random: Any) -> None:
    x, dy = random(6, 50, grad=False), random(6, 50, grad=False)
    _, mean, rstd, _ = layer_norm_fwd(x, None, None)
    strided = [torch.stack([values, -values], 1)[:, 0] for values in (mean, rstd)]
    dx, right = (layer_norm_bwd(dy, x, None, None, *given)[0] for given in (strided, (mean, rstd)))
    assert torch.equal(dx, right)


@kinds
@pytest.mark.parametrize("shape", [(0, 50), (3, 0, 8)], ids=str)
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
    check: Check,
    random: Any,
    dtypes_of: str,
    reads: str,
    residual_in_fp32: bool,
    is_rms_norm: bool,
) -> None:
    x_dtype, residual_dtype = RESIDUALS[dtypes_of]
    residual = None if residual_dtype is None else random(17, 40, dtype=residual_dtype)
    leaves = (random(17, 40, dtype=x_dtype), random(40), random(40), residual)
    outputs = layer_norm(
        *leaves, prenorm=True, residual_in_fp32=residual_in_fp32, is_rms_norm=is_rms_norm
    )
    stored = residual_dtype or (torch.float32 if residual_in_fp32 else x_dtype)
    assert [output.dtype for output in outputs] == [x_dtype, stored]

    exact_leaves = check.exact_leaves(*leaves)
    exact_x, *_, exact_residual = exact_leaves
    exact_sum = exact_x if exact_residual is None else exact_x + exact_residual
    exact = (check.reference(*exact_leaves, is_rms_norm=is_rms_norm), exact_sum)
    for mine, right in zip(outputs, exact, strict=True):
        check.close(mine, right)

    read = {"y": [0], "residual": [1], "both": [0, 1]}[reads]
    incoming = [torch.randn_like(output) for output in outputs]
    ours = check.gradients([outputs[i] for i in read], [incoming[i] for i in read], *leaves)
    theirs = check.gradients(
        [exact[i] for i in read], [incoming[i].double() for i in read], *exact_leaves
    )
    # Backward normalizes the sum as it was stored: in 16 bits, 2^-8 of it are lost.
    rounded = residual is not None and stored != torch.float32
    check.compare(ours, theirs, leaves, slack=2.0**12 if rounded else 1.0)


@kinds
@pytest.mark.parametrize("residual_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", ["plain", "both"])
@pytest.mark.parametrize("columns", [50, 64, 256, 512, 513, 1024])
def test_widths(
    check: Check,
    random: Any,
    columns: int,
    affine: str,
    residual_dtype: torch.dtype | None,
    is_rms_norm: bool,
) -> None:
    """Statement C8: all gradients at these widths, of a residual too, in the same dtype or not."""
    has_weight, has_bias = AFFINE[affine]
    weight, bias = (random(columns) if there else None for there in (has_weight, has_bias))
    residual = None if residual_dtype is None else random(21, columns, dtype=residual_dtype)
    leaves = (random(21, columns), weight, bias, residual)
    exact_leaves = check.exact_leaves(*leaves)

    y = layer_norm(*leaves, is_rms_norm=is_rms_norm)

    exact = check.reference(*exact_leaves, is_rms_norm=is_rms_norm)
    check.close(y, exact)
    dy = torch.randn_like(y)
    theirs = check.gradients(exact, dy.double(), *exact_leaves)
    # Backward normalizes the sum as it was stored: in bf16, 2^-8 of it are lost.
    slack = 2.0**12 if residual_dtype is torch.bfloat16 else 2.0
    check.compare(check.gradients(y, dy, *leaves), theirs, leaves, slack)


def test_residual_without_prenorm_returns_y_alone(check: Check, random: Any) -> None:
    x, residual = random(8, 24), random(8, 24)
    exact = check.reference(x.double(), None, None, residual.double())
    check.close(layer_norm(x, None, None, residual), exact)


@kinds
@pytest.mark.parametrize("has_residual", [False, True])
def test_gradcheck(random: Any, is_rms_norm: bool, has_residual: bool) -> None:
    x, weight, bias, residual = (
        random(*shape, dtype=torch.float64) for shape in ((2, 3), (3,), (3,), (2, 3))
    )

    def function(*leaves: torch.Tensor) -> Any:
        added = leaves[3] if has_residual else None
        return layer_norm(*leaves[:3], added, prenorm=True, is_rms_norm=is_rms_norm)

    leaves = (x, weight, bias, residual) if has_residual else (x, weight, bias)
    torch.autograd.gradcheck(function, leaves, eps=1e-5, atol=1e-6)


@kinds
@pytest.mark.parametrize("groups", [2, 3, 8])
@pytest.mark.parametrize("tokens", [1, 21])
def test_groups(check: Check, random: Any, tokens: int, groups: int, is_rms_norm: bool) -> None:
    """The low-level functions, as FLA's GroupNorm calls them; fewer tokens than groups too."""
    options = {"is_rms_norm": is_rms_norm, "num_groups": groups}
    leaves = (random(tokens, groups * 20), random(groups * 20), random(groups * 20))
    x, weight, bias = (leaf.detach() for leaf in leaves)
    exact_leaves = check.exact_leaves(*leaves)
    exact = check.reference(*exact_leaves, **options)

    rows = x.view(tokens * groups, 20)
    y, mean, rstd, normalized = layer_norm_fwd(rows, weight, bias, **options)
    assert normalized.data_ptr() == rows.data_ptr()
    assert (mean is None) == is_rms_norm
    assert rstd.shape == (tokens * groups,)
    check.close(y.view_as(x), exact)

    dy = torch.randn_like(x)
    dx, dw, db, dres, again = layer_norm_bwd(
        dy.view_as(rows), rows, weight, bias, mean, rstd, recompute_output=True, **options
    )
    theirs = check.gradients(exact, dy.double(), *exact_leaves)
    check.compare((dx.view_as(x), dw, db), theirs, leaves)
    assert dres is None
    check.close(again.view_as(x), exact)


def test_same_bits_every_time(gradients: Any, random: Any) -> None:
    x, weight, bias, dy = random(65, 50), random(50), random(50), random(65, 50, grad=False)
    runs = [gradients(layer_norm(x, weight, bias), dy, x, weight, bias) for _ in range(2)]
    assert all(map(torch.equal, *runs))
