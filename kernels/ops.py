"""The norms as PyTorch operators, for `torch.compile` and tensor subclasses.

`torch.library.custom_op`, not `triton_op`: Inductor would take the kernels of a `triton_op` out of
their tuner and time every config in the training process. A custom operator is opaque, so it
launches the stored choice, tuned in a child process, as a call without an operator does.

An operator always returns the same number of new tensors. An output that the call does not compute
is an empty tensor. Where residual_out is `x` itself, or one gradient serves two inputs, the caller
uses the other tensor. The types of all parameters are in the schemas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from safetune.errors import TracingError
from safetune.kernels.functional import forward_rows, layer_norm_bwd
from safetune.kernels.launches import ForwardOutputs, Launch, is_pinned, statistics_dtype
from safetune.kernels.operands import as_rows, check_operands, residual_rows, stores_residual


def norm_rows(
    x, weight, bias, residual, eps, out_dtype, residual_in_fp32, *options, joined=False
) -> tuple[ForwardOutputs, Tensor, Launch]:
    """Return what `forward_rows` does, for any `x`.

    y is of the shape of `x`; so is residual_out, if it is stored.
    """
    is_rms_norm, num_groups, pinned = options
    rows, added = as_rows(x, num_groups), residual_rows(residual, x, num_groups)
    residual_dtype = torch.float32 if residual_in_fp32 else None
    flags = (out_dtype, residual_dtype, is_rms_norm, num_groups, pinned)
    return forward_rows(rows, weight, bias, eps, added, *flags, x.shape, joined)


def norm_forward(x, *options) -> Any:
    """Return (y, residual_out, mean, rstd) for the operands and options of `norm_rows`.

    residual_out is empty if it would be `x`; mean is empty for RMS norm.
    """
    (y, mean, rstd, stored, _), _, _ = norm_rows(x, *options)
    residual_out, mean = (x.new_empty(0) if each is None else each for each in (stored, mean))
    return y, residual_out, mean, rstd


def fake_forward(
    x, weight, bias, residual, eps, out_dtype, residual_in_fp32, is_rms_norm, num_groups, pinned
) -> tuple[Any, ...]:
    """Return what `norm_forward` returns, without running a kernel."""
    matrix, added = as_rows(x, num_groups), residual_rows(residual, x, num_groups)
    check_operands(matrix, num_groups, {"residual": added}, {"weight": weight, "bias": bias})
    inputs = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    rows, statistics = matrix.shape[0], statistics_dtype(inputs)
    stored_dtype = torch.float32 if residual is None else residual.dtype
    stored = stores_residual(x, residual, residual_in_fp32)
    return (
        x.new_empty(x.shape, dtype=out_dtype or x.dtype),
        x.new_empty(x.shape, dtype=stored_dtype) if stored else x.new_empty(0),
        x.new_empty(0) if is_rms_norm else x.new_empty(rows, dtype=statistics),
        x.new_empty(rows, dtype=statistics),
    )


def norm_backward(
    dy, x, weight, bias, mean, rstd, dres, has_residual, is_rms_norm, *options
) -> Any:
    """Return (dx, dw, db, dres_in, y) for the normalized tensor `x`.

    Outputs that are not computed are empty. dres_in is empty if it would be dx: `x_dtype` is the
    dtype of `x`.
    """
    x_dtype, recompute_output, num_groups, pinned = options
    mean = None if is_rms_norm else mean
    dres = None if dres is None else as_rows(dres, num_groups)
    operands = (as_rows(dy, num_groups), as_rows(x, num_groups), weight, bias, mean, rstd, dres)
    flags = (has_residual, is_rms_norm, x_dtype, recompute_output, num_groups)
    dx, dw, db, dres_in, *recomputed = layer_norm_bwd(*operands, *flags, deterministic=pinned)
    dres_in = None if dres_in is None or dres_in is dx else dres_in.view(x.shape)
    y = recomputed[0].view(x.shape) if recompute_output else None
    found = (dx.view(x.shape), dw, db, dres_in, y)
    return tuple(x.new_empty(0) if tensor is None else tensor for tensor in found)


def _fake_backward(dy, x, weight, bias, mean, rstd, dres, has_residual, is_rms_norm, *options):
    x_dtype, recompute_output, _, _ = options
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


_backward = torch.library.custom_op(
    "safetune::layer_norm_backward",
    norm_backward,
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "Tensor? dres, bool has_residual, bool is_rms_norm, ScalarType x_dtype, "
    "bool recompute_output, int num_groups, bool deterministic) "
    "-> (Tensor dx, Tensor dw, Tensor db, Tensor dres_in, Tensor y)",
)
_backward.register_fake(_fake_backward)
_backward.register_autograd(refuse)


def keep_norm(ctx, x, residual, options, output) -> tuple[Any, ...]:
    """Keep the options of an operator; return the tensors to save: normalized, mean and rstd."""
    residual_in_fp32, ctx.is_rms_norm, ctx.num_groups, ctx.deterministic = options
    ctx.x_dtype, ctx.has_residual = x.dtype, residual is not None
    ctx.set_materialize_grads(False)
    stored = stores_residual(x, residual, residual_in_fp32)
    ctx.mark_non_differentiable(*(output[1:] if stored else output))
    return output if stored else (x, *output[1:])


def norm_gradients(
    ctx: Any,
    saved: tuple[Any, ...],
    dy: Tensor | None,
    dres: Tensor | None,
    recompute_output: bool = False,
) -> tuple[Any, ...]:
    """Return (dx, dw, db, dres_in, y); a gradient that is not needed is None."""
    x, mean, rstd, weight, bias = saved
    if dy is None:
        dx = None if dres is None else dres.to(ctx.x_dtype)
        return dx, None, None, dres if ctx.has_residual else None, None
    flags = (ctx.has_residual, ctx.is_rms_norm, ctx.x_dtype, recompute_output)
    options = (*flags, ctx.num_groups, is_pinned(ctx.deterministic))
    dx, dw, db, dres_in, y = _backward(dy, x, weight, bias, mean, rstd, dres, *options)
    dres_in = dx if ctx.x_dtype == x.dtype else dres_in
    dw, db = None if weight is None else dw, None if bias is None else db
    return dx, dw, db, dres_in if ctx.has_residual else None, y


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, _, _, *options = inputs
    ctx.save_for_backward(*keep_norm(ctx, x, residual, options, output[1:]), weight, bias)


def _gradients(
    ctx: Any, dy: Tensor | None, dres: Tensor | None, *statistics: Tensor | None
) -> tuple[Tensor | None, ...]:
    return *norm_gradients(ctx, ctx.saved_tensors, dy, dres)[:4], *(None,) * 6


_forward = torch.library.custom_op(
    "safetune::layer_norm",
    norm_forward,
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, "
    "ScalarType? out_dtype, bool residual_in_fp32, bool is_rms_norm, int num_groups, "
    "bool deterministic) -> (Tensor y, Tensor residual_out, Tensor mean, Tensor rstd)",
)
_forward.register_fake(fake_forward)
_forward.register_autograd(_gradients, setup_context=_keep_for_backward)
