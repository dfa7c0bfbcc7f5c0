"""Launches that no tuning reaches: the first config, on as many programs as on any other GPU.

Which config is chosen, and how many programs share the rows, decide in what order sums are formed,
and so their last bits. Pinned, that order depends on the shape and the constexprs alone.
"""

from __future__ import annotations

from typing import Any

import torch
from triton import Config

from safetune.frontend.autotuner import Autotuner
from safetune.kernels.launches import Launch

#: What a pinned plan is made for on every GPU: an H100.
MULTIPROCESSORS = 132

_configs: dict[tuple[Any, ...], Config] = {}


def is_pinned(deterministic: bool | None) -> bool:
    """Whether a call is pinned: as it asks, or else as torch was asked for all that it does."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    return deterministic


def multiprocessors(x: torch.Tensor, pinned: bool) -> int | None:
    """Return what to plan for in place of the device's own count, if anything."""
    return MULTIPROCESSORS if pinned and x.is_cuda else None


def run_launch(kernel: Autotuner, launch: Launch, pinned: bool) -> None:
    """Launch on the current device: tuned, or pinned to the first config that is not pruned."""
    if not pinned:
        kernel[launch.grid](*launch.args, **launch.kwargs)
        return
    key = (kernel, *launch.kwargs.values())  # all constexprs; pruning reads no others
    config = _configs.get(key)
    if config is None:
        named = dict(zip(kernel.arg_names, launch.args, strict=False))
        config = _configs[key] = kernel.pruned_for(named, launch.kwargs)[0]
    kernel.fn[launch.grid](*launch.args, **launch.kwargs, **config.all_kwargs())
