"""The norms as PyTorch operators, for `torch.compile` and tensor subclasses.

`torch.library.custom_op`, not `triton_op`: Inductor would take the kernels of a `triton_op` out of
their tuner and time every config in the training process. A custom operator is opaque, so it
launches the stored choice, tuned in a child process, as a call without an operator does.

An operator always returns the same number of new tensors. An output that the call does not compute
is an empty tensor. Where residual_out is `x` itself, or one gradient serves two inputs, the caller
uses the other tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from safetune.errors import TracingError
from safetune.kernels.functional import layer_norm_bwd, layer_norm_fwd
from safetune.kernels.launches import check_operands
from safetune.kernels.operands import as_rows, residual_rows, stores_residual


@torch.library.custom_op(
    "safetune::layer_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, "
    "ScalarType? out_dtype, bool residual_in_fp32, bool is_rms_norm, int num_groups, "
    "bool deterministic) -> (Tensor y, Tensor residual_out, Tensor mean, Tensor rstd)",
)
def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
    residual_in_fp32: bool,
    is_rms_norm: bool,
    num_groups: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, residual_out, mean, rstd) for `x` of any shape and layout.

    residual_out is empty if it would be `x`; mean is empty for RMS norm.
    """
    y, mean, rstd, normalized = layer_norm_fwd(
        as_rows(x, num_groups),
        weight,
        bias,
        eps,
        residual_rows(residual, x, num_groups),
        out_dtype,
        torch.float32 if residual_in_fp32 else None,
        is_rms_norm,
        num_groups,
        deterministic=deterministic,
    )
    stored = stores_residual(x, residual, residual_in_fp32)
    residual_out = normalized.view(x.shape) if stored else x.new_empty(0)
    return y.view(x.shape), residual_out, x.new_empty(0) if mean is None else mean, rstd


@norm_forward.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
    residual_in_fp32: bool,
    is_rms_norm: bool,
    num_groups: int,
    deterministic: bool,
) -> tuple[Tensor, ...]:
    matrix = as_rows(x, num_groups)
    added = residual_rows(residual, x, num_groups)
    check_operands(matrix, num_groups, {"residual": added}, {"weight": weight, "bias": bias})
    rows = matrix.shape[0]
    statistics = torch.float64 if x.dtype == torch.float64 else torch.float32
    if stores_residual(x, residual, residual_in_fp32):
        dtype = torch.float32 if residual is None else residual.dtype
        residual_out = x.new_empty(x.shape, dtype=dtype)
    else:
        residual_out = x.new_empty(0)
    return (
        x.new_empty(x.shape, dtype=out_dtype or x.dtype),
        residual_out,
        x.new_empty(0) if is_rms_norm else x.new_empty(rows, dtype=statistics),
        x.new_empty(rows, dtype=statistics),
    )


@torch.library.custom_op(
    "safetune::layer_norm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "Tensor? dres, bool has_residual, bool is_rms_norm, ScalarType x_dtype, "
    "bool recompute_output, int num_groups, bool deterministic) "
    "-> (Tensor dx, Tensor dw, Tensor db, Tensor dres_in, Tensor y)",
)
def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dres: Tensor | None,
    has_residual: bool,
    is_rms_norm: bool,
    x_dtype: torch.dtype,
    recompute_output: bool,
    num_groups: int,
    deterministic: bool,
) -> tuple[Tensor, ...]:
    """Return (dx, dw, db, dres_in, y) for the normalized tensor `x`.

    Outputs that are not computed are empty. dres_in is empty if it would be dx: `x_dtype` is the
    dtype of `x`.
    """
    dx, dw, db, dres_in, *recomputed = layer_norm_bwd(
        as_rows(dy, num_groups),
        as_rows(x, num_groups),
        weight,
        bias,
        None if is_rms_norm else mean,
        rstd,
        None if dres is None else as_rows(dres, num_groups),
        has_residual,
        is_rms_norm,
        x_dtype,
        recompute_output,
        num_groups,
        deterministic=deterministic,
    )
    dres_in = None if dres_in is dx else dres_in
    made = (dx, dw, db, dres_in, *(recomputed or [None]))
    shapes = (x.shape, None, None, x.shape, x.shape)
    return tuple(
        x.new_empty(0) if tensor is None else tensor if shape is None else tensor.view(shape)
        for tensor, shape in zip(made, shapes, strict=True)
    )


