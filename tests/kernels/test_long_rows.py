"""The backward kernel for rows that programs share, against the definition in fp64.

The interpreter runs one program after the other, so none can wait for the next one: here a program
takes what was published, and the kernel runs twice. The second time, every share has come.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune.kernels import calls, long_rows, rms_norm
from safetune.kernels.configs import FORWARD_CONFIGS, LONG_BACKWARD_CONFIGS, is_light
from safetune.kernels.launches import Launch, backward_launch, forward_launch
from safetune.kernels.long_rows import (
    is_long,
    long_rows_backward_kernel,
    long_rows_launch,
    long_rows_plan,
)
from safetune.verify.overlap import check_overlap

pytestmark = pytest.mark.usefixtures("loops", "published")


@triton.jit
def what_is_published(pointers):  # type: ignore[no-untyped-def]
    words = tl.load(pointers).to(tl.uint64, bitcast=True)
    low, high = words.to(tl.uint32), (words >> 32).to(tl.uint32)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safetune.kernels.long_rows.awaited", what_is_published)


@pytest.fixture
def has_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_rows, "_long_row", lambda device: 16385)
    monkeypatch.setattr(long_rows, "sm_count", lambda device: 132)


def config_of(launch: Launch) -> triton.Config:
    named = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
    (config,) = launch.kernel.pruned_for(named, launch.kwargs)
    return config


def run_twice(launch: Launch) -> None:
    config = config_of(launch)
    kernel, words = launch.kernel.fn, launch.args[9]
    for _ in range(2):
        words[-1] = -1  # no program has started
        kernel[launch.grid](*launch.args, **launch.kwargs, **config.all_kwargs())
    assert words[:-1].ne(-1).all(), "a word that was not published would be waited for"


kinds = pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])


@pytest.mark.parametrize(
    ("columns", "groups", "is_rms_norm", "has_bias", "dtype", "dx_dtype"),
    [
        (16385, 1, False, True, torch.float32, torch.bfloat16),
        (16385, 1, True, False, torch.float16, torch.float32),
        (20000, 2, False, False, torch.bfloat16, torch.float32),
        (20000, 2, True, True, torch.float32, torch.bfloat16),
        (32768, 1, False, True, torch.float16, torch.bfloat16),
        (40000, 1, True, False, torch.bfloat16, torch.float32),
    ],
)
def test_gradients(
    reference: Any,
    close: Any,
    random: Any,
    columns: int,
    groups: int,
    is_rms_norm: bool,
    has_bias: bool,
    dtype: torch.dtype,
    dx_dtype: torch.dtype,
) -> None:
    """With a residual's gradient, which is added and, in another dtype than dx, stored as well."""
    x, dy, dres = (random(4 * groups, columns, dtype=dtype, grad=False) for _ in range(3))
    weight, bias = (random(groups * columns, grad=False) for _ in range(2))
    bias = bias if has_bias else None
    mean = None if is_rms_norm else x.float().mean(1)
    centred = x.float() if mean is None else x.float() - mean[:, None]
    rstd = (centred.square().mean(1) + 1e-5).rsqrt()
    plan = long_rows_plan(x, groups, has_bias, True)
    operands = (plan, dy, x, weight, bias, mean, rstd, dres)
    outputs, made = backward_launch(*operands, True, is_rms_norm, dx_dtype, recompute_output=False)
    sums = [outputs.weight_partials, *([outputs.bias_partials] if has_bias else [])]
    for output in (outputs.x, outputs.residual, *sums):
        output.fill_(torch.nan)  # so that what is left unwritten cannot look right
    run_twice(long_rows_launch(made))

    leaves = [leaf.double().requires_grad_() for leaf in (x, weight, bias) if leaf is not None]
    tokens = leaves[0].view(-1, groups * columns)
    options = {"is_rms_norm": is_rms_norm, "num_groups": groups}
    y = reference(tokens, leaves[1], leaves[2] if has_bias else None, **options)
    incoming = (dy.double().view_as(y), dres.double())
    dx, *gradients = torch.autograd.grad((y, leaves[0]), leaves, incoming)
    close(outputs.x, dx, slack=2.0)
    close(outputs.residual, dx, slack=2.0)
    for found, right in zip(sums, gradients, strict=True):
        close(found.view(groups, -1, columns).sum(1).flatten(), right)


