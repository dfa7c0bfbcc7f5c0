"""A thread of its own for errands that may take for ever, and callers that do not.

One errand runs at a time, in order. Whoever asks waits as long as it wants to and no longer; what
it asked for goes on without it. A thread that never comes back, such as one in a dead NFS mount, is
left where it is: it is a daemon. A fork has no thread and no errands; it starts its own.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from safetune import forks

logger = logging.getLogger("safetune")

Answer = TypeVar("Answer")

_couriers: weakref.WeakSet[Courier] = weakref.WeakSet()


class Late(Exception):
    """The answer has not come in time. The errand goes on."""


class _Errand(Generic[Answer]):
    def __init__(self, work: Callable[[], Answer]) -> None:
        self._work = work
        self._done = threading.Event()
        self._answer: Answer | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._answer = self._work()
        except BaseException as error:
            self._error = error
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def answer(self, timeout_s: float) -> Answer:
        if not self._done.wait(timeout_s):
            raise Late
        if self._error is not None:
            raise self._error
        return self._answer  # type: ignore[return-value]


class Courier:
    """A queue of errands and its thread, which starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Errand[Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._late: _Errand[Any] | None = None
        _couriers.add(self)

    def ask(self, work: Callable[[], Answer], timeout_s: float) -> Answer:
        """Return what `work` returns, or raise what it raises; `Late` after so many seconds."""
        errand = _Errand(work)
        self._put(errand)
        try:
            return errand.answer(timeout_s)
        except Late:
            self._late = errand
            raise

    @property
    def is_stuck(self) -> bool:
        """Whether an errand that came late once is still not done."""
        return self._late is not None and not self._late.is_done

    def send(self, work: Callable[[], object]) -> None:
        """Have `work` done some time. What it raises is logged."""

        def logged() -> None:
            try:
                work()
            except Exception as error:
                logger.info("%s", error)

        self._put(_Errand(logged))

    def _put(self, errand: _Errand[Any]) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # too late in the life of the process
                    raise Late from error
                self._thread = thread
        self._queue.put(errand)

    def _run(self) -> None:
        while True:
            self._queue.get().run()

    def start_over(self) -> None:
        """Forget the parent's thread and errands, in a fork."""
        self._lock, self._queue = threading.Lock(), queue.SimpleQueue()
        self._thread = self._late = None


def _after_fork_in_child() -> None:
    for courier in tuple(_couriers):
        courier.start_over()


forks.register("shared store", after_in_child=_after_fork_in_child)
