"""LayerNorm, RMSNorm and GroupNorm as differentiable functions; names and arguments are FLA's.

Plain tensors go through an `autograd.Function`. Traces by `torch.compile` and tensor subclasses go
through the operators of `ops`, which cost about twice the host time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from safetune.kernels.calls import checked_call, known_call
from safetune.kernels.launches import is_pinned
from safetune.kernels.operands import (
    check_options,
    check_tensors,
    is_traced,
    is_transformed,
    launches_directly,
    refuse_transforms,
    stores_residual,
    with_offset,
)
from safetune.kernels.ops import norm_gradients, refuse


class LayerNormFunction(torch.autograd.Function):
    """Normalizes over the last dimension, or over each of the parts of it, as a `NormCall` says."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, call):
        """Return y, and residual_out after it if the call is a prenorm."""
        y, statistics, normalized = call.forward(x, weight, bias, residual)
        ctx.save_for_backward(normalized, statistics, weight, bias)
        ctx.call = call
        # An output that nothing reads has no gradient, rather than one full of zeros.
        ctx.set_materialize_grads(False)
        return (y, normalized) if call.prenorm else y

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, dres: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight, bias and residual."""
        # Only if a caller may ask for their gradients: the refusal takes the host 4 us.
        return (_gradients_once if torch.is_grad_enabled() else _gradients)(ctx, dy, dres)


#: Without what `Function.apply` does for transforms of `torch.func`, a third of its host time; but
#: an input of a transform that is over is to be unwrapped.
_apply = super(torch.autograd.Function, LayerNormFunction).apply
_unwrapped = torch._C._functorch.unwrap_if_dead


def _gradients(ctx: Any, dy: Tensor | None, dres: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return what `norm_gradients` returns, with less work on the host."""
    call, saved = ctx.call, ctx.saved_tensors
    gradients = None
    if dy is not None and not is_traced():  # as by compiled autograd
        gradients = call.known_backward(dy, dres, *saved)
        if gradients is None and not is_transformed(dy):
            gradients = call.backward(dy, dres, *saved)
    if gradients is None:
        normalized, statistics, *parameters = saved
        saved = (normalized, *call.split(statistics), *parameters)
        gradients = norm_gradients(call, saved, dy, dres)[:4]
    return *gradients, None


def _gradients_once(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return gradients whose own gradients raise `TracingError`.

    `torch.autograd.function.once_differentiable` raises only if the incoming gradients require
    gradients. A sum's gradients do not, so the part that depends on x would be lost silently.
    """
    with torch.no_grad():
        found = _gradients(ctx, *incoming)
    sources = (*incoming, *ctx.saved_tensors)
    return tuple(
        None if gradient is None else _Refusal.apply(gradient.detach().requires_grad_(), *sources)
        for gradient in found
    )


class _Refusal(torch.autograd.Function):
    """The identity for a gradient; its backward raises `TracingError`."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor | None) -> Tensor:
        return gradient.view_as(gradient)

    backward = staticmethod(refuse)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
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
    """Normalize `x`, or x + residual, in `num_groups` equal parts of the last dimension.

    Any float dtypes may be mixed; statistics and the affine map are computed in fp32 and y is cast
    once, to the dtype of `x`. Autocast changes nothing. Not twice differentiable.

    Args:
        x: [..., channels], any layout.
        weight, bias: [channels], or None.
        residual: of the shape of `x`, in any float dtype.
        prenorm: return (y, residual_out): x + residual in the dtype of `residual`; without a
            residual `x`, in fp32 if `residual_in_fp32`.
        is_rms_norm: do not subtract the mean.
        weight_offset: multiply by weight + weight_offset, added in fp32; 1.0 for Gemma.
        deterministic: run the first config of each kernel that is not pruned, with a fixed number
            of programs, so that the result does not depend on tuning or on the GPU's model.
            Default: `torch.are_deterministic_algorithms_enabled()`.

    Raises:
        InvalidOperand: a shape, dtype or device does not match `x`, or a row is too long.
        TracingError: in forward-mode AD, and under `torch.func.grad` and its like.
    """
    flags = (eps, prenorm, residual_in_fp32, is_rms_norm, num_groups, deterministic, weight_offset)
    call = known_call(x, weight, bias, residual, *flags)
    if call is None and launches_directly(x, weight, bias, residual):
        refuse_transforms(x, weight, bias, residual)
        x, weight, bias, residual = (
            None if each is None else _unwrapped(each) for each in (x, weight, bias, residual)
        )
        call = known_call(x, weight, bias, residual, *flags)
        call = call or checked_call(x, weight, bias, residual, *flags)
    if call is not None:
        if weight_offset:
            weight = with_offset(weight, weight_offset)
        if torch.is_grad_enabled():
            return _apply(x, weight, bias, residual, call)
        y, _, normalized = call.forward(x, weight, bias, residual)
        # As from a function: neither the input itself nor a view that requires gradients.
        return (y, normalized.detach()) if prenorm else y
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    check_tensors(**{name: o for name, o in given.items() if name == "x" or o is not None})
    check_options(eps, num_groups)
    refuse_transforms(x, weight, bias, residual)
    operands = (x, with_offset(weight, weight_offset), bias, residual)
    options = (residual_in_fp32, is_rms_norm, num_groups)
    y, residual_out, _, _ = torch.ops.safetune.layer_norm(
        *operands, eps, None, *options, is_pinned(deterministic)
    )
    stored = stores_residual(x, residual, residual_in_fp32)
    return (y, residual_out if stored else x) if prenorm else y


#: `group_norm` with one group.
layer_norm = functools.partial(group_norm, num_groups=1)

#: RMSNorm over the last dimension.
rms_norm = functools.partial(group_norm, is_rms_norm=True)
