"""Calls of the norms in eager code, and the short way for a call like one before.

The first call with some options and kinds of operands checks them, and launches through the tuners.
From then on, a call whose operands have the same shapes, strides, dtypes and device allocates its
outputs and launches what was launched, and does no more: see `bound_launch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from safetune.frontend.bound_launch import bound_launch
from safetune.kernels.functional import BackwardLaunches, backward_rows
from safetune.kernels.grid_policy import GridPlan
from safetune.kernels.launches import (
    backward_outputs,
    few_rows_outputs,
    forward_outputs,
    is_pinned,
    parameter_gradients,
)
from safetune.kernels.operands import check_options, in_shape
from safetune.kernels.ops import norm_rows

#: The most calls that are remembered. After that all are forgotten at once, and checked again.
MOST_CALLS = 4096

Gradients = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]

_calls: dict[Any, NormCall] = {}


def call_of(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *options: Any
) -> NormCall:
    """Return what is known of a call with such operands and these options of `NormCall`.

    Raises:
        InvalidOperand: `eps` or `num_groups` is not a number.
    """
    key: tuple[Any, ...] | None = None
    call: NormCall | None = None
    try:
        # 1, 1.0 and True are the same in a key.
        key = (kind_of(x, weight, bias, residual), options, *map(type, options))
        call = _calls.get(key)
    except (RuntimeError, TypeError):  # a layout without strides, or an option without a hash
        key = None
    if call is None:
        call = NormCall(*options)
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        if key is not None:
            _calls[key] = call
    return call


def kind_of(*operands: Tensor | None) -> tuple[Any, ...]:
    """Return all that decides how a kernel is launched on operands, but for where they are."""
    return tuple(
        [
            None if each is None else (each.shape, each.stride(), each.dtype, each.device)
            for each in operands
        ]
    )


class KnownBackward(NamedTuple):
    """The launches of a backward pass; `plan` and `sums` are None where one kernel does it all."""

    plan: GridPlan | None
    rows: Callable[..., Any]
    sums: Callable[..., Any] | None


class NormCall:
    """A call's options, and its launches once they are known; all operands are of one kind."""

    def __init__(
        self,
        eps: Any,
        prenorm: bool,
        residual_in_fp32: bool,
        is_rms_norm: bool,
        num_groups: Any,
        deterministic: bool | None,
    ) -> None:
        check_options(eps, num_groups)
        self.eps, self.prenorm, self.residual_in_fp32 = eps, prenorm, residual_in_fp32
        self.is_rms_norm, self.num_groups = is_rms_norm, num_groups
        self.deterministic = deterministic
        self._residual_dtype = torch.float32 if residual_in_fp32 else None
        #: The rows that are normalized, and their columns; from the first forward pass on.
        self.rows = (0, 0)
        self._forward: Callable[..., Any] | None = None
        self._backward: dict[Any, KnownBackward] = {}

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return (y, mean, rstd, residual_out), as `layer_norm_fwd` does, in the shape of `x`."""
        pinned = is_pinned(self.deterministic)
        if self._forward is not None and not pinned:
            y, mean, rstd, added = forward_outputs(
                x, residual, None, self._residual_dtype, self.is_rms_norm, self.rows[0]
            )
            if self._forward(x, residual, weight, bias, y, added, mean, rstd) is not None:
                return y, mean, rstd, x if added is None else added
        options = (self.residual_in_fp32, self.is_rms_norm, self.num_groups, pinned)
        found, launch = norm_rows(x, weight, bias, residual, self.eps, None, *options)
        y, mean, rstd, normalized = found
        self.shape, self.x_dtype, self.has_residual = x.shape, x.dtype, residual is not None
        self.rows = (rstd.shape[0], x.shape[-1] // self.num_groups)
        if not pinned and _are_launched_as_they_are(x, weight, bias, residual):
            self._forward = bound_launch(*launch)
        return y, mean, rstd, in_shape(normalized, x.shape)

    def backward(
        self,
        dy: Tensor,
        dres: Tensor | None,
        x: Tensor,
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Gradients:
        """Return (dx, dw, db, dres_in), as `layer_norm_bwd` does."""
        pinned = is_pinned(self.deterministic)
        operands = (dy, x, weight, bias, mean, rstd, dres)
        kind = kind_of(*operands)
        known = self._backward.get(kind)
        if known is not None and not pinned:
            found = self._known_backward(known, *operands)
            if found is not None:
                return found
        rows = [None if each is None else in_shape(each, self.rows) for each in (dy, x, dres)]
        options = (self.has_residual, self.is_rms_norm, self.x_dtype, False, self.num_groups)
        (dx, dw, db, dres_in), launches = backward_rows(
            rows[0], rows[1], weight, bias, mean, rstd, rows[2], *options, deterministic=pinned
        )
        if not pinned and _are_launched_as_they_are(*operands):
            self._remember_backward(kind, launches)
        shaped = in_shape(dx, self.shape)
        if dres_in is not None:
            # One object: with two, autograd would assume separate memory, and add to each in place.
            dres_in = shaped if dres_in is dx else in_shape(dres_in, self.shape)
        return shaped, dw, db, dres_in

    def _known_backward(
        self, known: KnownBackward, dy: Tensor, x: Tensor, *others: Any
    ) -> Gradients | None:
        weight, bias, mean, rstd, dres = others
        stores_dres = self.has_residual and self.x_dtype != x.dtype
        if known.plan is None:
            few = few_rows_outputs(x, weight, bias, stores_dres, self.x_dtype)
            if known.rows(dy, x, weight, mean, rstd, dres, *few) is None:
                return None
            dx, dres_in, dw, db = few
            return dx, dw, db, self._residual_gradient(dx, dres_in)
        options = (stores_dres, self.x_dtype, False, self.rows[1])
        made = backward_outputs(known.plan, dy, x, weight, bias, *options)
        if known.rows(dy, x, *others, *made) is None:
            return None
        dw = db = None
        if known.sums is not None:
            dw, db = parameter_gradients(weight, bias)
            if known.sums(made.weight_partials, made.bias_partials, dw, db) is None:
                return None
        return made.x, dw, db, self._residual_gradient(made.x, made.residual)

    def _residual_gradient(self, dx: Tensor, stored: Tensor | None) -> Tensor | None:
        return dx if self.has_residual and stored is None else stored

    def _remember_backward(self, kind: Any, launches: BackwardLaunches) -> None:
        rows = bound_launch(*launches.rows)
        sums = None if launches.sums is None else bound_launch(*launches.sums)
        if rows is not None and (sums is None) is (launches.sums is None):
            self._backward[kind] = KnownBackward(launches.plan, rows, sums)


def _are_launched_as_they_are(x: Tensor, *others: Tensor | None) -> bool:
    """Whether there is a launch, and on these operands, not on copies of them."""
    given = (x, *(each for each in others if each is not None))
    return x.numel() > 0 and all(each.is_contiguous() for each in given)
