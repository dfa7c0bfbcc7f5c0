"""On a GPU: FLA's table at its own sizes, torch.compile, CUDA graphs, long rows, many elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from safetune.kernels import (
    GroupNorm,
    LayerNorm,
    LayerNormLinear,
    RMSNorm,
    calls,
    group_norm,
    group_norm_linear,
    layer_norm,
    rms_norm,
)
from safetune.kernels.configs import (
    BACKWARD_CONFIGS,
    backward_configs,
    has_fast_memory,
    prune_backward_configs,
)

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
kinds = pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def sum_slack(rows: int) -> float:
    """How much a sum of fp32 terms over rows may be off, in units of a single term's rounding.

    The rounding of n terms, added pairwise in blocks, grows like sqrt(n); so does the sum itself
    where the terms are random. `close` allows 16 units in the last place of the largest element,
    which is enough up to 64^2 rows.
    """
    return max(1.0, rows**0.5 / 64)


@pytest.fixture
def compare(reference: Any, exact_leaves: Any, gradients: Any, close: Any) -> Callable[..., None]:
    """A function that compares y and all gradients with those of the definition in fp64.

    dx of rows of thousands of elements has two of their sums in it: twice the rounding.
    """

    def check(ours: Any, leaves: list[Any], dy: Any = None, **options: Any) -> None:
        exact = exact_leaves(*leaves)
        y, right = ours(*leaves), reference(*exact, **options)
        assert y.dtype == leaves[0].dtype
        close(y, right)
        dy = torch.ones((), device="cuda", dtype=y.dtype).expand_as(y) if dy is None else dy
        mine, theirs = gradients(y, dy, *leaves), gradients(right, dy.double(), *exact)
        close(mine[0], theirs[0], slack=2.0)
        rows = y.numel() // y.shape[-1]
        for gradient, exact_gradient in zip(mine[1:], theirs[1:], strict=True):
            assert (gradient is None) == (exact_gradient is None)
            if gradient is not None:
                close(gradient, exact_gradient, slack=sum_slack(rows))

    return check


@pytest.mark.parametrize("columns", [5120, 9216, 40000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@kinds
def test_a_pinned_backward_of_long_rows_fits(
    random: Any, gradients: Any, dtype: torch.dtype, columns: int, is_rms_norm: bool
) -> None:
    """A config of several stages needs up to 384 KiB of shared memory for them, an H100 has 227."""
    norm = rms_norm if is_rms_norm else layer_norm
    x, weight = random(64, columns), random(columns)
    x, weight = (leaf.detach().to(dtype).requires_grad_() for leaf in (x, weight))
    y = norm(x, weight, None, deterministic=True)
    right = norm(x, weight, None, deterministic=False)
    torch.testing.assert_close(y, right)
    dy = torch.ones_like(y)
    found, expected = (gradients(each, dy, x, weight) for each in (y, right))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class TestTableOfFla:
    """What FLA's test_layernorm.py checks, at its own sizes; the loss is a sum: dy has stride 0."""

    @pytest.fixture(params=[0, 512], ids=["many", "few"])
    def most_few_rows(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    @pytest.mark.parametrize("columns", [50, 64, 128])
    @pytest.mark.parametrize("parameters", [0, 1, 2])
    def test_layer_norm(self, compare: Any, random: Any, columns: int, parameters: int) -> None:
        norm = [random(columns) if i < parameters else None for i in range(2)]
        compare(layer_norm, [random(2, 2, 512, columns), *norm])

    @kinds
    @pytest.mark.parametrize("groups", [1, 4])
    @pytest.mark.parametrize("columns", [64, 128, 512, 1024, 2048])
    def test_group_norm(
        self, compare: Any, random: Any, columns: int, groups: int, is_rms_norm: bool
    ) -> None:
        options = {"num_groups": groups, "is_rms_norm": is_rms_norm}
        leaves = [random(2, 512, columns), random(columns), random(columns)]
        compare(lambda *leaves: group_norm(*leaves, **options), leaves, **options)

    @pytest.mark.parametrize("columns", [50, 64, 128, 256])
    def test_rms_norm(self, compare: Any, random: Any, columns: int) -> None:
        leaves = [random(2, 2, 512, columns), random(columns), None]
        compare(lambda *leaves: rms_norm(*leaves, eps=0), leaves, eps=0.0, is_rms_norm=True)

    @kinds
    @pytest.mark.parametrize(
        ("columns", "groups"), [(128, 1), (256, 1), (512, 1), (128, 4), (256, 4)]
    )
    @pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32])
    def test_few_tokens(
        self, compare: Any, random: Any, tokens: int, columns: int, groups: int, is_rms_norm: bool
    ) -> None:
        options = {"num_groups": groups, "is_rms_norm": is_rms_norm}
        leaves = [random(1, tokens, columns), random(columns), random(columns)]
        compare(lambda *leaves: group_norm(*leaves, **options), leaves, **options)

    @kinds
    @pytest.mark.parametrize(("columns", "groups"), [(50, 1), (64, 4), (128, 1), (512, 4)])
    @pytest.mark.parametrize("tokens", [1, 16, 128])
    def test_linear(
        self,
        random: Any,
        exact_leaves: Any,
        reference: Any,
        gradients: Any,
        close: Any,
        tokens: int,
        columns: int,
        groups: int,
        is_rms_norm: bool,
    ) -> None:
        """Sums of up to 512 products on the way there, and of them again on the way back."""
        options = {"num_groups": groups, "is_rms_norm": is_rms_norm}
        leaves = [random(tokens, columns), random(columns), random(columns)]
        leaves += [random(24, columns), random(24)]
        exact = exact_leaves(*leaves)
        ours = group_norm_linear(*leaves, **options)
        right = torch.nn.functional.linear(reference(*exact[:3], **options), *exact[3:])
        close(ours, right, slack=2.0)
        dy = torch.ones((), device="cuda").expand_as(ours)
        mine, theirs = gradients(ours, dy, *leaves), gradients(right, dy.double(), *exact)
        for gradient, exact_gradient in zip(mine, theirs, strict=True):
            close(gradient, exact_gradient, slack=4.0)


