"""`safetune.graph`: torch.cuda.graph with a report of safetune's work during the capture."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from safetune.both import backend
from safetune.config import check_seconds
from safetune.errors import CaptureWarning, NoDevice
from safetune.frozen import dataclass
from safetune.launch import scratch_memory
from safetune.launch.key_state import CapturedMiss
from safetune.messages import counted, logger, warn
from safetune.miss import reporting, under_capture


@dataclass(frozen=True)
class CaptureReport:
    """A capture as safetune saw it; after `prepare` it has no misses, tunings or allocations.

    Attributes:
        graph: the name given to `safetune.graph`, or the driver's number of the capture.
        misses: keys that had no choice; the graph keeps the fallback for them.
        tunings: the number that began during the capture, in other threads of this process.
        scratch_allocations: the number of scratch memory requests that torch passed to the driver.
    """

    graph: str
    misses: tuple[CapturedMiss, ...]
    tunings: int
    scratch_allocations: int

    @property
    def outdated(self) -> tuple[CapturedMiss, ...]:
        """The misses whose key has another choice by now; if there are any, capture again."""
        return tuple(each for each in self.misses if each.outdated)

    def __str__(self) -> str:
        keys = "; ".join(f"{each.kernel} for {each.key}" for each in self.misses)
        which = f" ({keys})" if keys else ""
        return (
            f"{self.graph} had {counted(len(self.misses), 'key')} without a choice{which}, "
            f"{counted(self.tunings, 'tuning')} and "
            f"{counted(self.scratch_allocations, 'allocation')} of scratch memory"
        )


class Watch:
    """Counts the misses, tunings and allocations of one capture, and logs all stacks if it hangs.

    Attributes:
        report: so far, or final after the capture.
    """

    def __init__(self, name: str = "", watchdog_s: float | None = 30.0) -> None:
        if watchdog_s is not None:
            check_seconds("safetune.graph, where None turns it off,", watchdog_s=watchdog_s)
        self._name = name
        self._watchdog_s = watchdog_s
        self._capture = 0
        self._tunings = reporting.tunings.begun
        seconds = min(watchdog_s or 0.0, threading.TIMEOUT_MAX)
        self._watchdog = threading.Timer(seconds, self._took_too_long)
        self._watchdog.name, self._watchdog.daemon = "safetune-watchdog", True
        self._final: CaptureReport | None = None

    def __enter__(self) -> Watch:
        if self._watchdog_s is not None:
            self._watchdog.start()
        return self

    def begin(self) -> None:
        """Begin counting: a capture has begun on the current stream."""
        self._capture = backend.capture_under_way()
        self._name = self._name or f"capture {self._capture}"
        if self._capture:
            under_capture.watched[self._capture] = self._name
            scratch_memory.reserve(self._capture, backend.required().launch_stream())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watchdog.cancel()
        report = self._final = self.report
        scratch_memory.release(self._capture)
        under_capture.watched.pop(self._capture, None)
        if not (report.misses or report.tunings or report.scratch_allocations):
            return
        if kind is not None:  # a warning may be an error, which would take that one's place
            logger.warning("%s", report)
            return
        warn(
            f"{report}. Call safetune.prepare with the captured function, before the capture",
            CaptureWarning,
        )

    @property
    def report(self) -> CaptureReport:
        """The report so far, or the final one."""
        return self._final or CaptureReport(
            graph=self._name,
            misses=under_capture.misses(self._capture) if self._capture else (),
            tunings=reporting.tunings.begun - self._tunings,
            scratch_allocations=scratch_memory.driver_calls(self._capture),
        )

    def _took_too_long(self) -> None:
        logger.error(
            "%s has taken more than %g s. Stacks of all threads:\n%s",
            self._name or "a capture",
            self._watchdog_s,
            stacks(),
        )


def stacks() -> str:
    """Return the stacks of all threads of this process, formatted like tracebacks."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(identifier, identifier)}:\n{''.join(traceback.format_stack(frame))}"
        for identifier, frame in sys._current_frames().items()
        if identifier != threading.get_ident()
    )


@contextlib.contextmanager
def graph(
    cuda_graph: Any,
    pool: Any = None,
    stream: Any = None,
    capture_error_mode: str = "global",
    *,
    name: str = "",
    watchdog_s: float | None = 30.0,
    **options: Any,
) -> Iterator[Watch]:
    """Capture like `torch.cuda.graph`, and count work that should have happened before.

    Yields an object whose `report` can be read during and after the capture. Misses, tunings and
    allocations of scratch memory cause one warning at the end.

    Args:
        name: of the graph, for warnings and reports.
        watchdog_s: the time after which the stacks of all threads are logged and running
            measurements abandoned. None: never.
        cuda_graph, pool, stream, capture_error_mode, options: as for `torch.cuda.graph`.

    Raises:
        NoDevice: torch finds no GPU.
        InvalidSetting: `watchdog_s` is not a positive number.
    """
    import torch

    watch = Watch(name, watchdog_s)
    if not torch.cuda.is_available():
        raise NoDevice("safetune.graph needs a GPU, and torch does not find one")
    inner = torch.cuda.graph(cuda_graph, pool, stream, capture_error_mode, **options)
    # torch does not go back to the current stream if a capture cannot begin or end.
    same_stream_after = torch.cuda.stream(torch.cuda.current_stream())
    with watch, same_stream_after, backend.no_collection(), unmasked(inner):
        watch.begin()
        yield watch


@contextlib.contextmanager
def unmasked(inner: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Enter a context whose exit error does not replace the error of the body.

    If the body has invalidated a capture, its exit fails too, without the reason.
    """
    inner.__enter__()
    try:
        yield
    except BaseException as error:
        try:
            inner.__exit__(type(error), error, error.__traceback__)
        except Exception as at_end:
            logger.warning("could not end the capture after %r: %s", error, at_end)
        raise
    inner.__exit__(None, None, None)
