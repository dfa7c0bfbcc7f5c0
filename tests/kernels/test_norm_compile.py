"""The operators: one graph under `torch.compile`, honest schemas, and the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import jvp
from torch.fx.experimental.proxy_tensor import make_fx

from safetune import TracingError
from safetune.kernels import (
    GroupNorm,
    LayerNorm,
    LayerNormLinear,
    RMSNorm,
    RMSNormLinear,
    group_norm,
    group_norm_linear,
    layer_norm,
    rms_norm,
    rms_norm_linear,
)
from safetune.kernels.layer_norm import (
    layer_norm_backward_kernel,
    layer_norm_finalize_kernel,
    layer_norm_forward_kernel,
)

pytestmark = pytest.mark.usefixtures("loops")

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def forget_graphs() -> None:
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    """Return the function compiled into one graph, and what counts the graphs."""
    # Takes seconds to import, and every test process imports this file.
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def operators(counter: Any) -> list[str]:
    """Return the names of safetune's operators in all graphs that were seen."""
    targets = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    return [target.removesuffix(".default") for target in targets if target.startswith("safetune")]


def block(x: Tensor, residual: Tensor, first: Any, last: Any) -> tuple[Tensor, Tensor]:
    """Two norms of a transformer's block, one with the other's residual."""
    y, residual = first(x, residual, prenorm=True)
    return last(torch.sigmoid(y), residual, prenorm=True)


def test_a_block_is_one_graph_with_the_same_gradients(random: Any, gradients: Any) -> None:
    x, residual = random(3, 5, 24, dtype=torch.bfloat16), random(3, 5, 24)
    modules = (GroupNorm(3, 24, bias=True), RMSNorm(24, weight_offset=1.0))
    for module in modules:
        module.to(x.device)
    leaves = (x, residual, *(p for module in modules for p in module.parameters()))
    function, counter = compiled(block)
    outputs = function(x, residual, *modules)
    assert counter.frame_count == 1
    assert operators(counter) == ["safetune.layer_norm", "safetune.layer_norm"]
    eager = block(x, residual, *modules)
    incoming = [torch.randn_like(output) for output in eager]
    mine, theirs = (gradients(found, incoming, *leaves) for found in (outputs, eager))
    for found, right in zip((*outputs, *mine), (*eager, *theirs), strict=True):
        assert found.dtype == right.dtype
        torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_residual_no_operator_returns_its_input(
    random: Any, gradients: Any, dtype: torch.dtype, prenorm: bool
) -> None:
    """residual_out is x, or its fp32 copy: no operator may return what it was given."""
    x, weight = random(4, 24, dtype=dtype), random(24)

    def call(x: Tensor) -> Any:
        found = layer_norm(x, weight, None, prenorm=prenorm, residual_in_fp32=True)
        return found if prenorm else (found,)

    function, counter = compiled(call)
    outputs, eager = function(x), call(x)
    assert counter.frame_count == 1
    incoming = [torch.randn_like(output) for output in eager]
    for found, right in zip(outputs, eager, strict=True):
        assert torch.equal(found, right)
    mine, theirs = (gradients(found, incoming, x, weight) for found in (outputs, eager))
    for found, right in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, right)


