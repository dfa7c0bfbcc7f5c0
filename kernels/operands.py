"""Arguments of the layer-norm functions: checks, and views as rows."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from triton.runtime.jit import JITFunction

from safetune.errors import InvalidOperand, TracingError
from safetune.kernels.layer_norm import layer_norm_forward_kernel

#: The code of a kernel is unrolled over the slices of a row, so their number has a limit.
MAX_COLUMNS = 2**18

#: The dtypes of operands: 8 bits are too few for a norm without scales of its own.
FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

#: Types with memory that a kernel can be launched on. Subclasses (fake, functional, distributed
#: tensors) have no memory, or several.
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_PLAIN_OR_NONE = _PLAIN | {type(None)}

_INTERPRETED = not isinstance(layer_norm_forward_kernel.fn, JITFunction)


def launches_directly(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether kernels are launched on the operands, not through an operator of `ops`."""
    if is_traced() or type(x) not in _PLAIN or not _PLAIN_OR_NONE.issuperset(map(type, others)):
        return False
    # torch.vmap has a rule for every operator.
    return not (x.is_meta or x.is_nested or is_transformed(x))


def is_traced() -> bool:
    """Return whether something is to see operators: it would not see the launch of a kernel.

    That is a trace, or a dispatch mode, as selective checkpoints are.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def is_transformed(x: Tensor) -> bool:
    """Return whether a transform of `torch.func` is active, or `is_grads_batched` has made `x`."""
    functorch = torch._C._functorch
    return torch._C._are_functorch_transforms_active() or functorch.is_legacy_batchedtensor(x)


def is_stored(x: Tensor) -> bool:
    """Return whether the values of `x` are in its memory, row after row.

    Those of a lazy negation, as of the imaginary part of a conjugate, and of zeros without memory,
    as forward-mode AD makes, are not: a kernel would read something else.
    """
    return x.is_contiguous() and not (x.is_neg() or x._is_zerotensor())


def stored(**operands: Tensor | None) -> tuple[Any, ...]:
    """Return the operands, each in memory: as it is, or a copy; see `is_stored`.

    Raises:
        InvalidOperand: the memory of an operand was freed. A kernel would read near address 0,
            after which nothing on the GPU works.
    """
    in_memory = []
    for name, operand in operands.items():
        if operand is not None and _is_freed(operand):
            raise InvalidOperand(
                f"{name} has no memory now: FSDP frees a parameter's memory outside the forward "
                "and backward pass of its module. Use it inside that pass"
            )
        if operand is not None and not is_stored(operand):
            operand = operand.clone(memory_format=torch.contiguous_format)
        in_memory.append(operand)
    return tuple(in_memory)


def _is_freed(x: Tensor) -> bool:
    try:  # a view of freed memory, as in FSDP's flat parameters, has its offset as its address
        is_near_0 = x.data_ptr() == x.storage_offset() * x.itemsize
        return is_near_0 and x.numel() > 0 and not x._is_zerotensor()
    except RuntimeError:  # one of torch.vmap's, which is refused where it is launched
        return False


def check_tensors(**operands: Any) -> None:
    """Raise `InvalidOperand` unless each operand is a tensor that has rows."""
    for name, operand in operands.items():
        if not isinstance(operand, Tensor):
            raise InvalidOperand(f"{name} is of type {type(operand).__name__}; it must be a tensor")
        if operand.is_nested:
            raise InvalidOperand(f"{name} is a nested tensor; pass its values, or a padded tensor")


def check_options(eps: Any, num_groups: Any) -> None:
    """Raise `InvalidOperand` unless eps is a number of at least 0, and num_groups an integer."""
    is_number = isinstance(eps, (float, torch.SymFloat, numbers.Real))
    if not (is_number and eps >= 0):
        raise InvalidOperand(f"eps={eps!r}; it must be a number of at least 0")
    if not isinstance(num_groups, (int, torch.SymInt)):
        raise InvalidOperand(f"num_groups={num_groups!r}; it must be an integer")


def check_dtypes(**dtypes: Any) -> None:
    """Raise `InvalidOperand` unless each is None or the dtype of an operand."""
    for name, dtype in dtypes.items():
        if dtype is not None and dtype not in FLOATS:
            raise InvalidOperand(f"{name}={dtype!r}; it must be {_FLOATS_TEXT}")


_FLOATS_TEXT = "torch.float16, bfloat16, float32 or float64"


def check_operands(
    x: Tensor,
    num_groups: int,
    matrices: dict[str, Any],
    vectors: dict[str, Any],
    statistics: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise `InvalidOperand` with the operand that does not match `x`, and the reason."""
    if x.ndim != 2 or num_groups < 1 or x.shape[0] % num_groups:
        raise InvalidOperand(
            f"x has shape {tuple(x.shape)}; it must be [tokens * num_groups, columns] "
            f"with num_groups={num_groups}"
        )
    shape, device = x.shape, x.device
    if not 1 <= shape[1] <= MAX_COLUMNS:
        raise InvalidOperand(f"x has rows of {shape[1]} elements; give 1 to {MAX_COLUMNS}")
    check_kind("x", x, device)
    # Every launch runs this, so it is written for speed on the host.
    for operands, wanted in (
        (matrices, shape),
        (vectors, (num_groups * shape[1],)),
        (statistics, (shape[0],)),
    ):
        for name, operand in operands.items():
            if operand is None:
                continue
            if operand.shape != wanted:
                raise InvalidOperand(
                    f"{name} has shape {tuple(operand.shape)}, not {tuple(wanted)}"
                )
            if operand.device != device or operand.dtype not in FLOATS or operand.is_sparse:
                check_kind(name, operand, device)


def check_kind(name: str, operand: Tensor, device: torch.device) -> None:
    """Raise `InvalidOperand` unless the operand is a dense float tensor on the device of x.

    Otherwise a kernel would get an address of another device's memory, or of a meta tensor.
    """
    if operand.dtype not in FLOATS:
        raise InvalidOperand(f"{name} is {operand.dtype}; it must be {_FLOATS_TEXT}")
    if operand.device != device:
        raise InvalidOperand(f"{name} is on {operand.device}, but x is on {device}; move one")
    if operand.layout is not torch.strided:
        raise InvalidOperand(f"{name} has the layout {operand.layout}; call its to_dense()")


def check_device(x: Tensor) -> None:
    """Raise `InvalidOperand` for a tensor on the CPU, unless kernels are interpreted."""
    if not (x.is_cuda or _INTERPRETED) and x.device.type == "cpu":
        raise InvalidOperand(
            "x is on the CPU; move it to a GPU. To run the kernels in Triton's interpreter "
            "instead, set TRITON_INTERPRET=1 before safetune.kernels is imported"
        )


def refuse_transforms(*operands: Tensor | None) -> None:
    """Raise `TracingError` under `torch.func.grad` and its like, and in forward-mode AD.

    An operator of `ops` has no rule for the first, and would lose the tangents of the second.
    """
    if torch._C._are_functorch_transforms_active():
        functorch = torch._C._functorch
        levels = functorch.get_interpreter_stack() or ()
        if any(level.key() == functorch.TransformType.Grad for level in levels):
            raise TracingError(
                "safetune's norms do not support torch.func.grad, vjp or jacrev; use torch's "
                "norms, or torch.autograd.grad, with is_grads_batched=True for a Jacobian"
            )
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
        raise InvalidOperand(
            f"residual has shape {tuple(residual.shape)}, but x has shape {tuple(x.shape)}"
        )
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
