"""The forward and backward pass over rows, without autograd, with FLA's names and arguments.

`layer_norm_fwd` and `layer_norm_bwd` can replace the functions of the same names in
`fla.modules.layernorm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from safetune.errors import InvalidOperand
from safetune.kernels.grid_policy import GridPlan
from safetune.kernels.launches import (
    BackwardOutputs,
    ForwardOutputs,
    Launch,
    are_few,
    backward_launch,
    backward_plan,
    few_rows_backward_launch,
    few_rows_forward_launch,
    finalize_launch,
    forward_launch,
    is_pinned,
    run_launch,
)
from safetune.kernels.long_rows import is_long, long_rows_launch, long_rows_plan
from safetune.kernels.operands import (
    check_device,
    check_dtypes,
    check_operands,
    check_options,
    check_tensors,
    stored,
)


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    num_groups: int = 1,
    *,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return (y, mean, rstd, residual_out) for `x` of shape [tokens * num_groups, columns].

    mean is None for RMS norm; mean and rstd are fp32 [tokens * num_groups]. residual_out is the
    normalized tensor: x + residual in the dtype of `residual`; without a residual, `x` in
    `residual_dtype` (`x` itself if that is its dtype).
    """
    check_tensors(x=x)
    check_options(eps, num_groups)
    check_dtypes(out_dtype=out_dtype, residual_dtype=residual_dtype)
    options = (out_dtype, residual_dtype, is_rms_norm, num_groups, deterministic)
    outputs, normalized, _ = forward_rows(x, weight, bias, eps, residual, *options)
    return outputs.y, outputs.mean, outputs.rstd, normalized


def forward_rows(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    is_rms_norm: bool,
    num_groups: int,
    deterministic: bool | None,
    shape: Sequence[int] | None = None,
    joined: bool = False,
) -> tuple[ForwardOutputs, Tensor, Launch]:
    """Return the outputs, residual_out and the launch: see `layer_norm_fwd`.

    y and a stored residual_out are of `shape`. With `joined`, the statistics are one tensor.
    """
    check_operands(x, num_groups, {"residual": residual}, {"weight": weight, "bias": bias})
    check_device(x)
    x, weight, bias, residual = stored(x=x, weight=weight, bias=bias, residual=residual)
    options = (out_dtype, residual_dtype, is_rms_norm, num_groups, shape, joined)
    operands = (x, weight, bias, float(eps), residual, *options)
    few = are_few(x, num_groups)
    outputs, launch = (few_rows_forward_launch if few else forward_launch)(*operands)
    if x.numel():
        with torch.cuda.device_of(x):
            run_launch(launch, is_pinned(deterministic))
    return outputs, x if outputs.residual is None else outputs.residual, launch


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    dres: Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
    num_groups: int = 1,
    *,
    deterministic: bool | None = None,
) -> tuple[Any, ...]:
    """Return (dx, dw, db, dres_in), and y after them if `recompute_output`.

    Args:
        x: residual_out of the forward pass, the tensor that was normalized.
        dres: the gradient of residual_out, if something else reads residual_out.
        has_residual: the forward pass added a residual, so dres_in is needed. It is `dx` itself
            unless `x_dtype`, the dtype of dx, differs from that of the residual.
    """
    check_tensors(dy=dy, x=x)
    check_dtypes(x_dtype=x_dtype)
    operands = (dy, x, weight, bias, mean, rstd, dres)
    options = (has_residual, is_rms_norm, x_dtype, recompute_output, num_groups)
    return backward_rows(*operands, *options, deterministic)[0]


class BackwardLaunches(NamedTuple):
    """What a backward pass launched; `plan` and `sums` are None where one kernel did it all."""

    plan: GridPlan | None
    rows: Launch
    sums: Launch | None


def backward_rows(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    dres: Tensor | None,
    has_residual: bool,
    is_rms_norm: bool,
    x_dtype: torch.dtype | None,
    recompute_output: bool,
    num_groups: int,
    deterministic: bool | None,
) -> tuple[tuple[Any, ...], BackwardLaunches]:
    """Return what `layer_norm_bwd` returns, and the launches."""
    matrices, vectors = {"dy": dy, "dres": dres}, {"weight": weight, "bias": bias}
    check_operands(x, num_groups, matrices, vectors, {"mean": mean, "rstd": rstd})
    check_device(x)
    rstd = _checked_statistics(mean, rstd, is_rms_norm)
    operands = stored(dy=dy, x=x, weight=weight, bias=bias, mean=mean, rstd=rstd, dres=dres)
    pinned = is_pinned(deterministic)
    if x.numel() and not recompute_output and are_few(x, num_groups):
        flags = (has_residual, is_rms_norm, x_dtype)
        (dx, dres_in, dw, db), launch = few_rows_backward_launch(*(*operands, *flags))
        with torch.cuda.device_of(x):
            run_launch(launch, pinned)
        dres_in = dx if has_residual and dres_in is None else dres_in
        return (dx, dw, db, dres_in), BackwardLaunches(None, launch, None)
    long = is_long(operands[0], operands[1], recompute_output, pinned)
    if long:
        plan = long_rows_plan(x, num_groups, bias is not None, dres is not None)
    else:
        plan = backward_plan(x, weight, bias, num_groups, pinned)
    arguments = (*operands, has_residual, is_rms_norm, x_dtype, recompute_output)
    outputs, launch = backward_launch(plan, *arguments)
    launch = long_rows_launch(launch) if long else launch
    with torch.cuda.device_of(x):
        if x.numel():
            run_launch(launch, pinned)
        (dw, db), sums = _finalize(plan, outputs, weight, bias, pinned)
    dres_in = outputs.x if has_residual and outputs.residual is None else outputs.residual
    gradients = (outputs.x, dw, db, dres_in)
    launches = BackwardLaunches(plan, launch, sums)
    return (*gradients, outputs.y) if recompute_output else gradients, launches


def _checked_statistics(mean: Tensor | None, rstd: Tensor | None, is_rms_norm: bool) -> Tensor:
    """Return rstd; raise `InvalidOperand` unless layer_norm_fwd can have returned both."""
    if rstd is None or (mean is None and not is_rms_norm):
        missing = "rstd" if rstd is None else "mean"
        raise InvalidOperand(f"{missing} is None; pass the {missing} that layer_norm_fwd returned")
    if rstd.dtype.itemsize < 4:  # all sums would have that dtype
        raise InvalidOperand(f"rstd is {rstd.dtype}; pass the rstd that layer_norm_fwd returned")
    return rstd


def _finalize(
    plan: GridPlan,
    outputs: BackwardOutputs,
    weight: Tensor | None,
    bias: Tensor | None,
    pinned: bool,
) -> tuple[tuple[Tensor | None, Tensor | None], Launch | None]:
    """Return (dw, db), the sums of all programs' partial sums, and the launches made for them."""
    if weight is None and bias is None:
        return (None, None), None
    if not outputs.x.numel():
        dw, db = (None if p is None else torch.zeros_like(p) for p in (weight, bias))
        return (dw, db), None
    partials = (outputs.weight_partials, outputs.bias_partials)
    gradients, launch = finalize_launch(plan, *partials, weight, bias)
    run_launch(launch, pinned)
    return gradients, launch
