"""A miss under CUDA graph capture, and the graphs that have kept a fallback.

No process measures under capture, because a copy of the inputs would wait for the device. The graph
gets the stored choice or the fallback. Either may be compiled and loaded now, because neither step
becomes part of a graph.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

from triton.runtime.autotuner import Config

from safetune.config import config_text
from safetune.errors import CaptureWarning
from safetune.launch.key_state import CapturedMiss, KeyState
from safetune.messages import warn
from safetune.miss import candidates
from safetune.settings import Mode, Settings

if TYPE_CHECKING:
    from safetune.launch.call_shape import Tuner
    from safetune.store.lookup import Lookup
    from safetune.tuning.requests import TuningRequest

#: Misses that are remembered: a program that captures again and again must not grow without end.
_MOST_MISSES = 4096

_misses: deque[CapturedMiss] = deque(maxlen=_MOST_MISSES)

#: The captures whose misses `safetune.graph` reports in one warning, with their names.
watched: dict[int, str] = {}


def fall_back(
    tuner: Tuner,
    state: KeyState,
    request: TuningRequest,
    lookup: Lookup | None,
    settings: Settings,
    capture: int,
    tunes: bool,
) -> Config:
    """Return the config for a key without a choice under a capture.

    Calls outside the capture do not launch it, because the next such call tunes. If nothing is
    tuned, they launch it as well.

    Args:
        lookup: None without a store.
        tunes: whether calls outside a capture are tuned.
    """
    if lookup is None:
        config = request.configs[0]
    elif tunes:
        config = candidates.fallback(request, lookup.store)
    else:
        config = candidates.best_known(request, lookup)
    captured = CapturedMiss(
        kernel=request.key.kernel.name,
        key=str(request.key),
        config=config,
        capture=capture,
        graph=watched.get(capture) or f"capture {capture}",
        state=weakref.ref(state),
    )
    state.captured = captured
    _misses.append(captured)
    if lookup is not None and settings.mode is not Mode.FROZEN:
        from safetune.miss.record import remember  # imports torch

        remember(request, lookup.store, captured=True)
    if not tunes:  # the log has a line about it
        return state.set_fallback(config)
    if capture not in watched and tuner.first_time("captured without a choice"):
        warn(
            f"{captured.kernel} has no choice for {captured.key} and is captured with "
            f"{config_text(config)}, which the graph keeps: nothing is tuned under CUDA graph "
            "capture. Call safetune.prepare with the captured function, before the capture",
            CaptureWarning,
        )
    return config


def misses(capture: int | None = None) -> tuple[CapturedMiss, ...]:
    """Return the misses of one capture, or of all, oldest first."""
    return tuple(miss for miss in list(_misses) if capture in (None, miss.capture))
