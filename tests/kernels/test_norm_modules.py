"""The modules against the definition in fp64: FLA's own table of cases, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from safetune import InvalidOperand, TracingError
from safetune.kernels import (
    GroupNorm,
    GroupNormLinear,
    LayerNorm,
    LayerNormLinear,
    RMSNorm,
    RMSNormLinear,
    group_norm,
    layer_norm,
    layer_norm_bwd,
    layer_norm_fwd,
    layer_norm_linear,
    rms_norm,
)

pytestmark = pytest.mark.usefixtures("loops")

Tensor = torch.Tensor
kinds = pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])


@pytest.fixture
def compare(exact_leaves: Any, gradients: Any, close: Any) -> Callable[..., None]:
    """A function that compares results, and the gradients of some leaves, with the fp64 ones."""

    def check(ours: Any, exact: Any, leaves: Any, *, dy: Any = None, slack: float = 1.0) -> None:
        exact_of_leaves = exact_leaves(*leaves)
        y, right = ours(*leaves), exact(*exact_of_leaves)
        close(y, right, slack)
        # As from `y.sum().backward()`: one element, expanded with stride 0.
        dy = torch.ones((), device=y.device, dtype=y.dtype) if dy is None else dy
        dy = dy.expand_as(y)
        mine = gradients(y, dy, *leaves)
        theirs = gradients(right, dy.double(), *exact_of_leaves)
        for gradient, exact_gradient, leaf in zip(mine, theirs, leaves, strict=True):
            assert (gradient is None) == (exact_gradient is None) == (leaf is None)
            if gradient is not None:
                assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype)
                close(gradient, exact_gradient, slack)

    return check


def fill(module: nn.Module, random: Any) -> nn.Module:
    """Give a module random parameters: ones and zeros hide mistakes."""
    for name, parameter in module.named_parameters():
        setattr(module, name, nn.Parameter(random(*parameter.shape, dtype=parameter.dtype)))
    return module


class TestTableOfFla:
    """What tests/modules/test_layernorm.py of FLA checks, at sizes for the interpreter."""

    @pytest.mark.parametrize("columns", [50, 64, 128])
    @pytest.mark.parametrize(
        ("affine", "bias"), [(False, False), (False, True), (True, False), (True, True)]
    )
    def test_layer_norm(
        self, compare: Any, reference: Any, random: Any, columns: int, affine: bool, bias: bool
    ) -> None:
        module = fill(LayerNorm(columns, affine, bias).to(random(1).device), random)
        assert (module.weight is None, module.bias is None) == (not affine, not (affine and bias))
        x = random(2, 2, 9, columns)
        compare(lambda x, *_: module(x), reference, (x, module.weight, module.bias))
        if not affine:
            (dx,) = torch.autograd.grad(module(x).sum(), x)
            assert dx.abs().max() <= 1e-6  # it is 0 but for rounding

    @kinds
    @pytest.mark.parametrize("groups", [1, 4])
    @pytest.mark.parametrize("columns", [64, 512])
    def test_group_norm(
        self, compare: Any, random: Any, device: str, columns: int, groups: int, is_rms_norm: bool
    ) -> None:
        module = GroupNorm(groups, columns, bias=True, is_rms_norm=is_rms_norm, device=device)
        fill(module, random)

        def exact(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            flat = x.reshape(-1, columns)
            if not is_rms_norm:
                return nn.functional.group_norm(flat, groups, weight, bias).view_as(x)
            parts = flat.view(-1, groups, columns // groups)
            parts = parts * (parts.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            return (parts.view_as(flat) * weight + bias).view_as(x)

        compare(lambda x, *_: module(x), exact, (random(2, 9, columns), module.weight, module.bias))

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of masked rows
    @pytest.mark.parametrize("columns", [50, 64, 256])
    def test_rms_norm(self, compare: Any, reference: Any, random: Any, columns: int) -> None:
        """As LlamaRMSNorm, with eps=0, an int."""
        module = fill(RMSNorm(columns, eps=0).to(random(1).device), random)

        def exact(x: Tensor, weight: Tensor) -> Tensor:
            return reference(x, weight, None, eps=0.0, is_rms_norm=True)

        compare(lambda x, *_: module(x), exact, (random(2, 2, 9, columns), module.weight))

    @pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32])
    @kinds
    def test_few_tokens(
        self, compare: Any, reference: Any, random: Any, tokens: int, is_rms_norm: bool
    ) -> None:
        module = fill((RMSNorm if is_rms_norm else LayerNorm)(128, bias=True), random)

        def exact(*leaves: Tensor) -> Tensor:
            return reference(*leaves, is_rms_norm=is_rms_norm)

        leaves = (random(1, tokens, 128), module.weight, module.bias)
        compare(lambda x, *_: module(x), exact, leaves, dy=torch.randn_like(leaves[0]))


def test_group_norm_of_channels_is_torchs(random: Any) -> None:
    """FLA's groups parts of the last dimension: nn.GroupNorm's, for [N, C]."""
    x, weight, bias = random(5, 24), random(24), random(24)
    right = nn.functional.group_norm(x, 3, weight, bias)
    torch.testing.assert_close(group_norm(x, weight, bias, num_groups=3), right)


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_groups_residual_and_prenorm_in_16_bits(
    reference: Any,
    exact_leaves: Any,
    gradients: Any,
    close: Any,
    random: Any,
    dtype: torch.dtype,
    is_rms_norm: bool,
) -> None:
    """An fp32 residual stream over 16-bit activations, as in training."""
    module = fill(GroupNorm(4, 96, bias=True, is_rms_norm=is_rms_norm), random)
    module.to(random(1).device)
    leaves = (random(3, 7, 96, dtype=dtype), module.weight, module.bias, random(3, 7, 96))
    y, residual_out = module(leaves[0], leaves[3], prenorm=True)
    assert (y.dtype, residual_out.dtype) == (dtype, torch.float32)
    exact = exact_leaves(*leaves)
    right = reference(*exact, is_rms_norm=is_rms_norm, num_groups=4)
    close(y, right)
    close(residual_out, exact[0] + exact[3])
    incoming = [torch.randn_like(y), torch.randn_like(residual_out)]
    mine = gradients((y, residual_out), incoming, *leaves)
    theirs = gradients((right, exact[0] + exact[3]), [dy.double() for dy in incoming], *exact)
    for gradient, exact_gradient, leaf in zip(mine, theirs, leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        close(gradient, exact_gradient)


class TestPrenormWithoutResidual:
    def test_residual_out_is_x(self, random: Any) -> None:
        x = random(4, 24)
        _, residual_out = LayerNorm(24).to(x.device)(x, prenorm=True)
        assert residual_out.data_ptr() == x.data_ptr()
        assert torch.equal(residual_out, x)

    @pytest.mark.parametrize("in_fp32", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_residual_in_fp32(self, random: Any, dtype: torch.dtype, in_fp32: bool) -> None:
        x = random(4, 24, dtype=dtype)
        y, residual_out = rms_norm(x, None, None, prenorm=True, residual_in_fp32=in_fp32)
        assert y.dtype == dtype
        assert residual_out.dtype == (torch.float32 if in_fp32 else dtype)
        assert torch.equal(residual_out.to(dtype), x)


def test_the_unused_residuals_gradient_is_not_made(
    monkeypatch: pytest.MonkeyPatch, random: Any
) -> None:
    """`dres` of the backward kernel stays None, rather than as many zeros as x has elements."""
    from safetune.kernels import calls

    seen = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[6])
        return backward(*args, **kwargs)

    backward = calls.backward_rows
    monkeypatch.setattr(calls, "backward_rows", noting)
    x, residual = random(4, 24), random(4, 24)
    y, residual_out = layer_norm(x, None, None, residual, prenorm=True)
    torch.autograd.grad(y.sum(), (x, residual), retain_graph=True)
    assert seen == [None]
    dx, dresidual = torch.autograd.grad(residual_out, (x, residual), residual_out)
    assert len(seen) == 1  # nothing read y, so there was no norm to go back through
    assert torch.equal(dx, residual_out)
    assert torch.equal(dresidual, residual_out)


@pytest.mark.parametrize("shape", [(6, 24), (2, 3, 24)], ids=str)
@pytest.mark.parametrize("num_groups", [1, 3])
def test_gradients_of_x_and_residual_are_added_up_apart(
    random: Any, shape: tuple[int, ...], num_groups: int
) -> None:
    """One tensor is both; autograd adds the next backward pass to each leaf's in place."""
    x, residual = random(*shape), random(*shape)
    dy = random(*shape)
    for _ in range(2):
        group_norm(x, None, None, residual, num_groups=num_groups).backward(dy)
    y = group_norm(x, None, None, residual, num_groups=num_groups)
    for leaf, once in zip((x, residual), torch.autograd.grad(y, (x, residual), dy), strict=True):
        torch.testing.assert_close(leaf.grad, 2 * once)


