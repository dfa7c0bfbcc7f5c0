"""One child from its parent's view: a process, a private pipe, and its output file.

After its jobs, a child is kept for a short time for the next tuning.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import time

from safetune import forks, triton_internals
from safetune.both import backend, protocol
from safetune.both.protocol import IDLE_EXIT_S, Answer, Job, Start
from safetune.errors import DeviceUnavailable, WorkerUnavailable
from safetune.isolation import fork_server
from safetune.isolation.fork_server import ForkServer, Output
from safetune.outcome import Outcome, Verdict

#: How long a child may take to answer its first job, `Start` or `Prepare`.
START_S = 60.0
#: A child is not used again this shortly before it exits.
_IDLE_MARGIN_S = 1.0
#: How long the kernel may take to end a child whose server has exited; it takes microseconds.
_END_S = 2.0

#: For each device, a pidfd of a child on it that SIGKILL did not end.
_stuck: dict[int, int] = {}


def start_job(gpu_blind: bool, memory_bytes: int = 0, kernel: bytes = b"") -> Start:
    """Return the job with this process's current environment, paths, program arguments and Triton
    knobs.
    """
    environment = fork_server.child_environment()
    if gpu_blind:
        environment.update(backend.HIDDEN)
    elif found := backend.current():  # an index means the same device there as here
        environment.update(found.visible_environment())
    directory = ""
    with contextlib.suppress(FileNotFoundError):  # it has been deleted
        directory = os.getcwd()
    return Start(
        environment=environment,
        path=fork_server.search_path(),
        argv=[str(argument) for argument in getattr(sys, "argv", [])],
        directory=directory,
        knobs=triton_internals.knobs_set_in_code(),
        backend_hashes=dict(triton_internals.backend_hashes),
        files_hash=triton_internals.files_hash.get(),
        memory_bytes=memory_bytes,
        kernel=kernel,
    )


def check_device(index: int) -> None:
    """Raise if a child must not use a device; -1 is the interpreter.

    The caller has a context on the device, or will need one for the following launch.

    Raises:
        DeviceUnavailable: a fault there could reach this process, or a killed child is stuck.
        BackendError: the driver does not answer.
    """
    if index in _stuck:
        if not protocol.has_ended(_stuck[index], _END_S):
            where = "" if index < 0 else f" on device {index}"
            raise DeviceUnavailable(
                f"a tuning process{where} was killed but has not exited; it is probably stuck in a "
                "driver call. Nothing is tuned there until it exits"
            )
        os.close(_stuck.pop(index))
    if index >= 0 and (reason := backend.required().why_not_shared(index)):
        raise DeviceUnavailable(reason)


def _note_stuck(index: int, pid: int) -> None:
    """Have `check_device` refuse a device until a killed child on it has ended."""
    with contextlib.suppress(OSError):  # it has ended after all
        handle = os.pidfd_open(pid)
        if index in _stuck:
            os.close(_stuck[index])
        _stuck[index] = handle


class ChildFailed(Exception):
    """A child did not answer its job: it died, hung, or sent something else. It has been killed."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.label)
        self.outcome = outcome

    def __str__(self) -> str:
        return f"{self.outcome.label} {self.outcome.message} {self.outcome.stderr}".strip()


