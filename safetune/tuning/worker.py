"""The parent's view of its children: ask one, outlive it, replace it."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from safetune.errors import WorkerUnavailable
from safetune.outcome import CLEAN, Outcome, Verdict
from safetune.tuning import devices, process, wire
from safetune.tuning.answers import reply_outcome
from safetune.tuning.child import IDLE_EXIT_S
from safetune.tuning.evidence import Evidence, Group, evidence_of
from safetune.tuning.fork_server import ForkServer, tail_of
from safetune.tuning.surroundings import start_job

#: A measuring child idle for longer is replaced, not reused: it may be on its way out.
REUSE_S = IDLE_EXIT_S / 2
_START_S = 60.0

server = ForkServer(("triton", "torch", "safetune.tuning.child", "safetune.tuning.session"))


class ChildFailed(Exception):
    """A child that did not answer: it died, hung or spoke nonsense. It is gone when this rises.

    Attributes:
        outcome: what that says of the job it was doing.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.label)
        self.outcome = outcome


class Child:
    """One forked process and the private pipe to it.

    Args:
        device: the one it uses, which is out of use while the child is killed but has not ended.

    Raises:
        WorkerUnavailable: it cannot be started.
    """

    def __init__(self, gpu_blind: bool, device: int | None = None) -> None:
        self._device = device
        self.pipe, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._mark = 0
        self._jobs: deque[int] = deque()
        self._last_job = 0
        self._pidfd: int | None = None
        try:
            self.pid = server.fork(theirs, self._output)
        except WorkerUnavailable:
            self._close()
            raise
        finally:
            theirs.close()
        self._alive = True
        with contextlib.suppress(OSError):  # it may have ended, which the pipe then tells
            self._pidfd = os.pidfd_open(self.pid)
        try:
            self.ask(start_job(gpu_blind), timeout_s=_START_S)
        except ChildFailed as failure:
            raise WorkerUnavailable(
                f"a tuning process ended before its first job: {failure.outcome.label} "
                f"{failure.outcome.stderr}"
            ) from failure

    def tell(
        self,
        job: dict[str, Any],
        blob: bytes = b"",
        fds: tuple[int, ...] = (),
        timeout_s: float = _START_S,
    ) -> None:
        """Send a job; a child that is gone shows when its answer is read."""
        self._mark = os.fstat(self._output.fileno()).st_size
        self._last_job += 1
        self._jobs.append(self._last_job)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            wire.send(self.pipe, {**job, "job": self._last_job}, blob, fds=fds, timeout_s=timeout_s)

    def answer(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Return the answer to the first job not answered yet; raises `ChildFailed` without one."""
        try:
            reply, blob, _ = wire.receive(self.pipe, timeout_s, self._pidfd)
            if reply.get("job") != self._jobs.popleft():
                raise wire.ProtocolError(f"an answer to no job: {str(reply)[:80]}")
        except TimeoutError:
            raise self._failed(Verdict.TIMEOUT, f"no answer within {timeout_s:g} s") from None
        except (EOFError, ConnectionResetError):
            raise self._failed(Verdict.DIED, "") from None
        except wire.ProtocolError as error:
            raise self._failed(Verdict.PROTOCOL_ERROR, str(error)) from None
        return reply, blob

    def ask(
        self, job: dict[str, Any], blob: bytes = b"", fds: tuple[int, ...] = (), *, timeout_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """Send a job and return its answer; raises `ChildFailed`."""
        try:
            self.tell(job, blob, fds, timeout_s)
        except TimeoutError:
            raise self._failed(Verdict.TIMEOUT, f"took no job within {timeout_s:g} s") from None
        return self.answer(timeout_s)

    def kill(self) -> int | None:
        """End the child and all that it started; return its wait status."""
        if not self._alive:
            return None
        self._close()
        return self._kill()

    def _kill(self) -> int | None:
        status = server.reap(self.pid, kill=True)
        if status is None and self._device is not None:
            devices.note_stuck(self._device, self.pid)
        return status

    def _failed(self, verdict: Verdict, message: str) -> ChildFailed:
        stderr = tail_of(self._output, self._mark)
        detail = ""
        if verdict is Verdict.DIED:
            # Its pipe closed by itself; killing it now would mask the cause.
            self._close()
            status = server.reap(self.pid, kill=False)
            if status is None:
                self._kill()
            detail = process.describe_exit(status)
            message = message or f"the process ended with {detail}"
        else:
            self.kill()
        return ChildFailed(Outcome(verdict, detail=detail, message=message, stderr=stderr))

    def abandon(self) -> None:
        """Let go of the pipe; the child ends when it sees that."""
        if self._alive:
            self._close()

    def _close(self) -> None:
        self._alive = False
        self.pipe.close()
        self._output.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class MeasuringChild:
    """The measuring child of one call on one device, replaced whenever a config spoils it."""

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
        self._index = int(header["index"])
        self._fresh = fresh

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
                raise wire.ProtocolError("a measurement without a time")
            return outcome, None if known is None else evidence_of(reply.get("evidence"))
        except wire.ProtocolError as error:
            self.replace()
            return Outcome(Verdict.PROTOCOL_ERROR, message=str(error)), None

    def replace(self) -> None:
        """Use a fresh child from here on."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def release(self) -> None:
        """Leave the child to the next tuning on this device, or to end by itself."""
        if self._child is not None:
            with contextlib.suppress(ChildFailed):
                self._child.ask({"op": "release"}, timeout_s=self._timeout_s)
                _keep(self._index, self._child)
            self._child = None

    def _ask(self, job: dict[str, Any]) -> tuple[Outcome, dict[str, Any], bytes]:
        child = self._ready()
        try:
            reply, blob = child.ask(job, timeout_s=self._timeout_s)
            outcome = reply_outcome(reply)
        except ChildFailed as failure:
            self._child = None
            return failure.outcome, {}, b""
        except wire.ProtocolError as error:
            self.replace()
            return Outcome(Verdict.PROTOCOL_ERROR, message=str(error)), {}, b""
        if outcome.verdict not in CLEAN:
            self.replace()
        return outcome, reply, blob

    def _ready(self) -> Child:
        if self._child is not None:
            return self._child
        devices.check(self._index)
        idle = None if self._fresh else _take(self._index)
        child = idle or Child(gpu_blind=self._index < 0, device=self._index)
        try:
            reply, _ = child.ask(
                self._header, self._blob, self._fds, timeout_s=max(_START_S, self._timeout_s)
            )
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
        self._child = child
        return child


_idle: dict[int, tuple[int, float, Child]] = {}
_idle_lock = threading.Lock()


def _keep(index: int, child: Child) -> None:
    with _idle_lock:
        previous = _idle.pop(index, None)
        _idle[index] = (os.getpid(), time.monotonic(), child)
    if previous is not None:
        previous[2].kill()


def _take(index: int) -> Child | None:
    with _idle_lock:
        entry = _idle.pop(index, None)
    if entry is None or entry[0] != os.getpid():
        return None
    if time.monotonic() - entry[1] > REUSE_S:
        entry[2].kill()
        return None
    try:
        entry[2].ask(start_job(gpu_blind=index < 0), timeout_s=_START_S)
    except ChildFailed:
        return None
    return entry[2]


def drop_idle(index: int) -> None:
    """End the idle child of a device now, so that its memory is free when this returns."""
    with _idle_lock:
        entry = _idle.pop(index, None)
    if entry is not None and entry[0] == os.getpid():
        entry[2].kill()


@atexit.register
def _drop_idle() -> None:
    for _, _, child in _idle.values():
        child.abandon()
    _idle.clear()