@kinds
@dtypes
@pytest.mark.parametrize("columns", [20000, 32768, 40960, 65536])
def test_long_rows(
    compare: Any, random: Any, columns: int, dtype: torch.dtype, is_rms_norm: bool
) -> None:
    leaves = [random(37, columns, dtype=dtype), random(columns), random(columns)]
    compare(
        lambda *leaves: layer_norm(*leaves, is_rms_norm=is_rms_norm),
        leaves,
        random(37, columns, dtype=dtype, grad=False),
        is_rms_norm=is_rms_norm,
    )


@kinds
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("columns", [16385, 20000, 32768])
def test_long_rows_with_many_turns(
    compare: Any, random: Any, columns: int, groups: int, is_rms_norm: bool
) -> None:
    """A card of 9.0 has a kernel of its own for these, whose programs wait for each other."""
    leaves = [random(300, groups * columns, dtype=torch.bfloat16), random(groups * columns), None]
    dy = random(300, groups * columns, dtype=torch.bfloat16, grad=False)
    options = {"is_rms_norm": is_rms_norm, "num_groups": groups}
    compare(lambda *leaves: group_norm(*leaves, **options), leaves, dy, **options)


def test_long_rows_again(compare: Any, random: Any) -> None:
    """From the second call on it is known; nothing of an earlier one may pass for its sums."""
    for _ in range(3):
        leaves = [random(300, 20000, dtype=torch.bfloat16), random(20000), random(20000)]
        compare(layer_norm, leaves, random(300, 20000, dtype=torch.bfloat16, grad=False))


@pytest.mark.parametrize("columns", [20000, 32768])
def test_long_rows_far_from_zero(compare: Any, random: Any, columns: int) -> None:
    leaves = [random(37, columns, grad=False) + 4, random(columns), random(columns)]
    leaves[0].requires_grad_()
    compare(layer_norm, leaves, random(37, columns, grad=False))


@pytest.mark.parametrize("unaligned", ["x", "dy"])
def test_long_rows_that_begin_between_pairs(compare: Any, random: Any, unaligned: str) -> None:
    """Pairs of bf16 are read as one value, which has to lie at 4 bytes."""
    x, dy = (random(300, 20000, dtype=torch.bfloat16, grad=False) for _ in range(2))
    moved = random(300 * 20000 + 1, dtype=torch.bfloat16, grad=False)[1:].view(300, 20000)
    x, dy = (moved, dy) if unaligned == "x" else (x, moved)
    compare(layer_norm, [x.requires_grad_(), random(20000), random(20000)], dy)


def test_rows_longer_than_the_card_has_programs_for_at_once(compare: Any, random: Any) -> None:
    """16 groups of 32 programs a row are more than run at the same time: some wait their turn."""
    leaves = [random(3, 16 * 2**17, dtype=torch.bfloat16), None, None]
    dy = random(3, 16 * 2**17, dtype=torch.bfloat16, grad=False)
    options = {"is_rms_norm": True, "num_groups": 16}
    compare(lambda *leaves: group_norm(*leaves, **options), leaves, dy, **options)


def assert_alike(found: list[Tensor], right: list[Tensor]) -> None:
    """Compare what was rounded to bf16 at different places: up to eight times, 2^-9 each."""
    for index, (mine, theirs) in enumerate(zip(found, right, strict=True)):
        assert mine.dtype == theirs.dtype, index
        mine, theirs = mine.detach().float(), theirs.detach().float()
        tolerance = {"rtol": 2.0**-6, "atol": 2.0**-5 * float(theirs.square().mean().sqrt())}
        torch.testing.assert_close(mine, theirs, **tolerance, msg=lambda m, i=index: f"{i}: {m}")


