"""A thread for I/O that may never return, and callers that stop waiting for it.

Tasks run one at a time, in order. A caller waits up to its timeout; its task goes on without it. A
thread that never returns, such as one that reads from a dead NFS mount, is left as it is: it is a
daemon. A forked child has neither the thread nor its tasks, and starts its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from safetune import forks
from safetune.messages import logger

Result = TypeVar("Result")


class TimedOut(Exception):
    """The result has not come in time. The task goes on."""


class IOThread:
    """A queue of tasks and the thread that runs them, which starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = forks.lock()
        self.start_over()
        forks.register("shared store", after_in_child=self.start_over)

    def start_over(self) -> None:
        """Forget the parent's thread and tasks, in a forked child."""
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._timed_out: Future[Any] | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether the last task that timed out is still running."""
        return self._timed_out is not None and not self._timed_out.done()

    def call(self, work: Callable[[], Result], timeout_s: float) -> Result:
        """Return what `work` returns, or raise what it raises; `TimedOut` after `timeout_s`."""
        task = self._put(work)
        if not wait([task], timeout_s).done:
            self._timed_out = task
            raise TimedOut
        return task.result()

    def submit(self, work: Callable[[], object]) -> None:
        """Have `work` run later. What it raises is logged."""

        def log_error(task: Future[Any]) -> None:
            if error := task.exception():
                logger.info("%s", error)

        self._put(work).add_done_callback(log_error)

    def _put(self, work: Callable[[], Result]) -> Future[Result]:
        task: Future[Result] = Future()
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the process is about to end
                    raise TimedOut from error
                self._thread = thread
        self._queue.put((task, work))
        return task

    def _run(self) -> None:
        while True:
            task, work = self._queue.get()
            try:
                task.set_result(work())
            except BaseException as error:
                task.set_exception(error)
            del task, work  # what they keep is not needed until the next one comes