class TestWeightOffset:
    @kinds
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_is_added_in_fp32(
        self, compare: Any, reference: Any, random: Any, dtype: torch.dtype, is_rms_norm: bool
    ) -> None:
        """Gemma: a bf16 weight of 2^-9 is not lost beside 1."""
        weight = (random(40, grad=False) * 2.0**-8).to(dtype).requires_grad_()
        leaves = (random(6, 40, dtype=dtype), weight)

        def ours(x: Tensor, weight: Tensor) -> Tensor:
            return group_norm(x, weight, None, is_rms_norm=is_rms_norm, weight_offset=1.0)

        def exact(x: Tensor, weight: Tensor) -> Tensor:
            return reference(x, weight + 1, None, is_rms_norm=is_rms_norm)

        compare(ours, exact, leaves, dy=random(6, 40, dtype=dtype, grad=False))
        in_fp32 = group_norm(leaves[0].float(), *leaves[1:], None, weight_offset=1.0)
        assert not torch.equal(in_fp32, group_norm(leaves[0].float(), None, None))

    def test_the_module_starts_as_the_identity(self) -> None:
        module = RMSNorm(8, eps=1e-6, weight_offset=1.0)
        assert not module.weight.any()
        assert repr(module) == "RMSNorm(8, eps=1e-06, weight_offset=1.0)"
        assert list(module.state_dict()) == ["weight"]

    @pytest.mark.parametrize(
        "call",
        [
            lambda: rms_norm(torch.ones(2, 4), None, None, weight_offset=1.0),
            lambda: RMSNorm(4, elementwise_affine=False, weight_offset=1.0),
        ],
    )
    def test_needs_a_weight(self, call: Any) -> None:
        with pytest.raises(ValueError, match=r"weight_offset=1.0 needs a weight"):
            call()


