"""The launch of each layer-norm kernel: it allocates outputs and builds the grid and arguments.

`functional` and `workloads` both build their launches here, so offline tuning tunes the launches
that run. A pinned launch is not tuned: it runs the first config that is not pruned, and plans for
the same number of multiprocessors on every GPU. The config and the number of programs decide the
order of sums, and so their last bits; pinned, they depend on the shape and the constexprs only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import Config

from safetune.frontend.autotuner import Autotuner
from safetune.kernels.configs import programs_per_sm, slice_count, tile_rows
from safetune.kernels.few_rows import few_rows_backward_kernel, few_rows_forward_kernel
from safetune.kernels.grid_policy import GridPlan, plan_grid
from safetune.kernels.layer_norm import (
    layer_norm_backward_kernel,
    layer_norm_finalize_kernel,
    layer_norm_forward_kernel,
)

#: The interpreter runs programs one after another, so two are enough.
INTERPRETER_SM_COUNT = 2

#: The multiprocessors that a pinned plan assumes on every GPU: those of an H100.
PINNED_SM_COUNT = 132

#: At most as many rows, columns and elements are few: the kernels in `few_rows` are launched. More
#: rows fill a card, and more elements would be read twice from memory, not from the L2 cache.
FEW_ROWS, FEW_COLUMNS, FEW_ELEMENTS = 512, 8192, 2**20

_pinned_configs: dict[tuple[Any, ...], Config] = {}


class Launch(NamedTuple):
    """A kernel, and the grid and the arguments of one launch of it."""

    kernel: Autotuner
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ForwardOutputs(NamedTuple):
    """The outputs of the forward kernel; `mean` is None for RMS norm, `residual` if not stored.

    `statistics` is the one tensor that mean and rstd are parts of, if they are: both are aligned.
    """

    y: Tensor
    mean: Tensor | None
    rstd: Tensor
    residual: Tensor | None
    statistics: Tensor | None


class BackwardOutputs(NamedTuple):
    """The outputs of the backward kernel.

    `weight_partials` and `bias_partials` have one row of sums per program. `residual` is None if
    the gradient of the residual input is `x`; `y` is None if it is not recomputed.
    """

    x: Tensor
    residual: Tensor | None
    y: Tensor | None
    weight_partials: Tensor | None
    bias_partials: Tensor | None


#: Every launch computes a grid, and constexpr functions such as `triton.cdiv` take 5 to 12 us when
#: they are called from Python.
_tile_rows = functools.cache(tile_rows)
_slice_count = functools.cache(slice_count)
_programs_per_sm = functools.cache(programs_per_sm)


def split_statistics(
    statistics: Tensor, rows: int, is_rms_norm: bool
) -> tuple[Tensor | None, Tensor]:
    """Return mean and rstd, which are parts of one tensor; mean is None for RMS norm."""
    if is_rms_norm:
        return None, statistics[:rows]
    half = statistics.numel() // 2
    return statistics[:rows], statistics[half : half + rows]


def forward_launch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
    residual_dtype: torch.dtype | None,
    is_rms_norm: bool,
    num_groups: int,
    shape: Sequence[int] | None = None,
    joined: bool = False,
) -> tuple[ForwardOutputs, Launch]:
    """Return the outputs and the launch of `layer_norm_forward_kernel`; operands contiguous.

    y and the residual have the shape `shape`, by default x's.
    """
    rows, columns = x.shape
    stored = residual.dtype if residual is not None else residual_dtype
    stores_residual = residual is not None or stored not in (None, x.dtype)
    inputs = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    dtype, count = statistics_dtype(inputs), 1 if is_rms_norm else 2
    statistics = x.new_empty(count * -(-rows // 4) * 4, dtype=dtype) if joined else None
    if statistics is None:
        rstd = x.new_empty(rows, dtype=dtype)
        mean = None if is_rms_norm else torch.empty_like(rstd)
    else:
        mean, rstd = split_statistics(statistics, rows, is_rms_norm)
    shape = x.shape if shape is None else shape
    y = x.new_empty(shape, dtype=out_dtype)
    residual_out = x.new_empty(shape, dtype=stored) if stores_residual else None
    args = (x, residual, weight, bias, y, residual_out, mean, rstd, rows, eps)
    kwargs = {
        "COLUMNS": columns,
        "GROUPS": num_groups,
        "IS_RMS_NORM": is_rms_norm,
        "HAS_RESIDUAL": residual is not None,
        "STORE_RESIDUAL": stores_residual,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
    }

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (-(-rows // _tile_rows(meta["TILE_ELEMENTS"], columns)),)

    outputs = ForwardOutputs(y, mean, rstd, residual_out, statistics)
    return outputs, Launch(layer_norm_forward_kernel, grid, args, kwargs)


def few_rows_forward_launch(*operands: Any) -> tuple[ForwardOutputs, Launch]:
    """Return what `forward_launch` does, of `few_rows_forward_kernel`."""
    outputs, launch = forward_launch(*operands)
    kwargs = {name: value for name, value in launch.kwargs.items() if name != "GROUPS"}
    return outputs, launch._replace(kernel=few_rows_forward_kernel, kwargs=kwargs)


def are_few(x: Tensor, num_groups: int) -> bool:
    """Return whether a launch on a matrix is so small that its latency counts, not bandwidth."""
    rows, columns = x.shape
    few = rows <= FEW_ROWS and columns <= FEW_COLUMNS and rows * columns <= FEW_ELEMENTS
    return few and num_groups == 1


def is_pinned(deterministic: bool | None) -> bool:
    """Return whether a call is pinned: by its argument, or else by torch's global setting."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    return deterministic