@pytest.mark.usefixtures("has_long_rows")
def test_long_rows_are_launched_with_it(random: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(
        "safetune.kernels.functional.run_launch",
        lambda launch, pinned: names.append(launch.kernel.base_fn.__name__),
    )
    x, weight = random(2, 16385), random(16385)
    rms_norm(x, weight, None).sum().backward()
    assert names == [
        "layer_norm_forward_kernel",
        "long_rows_backward_kernel",
        "layer_norm_finalize_kernel",
    ]


def test_which_rows_are_long(
    random: Any, has_long_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_rows, "sm_count", lambda device: 8)  # 64 programs
    rows = random(2, 16385)
    assert is_long(rows, rows, False, pinned=False)
    wide = random(1, 32768)
    assert is_long(wide, wide, False, pinned=False)
    unaligned = random(2 * 16385 + 1, dtype=torch.bfloat16)[1:].view(2, 16385)
    assert not is_long(unaligned, rows, False, pinned=False)
    assert not is_long(rows, unaligned, False, pinned=False)
    for changed in (
        (rows, True, False),
        (rows, False, True),
        (rows.double(), False, False),
        (random(2, 16384), False, False),
        (random(1, 32769), False, False),  # 33 programs
    ):
        assert not is_long(changed[0], *changed)


def test_no_row_is_long_in_the_interpreter(random: Any) -> None:
    rows = random(2, 16385)
    assert not is_long(rows, rows, False, pinned=False)


def test_no_word_of_a_known_call_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory they get: a sum of an earlier call would pass for one of this call."""
    used = {"_empty_strided_cpu": lambda *size_and_dtype: torch.full((5,), 7)}
    monkeypatch.setattr(calls, "guards", SimpleNamespace(**used))
    monkeypatch.setattr(torch, "empty_strided", lambda *size, **options: torch.ones(5) * 7)
    words = calls.like(torch.ones(5, dtype=torch.int64))
    assert words().tolist() == [-1] * 5
    assert calls.like(torch.ones(5))().tolist() == [7] * 5


@kinds
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_one_program_writes_each_element(random: Any, tokens: int, is_rms_norm: bool) -> None:
    x, dy = random(tokens, 16400), random(tokens, 16400)
    weight, bias = random(16400), random(16400)
    mean, rstd = torch.zeros_like(x[:, 0]), torch.ones_like(x[:, 0])
    operands = (
        long_rows_plan(x, 1, True, False),
        dy,
        x,
        weight,
        bias,
        None if is_rms_norm else mean,
        rstd,
    )
    _, made = backward_launch(*operands, None, False, is_rms_norm, None, recompute_output=False)
    launch = long_rows_launch(made)
    call = (long_rows_backward_kernel, launch.grid, *launch.args)
    names = ["input_gradient_pointer", "weight_partials_pointer", "bias_partials_pointer"]
    options = {"config": config_of(launch), "outputs": names, "allow": ["words_pointer"]}
    report = check_overlap(*call, **options, **launch.kwargs)
    assert report.ok, str(report)
    assert report.idle_programs == (), str(report)


@pytest.mark.parametrize(
    ("scale", "shift", "rounding"),
    [(1, 0, 1e-6), (0.125, 100, 3e-6), (0, 3, 1e-6), (5e16, 2e19, 2e-4)],
    ids=["normal", "far", "constant", "huge"],
)
def test_both_sums_of_a_row_in_one_exchange(
    random: Any, scale: float, shift: float, rounding: float
) -> None:
    """In two, where most of the squares cancel, or are infinite.

    The interpreter adds up one number after the other, so the mean has the rounding of many.
    """
    columns = 20000
    x = random(2, columns, dtype=torch.float32, grad=False) * scale + shift
    outputs, launch = forward_launch(x, None, None, 1e-5, None, None, None, False, 1)
    config = next(c for c in FORWARD_CONFIGS if c.kwargs["TILE_ELEMENTS"] > columns)
    launch.kernel.fn[launch.grid](*launch.args, **launch.kwargs, **config.all_kwargs())
    mean, variance = x.double().mean(1), x.double().var(1, correction=0)
    rstd = (variance + 1e-5).rsqrt()
    off = rounding * float((mean.abs() * rstd).max())
    torch.testing.assert_close(outputs.mean.double(), mean, rtol=rounding, atol=1e-6)
    torch.testing.assert_close(outputs.rstd.double(), rstd, rtol=1e-5 + off**2, atol=0)
    right = (x.double() - mean[:, None]) * rstd[:, None]
    torch.testing.assert_close(outputs.y.double(), right, rtol=1e-5 + off**2, atol=1e-5 + off)


def test_which_config_a_launch_of_long_rows_has(random: Any) -> None:
    x, weight, rstd = random(2, 16400, grad=False), random(16400, grad=False), torch.ones(2)
    for dtype, bias, dres in (
        (torch.bfloat16, None, None),
        (torch.bfloat16, weight, None),
        (torch.bfloat16, None, x),
        (torch.float32, None, None),
    ):
        x = x.to(dtype)
        light = dtype == torch.bfloat16 and bias is dres is None
        assert is_light(16400, x.dtype.itemsize, bias is not None, dres is not None) == light
        plan = long_rows_plan(x, 1, bias is not None, dres is not None)
        operands = (plan, x, x, weight, bias, None, rstd, dres)
        _, made = backward_launch(*operands, False, True, None, recompute_output=False)
        assert config_of(long_rows_launch(made)) is LONG_BACKWARD_CONFIGS[light]