@kinds
def test_gradcheck_of_groups(random: Any, is_rms_norm: bool) -> None:
    """With a residual, an offset and a layout that is not contiguous, in fp64."""
    x, weight, bias, residual = (
        random(*shape, dtype=torch.float64) for shape in ((6, 2), (6,), (6,), (2, 6))
    )

    def function(*leaves: Tensor) -> Any:
        x, *others = leaves
        options = {"is_rms_norm": is_rms_norm, "num_groups": 2, "weight_offset": 1.0}
        return group_norm(x.t(), *others, prenorm=True, **options)

    torch.autograd.gradcheck(function, (x, weight, bias, residual), eps=1e-5, atol=1e-6)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("shape", [(2, 8), (2, 3, 8)], ids=str)
def test_a_second_derivative_is_refused(random: Any, shape: tuple[int, ...], linear: bool) -> None:
    """Of a sum, too: the incoming gradient depends on nothing then, but dx depends on x."""
    x, residual = random(*shape), random(*shape)
    for given in (None, residual):
        if linear:
            y = layer_norm_linear(x, None, None, random(4, 8), None, given)
        else:
            y = layer_norm(x, None, None, given)
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(TracingError, match="use a norm of torch's"):
            (y.sum() + dx.square().sum()).backward()


def test_autocast_changes_nothing(random: Any) -> None:
    """As FLA's: y has the dtype of x."""
    x = random(4, 24)
    module = LayerNorm(24).to(x.device)
    plain = module(x)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, plain)


