"""A norm followed by a linear map; the backward pass recomputes the norm instead of keeping it.

As in `fla.modules.layernorm`. One operator, in eager code too, because its host time is small
beside a matrix product.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from safetune.errors import InvalidOperand
from safetune.kernels.launches import is_pinned
from safetune.kernels.operands import (
    as_rows,
    check_kind,
    check_options,
    check_tensors,
    refuse_transforms,
    stores_residual,
    with_offset,
)
from safetune.kernels.ops import fake_forward, keep_norm, norm_forward, norm_gradients


def _norm_linear(
    forward, x, norm_weight, norm_bias, linear_weight, linear_bias, residual, eps, *options
):
    """Return the output, and residual_out, mean and rstd as `safetune::layer_norm` does.

    y and the output have the dtype of `linear_weight`.
    """
    _check_linear(x, linear_weight, linear_bias)
    y, *others = forward(x, norm_weight, norm_bias, residual, eps, linear_weight.dtype, *options)
    return functional.linear(y, linear_weight, linear_bias), *others


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise `InvalidOperand` if the linear map cannot be applied to `x`."""
    if weight.ndim != 2 or not x.ndim or weight.shape[1] != x.shape[-1]:
        raise InvalidOperand(
            f"linear_weight has shape {tuple(weight.shape)}; for x of shape {tuple(x.shape)} it "
            "must be [out_features, channels]"
        )
    check_kind("linear_weight", weight, x.device)
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise InvalidOperand(
                f"linear_bias has shape {tuple(bias.shape)}, not {tuple(weight.shape[:1])}"
            )
        check_kind("linear_bias", bias, x.device)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, norm_weight, norm_bias, linear_weight, _, residual, _, *options = inputs
    norm = keep_norm(ctx, x, residual, options, output[1:])
    ctx.save_for_backward(*norm, norm_weight, norm_bias, linear_weight)


def _gradients(
    ctx: Any, output_gradient: Tensor | None, dres: Tensor | None, *statistics: Tensor | None
) -> tuple[Tensor | None, ...]:
    *saved, linear_weight = ctx.saved_tensors
    not_tensors = (None,) * 5
    if output_gradient is None:
        dx, dw, db, dres_in, _ = norm_gradients(ctx, tuple(saved), None, dres)
        return dx, dw, db, None, None, dres_in, *not_tensors
    wants_weight, wants_bias = ctx.needs_input_grad[3:5]
    dy = output_gradient @ linear_weight
    dx, dw, db, dres_in, y = norm_gradients(ctx, tuple(saved), dy, dres, wants_weight)
    rows = as_rows(output_gradient, 1)
    return (
        dx,
        dw,
        db,
        rows.t() @ as_rows(y, 1) if wants_weight else None,
        rows.sum(0) if wants_bias else None,
        dres_in,
        *not_tensors,
    )


_norm_linear_forward = torch.library.custom_op(
    "safetune::layer_norm_linear",
    functools.partial(_norm_linear, norm_forward),
    mutates_args=(),
    schema="(Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor linear_weight, "
    "Tensor? linear_bias, Tensor? residual, float eps, bool residual_in_fp32, bool is_rms_norm, "
    "int num_groups, bool deterministic) "
    "-> (Tensor output, Tensor residual_out, Tensor mean, Tensor rstd)",
)
_norm_linear_forward.register_fake(functools.partial(_norm_linear, fake_forward))
_norm_linear_forward.register_autograd(_gradients, setup_context=_keep_for_backward)


def group_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
    *,
    weight_offset: float = 0.0,
    deterministic: bool | None = None,
) -> Any:
    """Return the linear map of `group_norm` of `x`, without keeping the norm for backward.

    The norm's result, the linear map and the output have the dtype of `x`, or autocast's dtype
    under autocast. `linear_weight` is [out_features, channels], `linear_bias` [out_features]; the
    other arguments are those of `group_norm`.

    Raises:
        InvalidOperand: as `group_norm`, and if the linear map does not match `x`.
        TracingError: as `group_norm`.
    """
    given = {"norm_weight": norm_weight, "norm_bias": norm_bias, "linear_bias": linear_bias}
    given = {name: operand for name, operand in given.items() if operand is not None}
    check_tensors(x=x, linear_weight=linear_weight, **given)
    check_options(eps, num_groups)
    for name, operand in (("x", x), ("linear_weight", linear_weight), *given.items()):
        check_kind(name, operand, x.device)
    refuse_transforms(x, norm_weight, norm_bias, linear_weight, linear_bias, residual)
    kind = x.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else x.dtype
    norm = (x, with_offset(norm_weight, weight_offset), norm_bias)
    linear = (linear_weight.to(dtype), None if linear_bias is None else linear_bias.to(dtype))
    options = (residual_in_fp32, is_rms_norm, num_groups, is_pinned(deterministic))
    output, residual_out, _, _ = _norm_linear_forward(*norm, *linear, residual, eps, *options)
    stored = stores_residual(x, residual, residual_in_fp32)
    return (output, residual_out if stored else x) if prenorm else output


#: FLA's other name for it, which also takes groups.
layer_norm_linear = group_norm_linear

#: The linear map of `rms_norm`.
rms_norm_linear = functools.partial(group_norm_linear, is_rms_norm=True)
