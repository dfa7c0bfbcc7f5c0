"""`safetune.prepare`: prepares everything that a function launches before a graph captures it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from safetune.both import backend
from safetune.config import config_text
from safetune.errors import CaptureError
from safetune.frontend import observers
from safetune.frontend.autotuner import Autotuner
from safetune.frozen import dataclass
from safetune.isolation import measuring_child
from safetune.launch.key_state import CapturedMiss, Decision, KeyState, Reason
from safetune.miss import background, reporting, resolve, under_capture


@dataclass(frozen=True)
class PreparedKey:
    """One key of one kernel that a prepared function launches.

    Attributes:
        kernel: its name.
        key: in readable form.
        config: the config that its next launch uses; empty if none is known.
        settled: whether its next launch needs neither the store nor a tuning.
    """

    kernel: str
    key: str
    config: str
    settled: bool


@dataclass(frozen=True)
class PrepareReport:
    """The results of `prepare`.

    Attributes:
        keys: every safetuned kernel and key that the function launched, in order.
        tunings: the number of them tuned now; the store had the other misses.
        recapture: keys that earlier graphs launch with a fallback but that have a choice now.
    """

    keys: tuple[PreparedKey, ...]
    tunings: int
    recapture: tuple[CapturedMiss, ...]

    @property
    def unsettled(self) -> tuple[PreparedKey, ...]:
        """The keys that still have no choice because they could not be tuned now."""
        return tuple(key for key in self.keys if not key.settled)


def prepare(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> PrepareReport:
    """Call `fn(*args, **kwargs)`, so that a capture of the same call only launches.

    Every tuned kernel that `fn` launches, from any thread, is tuned if it has no choice, compiled,
    loaded and run once. `prepare` waits for background tunings, and calls `fn` a second time only
    if a tuning was already running, to load its choice. Afterwards the device is idle and no tuning
    process holds its memory.

    Raises:
        CaptureError: called under capture.
        NoWorkingConfig: every config of a kernel failed.
    """
    if backend.capture_under_way():
        raise CaptureError(
            "safetune.prepare was called during a CUDA graph capture: call it before"
        )
    tunings, launches = reporting.tunings.made, _Launches()
    with _one_at_a_time, resolve.waiting():
        observers.add(launches)
        try:
            fn(*args, **kwargs)
            waited = [background.wait(launched.state) for launched in launches.seen.values()]
            if any(waited):
                fn(*args, **kwargs)
        finally:
            observers.remove(launches)
        if (device := backend.current()) is not None:
            device.synchronize()
        for index in {launched.device for launched in launches.seen.values()}:
            measuring_child.drop_idle(index)
    return PrepareReport(
        keys=tuple(launched.report() for launched in launches.seen.values()),
        # One that was under way may have failed, or found the choice of another process.
        tunings=max(reporting.tunings.made - tunings, 0),
        recapture=tuple(miss for miss in under_capture.misses() if miss.outdated),
    )


#: Held by the call of `prepare` that observes the launches of the process.
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class _Launched:
    """A key of a tuner that has been launched."""

    tuner: Autotuner
    state: KeyState
    key: str
    device: int

    def report(self) -> PreparedKey:
        configs = self.tuner.configs
        only = Decision(configs[0], Reason.CHOICE) if len(configs) == 1 else None
        decision = only or self.state.decision()
        return PreparedKey(
            self.tuner.base_fn.__name__,
            self.key,
            config_text(decision.config) if decision is not None else "",
            settled=decision is not None and decision.lasting,
        )


class _Launches(observers.Observer):
    """Notes the keys of all launches."""

    def __init__(self) -> None:
        self.seen: dict[Any, _Launched] = {}

    def launch(self, tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        memory_key = tuner.shapes.of(args, kwargs).key(args, kwargs)
        if (tuner, memory_key) not in self.seen:
            miss = resolve.Miss(tuner, args, kwargs)
            state = tuner.states.of(memory_key)
            launched = _Launched(tuner, state, str(miss.key()), miss.call.index)
            self.seen.setdefault((tuner, memory_key), launched)
