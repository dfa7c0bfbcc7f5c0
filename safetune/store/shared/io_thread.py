"""A thread for I/O that may never return, and callers that stop waiting for it.

Tasks run one at a time, in order. A caller waits as long as it likes; its task continues without
it. A thread that never returns, for example from reading a dead NFS mount, is abandoned: it is a
daemon. A forked child has neither the thread nor its tasks, and starts its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from safetune import forks

Result = TypeVar("Result")


class IOThread:
    """A queue of tasks and the thread that runs them, which starts with the first task."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = forks.lock()
        self.start_over()
        forks.register("shared store", after_in_child=self.start_over)

    def start_over(self) -> None:
        """In a forked child, forget the parent's thread and tasks."""
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.last: Future[Any] | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue a task; raises `RuntimeError` if no thread can start, as at exit."""
        task: Future[Result] = Future()
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        self.last = task
        self._queue.put((task, work))
        return task

    def _run(self) -> None:
        while True:
            task, work = self._queue.get()
            try:
                task.set_result(work())
            except BaseException as error:
                task.set_exception(error)
            del task, work  # their objects are not needed until the next one comes
