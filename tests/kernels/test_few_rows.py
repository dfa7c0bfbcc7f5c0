"""The kernels for few rows: every config against the definition in fp64, and what launches them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from safetune.config import config_text
from safetune.kernels import group_norm, launches, layer_norm_linear, rms_norm
from safetune.kernels.configs import FEW_BACKWARD_CONFIGS, FEW_FORWARD_CONFIGS, prune_few_configs
from safetune.kernels.few_rows import few_rows_backward_kernel, few_rows_forward_kernel
from safetune.kernels.launches import few_rows_backward_launch, few_rows_forward_launch
from safetune.verify.overlap import check_overlap

pytestmark = pytest.mark.usefixtures("loops")

kinds = pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])
ROWS, COLUMNS = 37, 50


@pytest.fixture
def most_few_rows() -> int:
    return 512


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched."""
    names: list[str] = []
    run_launch = launches.run_launch

    def noting(launch: Any, pinned: bool) -> None:
        names.append(launch.kernel.base_fn.__name__)
        run_launch(launch, pinned)

    monkeypatch.setattr("safetune.kernels.functional.run_launch", noting)
    return names


def run(launch: Any, config: triton.Config) -> None:
    kernel = launch.kernel.fn
    kernel[launch.grid](*launch.args, **launch.kwargs, **config.all_kwargs())


def poison(outputs: Any) -> None:
    """So that what a kernel leaves unwritten cannot look right."""
    for output in outputs:
        if output is not None:
            output.fill_(torch.nan)


@kinds
@pytest.mark.parametrize("config", FEW_FORWARD_CONFIGS, ids=config_text)
def test_forward(reference: Any, close: Any, random: Any, config: Any, is_rms_norm: bool) -> None:
    x, residual = random(ROWS, COLUMNS, grad=False), random(ROWS, COLUMNS, grad=False)
    weight, bias = random(COLUMNS, grad=False), random(COLUMNS, grad=False)
    operands = (x, weight, bias, 1e-5, residual, None, None, is_rms_norm, 1)
    outputs, launch = few_rows_forward_launch(*operands)
    poison(outputs)
    run(launch, config)
    exact = reference(*(t.double() for t in (x, weight, bias, residual)), is_rms_norm=is_rms_norm)
    close(outputs.y, exact)
    assert torch.equal(outputs.residual, x + residual)
    assert outputs.rstd.isfinite().all()


@kinds
@pytest.mark.parametrize("config", FEW_BACKWARD_CONFIGS, ids=config_text)
def test_backward(reference: Any, close: Any, random: Any, config: Any, is_rms_norm: bool) -> None:
    """dx in another dtype than the residual's gradient, which is then stored apart."""
    x, weight, bias = random(ROWS, COLUMNS), random(COLUMNS), random(COLUMNS)
    dy, dres = random(ROWS, COLUMNS, grad=False), random(ROWS, COLUMNS, grad=False)
    mean = None if is_rms_norm else x.detach().mean(1)
    centred = x.detach() - (0 if mean is None else mean[:, None])
    rstd = (centred.square().mean(1) + 1e-5).rsqrt()
    operands = (dy, x, weight, bias, mean, rstd, dres, True, is_rms_norm, torch.bfloat16)
    outputs, launch = few_rows_backward_launch(*operands)
    poison(outputs)
    run(launch, config)

    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, weight, bias)]
    y = reference(*leaves, is_rms_norm=is_rms_norm)
    dx, dw, db = torch.autograd.grad((y, leaves[0]), leaves, (dy.double(), dres.double()))
    for found, right in zip(outputs, (dx, dx, dw, db), strict=True):
        close(found, right)


@pytest.mark.parametrize("columns", [1, 3, 50, 8192])
@kinds
def test_widths(
    reference: Any, exact_leaves: Any, gradients: Any, close: Any, random: Any, columns: int,
    is_rms_norm: bool,
) -> None:  # fmt: skip
    leaves = [random(2, columns), random(columns), random(columns)]
    exact = exact_leaves(*leaves)
    ours = group_norm(*leaves, is_rms_norm=is_rms_norm)
    right = reference(*exact, is_rms_norm=is_rms_norm)
    close(ours, right)
    dy = random(2, columns, grad=False)
    mine, theirs = gradients(ours, dy, *leaves), gradients(right, dy.double(), *exact)
    for gradient, exact_gradient in zip(mine, theirs, strict=True):
        close(gradient, exact_gradient, slack=2.0)


@pytest.mark.parametrize(
    ("shape", "groups", "few"),
    [
        ((1, 24), 1, True),
        ((8, 64, 24), 1, True),
        ((513, 24), 1, False),
        ((9, 24), 2, False),
        ((1, 8193), 1, False),
    ],
)
def test_what_few_rows_are(
    launched: list[str], random: Any, shape: tuple[int, ...], groups: int, few: bool
) -> None:
    group_norm(random(*shape), random(shape[-1]), None, num_groups=groups).sum().backward()
    expected = ["few_rows_forward_kernel", "few_rows_backward_kernel"]
    assert (launched == expected) == few
    assert (len(launched) == 3) == (not few)


def test_an_output_that_is_recomputed_is_not_of_few_rows(launched: list[str], random: Any) -> None:
    """The map after the norm takes longer than any launch."""
    x, weight = random(3, 24), random(8, 24)
    layer_norm_linear(x, random(24), None, weight, None).sum().backward()
    assert launched == [
        "few_rows_forward_kernel",
        "layer_norm_backward_kernel",
        "layer_norm_finalize_kernel",
    ]


def test_a_pinned_call_of_few_rows_launches_the_first_config(random: Any) -> None:
    x = random(5, 24)
    pinned = rms_norm(x, None, None, deterministic=True)
    outputs, launch = few_rows_forward_launch(x, None, None, 1e-5, None, None, None, True, 1)
    run(launch, prune_few_configs(FEW_FORWARD_CONFIGS, {}, COLUMNS=24)[0])
    assert torch.equal(pinned, outputs.y)


@kinds
@pytest.mark.parametrize("rows", [1, 3, 65])
def test_one_program_writes_each_element(random: Any, rows: int, is_rms_norm: bool) -> None:
    """Of each config; no program is idle."""
    x, weight, bias = (random(*shape, grad=False) for shape in ((rows, 20), (20,), (20,)))
    forward = (x, weight, bias, 1e-5, x.clone(), None, None, is_rms_norm, 1)
    mean, rstd = torch.zeros_like(x[:, 0]), torch.ones_like(x[:, 0])
    backward = (x.clone(), x, weight, bias, None if is_rms_norm else mean, rstd, None)
    for kernel, (outputs, launch) in (
        (few_rows_forward_kernel, few_rows_forward_launch(*forward)),
        (few_rows_backward_kernel, few_rows_backward_launch(*backward, False, is_rms_norm, None)),
    ):
        made = {id(output) for output in outputs if output is not None}
        named = zip(kernel.arg_names, launch.args, strict=False)
        names = [name for name, value in named if id(value) in made]
        for config in kernel.configs:
            call = (kernel, launch.grid, *launch.args)
            report = check_overlap(*call, config=config, outputs=names, **launch.kwargs)
            assert report.ok, str(report)
            assert report.idle_programs == (), str(report)