def test_linear_under_autocast(random: Any, gradients: Any) -> None:
    x, weight, bias = random(4, 24), random(7, 24), random(7)
    module = LayerNormLinear(24, bias=True).to(x.device)

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return module(x, weight, bias)

    function, counter = compiled(call)
    leaves = (x, weight, bias, module.weight, module.bias)
    y, eager = function(x, weight, bias), call(x, weight, bias)
    assert counter.frame_count == 1
    assert operators(counter) == ["safetune.layer_norm_linear"]
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, eager)
    dy = torch.randn_like(y)
    for found, right in zip(gradients(y, dy, *leaves), gradients(eager, dy, *leaves), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.skipif(torch.__version__.startswith("2.8."), reason="torch 2.8 makes two graphs")
def test_one_graph_for_every_number_of_tokens(random: Any, gradients: Any) -> None:
    weight, bias = random(24), random(24)

    def call(x: Tensor) -> Tensor:
        return group_norm(x * 2, weight, bias, num_groups=2)

    function, counter = compiled(call, dynamic=True)
    for tokens in (2, 5, 33, 64):
        x = random(tokens, 24)
        y, eager = function(x), call(x)
        assert torch.equal(y, eager)
        dy = torch.randn_like(y)
        (dx,), (right,) = gradients(y, dy, x), gradients(eager, dy, x)
        assert torch.equal(dx, right)
    # Dynamo counts a graph of nothing as well; the operator is in one graph only.
    assert operators(counter) == ["safetune.layer_norm"]


@pytest.mark.parametrize(
    ("groups", "is_rms_norm", "residual"),
    [(1, False, None), (3, False, torch.bfloat16), (3, True, torch.float32)],
    ids=str,
)
def test_opcheck(random: Any, groups: int, is_rms_norm: bool, residual: torch.dtype | None) -> None:
    """Schema, fake results (strides too), gradients and dynamic shapes, by PyTorch's own check."""
    x = random(24, 5).t()  # no operator needs contiguous operands
    added = None if residual is None else random(5, 24, dtype=residual)
    operands = (x, random(24), None if is_rms_norm else random(24), added)
    options = (is_rms_norm, groups, False)
    torch.library.opcheck(
        torch.ops.safetune.layer_norm.default, (*operands, 1e-5, None, True, *options)
    )
    linear = (*operands[:3], random(7, 24), random(7), added, 1e-5, False, *options)
    torch.library.opcheck(torch.ops.safetune.layer_norm_linear.default, linear)


@pytest.mark.parametrize(
    ("x_dtype", "recompute"), [(torch.float32, False), (torch.bfloat16, True)], ids=str
)
def test_opcheck_of_backward(random: Any, x_dtype: torch.dtype, recompute: bool) -> None:
    operands = [random(5, 24, grad=False) for _ in range(3)]
    weight, mean, rstd = (random(size, grad=False) for size in (24, 10, 10))
    options = (True, False, x_dtype, recompute, 2, False)
    arguments = (*operands[:2], weight, None, mean, rstd.abs(), operands[2], *options)
    torch.library.opcheck(torch.ops.safetune.layer_norm_backward.default, arguments)


@pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("prenorm", [False, True])
def test_compiled_autograd_sees_the_operator_of_an_eager_call(
    random: Any, gradients: Any, prenorm: bool, is_rms_norm: bool
) -> None:
    from torch._dynamo import compiled_autograd

    leaves = random(4, 24), random(24), None, random(4, 24)

    def loss() -> Tensor:
        found = group_norm(*leaves, prenorm=prenorm, is_rms_norm=is_rms_norm)
        return sum(each.square().sum() for each in (found if prenorm else [found]))

    right = gradients(loss(), None, *leaves)
    _, counter = compiled(loss)
    with compiled_autograd._enable(torch.compile(backend=counter)):
        found = gradients(loss(), None, *leaves)
    assert operators(counter) == ["safetune.layer_norm_backward"]
    for mine, theirs in zip(found, right, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def test_fake_tensors_run_no_kernel() -> None:
    """What estimates memory or places layers sees shapes; nothing has memory to launch on."""
    with FakeTensorMode():
        x = torch.empty(2**20, 4096, dtype=torch.bfloat16, requires_grad=True)
        y, residual_out = LayerNorm(4096, bias=True)(x, prenorm=True, residual_in_fp32=True)
        y.sum().backward()
        assert (y.shape, y.dtype, residual_out.dtype) == (x.shape, x.dtype, torch.float32)
        assert x.grad is not None
        assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_operator_and_the_plain_function_agree_to_the_bit(
    random: Any, gradients: Any, dtype: torch.dtype
) -> None:
    leaves = (random(33, 50, dtype=dtype), random(50), None, random(33, 50))
    plain = rms_norm(*leaves, prenorm=True)
    *operator, mean, rstd = torch.ops.safetune.layer_norm(
        *leaves, 1e-5, None, False, True, 1, False
    )
    assert not mean.requires_grad
    assert not rstd.requires_grad
    incoming = [torch.randn_like(output) for output in plain]
    found = (*operator, *gradients(operator, incoming, *leaves))
    right = (*plain, *gradients(plain, incoming, *leaves))
    for mine, theirs in zip(found, right, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


def test_norms_on_the_meta_device_give_shapes() -> None:
    """Shapes without memory, as large models are laid out before they have any."""
    x = torch.empty(2, 3, 24, device="meta", dtype=torch.bfloat16, requires_grad=True)
    module = RMSNorm(24, device="meta")
    y, residual_out = module(x, torch.empty_like(x), prenorm=True)
    weight = torch.empty(8, 24, device="meta")
    z = RMSNormLinear(24, device="meta")(y, weight, None)
    z.sum().backward()
    assert (z.shape, y.shape, residual_out.shape) == ((2, 3, 8), x.shape, x.shape)
    assert (x.grad.shape, x.grad.device.type) == (x.shape, "meta")


def test_a_dispatch_mode_sees_operators_and_no_kernel(random: Any) -> None:
    """Operators alone: of a kernel, a trace would keep the empty tensor that it is to fill."""
    x = random(4, 24, grad=False)
    traced = make_fx(lambda x: rms_norm(x, None, None))(x)
    assert torch.equal(traced(2 + x), rms_norm(2 + x, None, None))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(rms_norm(x, None, None), FakeTensor)


def test_a_fake_weight_is_enough(random: Any) -> None:
    x = random(4, 24)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = rms_norm(x, torch.ones(24), None)
    assert isinstance(y, FakeTensor)


def norm(x: Tensor) -> Tensor:
    return rms_norm(x, None, None)


def norm_linear(x: Tensor) -> Tensor:
    return rms_norm_linear(x, None, None, torch.ones(3, x.shape[-1], device=x.device), None)


@pytest.mark.parametrize("way", ["plain", "meta", "compiled"])
@pytest.mark.parametrize("function", [norm, norm_linear])
def test_tangents_are_refused_and_not_lost(random: Any, function: Any, way: str) -> None:
    """An operator of torch.library says nothing, and its results have none."""
    x = random(4, 24, grad=False)
    x = x.to("meta") if way == "meta" else x

    def tangent(x: Tensor) -> Tensor:
        return jvp(function, (x,), (x,))[1]

    tangent = torch.compile(tangent, backend="aot_eager") if way == "compiled" else tangent
    with pytest.raises(TracingError, match="do not support forward-mode AD"):
        tangent(x)


@pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
def test_both_ways_share_one_tuning(
    monkeypatch: pytest.MonkeyPatch, random: Any, gradients: Any, is_rms_norm: bool
) -> None:
    """Every launch has arguments of the same dtypes and constexprs, and so the same key."""
    launches: list[Any] = []
    for kernel in (
        layer_norm_forward_kernel,
        layer_norm_backward_kernel,
        layer_norm_finalize_kernel,
    ):

        def noting(*args: Any, grid: Any, _kernel: Any = kernel, **kwargs: Any) -> Any:
            dtypes = [getattr(argument, "dtype", argument) for argument in args]
            launches.append((_kernel.base_fn.__name__, dtypes, kwargs))
            return _kernel.fn.run(*args, grid=grid, **kwargs, **_kernel.configs[0].all_kwargs())

        kernel.forget_launches()  # and not by setattr, which would leave a `run` there
        monkeypatch.setitem(vars(kernel), "run", noting)

    def call(x: Tensor, weight: Tensor) -> Tensor:
        return layer_norm(x, weight, None, is_rms_norm=is_rms_norm)

    leaves = (random(5, 24), random(24))
    for function in (call, compiled(call)[0]):
        y = function(*leaves)
        gradients(y, torch.ones_like(y), *leaves)
    assert len(launches) == 6
    assert launches[:3] == launches[3:]


def test_bad_shapes_are_named_while_tracing(random: Any) -> None:
    function, _ = compiled(lambda x: group_norm_linear(x, None, None, x, None, num_groups=5))
    with pytest.raises(Exception, match="num_groups=5 must divide the last dimension of x"):
        function(random(4, 24))
