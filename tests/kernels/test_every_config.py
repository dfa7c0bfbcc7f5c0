"""Every config of every kernel gives the same, right results, and programs keep to their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune.config import config_text
from safetune.kernels.configs import (
    BACKWARD_CONFIGS,
    FINALIZE_CONFIGS,
    FORWARD_CONFIGS,
    backward_tile_heights,
    prune_spilling,
    tile_rows,
)
from safetune.kernels.grid_policy import GridPlan, plan_grid
from safetune.kernels.launches import (
    Launch,
    backward_launch,
    finalize_launch,
    forward_launch,
)
from safetune.kernels.layer_norm import (
    layer_norm_backward_kernel,
    layer_norm_finalize_kernel,
    layer_norm_forward_kernel,
    owned_rows,
)

pytestmark = pytest.mark.usefixtures("loops")

kinds = pytest.mark.parametrize("is_rms_norm", [False, True], ids=["layer", "rms"])


def launch_with(kernel: Any, config: triton.Config, launch: Launch) -> None:
    kernel.fn[launch.grid](*launch.args, **launch.kwargs, **config.all_kwargs())


def poison(outputs: Any) -> None:
    """So that what a kernel leaves unwritten cannot look right."""
    for output in outputs:
        if output is not None:
            output.fill_(torch.nan)


@kinds
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("config", FORWARD_CONFIGS, ids=config_text)
def test_forward(
    reference: Any, close: Any, random: Any, config: Any, groups: int, is_rms_norm: bool
) -> None:
    x, residual = random(34, groups * 50, grad=False), random(34, groups * 50, grad=False)
    weight, bias = random(groups * 50, grad=False), random(groups * 50, grad=False)
    rows = (x.view(-1, 50), weight, bias, 1e-5, residual.view(-1, 50), None, None)
    outputs, launch = forward_launch(*rows, is_rms_norm, groups)
    poison(outputs)
    launch_with(layer_norm_forward_kernel, config, launch)
    exact = reference(
        *(t.double() for t in (x, weight, bias, residual)),
        is_rms_norm=is_rms_norm,
        num_groups=groups,
    )
    close(outputs.y.view_as(x), exact)
    assert torch.equal(outputs.residual.view_as(x), x + residual)


class Backward:
    """One backward problem with its exact gradients."""

    def __init__(self, random: Any, tokens: int, columns: int, groups: int, is_rms_norm: bool):
        shape = (tokens * groups, columns)
        self.x, self.dy, self.dres = (random(*shape, grad=False) for _ in range(3))
        self.weight, self.bias = (random(groups * columns, grad=False) for _ in range(2))
        centred = self.x if is_rms_norm else self.x - self.x.mean(1, keepdim=True)
        self.rstd = (centred.square().mean(1) + 1e-5).rsqrt()
        self.mean = None if is_rms_norm else self.x.mean(1)
        self.groups, self.is_rms_norm = groups, is_rms_norm

    def run(self, plan: GridPlan, config: Any, *, in_place: bool = False) -> Any:
        """Return dx, dw and db; in place, dx is stored over dy."""
        dy = self.dy.clone()
        outputs, launch = backward_launch(
            plan,
            dy,
            self.x,
            self.weight,
            self.bias,
            self.mean,
            self.rstd,
            self.dres,
            has_residual=True,
            is_rms_norm=self.is_rms_norm,
            x_dtype=None,
            recompute_output=False,
        )
        poison(outputs)
        if in_place:
            args = tuple(dy if argument is outputs.x else argument for argument in launch.args)
            launch = launch._replace(args=args)
        launch_with(layer_norm_backward_kernel, config, launch)
        partials = (outputs.weight_partials, outputs.bias_partials)
        gradients, finalize = finalize_launch(plan, *partials, self.weight, self.bias)
        poison(gradients)
        launch_with(layer_norm_finalize_kernel, FINALIZE_CONFIGS[0], finalize)
        return (dy if in_place else outputs.x, *gradients)

    def exact(self, reference: Any) -> Any:
        tokens = len(self.x) // self.groups
        leaves = [t.double().requires_grad_() for t in (self.x, self.weight, self.bias)]
        x = leaves[0].view(tokens, -1)
        y = reference(x, *leaves[1:], is_rms_norm=self.is_rms_norm, num_groups=self.groups)
        return torch.autograd.grad(
            (y, leaves[0]), leaves, (self.dy.double().view_as(y), self.dres.double())
        )


@kinds
@pytest.mark.parametrize(
    ("tokens", "groups", "sm_count"), [(1, 1, 4), (129, 1, 2), (67, 1, 16), (13, 3, 3), (2, 5, 1)]
)
@pytest.mark.parametrize("config", BACKWARD_CONFIGS, ids=config_text)
def test_backward(
    reference: Any,
    close: Any,
    random: Any,
    config: Any,
    tokens: int,
    groups: int,
    sm_count: int,
    is_rms_norm: bool,
) -> None:
    """Tiles taller and lower than a program's run of rows, more programs than rows, groups.

    Stored over dy, a row that two programs write would be computed from the first one's result.
    """
    problem = Backward(random, tokens, 50, groups, is_rms_norm)
    plan = plan_grid(tokens, groups, sm_count, [4, 8, 16])
    gradients = problem.run(plan, config)
    for mine, right in zip(gradients, problem.exact(reference), strict=True):
        close(mine, right)
    in_place = problem.run(plan, config, in_place=True)
    assert all(map(torch.equal, in_place, gradients))


@pytest.mark.parametrize("columns", [7, 50, 200])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("config", FINALIZE_CONFIGS, ids=config_text)
def test_finalize(close: Any, random: Any, config: Any, groups: int, columns: int) -> None:
    plan = plan_grid(1000, groups, 50, [1])
    partials = [random(plan.programs, columns, grad=False) for _ in range(2)]
    weight, bias = random(groups * columns), random(groups * columns, dtype=torch.float16)
    gradients, launch = finalize_launch(plan, *partials, weight, bias)
    poison(gradients)
    launch_with(layer_norm_finalize_kernel, config, launch)
    for gradient, partial in zip(gradients, partials, strict=True):
        close(gradient, partial.double().view(groups, -1, columns).sum(1).flatten())


@triton.jit
def _store_owned_rows(output_pointer, rows, alignment, programs):
    index = tl.program_id(0).to(tl.int64)
    first, end = owned_rows(index, rows, alignment, programs)
    tl.store(output_pointer + 2 * index, first)
    tl.store(output_pointer + 2 * index + 1, end)


@pytest.mark.parametrize("rows", [1, 7, 129, 450, 24100, 2**31 - 1, 2**31])
def test_device_and_host_agree_on_the_rows(device: str, rows: int) -> None:
    """`owned_rows` on the device is `GridPlan.owned_rows`, up to the ends of 32 bits."""
    plan = plan_grid(rows, 1, 13, [8, 16, 64])
    found = torch.empty(plan.programs, 2, dtype=torch.int64, device=device)
    _store_owned_rows[(plan.programs,)](found, rows, plan.alignment, plan.programs_per_group)
    owned = [plan.owned_rows(program) for program in range(plan.programs)]
    assert found.tolist() == [[rows.start, rows.stop] for rows in owned]


@pytest.mark.parametrize("columns", [1, 50, 256, 4096, 8192, 65536])
@pytest.mark.parametrize("configs", [FORWARD_CONFIGS, BACKWARD_CONFIGS], ids=["fwd", "bwd"])
def test_pruning_leaves_some(configs: list[triton.Config], columns: int) -> None:
    left = prune_spilling(configs, {}, COLUMNS=columns, GROUPS=1)
    assert left
    if columns <= 1024:
        assert left == configs


def test_tiles_are_whole_rows() -> None:
    assert [tile_rows(4096, columns) for columns in (1, 50, 64, 4096, 5000)] == [4096, 64, 64, 1, 1]
    assert sorted(set(backward_tile_heights(256))) == [4, 8, 16, 32]
