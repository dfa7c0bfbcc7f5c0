"""A call like one before gives what that gave, with no check repeated; any other is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from safetune import InvalidOperand
from safetune.errors import TracingError
from safetune.kernels import calls, group_norm, layer_norm, rms_norm
from safetune.kernels.launches import forward_launch

pytestmark = pytest.mark.usefixtures("loops")

Tensor = torch.Tensor


class Bound:
    """Stands for a bound launch, by the tuner: the interpreter's launches are never known.

    Attributes:
        made: how many launches were bound, each after the checks of a call.
        launched: how many of them were launched.
        valid: whether they may still be launched.
    """

    def __init__(self) -> None:
        self.made = self.launched = 0
        self.valid = True

    def launch(
        self, kernel: Any, grid: Any, args: Any, kwargs: Any, offsets: Any = None
    ) -> Callable[..., Any]:
        self.made += 1

        def launch(*given: Any) -> Any:
            if not self.valid:
                return None
            self.launched += 1
            tensors = [*given]
            for place, offset in (offsets or {}).items():
                tensors[place] = given[place][offset // given[place].itemsize :]
            kernel[grid](*tensors, *args[len(tensors) :], **kwargs)
            return kernel

        return launch


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Bound:
    made = Bound()
    monkeypatch.setattr(calls, "bound_launch", made.launch)
    monkeypatch.setattr(calls, "_calls", {})
    return made


def both_passes(call: Callable[..., Any], leaves: list[Any]) -> list[Tensor]:
    found = call(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    wanted = [leaf for leaf in leaves if leaf is not None]
    incoming = [torch.ones_like(output) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, wanted, incoming)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_rms_norm": True},
        {"num_groups": 2, "prenorm": True},
        {"prenorm": True, "residual_in_fp32": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("given", ["weight bias residual", "weight", "bias", "residual", ""])
@pytest.mark.parametrize("most_few_rows", [0, 512])
def test_the_second_call_gives_what_the_first_gave(
    bound: Bound, random: Any, options: Any, given: str, most_few_rows: int
) -> None:
    def leaves() -> list[Any]:
        x = random(2, 3, 16, dtype=torch.bfloat16)
        weight, bias, residual = (
            random(*shape) if name in given.split() else None
            for name, shape in (("weight", (16,)), ("bias", (16,)), ("residual", (2, 3, 16)))
        )
        return [x, weight, bias, residual]

    def call(*leaves: Any) -> Any:
        return group_norm(*leaves, **options)

    both_passes(call, leaves())
    made, again = bound.made, leaves()
    has_sums = ("weight" in given or "bias" in given) and (
        not most_few_rows or "num_groups" in options
    )
    assert made == (3 if has_sums else 2)
    assert bound.launched == 0
    found = both_passes(call, again)
    assert (bound.made, bound.launched) == (made, made)
    bound.valid = False
    right = both_passes(call, again)
    for mine, theirs in zip(found, right, strict=True):
        assert mine.shape == theirs.shape
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_another_kind_of_operand_is_checked(bound: Bound, random: Any) -> None:
    x, weight = random(4, 16), random(16)
    layer_norm(x, weight, None)
    for other in (random(5, 16), random(4, 32)[:, ::2], random(4, 16).half(), random(2, 2, 16)):
        made = bound.made
        layer_norm(other, weight, None)
        assert bound.launched == 0
        assert bound.made == made + other.is_contiguous()
    with pytest.raises(InvalidOperand, match="weight has shape"):
        layer_norm(x, random(8), None)
    with pytest.raises(InvalidOperand, match=r"num_groups=1\.0"):
        layer_norm(x, weight, None, num_groups=1.0)


def test_a_weight_that_is_elsewhere_since_is_checked_in_backward(bound: Bound, random: Any) -> None:
    x, weight = random(4, 16), torch.nn.Parameter(random(16).detach())
    y = layer_norm(x, weight, None)
    (right,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    dy = torch.ones_like(y)
    for _ in range(2):
        torch.autograd.grad(y, x, dy, retain_graph=True)
    assert bound.launched == 2
    weight.data = weight.data.repeat_interleave(2)[::2]
    (dx,) = torch.autograd.grad(y, x, dy)
    assert bound.launched == 2
    assert torch.equal(dx, right)


@pytest.mark.parametrize("is_rms_norm", [False, True])
def test_saved_tensors_may_come_back_as_parts_of_a_larger_memory(
    bound: Bound, random: Any, is_rms_norm: bool
) -> None:
    def unpack(saved: Tensor) -> Tensor:
        return torch.cat([saved.new_ones(64), saved.flatten()])[64:].view_as(saved)

    x, dy = random(4, 16), random(4, 16, grad=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        y = group_norm(x, None, None, is_rms_norm=is_rms_norm)
    found = [torch.autograd.grad(y, x, dy, retain_graph=True)[0] for _ in range(2)]
    assert bound.launched == 1
    assert torch.equal(*found)


def test_a_pinned_call_is_not_bound(bound: Bound, random: Any) -> None:
    x = random(4, 16)
    rms_norm(x, None, None, deterministic=True)
    assert bound.made == 0
    rms_norm(x, None, None)
    torch.use_deterministic_algorithms(True)
    try:
        both_passes(rms_norm, [x, None, None])
    finally:
        torch.use_deterministic_algorithms(False)
    assert (bound.made, bound.launched) == (1, 0)


def test_no_rows_are_not_launched(bound: Bound, random: Any) -> None:
    for _ in range(2):
        dx, dw = both_passes(rms_norm, [random(0, 16), random(16), None])[1:]
        assert (dx.shape, dw.tolist()) == ((0, 16), [0.0] * 16)
    assert bound.made == 0


def test_an_input_of_a_transform_that_is_over_is_unwrapped(bound: Bound, random: Any) -> None:
    kept: list[Tensor] = []
    rows = random(4, 16, grad=False)
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(rows)
    for _ in range(2):
        assert torch.equal(rms_norm(kept[0], None, None), rms_norm(rows, None, None))
    assert bound.launched == 3


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(4, 16), (2, 2, 16)], ids=str)
def test_without_gradients_the_results_are_the_same(
    bound: Bound, random: Any, shape: tuple[int, ...], residual: bool
) -> None:
    x, added = random(*shape), random(*shape) if residual else None
    right = layer_norm(x, None, None, added, prenorm=True)
    calls._calls.clear()
    for mode in (torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with mode():
                found = layer_norm(x, None, None, added, prenorm=True)
            assert all(map(torch.equal, found, right))
            assert not any(each.requires_grad or each is x for each in found)
    assert bound.launched == 2  # in each mode, the second call


def test_calls_are_forgotten_before_they_are_too_many(
    bound: Bound, random: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MOST_CALLS", 3)
    for rows in range(1, 8):
        rms_norm(random(rows, 16), None, None)
        assert len(calls._calls) <= 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_call_that_is_known_is_not_taken_for_one_in_a_trace_or_transform(
    bound: Bound, random: Any
) -> None:
    def norm(x: Tensor) -> Any:
        return rms_norm(x, None, None)

    x = random(4, 16, grad=False)
    right = [norm(x) for _ in range(2)][1]
    assert bound.launched == 1
    assert "safetune.layer_norm" in make_fx(norm)(x).code
    assert "safetune::layer_norm" in str(torch.jit.trace(norm, (x,), check_trace=False).graph)
    assert torch.equal(torch.vmap(norm)(x[None])[0], right)
    for transform in (lambda: torch.func.jvp(norm, (x,), (x,)), lambda: torch.func.vjp(norm, x)):
        with pytest.raises(TracingError):
            transform()
    assert bound.launched == 1


@pytest.mark.parametrize("most_few_rows", [0, 512])
def test_one_gradient_of_both_outputs_is_known_too(
    bound: Bound, random: Any, most_few_rows: int
) -> None:
    leaves = random(2, 3, 16), random(16), None, random(2, 3, 16)

    def gradients(*incoming: Tensor) -> tuple[Tensor, ...]:
        outputs = layer_norm(*leaves, prenorm=True)
        wanted = [leaf for leaf in leaves if leaf is not None]
        return torch.autograd.grad(outputs, wanted, incoming)

    dy = random(2, 3, 16, grad=False)
    right = gradients(dy, dy.clone())
    gradients(dy, dy)
    made, before = bound.made, bound.launched
    for incoming in ((dy, dy), (dy, dy.clone())):
        found = gradients(*incoming)
        assert all(map(torch.equal, found, right))
    assert bound.made == made
    assert bound.launched == before + 2 * (2 if most_few_rows else 3)


@pytest.mark.parametrize(
    "place", [slice(16), slice(16, 32), slice(1, 32, 2)], ids=["first", "second", "strided"]
)
def test_a_weight_whose_memory_was_freed_is_named(bound: Bound, random: Any, place: slice) -> None:
    """As by FSDP, outside of a module's passes; a kernel would read address 0, or one near it."""
    x, weight = random(4, 16), torch.nn.Parameter(random(32, grad=False)[place])
    y = rms_norm(x, weight, None)
    memory = weight.untyped_storage()
    memory.resize_(0)
    bound.valid = False  # as a launch finds, which sees the addresses
    for fails in (lambda: rms_norm(x, weight, None), lambda: y.sum().backward()):
        with pytest.raises(InvalidOperand, match="weight has no memory now: FSDP frees"):
            fails()