def block(x: Tensor, residual: Tensor, first: Any, last: Any) -> tuple[Tensor, Tensor]:
    """Two norms of a transformer's block, one with the other's residual."""
    y, residual = first(x, residual, prenorm=True)
    return last(torch.sigmoid(y), residual, prenorm=True)


def block_modules(columns: int, dtype: torch.dtype) -> tuple[Any, Any]:
    modules = (GroupNorm(4, columns, bias=True), RMSNorm(columns, weight_offset=1.0))
    for module in modules:
        module.to("cuda", dtype)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
    return modules


@pytest.mark.parametrize(
    ("mode", "dynamic"), [("default", False), ("default", True), ("reduce-overhead", False)]
)
def test_compiled(random: Any, gradients: Any, mode: str, dynamic: bool) -> None:
    """Inductor, in one graph; with CUDA graphs in the second mode. Eager results are the measure.

    What is between the norms is fused and keeps more digits than bf16, so it is not to the bit.
    """
    torch._dynamo.reset()
    modules = block_modules(512, torch.bfloat16)
    function = torch.compile(block, fullgraph=True, dynamic=dynamic, mode=mode)
    for tokens in (64, 100, 257) if dynamic else (64, 64, 64):
        torch.compiler.cudagraph_mark_step_begin()
        leaves = [random(2, tokens, 512, dtype=torch.bfloat16), random(2, tokens, 512)]
        parameters = [p for module in modules for p in module.parameters()]
        outputs, eager = function(*leaves, *modules), block(*leaves, *modules)
        incoming = [torch.randn_like(output) for output in eager]
        found = [*outputs, *gradients(outputs, incoming, *leaves, *parameters)]
        right = [*eager, *gradients(eager, incoming, *leaves, *parameters)]
        assert_alike(found, right)


