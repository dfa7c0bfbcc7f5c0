"""The workloads of `safetune tune safetune.kernels.layer_norm`.

For each hidden size: layer norm with weight and bias, and RMS norm with a weight, each with and
without a residual; and norms over groups. So there is one workload for each key of

- the forward kernel: plain, and adding and storing a residual;
- the backward kernel: plain, and adding the gradient of the stored residual;
- the finalize kernel: sums of one parameter, and of two.

Other keys are tuned at their first launch: bias without weight or neither, sums in another dtype,
an output recomputed for a linear layer, an output in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from safetune import Workload
from safetune.kernels.launches import (
    BackwardOutputs,
    Launch,
    backward_launch,
    backward_plan,
    finalize_launch,
    forward_launch,
)
from safetune.kernels.layer_norm import (
    layer_norm_backward_kernel,
    layer_norm_finalize_kernel,
    layer_norm_forward_kernel,
)

#: (tokens, groups, columns); one entry per number of columns without groups, because the number of
#: tokens is not part of a key. On a GPU each matrix is larger than the L2 cache, as in training.
GPU_SHAPES = (
    (524288, 1, 128),
    (262144, 1, 256),
    (131072, 1, 512),
    (32768, 1, 1024),
    (32768, 1, 2048),
    (32768, 1, 4096),
    (16384, 1, 8192),
    (8192, 1, 16384),
    (4096, 1, 32768),
    (32768, 16, 128),
)
INTERPRETER_SHAPES = ((33, 1, 50), (5, 3, 20))


@dataclass(frozen=True)
class Problem:
    """One norm of [tokens * groups, columns] matrices of a dtype, on a device."""

    tokens: int
    groups: int
    columns: int
    is_rms_norm: bool
    with_residual: bool
    device: torch.device
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name that `safetune tune` prints."""
        kind = "rms" if self.is_rms_norm else "layer"
        groups = f"x{self.groups}" if self.groups > 1 else ""
        residual = "-residual" if self.with_residual else ""
        return f"{kind}{residual}-{self.tokens}{groups}x{self.columns}"

    def matrix(self) -> torch.Tensor:
        """Return a matrix of normal random numbers."""
        rows = self.tokens * self.groups
        return torch.randn(rows, self.columns, device=self.device, dtype=self.dtype)

    def parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a weight and a bias; the bias is None for RMS norm."""
        count = self.groups * self.columns
        weight, bias = (torch.randn(count, device=self.device, dtype=self.dtype) for _ in range(2))
        return weight, None if self.is_rms_norm else bias


def problems(device: torch.device, dtype: torch.dtype) -> Iterator[Problem]:
    """Yield all problems; those with groups are without a residual."""
    for shape in INTERPRETER_SHAPES if device.type == "cpu" else GPU_SHAPES:
        for is_rms_norm in (False, True):
            for with_residual in (False, True) if shape[1] == 1 else (False,):
                yield Problem(*shape, is_rms_norm, with_residual, device, dtype)


def _workload(problem: Problem, outputs: Iterable[Any], launch: Launch) -> Workload:
    """Return a launch as a workload; a kernel writes every element of its outputs."""
    made = {id(output) for output in outputs if output is not None}
    named = zip(launch.kernel.arg_names, launch.args, strict=False)
    return Workload(problem.name, *launch[1:], outputs=[name for name, v in named if id(v) in made])


@layer_norm_forward_kernel.workload
def _forward_workload(device: torch.device, dtype: torch.dtype) -> Iterator[Workload]:
    for problem in problems(device, dtype):
        made = forward_launch(
            problem.matrix(),
            *problem.parameters(),
            eps=1e-5,
            residual=problem.matrix() if problem.with_residual else None,
            out_dtype=None,
            residual_dtype=None,
            is_rms_norm=problem.is_rms_norm,
            num_groups=problem.groups,
        )
        yield _workload(problem, *made)


@layer_norm_backward_kernel.workload
def _backward_workload(device: torch.device, dtype: torch.dtype) -> Iterator[Workload]:
    for problem in problems(device, dtype):
        yield _workload(problem, *_backward_of(problem))


def _backward_of(problem: Problem) -> tuple[BackwardOutputs, Launch]:
    """Return the outputs and the launch of the backward kernel for a problem, on new operands."""
    x = problem.matrix()
    weight, bias = problem.parameters()
    return backward_launch(
        backward_plan(x, weight, bias, problem.groups),
        problem.matrix(),
        x,
        weight,
        bias,
        # The statistics of standard normal rows.
        mean=None if problem.is_rms_norm else x.new_zeros(len(x), dtype=torch.float32),
        rstd=x.new_ones(len(x), dtype=torch.float32),
        dres=problem.matrix() if problem.with_residual else None,
        has_residual=problem.with_residual,
        is_rms_norm=problem.is_rms_norm,
        x_dtype=None,
        recompute_output=False,
    )


@layer_norm_finalize_kernel.workload
def _finalize_workload(device: torch.device, dtype: torch.dtype) -> Iterator[Workload]:
    for problem in problems(device, dtype):
        if problem.with_residual or problem.groups > 1:
            continue  # its key is tuned already
        weight, bias = problem.parameters()
        plan = backward_plan(problem.matrix(), weight, bias, num_groups=1)
        partials = torch.randn(plan.programs, problem.columns, device=device)
        bias_partials = torch.randn_like(partials) if bias is not None else None
        made = finalize_launch(plan, partials, bias_partials, weight, bias)
        yield _workload(problem, *made)
