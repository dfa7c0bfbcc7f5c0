"""A forked child: reads jobs from its pipe, runs them, and answers in JSON.

Two kinds of child run this loop. A compile child sees no GPU, has no torch, and gets `Compile` jobs
for the kernel from its `Start`. A measuring child gets a `Prepare`, which rebuilds a call, then
`Specify`, `Measure`, `Repeat` and `Bits` jobs for its configs. An exception in a job becomes an
answer; the parent detects crashes and hangs.
"""

from __future__ import annotations

import os
import pickle
import resource
import select
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from safetune import triton_compile, triton_internals
from safetune.both import protocol
from safetune.both.protocol import DONE, Answer, Job, Prepare, Release, Start
from safetune.child import failures
from safetune.inputs import kernel_pickle

if TYPE_CHECKING:
    from safetune.child.session import Session


#: The limits of the program, soft and hard.
_DATA_LIMITS = resource.getrlimit(resource.RLIMIT_DATA)


def serve(pipe: socket.socket) -> None:
    """Run the jobs from `pipe` until it closes, or until no job follows a `Release`."""
    worker = _Worker()
    idle_ms: float | None = None
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(idle_ms):
        try:
            header, pickled, fds = protocol.receive(pipe)
        except protocol.Closed:
            return
        job: Job = pickle.loads(pickled)
        answer, data = worker.do(job, fds)
        idle_ms = protocol.IDLE_EXIT_S * 1000 if isinstance(job, Release) else None
        sys.stdout.flush()
        protocol.send(pipe, protocol.answer_header(answer, header["number"]), data)


class _Worker:
    """What a child keeps from one job to the next: a call, or a kernel to compile."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._kernel = b""
        self._jit: Any = None

    def do(self, job: Job, fds: list[int]) -> tuple[Answer, bytes]:
        """Return the answer to a job, and its bytes."""
        match job:
            case Start():
                _take_over(job)
                self._kernel, self._jit = job.kernel, None
            case Release():
                self._kernel, self._jit, self._session = b"", None, None
            case Prepare():
                return self._prepare(job, fds), b""
            case protocol.Compile():
                return self._compile(job), b""
            case _:
                assert self._session is not None
                return self._session.answer(job)
        return DONE, b""

    def _prepare(self, job: Prepare, fds: list[int]) -> Answer:
        from safetune.child.session import Session

        self._session = None  # its memory is freed before the next one's is allocated
        try:
            arguments_fd, *shared = fds
            job = replace(job, layout=replace(job.layout, fds=tuple(shared)))
            self._session = Session(job, arguments_fd)
        except BaseException as error:
            return Answer(failures.of_launch(error))
        return replace(DONE, torch=self._session.has_torch)

    def _compile(self, job: protocol.Compile) -> Answer:
        """Compile a config into Triton's disk cache."""
        try:
            if self._jit is None:
                self._jit = kernel_pickle.unpack(self._kernel)
            spec = kernel_pickle.unpack(job.spec)
            if job.launcher:
                triton_compile.begin_launcher(self._jit, spec)
            binary = triton_compile.compiled_binary(self._jit, spec, job.most_shared)
            return replace(DONE, binary=binary)
        except BaseException as error:
            return Answer(failures.of_compile(error))


def _take_over(job: Start) -> None:
    """Set this process up as the parent is now, which may differ from its first miss."""
    os.environ.clear()
    os.environ.update(job.environment)
    sys.path[:] = job.path
    sys.argv[:] = job.argv
    limits = [limit for limit in (job.memory_bytes, *_DATA_LIMITS) if limit > 0]  # infinity is -1
    least = min(limits, default=resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (least, _DATA_LIMITS[1]))
    if os.path.isdir(job.directory):
        os.chdir(job.directory)
    triton_internals.set_knobs(job.knobs)
    triton_internals.use_backend_hashes(job.backend_hashes)
    if job.files_hash:
        triton_internals.use_files_hash(job.files_hash)