def without_memory(values: Tensor) -> Tensor:
    return torch._efficientzerotensor(tuple(values.shape), device=values.device)


@pytest.mark.parametrize("stand_in", [torch._neg_view, without_memory])
def test_values_that_are_not_in_memory_are_written_out_first(
    bound: Bound, random: Any, stand_in: Callable[[Tensor], Tensor]
) -> None:
    """A lazy negation, as of the imaginary part of a conjugate, and zeros without memory."""
    for place in range(5):
        leaves = [random(4, 16), random(16), random(16), random(4, 16)]
        dy = random(4, 16, grad=False)
        for leaf in leaves:
            leaf.requires_grad_(False)
        if place < 4:
            leaves[place] = stand_in(leaves[place])
        else:
            dy = stand_in(dy)

        def both(leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
            given = [leaf.detach().requires_grad_() for leaf in leaves]
            y, added = layer_norm(*given, prenorm=True)
            return [y, added, *torch.autograd.grad((y, added), given, (dy, dy))]

        right = both([leaf + 0 for leaf in leaves], dy + 0)
        for _ in range(2):
            assert all(map(torch.equal, both(leaves, dy), right))


def test_one_tensor_as_two_operands(bound: Bound, random: Any) -> None:
    x = random(4, 16)
    for _ in range(2):
        y, added = rms_norm(x, None, None, x, prenorm=True)
        assert torch.equal(added, 2 * x)
        (dx,) = torch.autograd.grad((y, added), x, (x.detach(), x.detach()))
        (wanted,) = torch.autograd.grad(
            rms_norm(x, None, None, x.detach() + 0, prenorm=True), x, (x.detach(), x.detach())
        )
        torch.testing.assert_close(dx, 2 * wanted)


def test_statistics_are_aligned_for_any_number_of_rows() -> None:
    for rows in range(1, 6):
        operands = (torch.zeros(rows, 16), None, None, 1e-5, None, None, None, False, 1)
        found, _ = forward_launch(*operands, joined=True)
        assert found.mean is not None
        assert found.mean.shape == found.rstd.shape == (rows,)
        assert (found.rstd.data_ptr() - found.mean.data_ptr()) % 16 == 0
