"""On a GPU: every config at the sizes people use, offsets past 2^31, nothing compiled twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from safetune.config import config_text
from safetune.kernels import launches, layer_norm
from safetune.kernels.configs import BACKWARD_CONFIGS, FINALIZE_CONFIGS, FORWARD_CONFIGS
from safetune.kernels.layer_norm import (
    layer_norm_backward_kernel,
    layer_norm_finalize_kernel,
    layer_norm_forward_kernel,
)

pytestmark = pytest.mark.gpu

kinds = pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])

CONFIGS = [
    *((layer_norm_forward_kernel, config) for config in FORWARD_CONFIGS),
    *((layer_norm_backward_kernel, config) for config in BACKWARD_CONFIGS),
    *((layer_norm_finalize_kernel, config) for config in FINALIZE_CONFIGS),
]


def check(
    x: Any, weight: Any, bias: Any, dy: Any, helpers: Any, rows_per_sum: int, is_rms_norm: bool
) -> None:
    """Compare y and all gradients with the definition in fp64.

    The sums over rows in dw and db are of `rows_per_sum` fp32 terms: their rounding grows like the
    square root of that, as the sum itself does, and so is compared with the largest element.
    """
    reference, exact_leaves, gradients, close = helpers
    leaves = (x, weight, bias)
    exact = exact_leaves(*leaves)
    y = layer_norm(*leaves, is_rms_norm=is_rms_norm)
    right = reference(*exact, is_rms_norm=is_rms_norm)
    close(y, right)
    mine = gradients(y, dy, *leaves)
    theirs = gradients(right, dy.double(), *exact)
    close(mine[0], theirs[0], slack=2.0)
    for gradient, exact_gradient in zip(mine[1:], theirs[1:], strict=True):
        close(gradient, exact_gradient, slack=max(1.0, rows_per_sum**0.5 / 64))


@pytest.fixture
def helpers(reference: Any, exact_leaves: Any, gradients: Any, close: Any) -> Any:
    return reference, exact_leaves, gradients, close


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(450, 256), (4096, 1024), (10007, 513), (1031, 4096), (257, 8192), (67, 16384), (33, 32768)],
    ids=str,
)
def test_large(
    helpers: Any, random: Any, shape: tuple[int, int], dtype: torch.dtype, is_rms_norm: bool
) -> None:
    rows, columns = shape
    operands = (random(rows, columns, dtype=dtype), random(columns), random(columns, dtype=dtype))
    dy = random(rows, columns, dtype=dtype, grad=False)
    check(*operands, dy, helpers, rows, is_rms_norm)


@pytest.mark.parametrize("columns", [50, 256, 4096])
@pytest.mark.parametrize(
    ("kernel", "config"),
    CONFIGS,
    ids=[f"{kernel.base_fn.__name__}-{config_text(config)}" for kernel, config in CONFIGS],
)
def test_every_config(
    monkeypatch: pytest.MonkeyPatch,
    helpers: Any,
    random: Any,
    kernel: Any,
    config: triton.Config,
    columns: int,
) -> None:
    launches = []

    def run(*args: Any, **kwargs: Any) -> Any:
        launches.append(config)
        return kernel.fn.run(*args, **kwargs, **config.all_kwargs())

    kernel.forget_launches()  # and not by setattr, which would leave a `run` there
    monkeypatch.setitem(vars(kernel), "run", run)
    rows = 1025 if columns > 256 else 34001  # more than a round of the tallest tiles
    operands = (random(rows, columns), random(columns), random(columns))
    check(*operands, random(rows, columns, grad=False), helpers, rows, is_rms_norm=False)
    assert launches == [config]


def test_no_compile_for_new_numbers_of_rows(monkeypatch: pytest.MonkeyPatch, random: Any) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(launches, "FEW_ROWS", 512)
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda *args, fn, **kwargs: compiled.append(fn.name),
    )
    weight, bias = random(384), random(384)
    for rows in (1, 2, 16, 100, 450, 4096, 20_000, 100_000, 1_000_000):
        x = random(rows, 384)
        layer_norm(x, weight, bias).sum().backward()
        torch.cuda.synchronize()
    assert sorted(name.rpartition(".")[2] for name in compiled) == [
        "few_rows_backward_kernel",
        "few_rows_forward_kernel",
        "layer_norm_backward_kernel",
        "layer_norm_finalize_kernel",
        "layer_norm_forward_kernel",
    ]


@kinds
def test_offsets_past_2_31(helpers: Any, random: Any, is_rms_norm: bool) -> None:
    """The last rows of more than 2^31 elements are right; 12.9 GB in all."""
    columns = 4096
    rows = 2**31 // columns + 100
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    reference, _, gradients, close = helpers
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    tail = random(64, columns, dtype=torch.bfloat16, grad=False)
    x[-64:] = tail
    x.requires_grad_()
    weight = random(columns)
    y = layer_norm(x, weight, None, is_rms_norm=is_rms_norm)
    exact_tail = tail.double().requires_grad_()
    exact = reference(exact_tail, weight.double(), None, is_rms_norm=is_rms_norm)
    close(y[-64:], exact)
    (dx,) = gradients(y, y.detach(), x)
    (right,) = gradients(exact, y[-64:].detach().double(), exact_tail)
    close(dx[-64:], right, slack=2.0)
    assert not dx[0].any()
