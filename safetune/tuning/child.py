"""A forked child: reads jobs from its pipe, does them, answers in JSON.

Two kinds of child do the same loop. A compile child sees no GPU and gets `compile` jobs; a
measuring child gets one `prepare`, which rebuilds a call, then `resolve` and `measure` jobs on its
configs. Any exception of a job is an answer; a crash or a hang is the parent's to see.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from typing import TYPE_CHECKING, Any

from safetune.outcome import Outcome, Verdict
from safetune.tuning import wire
from safetune.tuning.answers import outcome_reply

if TYPE_CHECKING:
    from safetune.tuning.session import Session

#: A child that nobody has needed for so long goes, so that its context does not sit on the
#: caller's memory. The parent stops reusing it a little earlier (see `worker.REUSE_S`).
IDLE_EXIT_S = 2.0

#: What the knobs set by the last `start` were before it, for a child that is used again.
_adopted_knobs: list[tuple[str, str, Any]] = []
_UNSET = object()


def serve(pipe: socket.socket) -> None:
    """Do the jobs that come through `pipe` until it closes, or after `release` nothing comes."""
    session: Session | None = None
    released = False
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(IDLE_EXIT_S * 1000 if released else None):
        try:
            job, blob, fds = wire.receive(pipe)
        except EOFError:
            return
        released = job["op"] == "release"
        reply: dict[str, Any] = {"ok": True}
        data = b""
        if job["op"] == "start":
            _adopt(job)
        elif released:
            session = None
        elif job["op"] == "compile":
            reply = _compile(job, blob)
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
        wire.send(pipe, {**reply, "job": job["job"]}, data)


def _adopt(job: dict[str, Any]) -> None:
    """Take over the parent's surroundings as they are now, not as they were at its first miss."""
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[:] = job["path"]
    if os.path.isdir(job["directory"]):
        os.chdir(job["directory"])
    from triton import knobs

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
    from safetune.tuning import failures
    from safetune.tuning.session import Session

    try:
        return Session(job, blob, *fds), {"ok": True}
    except BaseException as error:
        outcome = failures.of_launch(error)
        return None, {"error": outcome.message, "verdict": outcome.verdict.value}


def _compile(job: dict[str, Any], blob: bytes) -> dict[str, Any]:
    from safetune.tuning import compilation, failures

    try:
        facts = compilation.compile_spec(blob[: job["kernel_size"]], blob[job["kernel_size"] :])
    except BaseException as error:
        return outcome_reply(failures.of_compile(error))
    return {**outcome_reply(Outcome(Verdict.OK)), "facts": facts}
