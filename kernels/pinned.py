"""Pinned launches, without tuning: the first config, with the same number of programs on every GPU.

The config and the number of programs decide the order of sums, and so their last bits. In a pinned
launch that order depends on the shape and the constexprs only.
"""

from __future__ import annotations

from typing import Any

import torch
from triton import Config

from safetune.frontend.autotuner import Autotuner
from safetune.kernels.launches import Launch

#: The multiprocessors that a pinned plan assumes on every GPU: those of an H100.
MULTIPROCESSORS = 132

_configs: dict[tuple[Any, ...], Config] = {}


def is_pinned(deterministic: bool | None) -> bool:
    """Return whether a call is pinned: by its argument, or else by torch's global setting."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    return deterministic


def multiprocessors(x: torch.Tensor, pinned: bool) -> int | None:
    """Return the count to plan for instead of the device's own, or None."""
    return MULTIPROCESSORS if pinned and x.is_cuda else None


def run_launch(kernel: Autotuner, launch: Launch, pinned: bool) -> None:
    """Launch on the current device: tuned, or pinned to the first config that is not pruned."""
    if not pinned:
        kernel[launch.grid](*launch.args, **launch.kwargs)
        return
    key = (kernel, *launch.kwargs.values())  # all constexprs; pruning reads nothing else
    config = _configs.get(key)
    if config is None:
        named = dict(zip(kernel.arg_names, launch.args, strict=False))
        config = _configs[key] = kernel.pruned_for(named, launch.kwargs)[0]
    kernel.fn[launch.grid](*launch.args, **launch.kwargs, **config.all_kwargs())
