"""Tuning as triton.autotune does it: in this process, on the caller's tensors; and when."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune.isolation import backend
from safetune.keys import device
from safetune.keys.kernel_digest import is_interpreted
from safetune.keys.tuning_key import readable_key
from safetune.launch.call_shape import named_arguments
from safetune.launch.scratch_memory import scratch_allocator
from safetune.miss import reporting

if TYPE_CHECKING:
    from safetune.frontend.autotuner import Autotuner
    from safetune.inputs.call import Call


def tune_inline(tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Config:
    """Return the fastest config; nothing is stored."""
    view = copy.copy(tuner)
    view.nargs = named = named_arguments(tuner.arg_names, args)
    configs = view.prune_configs(kwargs)
    if len(configs) == 1:
        return configs[0]
    if tuner.hooks.do_bench is None and is_interpreted(tuner.fn):
        view.do_bench = _wall_clock
    start = time.perf_counter()
    reporting.count_tuning()
    with scratch_allocator():
        timings = {config: view._bench(*args, config=config, **kwargs) for config in configs}
    best = min(timings, key=lambda config: timings[config])
    view.pre_hook({**named, **kwargs, **best.all_kwargs()}, reset_only=True)
    key = readable_key(tuner.keys, tuner.arg_names, {**named, **kwargs})
    reporting.report(tuner, key, best, timings, time.perf_counter() - start)
    return best


def _wall_clock(launch: Callable[[], object], quantiles: object) -> list[float]:
    """What stands in for Triton's `do_bench` in its interpreter, where that finds no device."""
    from safetune.isolation.protocol import Budget
    from safetune.launch.timing import Timer, measure

    timing = measure(launch, lambda: None, lambda: None, Timer(), Budget())
    return [timing.median_ms, timing.p20_ms, timing.p80_ms]


def why_not_isolated(call: Call) -> str:
    """Return why candidates for this call cannot run in a child; empty where they can."""
    if not hasattr(os, "memfd_create"):
        return f"there is no isolation on {sys.platform} yet"
    if call.interpreted:
        return ""
    return backend.why_missing(device.active_driver().get_current_target().backend)
