"""LayerNorm and RMSNorm as differentiable functions, with the names and arguments of FLA's.

`layer_norm_fwd` and `layer_norm_bwd` have the signatures of their namesakes in
`fla.modules.layernorm` and can be put in their place.
"""

from __future__ import annotations

from typing import Any

import torch

from safetune.kernels.grid_policy import GridPlan
from safetune.kernels.launches import (
    BackwardOutputs,
    backward_launch,
    backward_plan,
    check_operands,
    finalize_launch,
    forward_launch,
)
from safetune.kernels.layer_norm import (
    layer_norm_backward_kernel,
    layer_norm_finalize_kernel,
    layer_norm_forward_kernel,
)


def layer_norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return (y, mean, rstd, residual_out) for `x` of shape [tokens * num_groups, columns].

    mean is None for RMS norm; mean and rstd are fp32 [tokens * num_groups]. residual_out is what
    was normalized: x + residual in `residual_dtype`, or `x` itself where that is the same.

    Raises:
        ValueError: a shape does not go with that of `x`, or the rows are too long.
    """
    check_operands(x, num_groups, {"residual": residual}, {"weight": weight, "bias": bias})
    x, weight, bias, residual = _contiguous(x, weight, bias, residual)
    outputs, launch = forward_launch(
        x, weight, bias, eps, residual, out_dtype, residual_dtype, is_rms_norm, num_groups
    )
    if x.numel():
        with torch.cuda.device_of(x):
            layer_norm_forward_kernel[launch.grid](*launch.args, **launch.kwargs)
    normalized = x if outputs.residual is None else outputs.residual
    return outputs.y, outputs.mean, outputs.rstd, normalized


def layer_norm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None = None,
    rstd: torch.Tensor | None = None,
    dres: torch.Tensor | None = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: torch.dtype | None = None,
    recompute_output: bool = False,
    num_groups: int = 1,
) -> tuple[Any, ...]:
    """Return (dx, dw, db, dres_in), and y after them if `recompute_output`.

    Args:
        x: what the forward pass normalized, its residual_out.
        dres: the gradient of residual_out where something else reads that too.
        has_residual: the forward pass added a residual, so dres_in is wanted: `dx` itself unless
            `x_dtype`, the dtype of dx, is another than that of the residual.

    Raises:
        ValueError: a shape does not go with that of `x`, or the rows are too long.
    """
    check_operands(x, num_groups, {"dy": dy, "dres": dres}, {"weight": weight, "bias": bias})
    dy, x, weight, bias, dres = _contiguous(dy, x, weight, bias, dres)
    plan = backward_plan(x, num_groups)
    outputs, launch = backward_launch(
        plan,
        dy,
        x,
        weight,
        bias,
        mean,
        rstd,
        dres,
        has_residual,
        is_rms_norm,
        x_dtype,
        recompute_output,
    )
    if x.numel():
        with torch.cuda.device_of(x):
            layer_norm_backward_kernel[launch.grid](*launch.args, **launch.kwargs)
    dw, db = _finalize(plan, outputs, weight, bias)
    dres_in = outputs.x if has_residual and outputs.residual is None else outputs.residual
    gradients = (outputs.x, dw, db, dres_in)
    return (*gradients, outputs.y) if recompute_output else gradients


def _finalize(
    plan: GridPlan,
    outputs: BackwardOutputs,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (dw, db): the partial sums of all programs, added up."""
    if weight is None and bias is None:
        return None, None
    if not outputs.x.numel():
        dw, db = (None if p is None else torch.zeros_like(p) for p in (weight, bias))
        return dw, db
    partials = (outputs.weight_partials, outputs.bias_partials)
    gradients, launch = finalize_launch(plan, *partials, weight, bias)
    with torch.cuda.device_of(outputs.x):
        layer_norm_finalize_kernel[launch.grid](*launch.args, **launch.kwargs)
    return gradients


class LayerNormFunction(torch.autograd.Function):
    """Normalizes over the last dimension, or over each of `num_groups` parts of it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
        eps: float = 1e-5,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
        is_rms_norm: bool = False,
        num_groups: int = 1,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return y, and residual_out after it if `prenorm`."""
        if x.shape[-1] % num_groups:
            raise ValueError(f"num_groups={num_groups} does not divide {x.shape[-1]} channels")
        if residual is not None and residual.shape != x.shape:
            raise ValueError(f"residual has shape {tuple(residual.shape)}, x {tuple(x.shape)}")
        shape, matrix = x.shape, (x.shape[:-1].numel() * num_groups, x.shape[-1] // num_groups)
        y, mean, rstd, normalized = layer_norm_fwd(
            x.reshape(matrix),
            weight,
            bias,
            eps,
            None if residual is None else residual.reshape(matrix),
            residual_dtype=torch.float32 if residual_in_fp32 else None,
            is_rms_norm=is_rms_norm,
            num_groups=num_groups,
        )
        ctx.save_for_backward(normalized, weight, bias, mean, rstd)
        ctx.shape, ctx.x_dtype, ctx.has_residual = shape, x.dtype, residual is not None
        ctx.is_rms_norm, ctx.num_groups = is_rms_norm, num_groups
        # An output that nothing reads has no gradient, rather than one full of zeros.
        ctx.set_materialize_grads(False)
        return (y.view(shape), normalized.view(shape)) if prenorm else y.view(shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dy: torch.Tensor | None, dres: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, weight, bias and residual."""
        x, weight, bias, mean, rstd = ctx.saved_tensors
        not_tensors = (None,) * 5
        if dy is None:
            dx = None if dres is None else dres.to(ctx.x_dtype)
            return dx, None, None, dres if ctx.has_residual else None, *not_tensors
        dx, dw, db, dres_in = layer_norm_bwd(
            dy.reshape(x.shape),
            x,
            weight,
            bias,
            mean,
            rstd,
            None if dres is None else dres.reshape(x.shape),
            ctx.has_residual,
            ctx.is_rms_norm,
            x_dtype=ctx.x_dtype,
            num_groups=ctx.num_groups,
        )
        dres_in = None if dres_in is None else dres_in.view(ctx.shape)
        return dx.view(ctx.shape), dw, db, dres_in, *not_tensors


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return LayerNorm of `x`, or of x + residual, over the last dimension, in the dtype of `x`.

    With `prenorm`, return (y, residual_out): x + residual in the dtype of `residual`; without a
    residual `x`, in fp32 if `residual_in_fp32`. Any float dtypes may be mixed; statistics and the
    affine map are computed in fp32. Not twice differentiable.

    Raises:
        ValueError: a shape does not go with that of `x`, or the last dimension is too long.
    """
    return LayerNormFunction.apply(
        x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm
    )


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return RMSNorm of `x`; everything else is as for `layer_norm`."""
    return layer_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm=True)


def _contiguous(*operands: torch.Tensor | None) -> tuple[Any, ...]:
    return tuple(None if operand is None else operand.contiguous() for operand in operands)
