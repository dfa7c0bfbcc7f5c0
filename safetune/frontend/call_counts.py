"""`SAFETUNE_MODE=record`: counts the launches of each key, and times some of them.

An observer counts launches from the first miss until the mode changes; a program that does not
record has no observer. The counts are added to the recorded calls once a minute and at exit.
"""

from __future__ import annotations

import contextlib
import statistics
import time
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
#: The launches of a key are timed up to this number, and the 8th, 16th, … The first one, which
#: compiles, is not: its key is not looked up yet.
_ALL_TIMED = 4


class _Count:
    """The launches of one key in this process, and the number of stored ones."""

    def __init__(self, key: str) -> None:
        self.calls = self.captured = 0
        self.watches: list[_Watch] = []  # of launches that may not have ended
        self.times_ms: list[float] = []
        self.stored = CallCount(key, 0)

    def is_timed(self) -> bool:
        """Whether the next launch is timed."""
        number = self.calls + 1
        return number <= _ALL_TIMED or number & (number - 1) == 0

    def news(self) -> CallCount:
        """Return the counts not stored yet, except launches that compiled again."""
        ended = [ms for watch in self.watches if (ms := watch.milliseconds()) is not None]
        self.times_ms += ended
        self.watches = [watch for watch in self.watches if watch.running]
        timed = len(self.times_ms)
        total_ms = timed * statistics.median(self.times_ms) if timed else 0.0
        stored = self.stored
        self.stored = CallCount(stored.key, self.calls, timed, total_ms, self.captured)
        return CallCount(
            stored.key,
            self.calls - stored.calls,
            timed - stored.timed,
            total_ms - stored.timed_ms,
            self.captured - stored.captured,
        )


class _Watch:
    """Times one launch, on the device without waiting for it, or in the interpreter."""

    def __init__(self, interpreted: bool) -> None:
        self.running = True
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
        """Return the time of the launch, once; None before it is known, or if it never is."""
        if not self._events:
            self.running = False
            return (self._end - self._begin) * 1e3
        try:
            if not self._events[1].query():
                return None
            self.running = False
            return float(self._events[0].elapsed_time(self._events[1]))
        except RuntimeError:  # the device is lost
            self.running = False
            return None


class CallCounts(observers.Observer):
    """Counts the launches of every tuner of this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = forks.lock()
        self._counts: dict[str, _Count] = {}
        #: Of a launch that was under way when this was made.
        self._unseen: list[tuple[KeyState, None, bool]] = []
        self._flushed = time.monotonic()

    def begin(self, state: KeyState) -> None:
        """Count the launches of every tuner from now on, and the running launch of this key."""
        self._unseen.append((state, None, bool(backend.capture_under_way())))
        observers.add(self)
        forks.register("report", after_in_child=self.clear, at_exit=self.flush)
        forks.register_worker_exit(self, self.flush)

    def end(self) -> None:
        """Stop counting."""
        observers.remove(self)
        self.flush()
        self.clear()

    def launch(
        self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Count a launch when it ends, and time it if a timing is due."""
        if Settings.current().mode is not Mode.RECORD:
            end()
            return None
        if len(tuner.configs) == 1 or kwargs.get("warmup"):
            return None
        self._catch_up()
        state = tuner.states.of(tuner.shapes.of(args, kwargs).key(args, kwargs))
        count, watch, captured = self._of(state), None, bool(backend.capture_under_way())
        if count is not None and count.is_timed() and not captured:
            with contextlib.suppress(RuntimeError):  # no events on this device
                watch = _Watch(is_interpreted(tuner.fn))

        def launched() -> None:
            if watch is not None:
                watch.stop()
            self._add(state, watch, captured)
            if time.monotonic() - self._flushed > _FLUSH_S:
                self.flush()

        return launched

    def flush(self) -> None:
        """Add the counts to the recorded calls."""
        self._flushed = time.monotonic()
        self._catch_up()
        with self._lock:
            news = [count.news() for count in self._counts.values()]
        if counted := [count for count in news if count.calls or count.timed]:
            open_lookup(self._settings).store.count_calls(*counted)

    def clear(self) -> None:
        """Start over, in a forked child or at the end."""
        self._counts, self._unseen = {}, []

    def _catch_up(self) -> None:
        while self._unseen:
            self._add(*self._unseen.pop())

    def _add(self, state: KeyState, watch: _Watch | None, captured: bool) -> None:
        with self._lock:
            if (count := self._of(state)) is not None:
                count.calls += 1
                count.captured += captured
                count.watches += [watch] if watch is not None else []

    def _of(self, state: KeyState) -> _Count | None:
        """Return the count of a key, if it has been looked up."""
        if state.asked is None:
            return None
        digest = state.asked.key.digest
        return self._counts.get(digest) or self._counts.setdefault(digest, _Count(digest))


_active: CallCounts | None = None
_changing = forks.lock()


def begin(state: KeyState) -> None:
    """Start counting, including the running launch of this key."""
    global _active
    with _changing:
        if _active is None:
            _active = CallCounts(Settings.current())
            _active.begin(state)


def end() -> None:
    """Stop counting."""
    global _active
    with _changing:
        ended, _active = _active, None
    if ended is not None:
        ended.end()
