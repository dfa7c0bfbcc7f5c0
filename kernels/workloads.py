"""The work that `safetune tune safetune.kernels.layer_norm` tunes the kernels for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from safetune import Workload
from safetune.kernels.launches import (
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

#: (tokens, hidden size), one per hidden size: the number of tokens is in no tuning key. On a GPU
#: each matrix is larger than the L2 cache, as it is in training.
GPU_SHAPES = (
    (262144, 256),
    (131072, 512),
    (32768, 1024),
    (32768, 2048),
    (32768, 4096),
    (16384, 8192),
    (8192, 16384),
    (4096, 32768),
)
INTERPRETER_SHAPES = ((16, 64), (33, 50))


def _problems(
    device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, bool, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield (name, is_rms_norm, x, weight, bias); RMS norm goes without a bias."""
    for rows, columns in INTERPRETER_SHAPES if device.type == "cpu" else GPU_SHAPES:
        x = torch.randn(rows, columns, device=device, dtype=dtype)
        weight = torch.randn(columns, device=device, dtype=dtype)
        bias = torch.randn(columns, device=device, dtype=dtype)
        yield f"layer-{rows}x{columns}", False, x, weight, bias
        yield f"rms-{rows}x{columns}", True, x, weight, None


@layer_norm_forward_kernel.workload
def _forward_workload(device: torch.device, dtype: torch.dtype) -> Iterator[Workload]:
    for name, is_rms_norm, x, weight, bias in _problems(device, dtype):
        _, launch = forward_launch(
            x,
            weight,
            bias,
            eps=1e-5,
            residual=None,
            out_dtype=None,
            residual_dtype=None,
            is_rms_norm=is_rms_norm,
            num_groups=1,
        )
        yield Workload(name, *launch)


@layer_norm_backward_kernel.workload
def _backward_workload(device: torch.device, dtype: torch.dtype) -> Iterator[Workload]:
    for name, is_rms_norm, x, weight, bias in _problems(device, dtype):
        _, launch = backward_launch(
            backward_plan(x, num_groups=1),
            torch.randn_like(x),
            x,
            weight,
            bias,
            # The statistics of standard normal rows.
            mean=None if is_rms_norm else x.new_zeros(len(x), dtype=torch.float32),
            rstd=x.new_ones(len(x), dtype=torch.float32),
            dres=None,
            has_residual=False,
            is_rms_norm=is_rms_norm,
            x_dtype=None,
            recompute_output=False,
        )
        yield Workload(name, *launch)


@layer_norm_finalize_kernel.workload
def _finalize_workload(device: torch.device, dtype: torch.dtype) -> Iterator[Workload]:
    for name, _, x, weight, bias in _problems(device, dtype):
        plan = backward_plan(x, num_groups=1)
        partials = torch.randn(plan.programs, x.shape[1], device=device)
        bias_partials = torch.randn_like(partials) if bias is not None else None
        _, launch = finalize_launch(plan, partials, bias_partials, weight, bias)
        yield Workload(name, *launch)
