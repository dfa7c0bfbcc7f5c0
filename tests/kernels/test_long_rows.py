"""The backward kernel for rows of two slices against the definition in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from safetune.kernels import rms_norm
from safetune.kernels.configs import LONG_BACKWARD_CONFIGS
from safetune.kernels.launches import backward_launch, backward_plan, is_long, long_rows_launch
from safetune.kernels.long_rows import long_rows_backward_kernel
from safetune.verify.overlap import check_overlap

pytestmark = pytest.mark.usefixtures("loops")

kinds = pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])


@pytest.mark.parametrize(
    ("columns", "groups", "is_rms_norm", "dtype", "dx_dtype"),
    [
        (16385, 1, False, torch.float32, torch.bfloat16),
        (16385, 1, True, torch.float16, torch.float32),
        (20000, 2, False, torch.bfloat16, torch.float32),
        (20000, 2, True, torch.float32, torch.bfloat16),
        (32768, 1, False, torch.float16, torch.bfloat16),
        (32768, 1, True, torch.bfloat16, torch.float32),
    ],
)
def test_gradients(
    reference: Any,
    close: Any,
    random: Any,
    columns: int,
    groups: int,
    is_rms_norm: bool,
    dtype: torch.dtype,
    dx_dtype: torch.dtype,
) -> None:
    """With a residual's gradient, which is added and, in another dtype than dx, stored as well."""
    x, dy, dres = (random(4 * groups, columns, dtype=dtype, grad=False) for _ in range(3))
    weight = random(groups * columns, grad=False)
    mean = None if is_rms_norm else x.float().mean(1)
    centred = x.float() if mean is None else x.float() - mean[:, None]
    rstd = (centred.square().mean(1) + 1e-5).rsqrt()
    operands = (dy, x, weight, None, mean, rstd, dres)
    plan = backward_plan(x, weight, None, groups)
    outputs, made = backward_launch(
        plan, *operands, True, is_rms_norm, dx_dtype, recompute_output=False
    )
    for output in (outputs.x, outputs.residual, outputs.weight_partials):
        output.fill_(torch.nan)  # so that what is left unwritten cannot look right
    launch = long_rows_launch(made)
    (config,) = LONG_BACKWARD_CONFIGS
    kernel = launch.kernel.fn
    kernel[launch.grid](*launch.args, **launch.kwargs, **config.all_kwargs())

    leaves = [leaf.double().requires_grad_() for leaf in (x, weight)]
    tokens = leaves[0].view(-1, groups * columns)
    options = {"is_rms_norm": is_rms_norm, "num_groups": groups}
    y = reference(tokens, leaves[1], None, **options)
    incoming = (dy.double().view_as(y), dres.double())
    dx, dw = torch.autograd.grad((y, leaves[0]), leaves, incoming)
    close(outputs.x, dx, slack=2.0)
    close(outputs.residual, dx, slack=2.0)
    close(outputs.weight_partials.view(groups, -1, columns).sum(1).flatten(), dw)


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


def test_which_rows_are_long(random: Any) -> None:
    rows, weight = random(2, 16385), random(16385)
    assert is_long(rows, weight, None, False, pinned=False)
    for changed in (
        (rows, weight, weight, False, False),
        (rows, None, None, False, False),
        (rows, weight, None, True, False),
        (rows, weight, None, False, True),
        (rows.double(), weight, None, False, False),
        (random(2, 16384), weight, None, False, False),
        (random(1, 32769), weight, None, False, False),
    ):
        assert not is_long(*changed)


@kinds
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_one_program_writes_each_element(random: Any, tokens: int, is_rms_norm: bool) -> None:
    x, dy, weight = random(tokens, 16400), random(tokens, 16400), random(16400)
    mean, rstd = torch.zeros_like(x[:, 0]), torch.ones_like(x[:, 0])
    operands = (dy, x, weight, None, None if is_rms_norm else mean, rstd, None)
    outputs, made = backward_launch(
        backward_plan(x, weight, None, 1),
        *operands,
        False,
        is_rms_norm,
        None,
        recompute_output=False,
    )
    launch = long_rows_launch(made)
    call = (long_rows_backward_kernel, launch.grid, *launch.args)
    names = ["input_gradient_pointer", "weight_partials_pointer"]
    (config,) = LONG_BACKWARD_CONFIGS
    report = check_overlap(*call, config=config, outputs=names, **launch.kwargs)
    assert report.ok, str(report)
    assert report.idle_programs == (), str(report)
    assert outputs.bias_partials is None