@pytest.mark.parametrize(
    ("module", "text", "keys"),
    [
        (LayerNorm(8), "LayerNorm(8, eps=1e-05)", ["weight"]),
        (LayerNorm(8, bias=True), "LayerNorm(8, eps=1e-05)", ["weight", "bias"]),
        (RMSNorm(8, False, True), "RMSNorm(8, elementwise_affine=False, eps=1e-05)", []),
        (GroupNorm(2, 8, eps=1.0), "GroupNorm(2, 8, eps=1.0)", ["weight"]),
        (LayerNormLinear(8), "LayerNormLinear(8, eps=1e-05)", ["weight"]),
        (RMSNormLinear(8), "RMSNormLinear(8, eps=1e-05)", ["weight"]),
        (
            GroupNormLinear(2, 8, bias=True, is_rms_norm=True),
            "GroupNormLinear(2, 8, is_rms_norm=True, eps=1e-05)",
            ["weight", "bias"],
        ),
        (
            LayerNorm(8, deterministic=True),
            "LayerNorm(8, eps=1e-05, deterministic=True)",
            ["weight"],
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_state_and_text(module: Any, text: str, keys: list[str]) -> None:
    assert repr(module) == text
    state = module.state_dict()
    assert list(state) == keys
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    module.reset_parameters()
    assert all(bool((value == (name == "weight")).all()) for name, value in state.items())
    assert module.weight is None or module.weight.dtype == torch.float32


def test_device_and_dtype(device: str) -> None:
    module = GroupNorm(2, 8, bias=True, device=device, dtype=torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in module.parameters()} == {device}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: group_norm(x, None, None, num_groups=4), "num_groups=4 must divide"),
        (lambda x: group_norm(x, None, None, num_groups=0), "num_groups=0 must divide"),
        (lambda x: layer_norm(x[0, 0], None, None), r"which has shape \(\)"),
        (lambda x: GroupNorm(4, 6), "num_groups=4 must divide hidden_size=6"),
        (
            lambda x: GroupNorm(2, 6)(x, residual=x[:1]),
            r"residual has shape \(1, 6\), but x has shape \(2, 6\)",
        ),
        (lambda x: LayerNorm(8)(x), r"weight has shape \(8,\), not \(6,\)"),
        (lambda x: LayerNorm(6, device="meta")(x), "weight is on meta, but x is on cpu"),
        (lambda x: RMSNorm(6)(x.to("meta")), "weight is on cpu, but x is on meta"),
        (
            lambda x: LayerNorm(8, device="meta")(x.to("meta")),
            r"weight has shape \(8,\), not \(6,\)",
        ),
        (
            lambda x: layer_norm(x.int(), None, None),
            "x is torch.int32; it must be torch.float16",
        ),
        (lambda x: layer_norm(x, None, None, x.bool()), "residual is torch.bool"),
        (lambda x: rms_norm(x, x[0].to(torch.complex64), None), "weight is torch.complex64"),
        (lambda x: layer_norm_fwd(x, None, None, num_groups=0), "with num_groups=0"),
        (
            lambda x: layer_norm_bwd(x, x, None, None, None, x[:1, 0], is_rms_norm=True),
            r"rstd has shape \(1,\), not \(2,\)",
        ),
        (
            lambda x: layer_norm_linear(x, None, None, x[:, 1:], None),
            r"linear_weight has shape \(2, 5\); for x of shape \(2, 6\)",
        ),
        (lambda x: layer_norm_linear(x, None, None, x[0], None), r"linear_weight has shape \(6,\)"),
        (
            lambda x: layer_norm_linear(x, None, None, x, x[0]),
            r"linear_bias has shape \(6,\), not \(2,\)",
        ),
        (
            lambda x: layer_norm_linear(x, None, None, x.to("meta"), None),
            "linear_weight is on meta",
        ),
        (
            lambda x: layer_norm_bwd(x, x, None, None, rstd=x[:, 0].half(), is_rms_norm=True),
            "rstd is torch.float16; pass the rstd that layer_norm_fwd returned",
        ),
        (lambda x: layer_norm(None, None, None), "x is of type NoneType; it must be a tensor"),
        (lambda x: layer_norm(x.numpy(), None, None), "x is of type ndarray"),
        (lambda x: layer_norm(x, [1.0] * 6, None), "weight is of type list"),
        (lambda x: layer_norm(x.to_sparse(), None, None), "x has the layout torch.sparse_coo"),
        (
            lambda x: layer_norm(x, x[0].to_sparse(), None),
            "weight has the layout torch.sparse_coo",
        ),
        (lambda x: layer_norm(torch.nested.nested_tensor([x, x]), None, None), "x is a nested"),
        (
            lambda x: layer_norm(torch.nested.nested_tensor([x], layout=torch.jagged), None, None),
            "x is a nested",
        ),
        (lambda x: layer_norm(x.to(torch.float8_e5m2), None, None), "x is torch.float8_e5m2"),
        (lambda x: layer_norm(x, None, None, eps=None), "eps=None; it must be a number"),
        (lambda x: layer_norm(x, None, None, eps="1e-5"), "eps='1e-5'; it must be a number"),
        (lambda x: rms_norm(x, None, None, eps=-1e-5), "eps=-1e-05; it must be"),
        (lambda x: layer_norm_fwd(x, None, None, eps=float("nan")), "eps=nan; it must be"),
        (lambda x: group_norm(x, None, None, num_groups=2.0), "num_groups=2.0; it must be an int"),
        (
            lambda x: layer_norm_fwd(x, None, None, out_dtype=torch.int32),
            "out_dtype=torch.int32; it must be torch.float16",
        ),
        (
            lambda x: layer_norm_fwd(x, None, None, residual_dtype=torch.int32),
            "residual_dtype=torch.int32",
        ),
        (
            lambda x: layer_norm_bwd(x, x, None, None, None, x[:, 0], x_dtype=torch.bool),
            "x_dtype=torch.bool",
        ),
        (lambda x: layer_norm_linear(x.int(), None, None, x, None), "x is torch.int32"),
        (lambda x: layer_norm_linear(x, None, None, None, None), "linear_weight is of type None"),
        (
            lambda x: layer_norm_linear(x, None, None, x.long(), None),
            "linear_weight is torch.int64",
        ),
        (
            lambda x: layer_norm_linear(x, None, None, x, x[0, :2].bool()),
            "linear_bias is torch.bool",
        ),
    ],
)
def test_bad_arguments_are_named(call: Any, message: str) -> None:
    """Before anything runs, also where an operator has only shapes to look at."""
    with pytest.raises(InvalidOperand, match=message):
        call(torch.ones(2, 6))


def test_a_tensor_on_the_cpu_is_named_where_kernels_are_compiled(fresh_process: Any) -> None:
    code = "import torch, safetune.kernels as k; k.layer_norm(torch.ones(2, 6), None, None)"
    done = fresh_process(code, env={"TRITON_INTERPRET": None}, warm=True, ends=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("safetune.errors.InvalidOperand: x is on the CPU; move it to a GPU")


@pytest.mark.parametrize("eps", [1, np.float32(0.5), np.float64(0.5)], ids=repr)
def test_eps_may_be_any_real_number(eps: Any, device: str) -> None:
    x = torch.arange(12.0, device=device).view(2, 6)
    assert torch.equal(
        layer_norm_fwd(x, None, None, eps)[0], layer_norm(x, None, None, eps=float(eps))
    )


def test_a_weight_may_be_computed(random: Any) -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    module, x = RMSNorm(16).to(random(1).device), random(4, 16)
    right = 2 * module(x)
    nn.utils.parametrize.register_parametrization(module, "weight", Twice())
    torch.testing.assert_close(module(x), right)
    moved = torch.func.functional_call(module, {"parametrizations.weight.original": random(16)}, x)
    assert not torch.equal(moved, right)