class Child:
    """One forked process and the private pipe to it; raises `WorkerUnavailable`.

    Args:
        device: the device that it uses; a killed child that has not ended blocks tuning there.
        forks: the server that forks it.
        started: send `start_job` and wait for its answer; otherwise it must be the first job.
        modules: imported by the server before it forks.
    """

    def __init__(
        self,
        gpu_blind: bool,
        device: int | None = None,
        forks: ForkServer = fork_server.server,
        started: bool = True,
        modules: tuple[str, ...] = (),
    ) -> None:
        self._device = device
        self._server = forks
        self._last_job = 0
        self.unanswered = 0
        self._pidfd: int | None = None
        with contextlib.ExitStack() as on_error:
            self._output = on_error.enter_context(contextlib.closing(Output()))
            self.pipe, theirs = socket.socketpair()
            on_error.enter_context(self.pipe)
            with theirs:
                self.pid, self._parent = self._server.fork(theirs, self._output, modules)
            on_error.pop_all()
        self._alive = True
        with contextlib.suppress(OSError):  # it may have ended, which the pipe then shows
            self._pidfd = os.pidfd_open(self.pid)
        if started:
            self._start(gpu_blind)

    def _start(self, gpu_blind: bool) -> None:
        try:
            self.ask(start_job(gpu_blind), timeout_s=START_S)
        except ChildFailed as failure:
            raise WorkerUnavailable(
                f"a tuning process ended before its first job: {failure}"
            ) from failure
        except BaseException:
            self.kill()
            raise

    @property
    def ended(self) -> bool:
        """Whether the process has ended, is ending with its server, or was abandoned."""
        if not self._alive or not self._server.is_running(self._parent):
            return True
        return self._pidfd is not None and protocol.has_ended(self._pidfd)

    def send(self, job: Job, fds: tuple[int, ...] = (), timeout_s: float = START_S) -> None:
        """Send a job. If the child has died or does not read, `answer` reports it."""
        self._output.mark()
        self._last_job += 1
        self.unanswered += 1
        header = {"number": self._last_job}  # which its answer will have
        with contextlib.suppress(protocol.WireError):
            protocol.send(self.pipe, header, pickle.dumps(job), fds=fds, timeout_s=timeout_s)

    def answer(self, timeout_s: float) -> tuple[Answer, bytes]:
        """Return the answer to the oldest unanswered job, and its bytes.

        Raises `ChildFailed` if there is no answer, and `WorkerUnavailable` if the child ended with
        its server.
        """
        try:
            found = protocol.receive(self.pipe, timeout_s, self._pidfd, self.cut_output)
            header, blob, _ = found
            answer = protocol.answer_of(header, self._last_job - self.unanswered + 1)
        except protocol.Stalled:
            raise self._failed(Verdict.TIMEOUT, f"no answer within {timeout_s:g} s") from None
        except protocol.Closed:
            raise self._failed(Verdict.DIED, "") from None
        except protocol.ProtocolError as error:
            raise self._failed(Verdict.PROTOCOL_ERROR, str(error)) from None
        self.unanswered -= 1
        return answer, blob

    def ask(self, job: Job, fds: tuple[int, ...] = (), *, timeout_s: float) -> tuple[Answer, bytes]:
        """Send a job and return its answer; raises like `answer`."""
        self.send(job, fds, timeout_s)
        return self.answer(timeout_s)

    def cut_output(self) -> None:
        """Drop all but the end of long output."""
        self._output.cut()

    def kill(self) -> int | None:
        """Kill the child and all processes that it started; return its wait status."""
        if not self._alive:
            return None
        status = self._kill()
        self._close()  # not before: the child would exit by itself when it notices
        return status

    def _kill(self) -> int | None:
        try:
            status = self._server.reap(self.pid, self._parent, kill=True)
        except WorkerUnavailable:
            return None  # it has ended with its server
        if status is None and self._device is not None:
            _note_stuck(self._device, self.pid)
        return status

    def _failed(self, verdict: Verdict, message: str) -> ChildFailed:
        self._alive = False
        self.pipe.close()
        detail = ""
        if verdict is Verdict.DIED:
            # A child whose pipe closed by itself is ending; killing it now would mask the cause.
            try:
                status = self._server.reap(self.pid, self._parent, kill=False)
            except WorkerUnavailable:
                self._close()
                raise
            if status is None:
                self._kill()
            detail = describe_exit(status)
            message = f"the process ended with {detail}"
        else:
            self._kill()
        stderr = self._output.tail()  # after its end, which it may print about
        self._close()
        return ChildFailed(Outcome(verdict, detail=detail, message=message, stderr=stderr))

    def abandon(self) -> None:
        """Close the pipe; the child ends when it notices."""
        if self._alive:
            self._close()

    def _close(self) -> None:
        self._alive = False
        self.pipe.close()
        self._output.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def describe_exit(status: int | None) -> str:
    """Return a wait status in words; `unknown` if there is none."""
    return "unknown" if status is None else exit_text(os.waitstatus_to_exitcode(status))


def exit_text(code: int) -> str:
    """Return an exit code, below 0 for a signal, in words: `SIGSEGV`, `exit code 3`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class IdleChildren:
    """Released children by purpose; thread-safe."""

    def __init__(self) -> None:
        self.kept_s = IDLE_EXIT_S - _IDLE_MARGIN_S
        self._lock = forks.lock()
        self._kept: dict[str, list[tuple[Child, float]]] = {}
        forks.register("child processes", after_in_child=self._forget, at_exit=self.drop)

    def keep(self, purpose: str, child: Child, most: int = 1) -> None:
        """Keep a released child until shortly before it exits; beyond `most`, kill the oldest."""
        with self._lock:
            kept = self._kept.setdefault(purpose, [])
            kept.append((child, time.monotonic() + self.kept_s))
            oldest = kept.pop(0)[0] if len(kept) > most else None
        if oldest is not None:
            oldest.kill()

    def take(self, purpose: str) -> Child | None:
        """Return the most recently used live child; None without one."""
        while True:
            with self._lock:
                kept = self._kept.get(purpose)
                if not kept:
                    return None
                child, until = kept.pop()
            if until > time.monotonic() and not child.ended:
                return child
            child.kill()

    def drop(self) -> None:
        """Close the pipes of all children, which then exit by themselves."""
        with self._lock:
            kept, self._kept = self._kept, {}
        for children in kept.values():
            for child, _ in children:
                child.abandon()

    def _forget(self) -> None:
        """In a forked copy of this process, where the children belong to the parent."""
        self._kept = {}


idle = IdleChildren()
