"""Calls of the norms in eager code, and a short path for calls like an earlier one.

The first call with some options and kinds of operands checks them and launches through the tuners.
Later calls whose operands have the same shapes, strides, dtypes and device only allocate outputs
and repeat the launch: see `bound_launch`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch.autograd import forward_ad

from safetune.frontend.bound_launch import bound_launch
from safetune.kernels.functional import BackwardLaunches, backward_rows
from safetune.kernels.launches import Launch, is_pinned, split_statistics
from safetune.kernels.operands import check_options, in_shape, is_stored, is_traced
from safetune.kernels.ops import norm_rows

#: The most options and shapes that are remembered. After that all are forgotten at once, and
#: checked again.
MOST_CALLS = 4096

#: The most kinds of operands that are remembered for each.
MOST_KINDS = 8

Gradients = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
Allocator = Callable[[], Tensor]

_calls: dict[Any, list[tuple[Callable[..., bool], NormCall]]] = {}


def known_call(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *options: Any
) -> NormCall | None:
    """Return the call that was checked with such operands and options, outside of any transform."""
    if is_traced() or forward_ad._current_level >= 0:
        return None
    try:
        kinds = _calls.get(_key(x, weight, bias, residual, options), ())
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or an option without a hash
        return None
    operands = [each for each in (x, weight, bias, residual) if each is not None]
    for are_alike, call in kinds:
        if are_alike(*operands):
            return call
    return None


def checked_call(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *options: Any
) -> NormCall:
    """Return a call for these operands and options: the fields of `NormCall`, then the others.

    Raises:
        InvalidOperand: `eps` or `num_groups` is not a number.
    """
    call = NormCall(*options[:6])
    are_alike = alike(x, weight, bias, residual)
    if are_alike is None:
        return call
    if len(_calls) >= MOST_CALLS:
        _calls.clear()
    try:
        kinds = _calls.setdefault(_key(x, weight, bias, residual, options), [])
    except TypeError:  # an option without a hash
        return call
    del kinds[: 1 - MOST_KINDS]
    kinds.append((are_alike, call))
    return call


def _key(x: Tensor, weight: Any, bias: Any, residual: Any, options: tuple[Any, ...]) -> Any:
    # 1, 1.0 and True are the same in a key, but not all of them are an eps or a number of groups.
    types = options[0].__class__, options[4].__class__
    return x.shape, weight is None, bias is None, residual is None, options, types


def alike(*operands: Tensor | None) -> Callable[..., bool] | None:
    """Return whether operands are of the same kind as these: all that a launch on them depends on.

    That is their types, shapes, strides, dtypes, layouts and devices; and transforms and autocast.
    What is None here is not passed. None where two of them are one tensor.
    """
    given = [each for each in operands if each is not None]
    try:
        sizes: Any = [[*each.shape] for each in given]
        strides: Any = [[*each.stride()] for each in given]
        kind = guards.TensorGuards(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (AttributeError, RuntimeError, TypeError):  # a layout without strides
        return None
    return kind.check if kind.check(*given) else None


class KnownBackward(NamedTuple):
    """The launches of a backward pass, and what allocates its outputs; `few` is of few rows."""

    are_alike: Callable[..., bool]
    few: bool
    rows: Callable[..., Any]
    sums: Callable[..., Any] | None
    outputs: list[Allocator | None]
    gradients: list[Allocator | None]


class NormCall:
    """A call's options, and its launches once they are known; all operands are of one kind.

    The statistics of all rows are one tensor, the means first (not for RMS norm), then rstd.
    """

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
        self._forward: Callable[..., Any] | None = None
        #: By whether residual_out has a gradient, and whether that is y's, one tensor.
        self._backward: dict[tuple[bool, bool], KnownBackward] = {}

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (y, statistics, residual_out), y and residual_out in the shape of `x`."""
        pinned = is_pinned(self.deterministic)
        launch = None if pinned else self._forward
        if launch is not None:
            new_y, new_statistics, new_residual = self._new
            y, statistics = new_y(), new_statistics()
            added = new_residual and new_residual()
            mean = None if self.is_rms_norm else statistics
            if launch(x, residual, weight, bias, y, added, mean, statistics) is not None:
                return y, statistics, x if added is None else added
        return self._checked_forward(x, weight, bias, residual, pinned)

    def _checked_forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        pinned: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = (self.residual_in_fp32, self.is_rms_norm, self.num_groups, pinned)
        operands = (x, weight, bias, residual, self.eps, None, *options)
        result, normalized, launch = norm_rows(*operands, joined=True)
        statistics: Any = result.statistics
        self.shape, self.x_dtype, self.has_residual = x.shape, x.dtype, residual is not None
        self.rows = (result.rstd.shape[0], x.shape[-1] // self.num_groups)
        if not pinned and _are_launched_as_they_are(x, weight, bias, residual):
            self._new: Any = like(result.y), like(statistics), like(result.residual)
            self._forward = bound_launch(*launch, offsets=_offset(launch, 7, statistics))
        return result.y, statistics, in_shape(normalized, x.shape)

    def split(self, statistics: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the means, None for RMS norm, and rstd."""
        return split_statistics(statistics, self.rows[0], self.is_rms_norm)

    def known_backward(self, dy: Tensor, dres: Tensor | None, *saved: Any) -> Gradients | None:
        """Return (dx, dw, db, dres_in) as `layer_norm_bwd`; None for another call than before.

        `saved` are the normalized tensor, the statistics, and the parameters.
        """
        x, statistics, weight, bias = saved
        stored_call = self._backward.get((dres is None, dres is dy))
        if stored_call is None or is_pinned(self.deterministic):
            return None
        given = (dy, x, statistics, weight, bias, None if dres is dy else dres)
        if not stored_call.are_alike(*[operand for operand in given if operand is not None]):
            return None
        mean = None if self.is_rms_norm else statistics
        made = [None if new is None else new() for new in stored_call.outputs]
        operands = (dy, x, weight) if stored_call.few else (dy, x, weight, bias)
        if stored_call.rows(*operands, mean, statistics, dres, *made) is None:
            return None
        dx, dres_in, *_, dw, db = made
        if stored_call.sums is not None:
            partials = dw, db
            dw, db = [None if new is None else new() for new in stored_call.gradients]
            if stored_call.sums(*partials, dw, db) is None:
                return None
        return dx, dw, db, dx if self.has_residual and dres_in is None else dres_in

    def backward(self, dy: Tensor, dres: Tensor | None, *saved: Any) -> Gradients:
        """Return what `known_backward` does, for any operands."""
        x, statistics, weight, bias = saved
        pinned = is_pinned(self.deterministic)
        rows = [None if each is None else in_shape(each, self.rows) for each in (dy, x, dres)]
        operands = (rows[0], rows[1], weight, bias, *self.split(statistics), rows[2])
        options = (self.has_residual, self.is_rms_norm, self.x_dtype, False, self.num_groups)
        (dx, dw, db, dres_in), launches = backward_rows(*operands, *options, pinned)
        given = (dy, x, statistics, weight, bias)
        if not pinned and _are_launched_as_they_are(*given, dres):
            self._remember_backward(given, dres, launches)
        shaped = in_shape(dx, self.shape)
        if dres_in is not None:
            # One object: with two, autograd would assume separate memory, and add to each in place.
            dres_in = shaped if dres_in is dx else in_shape(dres_in, self.shape)
        return shaped, dw, db, dres_in

    def _remember_backward(
        self, operands: tuple[Any, ...], dres: Tensor | None, launches: BackwardLaunches
    ) -> None:
        dy, statistics = operands[0], operands[2]
        launch, few = launches.rows, launches.plan is None
        rstd_index = 4 if few else 5  # of rstd
        dx, dres_in, *others = launch.args[rstd_index + 2 : rstd_index + (6 if few else 7)]
        # Launched on as rows, and returned in the shape of x.
        shaped = [
            None if tensor is None else in_shape(tensor, self.shape) for tensor in (dx, dres_in)
        ]
        gradients = () if launches.sums is None else launches.sums.args[2:4]
        rows = bound_launch(*launch, offsets=_offset(launch, rstd_index, statistics))
        sums = None if launches.sums is None else bound_launch(*launches.sums)
        are_alike = alike(*operands, None if dres is dy else dres)
        if rows and are_alike and (sums is None) is (launches.sums is None):
            new = (
                [like(tensor) for tensor in (*shaped, *others)],
                [like(tensor) for tensor in gradients],
            )
            stored_call = KnownBackward(are_alike, few, rows, sums, *new)
            self._backward[dres is None, dres is dy] = stored_call


def like(tensor: Tensor | None) -> Allocator | None:
    """Return what allocates such a tensor, on the current device."""
    if tensor is None:
        return None
    given = tuple(tensor.shape), tensor.stride()
    if tensor.dtype == torch.int64:  # the words of `long_rows`, which are all -1
        return functools.partial(torch.full, given[0], -1, dtype=torch.int64, device=tensor.device)
    # Past the dispatcher, as Inductor allocates: a third of the host time of `empty_like`.
    quick = getattr(guards, f"_empty_strided_{tensor.device.type}", None)
    if quick is not None:
        return functools.partial(quick, *given, tensor.dtype)
    return functools.partial(torch.empty_strided, *given, dtype=tensor.dtype, device=tensor.device)


def _offset(launch: Launch, place: int, statistics: Tensor) -> dict[int, int]:
    """Return where rstd, an argument, begins in the statistics, in bytes."""
    # Not the place in the storage: a hook for saved tensors may return a part of a larger one.
    return {place: launch.args[place].data_ptr() - statistics.data_ptr()}


def _are_launched_as_they_are(x: Tensor, *others: Tensor | None) -> bool:
    """Whether there is a launch, and on these operands, not on copies of them."""
    given = (x, *(each for each in others if each is not None))
    return x.numel() > 0 and all(map(is_stored, given))
