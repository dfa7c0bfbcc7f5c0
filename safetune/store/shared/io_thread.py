"""A thread for I/O that may never return, and callers that stop waiting for it.

Tasks run one at a time, in order. A caller waits up to its timeout; its task goes on without it. A
thread that never returns, such as one that reads from a dead NFS mount, is left as it is: it is a
daemon. A forked child has neither the thread nor its tasks, and starts its own.
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

Result = TypeVar("Result")

_threads: weakref.WeakSet[IOThread] = weakref.WeakSet()


class TimedOut(Exception):
    """The result has not come in time. The task goes on."""


class _Task(Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._done = threading.Event()
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout_s: float) -> Result:
        if not self._done.wait(timeout_s):
            raise TimedOut
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class IOThread:
    """A queue of tasks and the thread that runs them, which starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Task[Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._timed_out: _Task[Any] | None = None
        _threads.add(self)

    def call(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Return what `work` returns, or raise what it raises; `TimedOut` after `timeout_s`."""
        task = _Task(work)
        self._put(task)
        try:
            return task.result(timeout_s)
        except TimedOut:
            self._timed_out = task
            raise

    @property
    def is_stuck(self) -> bool:
        """Whether the last task that timed out is still running."""
        return self._timed_out is not None and not self._timed_out.is_done

    def submit(self, work: Callable[[], object]) -> None:
        """Have `work` run later. What it raises is logged."""

        def logged() -> None:
            try:
                work()
            except Exception as error:
                logger.info("%s", error)

        self._put(_Task(logged))

    def _put(self, task: _Task[Any]) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the process is about to end
                    raise TimedOut from error
                self._thread = thread
        self._queue.put(task)

    def _run(self) -> None:
        while True:
            self._queue.get().run()

    def start_over(self) -> None:
        """Forget the parent's thread and tasks, in a forked child."""
        self._lock, self._queue = threading.Lock(), queue.SimpleQueue()
        self._thread = self._timed_out = None


def _after_fork_in_child() -> None:
    for thread in tuple(_threads):
        thread.start_over()


forks.register("shared store", after_in_child=_after_fork_in_child)
