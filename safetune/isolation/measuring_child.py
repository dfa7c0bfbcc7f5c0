"""The measuring child of one call, and the children that one tuning leaves to the next."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from safetune.child.job_loop import IDLE_EXIT_S
from safetune.errors import WorkerUnavailable
from safetune.isolation import devices, process, protocol
from safetune.isolation.answers import reply_outcome
from safetune.isolation.child_environment import start_job
from safetune.isolation.child_handle import START_S, Child, ChildFailed
from safetune.isolation.fork_server import compile_server
from safetune.isolation.idle import IdleChildren
from safetune.outcome import CLEAN, Outcome, Verdict
from safetune.tuning.evidence import Evidence, Group, evidence_of

#: A child that leaves within so long is not used again: it may be on its way out.
_MARGIN_S = 1.0
_COMPILER = "compiler"

_idle = IdleChildren()
_measuring: weakref.WeakSet[MeasuringChild] = weakref.WeakSet()


class MeasuringChild:
    """The measuring child of one call on one device, replaced whenever a config spoils it.

    Attributes:
        compilations: how many configs it had to compile itself, as the disk cache had them not.
    """

    def __init__(
        self,
        header: dict[str, Any],
        blob: bytes,
        fds: tuple[int, ...],
        run_timeout_s: float,
        fresh: bool = False,
    ) -> None:
        self._header = {"op": "prepare", **header}
        self._blob = blob
        self._fds = fds
        self._timeout_s = run_timeout_s
        self._child: Child | None = None
        self._coming: Future[Child] | None = None
        self._index = int(header["index"])
        self._fresh = fresh
        self._interrupted = ""
        self.compilations = 0
        _measuring.add(self)

    def begin(self) -> None:
        """Have the child come up while others compile; the first job waits for it."""
        coming: Future[Child] = Future()
        # The tuning may be over, and its files closed, before this is.
        fds = tuple(os.dup(fd) for fd in self._fds)

        def prepare() -> None:
            try:
                coming.set_result(self._prepared(fds))
            except BaseException as error:
                coming.set_exception(error)
            finally:
                for fd in fds:
                    os.close(fd)

        thread = threading.Thread(target=prepare, name="safetune-measuring-child", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be had; the first job does it
            for fd in fds:
                os.close(fd)
        else:
            self._coming = coming

    def wait(self) -> None:
        """Return when the child is ready for a job; raises `WorkerUnavailable`."""
        self._ready()

    def resolve(self, config: int) -> tuple[Outcome, bytes]:
        """Return what the compiler needs for a config, or why that cannot be told."""
        outcome, _, blob = self._ask({"op": "resolve", "config": config})
        return outcome, blob

    def measure(
        self, config: int, budget: dict[str, Any], groups: Sequence[Group] | None = None
    ) -> tuple[Outcome, Evidence | None]:
        """Run and time one config. Whatever it does, the answer is an outcome.

        With `groups`, its result is compared with theirs, and an outcome that is ok has evidence.
        """
        known = None if groups is None else [asdict(group) for group in groups]
        job = {"op": "measure", "config": config, "budget": budget, "groups": known}
        outcome, reply, _ = self._ask(job)
        if not outcome.ok:
            return outcome, None
        try:
            if outcome.timing is None:
                raise protocol.ProtocolError("a measurement without a time")
            return outcome, None if known is None else evidence_of(reply.get("evidence"))
        except protocol.ProtocolError as error:
            self.replace()
            return Outcome(Verdict.PROTOCOL_ERROR, message=str(error)), None

    def replace(self) -> None:
        """Use a fresh child from here on."""
        if self._coming is not None:
            self._coming.add_done_callback(_kill_unwanted)
            self._coming = None
        if self._child is not None:
            self._child.kill()
            self._child = None

    def release(self) -> None:
        """Leave the child to the next tuning on this device, or to end by itself."""
        if self._child is None:
            self.replace()
            return
        with contextlib.suppress(ChildFailed):
            self._child.ask({"op": "release"}, timeout_s=self._timeout_s)
            _idle.keep(
                _measures_on(self._index), self._child, for_s=IDLE_EXIT_S - _MARGIN_S, most=1
            )
        self._child = None

    def interrupt(self, reason: str) -> None:
        """End the child under a job: the tuning is given up, and no config is blamed."""
        child = self._child
        if child is not None:
            self._interrupted = reason
            child.interrupt()

    def _ask(self, job: dict[str, Any]) -> tuple[Outcome, dict[str, Any], bytes]:
        child = self._ready()
        try:
            reply, blob = child.ask(job, timeout_s=self._timeout_s)
            outcome = reply_outcome(reply)
            self.compilations += _count_of(reply)
        except ChildFailed as failure:
            self._child = None
            if self._interrupted:
                raise WorkerUnavailable(self._interrupted) from None
            return failure.outcome, {}, b""
        except protocol.ProtocolError as error:
            self.replace()
            return Outcome(Verdict.PROTOCOL_ERROR, message=str(error)), {}, b""
        if outcome.verdict not in CLEAN:
            self.replace()
        return outcome, reply, blob

    def _ready(self) -> Child:
        if self._child is None:
            coming, self._coming = self._coming, None
            self._child = self._prepared(self._fds) if coming is None else coming.result()
        return self._child

    def _prepared(self, fds: tuple[int, ...]) -> Child:
        devices.check(self._index)
        left = None if self._fresh else self._left()
        child = left or Child(gpu_blind=self._index < 0, device=self._index)
        timeout_s = max(START_S, self._timeout_s)
        try:
            reply, _ = child.ask(self._header, self._blob, fds, timeout_s=timeout_s)
        except ChildFailed as failure:
            raise WorkerUnavailable(
                f"a tuning process could not rebuild the call: {failure.outcome.label} "
                f"{failure.outcome.message} {failure.outcome.stderr}".strip()
            ) from failure
        if "error" in reply:
            child.kill()
            raise WorkerUnavailable(
                f"a tuning process could not rebuild the call: {reply['error']}"
            )
        return child

    def _left(self) -> Child | None:
        """The child that the last tuning on this device has left, in our surroundings."""
        child = _idle.take(_measures_on(self._index))
        if child is not None:
            try:
                child.ask(start_job(gpu_blind=self._index < 0), timeout_s=START_S)
            except ChildFailed:
                return None
        return child


def _measures_on(index: int) -> str:
    return f"measures on {index}"


def _kill_unwanted(coming: Future[Child]) -> None:
    if coming.exception() is None:
        coming.result().kill()


def _count_of(reply: dict[str, Any]) -> int:
    try:
        return int(reply["compilations"])
    except (KeyError, TypeError, ValueError) as error:
        raise protocol.ProtocolError(f"not a count of compilations: {str(reply)[:80]}") from error


def release_compiler(child: Child) -> None:
    """Leave a compile child to the next tuning; its answer to that is not waited for."""
    child.tell({"op": "release", "idle_s": IDLE_EXIT_S})
    _idle.keep(_COMPILER, child, for_s=IDLE_EXIT_S - _MARGIN_S, most=process.usable_cpus())


def compiler() -> tuple[Child, bool]:
    """Return a compile child that waits for a `start` job, and whether an earlier tuning left it.

    Raises:
        WorkerUnavailable: none can be started.
    """
    child = _idle.take(_COMPILER)
    if child is not None:
        return child, True
    return Child(gpu_blind=True, forks=compile_server, started=False), False


def interrupt(reason: str) -> None:
    """Give up what is being measured now: those tunings raise `WorkerUnavailable`."""
    for measuring in list(_measuring):
        measuring.interrupt(reason)


def drop_idle(index: int) -> None:
    """End the idle child of a device now, so that its memory is free when this returns."""
    child = _idle.take(_measures_on(index))
    if child is not None:
        child.kill()


def drop_all_idle() -> None:
    """Let go of every idle child; it ends by itself."""
    _idle.drop()