def test_compiled_linear_under_autocast(random: Any, gradients: Any) -> None:
    torch._dynamo.reset()
    module = LayerNormLinear(256, bias=True).to("cuda")
    x, weight, bias = random(128, 256), random(192, 256), random(192)
    leaves = [x, weight, bias, *module.parameters()]

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return module(x, weight, bias)

    outputs = [torch.compile(call, fullgraph=True)(x, weight, bias), call(x, weight, bias)]
    assert [output.dtype for output in outputs] == [torch.bfloat16] * 2
    dy = torch.randn_like(outputs[0])
    found, right = (gradients(output, dy, *leaves) for output in outputs)
    assert_alike([outputs[0], *found], [outputs[1], *right])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cuda_graph_of_both_passes(random: Any, deterministic: bool) -> None:
    """Captured once, replayed on other data: results and gradients are those of eager calls."""
    shape = (300, 768)
    norm = LayerNorm(768, bias=True, deterministic=deterministic).to("cuda")
    x, residual = random(*shape, dtype=torch.bfloat16), random(*shape)
    incoming = [random(*shape, dtype=torch.bfloat16, grad=False), random(*shape, grad=False)]
    static = [x, residual, *incoming]

    def both_passes() -> list[Tensor]:
        outputs = norm(x, residual, prenorm=True)
        leaves = (x, residual, norm.weight, norm.bias)
        return [*outputs, *torch.autograd.grad(outputs, leaves, incoming)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both_passes()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_passes()
    for _ in range(3):
        with torch.no_grad():
            for tensor in static:
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        for found, right in zip(captured, both_passes(), strict=True):
            assert torch.equal(found, right)


@kinds
@pytest.mark.parametrize("rows", [3, 450, 5000])
def test_a_call_like_one_before_launches_without_checks(
    random: Any, monkeypatch: pytest.MonkeyPatch, rows: int, is_rms_norm: bool
) -> None:
    x, residual, dy = (random(rows, 768, dtype=torch.bfloat16) for _ in range(3))
    weight, bias = random(768), random(768)

    def both_passes() -> list[Tensor]:
        outputs = group_norm(x, weight, bias, residual, prenorm=True, is_rms_norm=is_rms_norm)
        leaves = (x, weight, bias, residual)
        return [*outputs, *torch.autograd.grad(outputs, leaves, (dy.detach(), residual.detach()))]

    def fail(*operands: Any) -> Any:
        raise AssertionError("a call like one before was checked")

    right = both_passes()
    monkeypatch.setattr(calls.NormCall, "_checked_forward", fail)
    monkeypatch.setattr(calls.NormCall, "backward", fail)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = both_passes()
        stream.synchronize()
        assert all(map(torch.equal, found, right))


def test_make_graphed_callables(random: Any) -> None:
    module = RMSNorm(1024, bias=True, dtype=torch.bfloat16, device="cuda")
    x = random(128, 1024, dtype=torch.bfloat16)
    eager = RMSNorm(1024, bias=True, dtype=torch.bfloat16, device="cuda")
    graphed = torch.cuda.make_graphed_callables(module, (x,))
    for _ in range(2):
        x = random(128, 1024, dtype=torch.bfloat16)
        results = []
        for function in (graphed, eager):
            y = function(x)
            (dx,) = torch.autograd.grad(y.square().sum(), x)
            results.append((y.detach().clone(), dx.clone()))
        assert all(map(torch.equal, *results))


def test_more_than_2_31_elements_with_a_residual(
    reference: Any, gradients: Any, random: Any
) -> None:
    """The last rows of both outputs and both gradients are right; 26 GB in all."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    columns = 2048
    shape = (2**31 // columns + 100, columns)
    x, residual = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for tensor in (x, residual):
        tensor[-64:] = random(64, columns, dtype=torch.bfloat16, grad=False)
        tensor.requires_grad_()
    options = {"is_rms_norm": True, "num_groups": 2}
    y, residual_out = group_norm(x, None, None, residual, prenorm=True, **options)
    dy, dres = residual_out.detach(), y.detach()
    found = gradients((y, residual_out), (dy, dres), x, residual)
    last = slice(-64, None)
    added = (x[last] + residual[last]).detach().double().requires_grad_()
    right = reference(added, None, None, **options)
    (dx,) = gradients((right, added), (dy[last].double(), dres[last].double()), added)
    assert_alike([y[last], residual_out[last]], [right.bfloat16(), added.bfloat16()])
    assert_alike([gradient[last] for gradient in found], [dx.bfloat16()] * 2)
    for tensor in (y, residual_out, *found):  # and nothing was written where it does not belong
        assert not tensor[0].any()
        assert not tensor[-65].any()


@kinds
def test_pinned_gradients_are_bit_equal_beside_other_work(
    random: Any, gradients: Any, is_rms_norm: bool
) -> None:
    leaves = [random(100_003, 1024, dtype=torch.bfloat16), random(1024), random(1024)]
    dy = random(100_003, 1024, dtype=torch.bfloat16, grad=False)

    def results() -> list[Tensor]:
        y = layer_norm(*leaves, is_rms_norm=is_rms_norm, deterministic=True)
        return [y, *gradients(y, dy, *leaves)]

    first = results()
    noise, side = torch.ones(4096, 4096, device="cuda"), torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(side):
            noise @ noise
        assert all(map(torch.equal, results(), first))
    torch.cuda.synchronize()


def test_backward_allocates_dx_and_little_else(random: Any) -> None:
    """The gradient of a residual_out that nothing reads is not made, nor one for each input."""
    shape = (8192, 4096)
    x, residual = (random(*shape, dtype=torch.bfloat16) for _ in range(2))
    weight = random(4096)
    y, _residual_out = rms_norm(x, weight, None, residual, prenorm=True)
    dy = torch.randn_like(y)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = torch.autograd.grad(y, (x, weight, residual), dy)
    torch.cuda.synchronize()
    tensors = (torch.cuda.max_memory_allocated() - before) / x.nbytes
    assert 1.0 <= tensors < 1.5, f"backward took {tensors:.2f} times the bytes of x"
    assert found[0].shape == shape


def test_other_layouts_and_autocast(reference: Any, close: Any, random: Any) -> None:
    base = random(700, 1024, dtype=torch.bfloat16, grad=False)
    weight = random(512, grad=False)
    with torch.autocast("cuda", dtype=torch.float16):
        for x in (
            base[:, ::2],
            base[::3, 512:],
            base[:512].t()[:, :512],
            base[:1, :512].expand(9, -1),
        ):
            y = layer_norm(x, weight, None)
            assert y.dtype == torch.bfloat16
            close(y, reference(x.double(), weight.double(), None))


def test_pruning_leaves_the_configs_for_the_card_that_is_here() -> None:
    keys = {"COLUMNS": 256, "HAS_WEIGHT": True, "HAS_BIAS": True}
    keys |= {"IN_PLACE": False, "HAS_RESIDUAL_GRADIENT": False}
    torch.cuda.init()
    expected = backward_configs(BACKWARD_CONFIGS, has_fast_memory(), **keys)
    assert prune_backward_configs(BACKWARD_CONFIGS, {}, **keys) == expected
    in_turns = {c.kwargs["TILE_ELEMENTS"] for c in expected if c.kwargs["IN_TURNS"]}
    fast = torch.cuda.get_device_name().startswith("NVIDIA H200")
    assert has_fast_memory() == (4096 in in_turns) == fast
