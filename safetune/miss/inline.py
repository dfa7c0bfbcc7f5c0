"""`isolation="inline"`: configs are measured in this process, as `triton.autotune` does it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from triton.runtime.autotuner import Config

from safetune.keys.kernel_digest import is_interpreted
from safetune.launch import scratch_memory
from safetune.launch.call_shape import named_arguments
from safetune.miss import reporting

if TYPE_CHECKING:
    from safetune.miss.tuner import Tuner


def tune(
    tuner: Tuner, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Config, dict[Config, list[float]]]:
    """Return the fastest config that pruning leaves, and the times of all; none of a single one.

    Nothing is stored.
    """
    view: Any = copy.copy(tuner)
    view.nargs = named = named_arguments(tuner.arg_names, args)
    configs = view.prune_configs(kwargs)
    if len(configs) == 1:
        return configs[0], {}
    if tuner.hooks.do_bench is None and is_interpreted(tuner.fn):
        view.do_bench = _wall_clock
    reporting.count_tuning()
    with scratch_memory.scratch_allocator():
        timings = {config: view._bench(*args, config=config, **kwargs) for config in configs}
    best = min(timings, key=lambda config: timings[config])
    view.pre_hook({**named, **kwargs, **best.all_kwargs()}, reset_only=True)
    return best, timings


def _wall_clock(launch: Callable[[], object], quantiles: object) -> list[float]:
    """Take the place of Triton's `do_bench` in its interpreter, where that finds no device."""
    from safetune.isolation.protocol import Budget
    from safetune.launch.timing import Timer, measure

    timing = measure(launch, lambda: None, lambda: None, Timer(), Budget())
    return [timing.median_ms, timing.p20_ms, timing.p80_ms]