@norm_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dres: Tensor | None,
    has_residual: bool,
    is_rms_norm: bool,
    x_dtype: torch.dtype,
    recompute_output: bool,
    num_groups: int,
    deterministic: bool,
) -> tuple[Tensor, ...]:
    stores_dres = has_residual and x_dtype != x.dtype
    return (
        x.new_empty(x.shape, dtype=x_dtype),
        x.new_empty(0) if weight is None else weight.new_empty(weight.shape),
        x.new_empty(0) if bias is None else bias.new_empty(bias.shape),
        x.new_empty(x.shape) if stores_dres else x.new_empty(0),
        dy.new_empty(dy.shape) if recompute_output else x.new_empty(0),
    )


def refuse(ctx: Any, *gradients: Tensor | None) -> Any:
    """Raise `TracingError`: the results of norm_backward cannot be differentiated."""
    raise TracingError(
        "the gradients of safetune's norms cannot be differentiated: if a loss depends on "
        "gradients (create_graph=True), use a norm of torch's"
    )


norm_backward.register_autograd(refuse)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, _, _, *options = inputs
    ctx.save_for_backward(*keep_norm(ctx, x, residual, options, output[1:]), weight, bias)


def keep_norm(
    ctx: Any,
    x: Tensor,
    residual: Tensor | None,
    options: Sequence[Any],
    output: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Set the attributes of `ctx` that `norm_gradients` reads; return the tensors to save.

    Args:
        options: residual_in_fp32, is_rms_norm, num_groups and deterministic.
        output: residual_out, mean and rstd.
    """
    residual_in_fp32, ctx.is_rms_norm, ctx.num_groups, ctx.deterministic = options
    ctx.x_dtype, ctx.has_residual = x.dtype, residual is not None
    # An output that nothing reads has no gradient, rather than one full of zeros.
    ctx.set_materialize_grads(False)
    if stores_residual(x, residual, residual_in_fp32):
        ctx.mark_non_differentiable(*output[1:])
        return output
    ctx.mark_non_differentiable(*output)
    return x, *output[1:]


def norm_gradients(
    ctx: Any,
    saved: tuple[Any, ...],
    dy: Tensor | None,
    dres: Tensor | None,
    recompute_output: bool = False,
) -> tuple[Any, ...]:
    """Return (dx, dw, db, dres_in, y); a gradient that is not needed is None.

    Args:
        saved: the tensors that `keep_norm` returned, then weight and bias.
    """
    x, mean, rstd, weight, bias = saved
    if dy is None:
        dx = None if dres is None else dres.to(ctx.x_dtype)
        return dx, None, None, dres if ctx.has_residual else None, None
    dx, dw, db, dres_in, y = norm_backward(
        dy,
        x,
        weight,
        bias,
        mean,
        rstd,
        dres,
        ctx.has_residual,
        ctx.is_rms_norm,
        ctx.x_dtype,
        recompute_output,
        ctx.num_groups,
        ctx.deterministic,
    )
    dres_in = dx if ctx.x_dtype == x.dtype else dres_in
    return (
        dx,
        None if weight is None else dw,
        None if bias is None else db,
        dres_in if ctx.has_residual else None,
        y,
    )


def _gradients(
    ctx: Any, dy: Tensor | None, dres: Tensor | None, *statistics: Tensor | None
) -> tuple[Tensor | None, ...]:
    return *norm_gradients(ctx, ctx.saved_tensors, dy, dres)[:4], *(None,) * 6


norm_forward.register_autograd(_gradients, setup_context=_keep_for_backward)
