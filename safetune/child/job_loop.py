"""A forked child: reads jobs from its pipe, does them, answers in JSON.

Two kinds of child run this loop. A compile child sees no GPU, has no torch, and gets `Compile` jobs
on the kernel that came with its `Start`. A measuring child gets a `Prepare`, which rebuilds a call,
then `Resolve` and `Measure` jobs on its configs. An exception of a job is an answer; a crash or a
hang is found by the parent.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import sys
from typing import TYPE_CHECKING

from safetune import triton_internals
from safetune.child import failures
from safetune.isolation import protocol
from safetune.isolation.protocol import (
    DONE,
    Answer,
    Compile,
    Job,
    Measure,
    Prepare,
    Release,
    Resolve,
    Start,
)
from safetune.outcome import Outcome, Verdict

if TYPE_CHECKING:
    from safetune.child.compilation import Compiler
    from safetune.child.session import Session


def serve(pipe: socket.socket) -> None:
    """Do the jobs that come through `pipe`, until it closes or no job comes after a `Release`."""
    worker = _Worker()
    idle_ms: float | None = None
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(idle_ms):
        try:
            job, number, fds = protocol.receive_job(pipe)
        except EOFError:
            return
        answer, data = worker.do(job, fds)
        idle_ms = job.idle_s * 1000 if isinstance(job, Release) else None
        sys.stdout.flush()
        protocol.send(pipe, protocol.answer_header(answer, number), data)


class _Worker:
    """What a child keeps from one job to the next: the call it measures, or its compiler."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._compiler: Compiler | None = None

    def do(self, job: Job, fds: list[int]) -> tuple[Answer, bytes]:
        """Return the answer to a job, and its bytes."""
        match job:
            case Start():
                _take_over(job)
                self._compiler = _compiler(job.kernel)
            case Release():
                self._session = self._compiler = None
            case Prepare():
                return self._prepare(job, fds), b""
            case Compile():
                return (self._compiler or _compiler(b"")).compile(job.spec), b""
            case Resolve() if self._session is not None:
                return self._session.resolve(job.config)
            case Measure() if self._session is not None:
                return self._session.measure(job), b""
            case _:
                return Answer(Outcome(Verdict.PROTOCOL_ERROR, message="no call was prepared")), b""
        return DONE, b""

    def _prepare(self, job: Prepare, fds: list[int]) -> Answer:
        from safetune.child.session import Session

        self._session = None  # its memory is freed before the next one's is allocated
        try:
            self._session = Session(job, *fds)
        except BaseException as error:
            return Answer(failures.of_launch(error))
        return DONE


def _compiler(kernel: bytes) -> Compiler:
    from safetune.child.compilation import Compiler

    return Compiler(kernel)


def _take_over(job: Start) -> None:
    """Set this process up as the parent is now, which may differ from its first miss."""
    os.environ.clear()
    os.environ.update(job.environment)
    sys.path[:] = job.path
    sys.argv[:] = job.argv
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (job.memory_bytes, most) if limit > 0]  # infinity is -1
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits, default=most), most))
    if os.path.isdir(job.directory):
        os.chdir(job.directory)
    triton_internals.set_knobs(job.knobs)
