"""`SAFETUNE_MODE=record`: counts the launches of each key, and times some of them.

An observer counts launches from the first miss until the mode changes; a program that does not
record has no observer. The counts are added to the recorded calls once a minute and at exit.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from safetune import forks
from safetune.both import backend
from safetune.frontend import observers
from safetune.keys.identity import is_interpreted
from safetune.settings import Mode, Settings
from safetune.store.lookup import open_lookup
from safetune.store.records import CallCount

if TYPE_CHECKING:
    from collections.abc import Callable

    from safetune.launch.key_state import KeyState

_FLUSH_S = 60.0
#: In each minute the launches of a key are timed up to this number, and the 8th, 16th, … The first
#: of all, which compiles, is not: its key is not looked up yet.
_ALL_TIMED = 4


class _Count:
    """The launches of one key since the counts were stored."""

    def __init__(self) -> None:
        self.calls = self.captured = 0
        self.watches: list[_Watch] = []

    def is_timed(self) -> bool:
        """Whether the next launch is timed."""
        number = self.calls + 1
        return number <= _ALL_TIMED or number & (number - 1) == 0

    def of(self, key: str) -> CallCount:
        """Return the counts to store; the median leaves out launches that compiled again."""
        times_ms = [ms for watch in self.watches if (ms := watch.milliseconds()) is not None]
        timed_ms = len(times_ms) * statistics.median(times_ms) if times_ms else 0.0
        return CallCount(key, self.calls, len(times_ms), timed_ms, self.captured)


class _Watch:
    """Times one launch, on the device without waiting for it, or in the interpreter."""

    def __init__(self, interpreted: bool) -> None:
        self._events: list[Any] = []
        if not interpreted:
            import torch

            self._events = [torch.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._begin, self._end = time.perf_counter(), 0.0

    def stop(self) -> None:
        """Record the end of the launch."""
        self._end = time.perf_counter()
        if self._events:
            self._events[1].record()

    def milliseconds(self) -> float | None:
        """Return the time of the launch; None if it has not ended, or the device is lost."""
        if not self._events:
            return (self._end - self._begin) * 1e3
        begin, end = self._events
        with contextlib.suppress(RuntimeError):
            return float(begin.elapsed_time(end)) if end.query() else None
        return None


class CallCounts(observers.Observer):
    """Counts the launches of all tuners in this process, from its creation on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = forks.lock()
        self._counts: defaultdict[str, _Count] = defaultdict(_Count)
        self._flushed = time.monotonic()
        observers.add(self)
        forks.register("report", after_in_child=self.clear, at_exit=self.flush)
        forks.register_worker_exit(self, self.flush)

    def end(self) -> None:
        """Stop counting."""
        observers.remove(self)
        self.flush()

    def launch(
        self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Count a launch when it ends, and time it if a timing is due."""
        if Settings.current().mode is not Mode.RECORD:
            end()
            return None
        if len(tuner.configs) == 1 or kwargs.get("warmup"):
            return None
        state = tuner.states.of(tuner.shapes.of(args, kwargs).key(args, kwargs))
        watch, captured = None, bool(backend.capture_under_way())
        if state.asked is not None and not captured and self._of(state).is_timed():
            with contextlib.suppress(RuntimeError):  # no events on this device
                watch = _Watch(is_interpreted(tuner.fn))

        def launched() -> None:
            if watch is not None:
                watch.stop()
            self.add(state, captured, watch)
            if time.monotonic() - self._flushed > _FLUSH_S:
                self.flush()

        return launched

    def flush(self) -> None:
        """Add the counts to the recorded calls."""
        self._flushed = time.monotonic()
        with self._lock:
            counts, self._counts = self._counts, defaultdict(_Count)
        if counted := [count.of(key) for key, count in counts.items() if count.calls]:
            open_lookup(self._settings).store.count_calls(*counted)

    def clear(self) -> None:
        """Start over, in a forked child."""
        self._counts = defaultdict(_Count)

    def add(self, state: KeyState, captured: bool, watch: _Watch | None = None) -> None:
        """Count one launch."""
        if state.asked is not None:  # it has been looked up
            with self._lock:
                count = self._of(state)
                count.calls += 1
                count.captured += captured
                count.watches += [watch] if watch is not None else []

    def _of(self, state: KeyState) -> _Count:
        assert state.asked is not None
        return self._counts[state.asked.key.digest]


_active: CallCounts | None = None
_changing = forks.lock()


def begin(running: KeyState) -> None:
    """Start counting, including the running launch of this key, which has been looked up."""
    global _active
    with _changing:
        if _active is None:
            _active = CallCounts(Settings.current())
            _active.add(running, bool(backend.capture_under_way()))


def end() -> None:
    """Stop counting."""
    global _active
    with _changing:
        ended, _active = _active, None
    if ended is not None:
        ended.end()