def run_launch(launch: Launch, pinned: bool) -> None:
    """Launch on the current device."""
    kernel = launch.kernel
    if not pinned:
        kernel[launch.grid](*launch.args, **launch.kwargs)
        return
    key = (kernel, *launch.kwargs.values())  # all constexprs; pruning reads nothing else
    config = _pinned_configs.get(key)
    if config is None:
        named = dict(zip(kernel.arg_names, launch.args, strict=False))
        config = _pinned_configs[key] = kernel.pruned_for(named, launch.kwargs)[0]
    kernel.fn[launch.grid](*launch.args, **launch.kwargs, **config.all_kwargs())


def backward_plan(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, pinned: bool = False
) -> GridPlan:
    """Return the grid plan of the backward kernel for `x` and these parameters."""
    sums = (weight is not None) + (bias is not None)
    rows, columns = x.shape
    count = PINNED_SM_COUNT if pinned and x.device.type != "cpu" else sm_count(x.device)
    per_sm = _programs_per_sm(columns, sums, pinned)
    row_bytes = 3 * columns * x.dtype.itemsize
    partial_bytes = 4 * columns * statistics_dtype(x.dtype).itemsize
    return plan_grid(rows // num_groups, num_groups, count, per_sm, row_bytes, partial_bytes)


def backward_launch(
    plan: GridPlan,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None,
    has_residual: bool,
    is_rms_norm: bool,
    x_dtype: torch.dtype | None,
    recompute_output: bool,
) -> tuple[BackwardOutputs, Launch]:
    """Return the outputs and the launch of `layer_norm_backward_kernel`; operands contiguous."""
    columns = x.shape[1]
    stores_dres = has_residual and x_dtype not in (None, x.dtype)
    sizes, dtype = (plan.programs, columns), statistics_dtype(x.dtype)
    outputs = BackwardOutputs(
        x=torch.empty_like(x, dtype=x_dtype),
        residual=torch.empty_like(x) if stores_dres else None,
        y=torch.empty_like(dy) if recompute_output else None,
        weight_partials=None if weight is None else x.new_empty(*sizes, dtype=dtype),
        bias_partials=None if bias is None else x.new_empty(*sizes, dtype=dtype),
    )
    runs = (plan.rows, plan.programs_per_group)
    args = (dy, x, weight, bias, mean, rstd, dres, *outputs, *runs)
    kwargs = {
        "COLUMNS": columns,
        "GROUPS": plan.groups,
        "IS_RMS_NORM": is_rms_norm,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL_GRADIENT": dres is not None,
        "STORE_RESIDUAL_GRADIENT": stores_dres,
        "RECOMPUTE_OUTPUT": recompute_output,
        "IN_PLACE": False,
    }

    programs = plan.programs

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (programs * _slice_count(meta["TILE_ELEMENTS"], columns),)

    return outputs, Launch(layer_norm_backward_kernel, grid, args, kwargs)


def finalize_launch(
    plan: GridPlan,
    weight_partials: Tensor | None,
    bias_partials: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[tuple[Tensor | None, Tensor | None], Launch]:
    """Return (dw, db) and the launch of `layer_norm_finalize_kernel` that writes them."""
    columns = next(p.shape[1] for p in (weight_partials, bias_partials) if p is not None)
    dw, db = parameter_gradients(weight, bias)
    args = (weight_partials, bias_partials, dw, db, plan.programs_per_group)
    flags = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}

    groups, parameters = plan.groups, sum(flags.values())

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (-(-columns // meta["TILE_COLUMNS"]), groups, parameters)

    kwargs = {"COLUMNS": columns, **flags}
    return (dw, db), Launch(layer_norm_finalize_kernel, grid, args, kwargs)


def few_rows_backward_launch(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None,
    has_residual: bool,
    is_rms_norm: bool,
    x_dtype: torch.dtype | None,
) -> tuple[tuple[Tensor, Tensor | None, Tensor | None, Tensor | None], Launch]:
    """Return the outputs and the launch of `few_rows_backward_kernel`; operands contiguous."""
    rows, columns = x.shape
    stores_dres = has_residual and x_dtype not in (None, x.dtype)
    dx, dres_in = torch.empty_like(x, dtype=x_dtype), torch.empty_like(x) if stores_dres else None
    outputs = (dx, dres_in, *parameter_gradients(weight, bias))
    flags = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    has_sums = any(flags.values())
    kwargs = {
        "COLUMNS": columns,
        "IS_RMS_NORM": is_rms_norm,
        **flags,
        "HAS_RESIDUAL_GRADIENT": dres is not None,
        "STORE_RESIDUAL_GRADIENT": stores_dres,
    }

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        tiles = -(-rows // _tile_rows(meta["TILE_ELEMENTS"], columns))
        return (tiles - (-columns // meta["SUM_COLUMNS"] if has_sums else 0),)

    args = (dy, x, weight, mean, rstd, dres, *outputs, rows)
    return outputs, Launch(few_rows_backward_kernel, grid, args, kwargs)


def parameter_gradients(
    weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Allocate dw and db."""
    dw = None if weight is None else torch.empty_like(weight)
    return dw, None if bias is None else torch.empty_like(bias)


def sm_count(device: torch.device) -> int:
    """Return the number of multiprocessors that the grid policy plans for."""
    if device.type == "cpu":
        return INTERPRETER_SM_COUNT
    return _gpu_sm_count(device)


@functools.cache
def _gpu_sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for computations on a tile of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32
