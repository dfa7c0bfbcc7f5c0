"""One child as its parent sees it: a process, a private pipe, the file that it prints to."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import tempfile
from collections import deque
from typing import Any

from safetune.errors import WorkerUnavailable
from safetune.isolation import devices, process, protocol
from safetune.isolation.child_environment import start_job
from safetune.isolation.fork_server import ForkServer, server, tail_of
from safetune.outcome import Outcome, Verdict

START_S = 60.0


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
        forks: where it is forked from; `server` by default.
        started: wait until it has our surroundings; without, its first job has to be `start_job`.

    Raises:
        WorkerUnavailable: it cannot be started.
    """

    def __init__(
        self,
        gpu_blind: bool,
        device: int | None = None,
        forks: ForkServer | None = None,
        started: bool = True,
    ) -> None:
        self._device = device
        self._server = forks or server
        self.pipe, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._mark = 0
        self._jobs: deque[int] = deque()
        self._last_job = 0
        self._pidfd: int | None = None
        try:
            self.pid = self._server.fork(theirs, self._output)
        except WorkerUnavailable:
            self._close()
            raise
        finally:
            theirs.close()
        self._alive = True
        with contextlib.suppress(OSError):  # it may have ended, which the pipe then tells
            self._pidfd = os.pidfd_open(self.pid)
        if not started:
            return
        try:
            self.ask(start_job(gpu_blind), timeout_s=START_S)
        except ChildFailed as failure:
            raise WorkerUnavailable(
                f"a tuning process ended before its first job: {failure.outcome.label} "
                f"{failure.outcome.stderr}"
            ) from failure

    @property
    def ended(self) -> bool:
        """Whether the process has ended, or was let go."""
        if not self._alive or self._pidfd is None:
            return not self._alive
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def unanswered(self) -> int:
        """How many jobs have no answer yet."""
        return len(self._jobs)

    def tell(
        self,
        job: dict[str, Any],
        blob: bytes = b"",
        fds: tuple[int, ...] = (),
        timeout_s: float = START_S,
    ) -> None:
        """Send a job; a child that is gone shows when its answer is read."""
        self._mark = os.fstat(self._output.fileno()).st_size
        self._last_job += 1
        self._jobs.append(self._last_job)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            protocol.send(
                self.pipe, {**job, "job": self._last_job}, blob, fds=fds, timeout_s=timeout_s
            )

    def answer(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Return the answer to the first job not answered yet; raises `ChildFailed` without one."""
        try:
            reply, blob, _ = protocol.receive(self.pipe, timeout_s, self._pidfd)
            if reply.get("job") != self._jobs.popleft():
                raise protocol.ProtocolError(f"an answer to no job: {str(reply)[:80]}")
        except TimeoutError:
            raise self._failed(Verdict.TIMEOUT, f"no answer within {timeout_s:g} s") from None
        except (EOFError, ConnectionResetError):
            raise self._failed(Verdict.DIED, "") from None
        except protocol.ProtocolError as error:
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
        self._alive = False
        status = self._kill()
        self._close()  # not before: it would leave by itself when it sees that
        return status

    def _kill(self) -> int | None:
        status = self._server.reap(self.pid, kill=True)
        if status is None and self._device is not None:
            devices.note_stuck(self._device, self.pid)
        return status

    def _failed(self, verdict: Verdict, message: str) -> ChildFailed:
        self._alive = False
        self.pipe.close()
        died = verdict is Verdict.DIED
        # One whose pipe closed by itself is ending; killing it now would mask the cause.
        status = self._server.reap(self.pid, kill=False) if died else self._kill()
        if died and status is None:
            self._kill()
        detail = process.describe_exit(status) if died else ""
        if died:
            message = message or f"the process ended with {detail}"
        stderr = tail_of(self._output, self._mark)  # its last words come with its end
        self._close()
        return ChildFailed(Outcome(verdict, detail=detail, message=message, stderr=stderr))

    def interrupt(self) -> None:
        """Kill the process under the thread that waits for its answer; safe from any other."""
        handle = self._pidfd
        if handle is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)

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
