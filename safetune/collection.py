"""Pauses of Python's garbage collector: the only module that turns it off."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses = 0
_resume = False


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause Python's garbage collector, in all threads.

    A miss allocates enough to start it, and if it destroys an older CUDA graph, a capture in global
    mode becomes invalid. Syntax trees start it often, and each time it walks the heap of torch.
    """
    global _pauses, _resume
    with _lock:
        if not _pauses:
            _resume = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses and _resume:
                gc.enable()
