"""Arguments of the layer-norm functions: checks, and views as rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

from safetune.errors import InvalidOperand, TracingError

#: Types with memory that a kernel can be launched on. Subclasses (fake, functional, distributed
#: tensors) have no memory, or several.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})


def launches_directly(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether kernels are launched on the operands, not through an operator of `ops`."""
    # A dispatch mode (tracing, selective checkpoints) sees operators, but not kernel launches.
    if torch.compiler.is_compiling() or x.is_meta or torch._C._len_torch_dispatch_stack():
        return False
    return type(x) in _PLAIN and _PLAIN.issuperset(map(type, others))


def refuse_tangents(*operands: Tensor | None) -> None:
    """Raise `TracingError` in forward-mode AD: an operator of `ops` would lose the tangents."""
    if forward_ad._current_level < 0:
        return
    if any(o is not None and forward_ad.unpack_dual(o).tangent is not None for o in operands):
        raise TracingError(
            "safetune's norms do not support forward-mode AD; use torch's norms, or reverse mode"
        )


def as_rows(x: Tensor, num_groups: int) -> Tensor:
    """Return `x` of shape [..., channels] as [tokens * num_groups, channels / num_groups]."""
    if x.ndim == 2 and num_groups == 1:
        return x
    if not x.ndim or num_groups < 1 or x.shape[-1] % num_groups:
        raise InvalidOperand(
            f"num_groups={num_groups} must divide the last dimension of x, "
            f"which has shape {tuple(x.shape)}"
        )
    return x.reshape(math.prod(x.shape[:-1]) * num_groups, x.shape[-1] // num_groups)


def residual_rows(residual: Tensor | None, x: Tensor, num_groups: int) -> Tensor | None:
    """Return `as_rows(residual)`; raises `InvalidOperand` unless it has the shape of `x`."""
    if residual is None:
        return None
    if residual.shape != x.shape:
        raise InvalidOperand(f"residual has shape {tuple(residual.shape)}, x {tuple(x.shape)}")
    return as_rows(residual, num_groups)


def in_shape(x: Tensor, shape: torch.Size) -> Tensor:
    """Return `x` in a shape; the check is ten times as fast on the host as a reshape."""
    return x if x.shape == shape else x.reshape(shape)


def stores_residual(x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> bool:
    """Return whether residual_out is a new tensor, not `x`."""
    return residual is not None or (residual_in_fp32 and x.dtype != torch.float32)


def with_offset(weight: Tensor | None, offset: float) -> Tensor | None:
    """Return weight + offset, in fp32 at least: near 1, a bf16 has two decimal digits."""
    if not offset:
        return weight
    if weight is None:
        raise InvalidOperand(f"weight_offset={offset} needs a weight, not None")
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset
