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

from safetune.isolation import protocol
from safetune.isolation.protocol import DONE, Answer, Job, Prepare, Release, Resolve, Start
from safetune.outcome import Outcome, Verdict

if TYPE_CHECKING:
    from safetune.child.compilation import Compiler
    from safetune.child.session import Session


def serve(pipe: socket.socket) -> None:
    """Do the jobs that come through `pipe`, until it closes or no job comes after a `Release`."""
    worker = _Worker()
    idle_s: float | None = None
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(None if idle_s is None else idle_s * 1000):
        try:
            header, blob, fds = protocol.receive(pipe)
        except EOFError:
            return
        job, number = protocol.job_of(header)
        answer, data = worker.do(job, blob, fds)
        idle_s = job.idle_s if isinstance(job, Release) else None
        sys.stdout.flush()
        protocol.send(pipe, protocol.answer_header(answer, number), data)


class _Worker:
    """What a child keeps from one job to the next: the call it measures, or its compiler."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._compiler: Compiler | None = None
        self._kernel = b""

    def do(self, job: Job, blob: bytes, fds: list[int]) -> tuple[Answer, bytes]:
        """Return the answer to a job, and its bytes."""
        if isinstance(job, Start):
            _take_over(job)
            self._compiler, self._kernel = None, blob
        elif isinstance(job, Release):
            self._session, self._compiler, self._kernel = None, None, b""
        elif isinstance(job, Prepare):
            return self._prepare(job, blob, fds), b""
        elif isinstance(job, protocol.Compile):
            return self._compile(blob), b""
        elif self._session is None:
            return Answer(Outcome(Verdict.PROTOCOL_ERROR, message="no call was prepared")), b""
        elif isinstance(job, Resolve):
            return self._session.resolve(job.config)
        else:
            return self._session.measure(job), b""
        return DONE, b""

    def _prepare(self, job: Prepare, packed: bytes, fds: list[int]) -> Answer:
        from safetune.child import failures
        from safetune.child.session import Session

        self._session = None  # its memory is freed before the next one's is allocated
        try:
            self._session = Session(job, packed, *fds)
        except BaseException as error:
            return Answer(failures.of_launch(error))
        return DONE

    def _compile(self, spec: bytes) -> Answer:
        from safetune.child.compilation import Compiler

        self._compiler = self._compiler or Compiler(self._kernel)
        return self._compiler.compile(spec)


def _take_over(job: Start) -> None:
    """Set this process up as the parent is now, which may differ from its first miss."""
    os.environ.clear()
    os.environ.update(job.environment)
    sys.path[:] = job.path
    sys.argv[:] = job.argv
    _limit_memory(job.memory_bytes)
    if os.path.isdir(job.directory):
        os.chdir(job.directory)
    from safetune import triton_internals

    triton_internals.set_knobs(job.knobs)


def _limit_memory(limit: int) -> None:
    """Limit the memory of this process and of those that it starts; 0 removes the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if limit and most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit or most, most))
