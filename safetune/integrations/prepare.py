"""`safetune.prepare`: prepares everything that a function launches before a graph captures it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from safetune import triton_compile
from safetune.both import backend
from safetune.config import config_text
from safetune.errors import CaptureError
from safetune.frontend import observers
from safetune.frontend.autotuner import Autotuner
from safetune.frozen import dataclass
from safetune.isolation import measuring_child
from safetune.launch import scratch_memory
from safetune.launch.key_state import CapturedMiss
from safetune.miss import background, reporting, resolve, under_capture


@dataclass(frozen=True)
class PreparedKey:
    """One key of one kernel that a prepared function launches.

    Attributes:
        kernel: its name.
        key: in readable form.
        config: the config of the last launch; empty if no launch succeeded.
        launches, hits: the number of launches, and of those whose config was already known.
        settled: whether its next launch needs neither the store nor a tuning.
    """

    kernel: str
    key: str
    config: str
    launches: int
    hits: int
    settled: bool


@dataclass(frozen=True)
class PrepareReport:
    """The results of `prepare`.

    Attributes:
        keys: every safetuned kernel and key that the function launched, in order.
        tunings: the number of them tuned now; the store had the other misses.
        compiles: the number of binaries that Triton made or found in its disk cache in this
            process.
        scratch_bytes: the most scratch memory that one launch requested.
        seconds: wall time.
        recapture: keys that earlier graphs launch with a fallback but that have a choice now.
    """

    keys: tuple[PreparedKey, ...]
    tunings: int
    compiles: int
    scratch_bytes: int
    seconds: float
    recapture: tuple[CapturedMiss, ...]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels, without duplicates."""
        return tuple(dict.fromkeys(key.kernel for key in self.keys))

    @property
    def hits(self) -> int:
        """The number of launches whose config was known."""
        return sum(key.hits for key in self.keys)

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
    begin, tunings = time.monotonic(), reporting.tunings.made
    observed, compilations = scratch_memory.observed(), triton_compile.compilations()
    launches = _Launches()
    with _one_at_a_time, resolve.waiting(), observed as sizes, compilations as compiled:
        with observers.added(launches):
            fn(*args, **kwargs)
            waited = [background.wait(launched.state) for launched in launches.seen.values()]
            if any(waited):
                fn(*args, **kwargs)
        if (device := backend.current()) is not None:
            device.synchronize()
        for index in {launched.index for launched in launches.seen.values()}:
            measuring_child.drop_idle(index)
    return PrepareReport(
        keys=tuple(launched.report() for launched in launches.seen.values()),
        # One that was under way may have failed, or found the choice of another process.
        tunings=max(reporting.tunings.made - tunings, 0),
        compiles=len(compiled),
        scratch_bytes=max(sizes, default=0),
        seconds=time.monotonic() - begin,
        recapture=tuple(miss for miss in under_capture.misses() if miss.outdated),
    )


#: Held by the call of `prepare` that observes the launches of the process.
_one_at_a_time = threading.RLock()


class _Launched:
    """The launches of one key of one tuner."""

    def __init__(self, tuner: Autotuner, memory_key: Any, call: resolve.Miss) -> None:
        self._tuner = tuner
        self.state = tuner.states.of(memory_key)
        self.index = call.call.index
        self._key = str(call.key())
        self._config = ""
        self._launches = self._hits = 0

    def known(self) -> bool:
        """Whether a launch of the key would find its config in this process's memory."""
        if len(self._tuner.configs) == 1:
            return True
        decision = self.state.decision()
        return decision is not None and decision.lasting

    def count(self, hit: bool) -> None:
        self._launches += 1
        self._hits += hit
        self._config = config_text(self.state.hit or self._tuner.best_config)

    def report(self) -> PreparedKey:
        return PreparedKey(
            self._tuner.base_fn.__name__,
            self._key,
            self._config,
            self._launches,
            self._hits,
            self.known(),
        )


class _Launches(observers.Observer):
    """Notes every launch, by tuner and memory key."""

    def __init__(self) -> None:
        self.seen: dict[Any, _Launched] = {}
        self._lock = threading.Lock()

    def launch(
        self, tuner: Autotuner, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None]:
        memory_key = tuner.shapes.of(args, kwargs).key(args, kwargs)
        with self._lock:
            launched = self.seen.get((tuner, memory_key))
            if launched is None:
                launched = _Launched(tuner, memory_key, resolve.Miss(tuner, args, kwargs))
                self.seen[tuner, memory_key] = launched
        hit = launched.known()

        def after() -> None:
            with self._lock:
                launched.count(hit)

        return after
