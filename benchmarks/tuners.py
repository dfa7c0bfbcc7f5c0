"""The two tuners under comparison, made alike, and what they say of themselves afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

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


def _wall_clock(launch: Callable[[], object], quantiles: Any) -> list[float]:
    start = time.perf_counter()
    launch()
    return [(time.perf_counter() - start) * 1e3] * 3


def failed(tuner: Any) -> int:
    """Return how many configs of the last tuning got no time.

    Raises:
        SystemExit: there was no tuning, so a fallback runs and nothing is measured.
    """
    if not hasattr(tuner, "configs_timings"):
        raise SystemExit(f"{tuner.base_fn.__name__} was not tuned: see the warnings above")
    medians = [
        float(timing[0] if isinstance(timing, (list, tuple)) else timing)
        for timing in tuner.configs_timings.values()
    ]
    return sum(not math.isfinite(median) for median in medians)


def phases(tuner: Any) -> dict[str, float]:
    """Return where the last tuning's time went, as `phase_s_<name>`; empty for other tuners."""
    found = getattr(tuner, "tuning_phases", None) or {}
    return {f"phase_s_{name}": float(seconds) for name, seconds in found.items()}
