"""A forked child: reads jobs from its pipe, does them, answers in JSON.

Two kinds of child do the same loop. A compile child sees no GPU, has no torch, and gets `compile`
jobs on the kernel that came with its `start`; a measuring child gets one `prepare`, which rebuilds
a call, then `resolve` and `measure` jobs on its configs. Any exception of a job is an answer; a
crash or a hang is the parent's to see.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import sys
from typing import TYPE_CHECKING, Any

from safetune.isolation import protocol
from safetune.isolation.answers import outcome_reply
from safetune.outcome import Outcome, Verdict

if TYPE_CHECKING:
    from safetune.child.session import Session

#: A child that nobody has needed for so long goes, so that its context does not sit on the
#: caller's memory. The parent stops reusing it a little earlier.
IDLE_EXIT_S = 2.0

#: How many configs Triton has compiled in this process, not found in its disk cache.
_compilations = 0

#: What the knobs set by the last `start` were before it, for a child that is used again.
_adopted_knobs: list[tuple[str, str, Any]] = []
_UNSET = object()


def serve(pipe: socket.socket) -> None:
    """Do the jobs that come through `pipe` until it closes, or after `release` nothing comes."""
    session: Session | None = None
    kernel = _Kernel(b"")
    idle_s: float | None = None
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(None if idle_s is None else idle_s * 1000):
        try:
            job, blob, fds = protocol.receive(pipe)
        except EOFError:
            return
        idle_s = job.get("idle_s", IDLE_EXIT_S) if job["op"] == "release" else None
        reply: dict[str, Any] = {"ok": True}
        before = _compilations
        data = b""
        if job["op"] == "start":
            _adopt(job)
            kernel = _Kernel(blob)
        elif job["op"] == "release":
            session, kernel = None, _Kernel(b"")
        elif job["op"] == "compile":
            reply = _compile(kernel, blob)
        elif job["op"] == "prepare":
            session = None  # its memory goes before the next one's is taken
            session, reply = _prepare(job, blob, fds)
        elif session is None:
            reply = {"error": "no call was prepared"}
        elif job["op"] == "resolve":
            reply, data = session.resolve(job["config"])
        else:
            reply = session.measure(job)
        sys.stdout.flush()
        made = {"job": job["job"], "compilations": _compilations - before}
        protocol.send(pipe, {**reply, **made}, data)


def _adopt(job: dict[str, Any]) -> None:
    """Take over the parent's surroundings as they are now, not as they were at its first miss."""
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[:] = job["path"]
    sys.argv[:] = job["argv"]
    _limit_memory(job["memory_bytes"])
    if os.path.isdir(job["directory"]):
        os.chdir(job["directory"])
    from triton import knobs

    knobs.compilation.listener = _count
    while _adopted_knobs:
        group, name, value = _adopted_knobs.pop()
        if value is _UNSET:
            delattr(getattr(knobs, group), name)
        else:
            setattr(getattr(knobs, group), name, value)
    for group, values in job["knobs"].items():
        for name, value in values.items():
            owner = getattr(knobs, group)
            _adopted_knobs.append((group, name, vars(owner).get(name, _UNSET)))
            setattr(owner, name, value)


def _prepare(
    job: dict[str, Any], blob: bytes, fds: list[int]
) -> tuple[Session | None, dict[str, Any]]:
    from safetune.child import failures
    from safetune.child.session import Session

    try:
        return Session(job, blob, *fds), {"ok": True}
    except BaseException as error:
        outcome = failures.of_launch(error)
        return None, {"error": outcome.message, "verdict": outcome.verdict.value}


def _limit_memory(limit: int) -> None:
    """Have allocations past `limit` bytes fail, here and in what this process starts; 0: none."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if limit and most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit or most, most))


def _count(*, cache_hit: bool, **_: Any) -> None:
    """Triton's compilation listener."""
    global _compilations
    _compilations += not cache_hit


class _Kernel:
    """The kernel of a compile child, rebuilt when the first config needs it."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        self._jit: Any = None

    def rebuilt(self) -> Any:
        from safetune.isolation import kernel_pickle

        if self._jit is None:
            self._jit = kernel_pickle.unpack(self._packed)
        return self._jit


def _compile(kernel: _Kernel, spec: bytes) -> dict[str, Any]:
    from safetune.child import compilation, failures

    try:
        facts = compilation.compile_spec(kernel.rebuilt(), spec)
    except BaseException as error:
        return outcome_reply(failures.of_compile(error))
    return {**outcome_reply(Outcome(Verdict.OK)), "facts": facts}
