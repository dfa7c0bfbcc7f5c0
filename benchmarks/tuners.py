"""The two tuners under comparison, made alike, and what they say of themselves afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import device_time
import fresh_process
import recording

TUNERS = ("safetune", "triton")


def tuned(
    name: str,
    kernel: Any,
    configs: Sequence[Any],
    key: Sequence[str],
    both: Mapping[str, Any] = MappingProxyType({}),
    **ours: Any,
) -> Any:
    """Return a fresh tuner of a kernel: safetune's, with its own parameters, or Triton's."""
    if name == "safetune":
        from safetune import safetune

        return safetune(configs=list(configs), key=list(key), **both, **ours)(kernel)
    import triton

    # In the interpreter triton.autotune itself needs a GPU to take times.
    settings: dict[str, Any] = {"do_bench": _wall_clock} if recording.interpreted() else {}
    return triton.autotune(configs=list(configs), key=list(key), **both, **settings)(kernel)


def caches(folder: Path, tuner: str, state: str) -> dict[str, str]:
    """Return the variables for this tuner's compile cache, cold or warm, and an empty store."""
    compiled = folder / f"triton-{tuner}"
    assert state == "warm" or not compiled.exists(), "a cold process needs an empty compile cache"
    return fresh_process.caches(compiled, folder / f"store-{tuner}-{state}")


def _wall_clock(launch: Callable[[], object], quantiles: Any) -> list[float]:
    start = time.perf_counter()
    launch()
    return [(time.perf_counter() - start) * 1e3] * 3


def tune(tuner: Any, launch: Callable[[], object]) -> dict[str, Any]:
    """Tune by a first launch; return the seconds until the device has finished, and the choice.

    Raises:
        SystemExit: there was no tuning, so a fallback runs and nothing is measured.
    """
    device_time.synchronize()
    start = time.perf_counter()
    launch()
    device_time.synchronize()
    seconds = time.perf_counter() - start
    if not hasattr(tuner, "configs_timings"):
        raise SystemExit(f"{tuner.base_fn.__name__} was not tuned: see the warnings above")
    found = {"seconds": seconds, "config": str(tuner.best_config), "failed": _failed(tuner)}
    phases = getattr(tuner, "tuning_phases", None) or {}  # of safetune
    return found | {f"phase_s_{name}": float(spent) for name, spent in phases.items()}


def _failed(tuner: Any) -> int:
    """Return how many configs got no time."""
    medians = [
        float(timing[0] if isinstance(timing, (list, tuple)) else timing)
        for timing in tuner.configs_timings.values()
    ]
    return sum(not math.isfinite(median) for median in medians)
