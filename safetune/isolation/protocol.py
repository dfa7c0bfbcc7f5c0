"""What a parent and its children agree on; the only module of theirs that both import.

A frame on the private pipe is a JSON header and an optional block of bytes, both with their length
in front, and may carry file descriptors. A job goes to a child, an answer comes back. Answers are
parsed as JSON and never unpickled, because a candidate config has had control of that process.
Bytes from the parent may be a pickle: the child trusts the parent as it trusts its own code.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from safetune.outcome import Outcome, Timing, Verdict

#: A child without work exits after this time, so that its context does not occupy the caller's
#: device memory. The parent stops reusing it a little earlier.
IDLE_EXIT_S = 2.0

#: At most this many different results of one tuning are kept for comparison.
MAX_GROUPS = 8

#: A Ctrl-C that comes just before a wait, or to another thread, does not end that wait; Python
#: looks for it after this long.
SIGNAL_S = 1.0

_PREFIX = struct.Struct("!IQ")
_MAX_HEADER = 1 << 24
_MAX_BLOB = 1 << 34
_MAX_FDS = 4


class ProtocolError(Exception):
    """What arrived is not a frame, or not an answer."""


@dataclass(frozen=True)
class Budget:
    """How much to measure.

    Attributes:
        estimate_launches: timed first; a config whose median is over `give_up_ratio` times
            `best_ms` gets no more.
        time_ms: kernel time to spend on one config after that.
        max_launches: upper limit of launches in that time.
    """

    estimate_launches: int = 5
    time_ms: float = 20.0
    max_launches: int = 200
    give_up_ratio: float = 1.5
    best_ms: float | None = None


@dataclass(frozen=True)
class Group:
    """Configs whose results agree. The result of the first of them is in the file of results.

    Attributes:
        number: its index in the file, and the order in which groups were opened.
        blocks: the storages that it has written.
        rms, spread: for each compared tensor, see `compare.Scale`.
    """

    number: int
    blocks: tuple[int, ...]
    rms: tuple[float, ...]
    spread: tuple[float, ...]

    @classmethod
    def of(cls, data: dict[str, Any]) -> Group:
        """Return the group in plain JSON data; raises what a missing or wrong field raises."""
        return cls(
            number=int(data["number"]),
            blocks=tuple(int(block) for block in data["blocks"]),
            rms=tuple(float(value) for value in data["rms"]),
            spread=tuple(float(value) for value in data["spread"]),
        )


@dataclass(frozen=True)
class OutputReport:
    """What the first launches of one config have shown of its outputs.

    Attributes:
        group: the number of the group that it agrees with; None if no more groups could be kept.
        new_group: that group, when this config is its first.
        depends_on_prior_output: whether the result changes with what the outputs held before.
        written_masks: for each compared tensor, a hash of which elements it writes; empty where
            that is not known, as with atomics and for integers.
        unowned: names of arguments beside whose elements it wrote, in bytes that no argument has.
        difference: how it differs from the largest group, in words; empty if it does not.
    """

    group: int | None
    new_group: Group | None = None
    depends_on_prior_output: bool = False
    written_masks: tuple[int, ...] = ()
    unowned: tuple[str, ...] = ()
    difference: str = ""

    @classmethod
    def of(cls, data: dict[str, Any]) -> OutputReport:
        """Return the report in plain JSON data; raises what a missing or wrong field raises."""
        new_group = data["new_group"]
        return cls(
            group=None if data["group"] is None else int(data["group"]),
            new_group=None if new_group is None else Group.of(new_group),
            depends_on_prior_output=bool(data["depends_on_prior_output"]),
            written_masks=tuple(int(number) for number in data["written_masks"]),
            unowned=tuple(str(name) for name in data["unowned"]),
            difference=str(data["difference"]),
        )


@dataclass(frozen=True)
class Start:
    """Take over the parent's environment. The bytes are the kernel of a compile child.

    Attributes:
        knobs: Triton's knobs that were set in code, by group.
        memory_bytes: what the child, and each process that it starts, may allocate; 0: no limit.
    """

    environment: dict[str, str]
    path: list[str]
    argv: list[str]
    directory: str
    knobs: dict[str, dict[str, Any]]
    memory_bytes: int = 0


@dataclass(frozen=True)
class Prepare:
    """Rebuild a call. The bytes are the packed call; the descriptors are the memory file with its
    tensors and the file in which results are kept.

    Attributes:
        index: the device's index; -1 in the interpreter.
        grids: one for each config of the call.
        arguments: what goes with the memory file, see `Inputs.header`.
        atomics: whether the kernel has atomic operations.
        backend: the name of the device's back end; empty in the interpreter.
    """

    index: int
    grids: list[Any]
    arguments: dict[str, Any]
    atomics: bool
    backend: str = ""


@dataclass(frozen=True)
class Resolve:
    """Answer with the bytes that a compiler needs for a config."""

    config: int


@dataclass(frozen=True)
class Measure:
    """Run and time a config. With `groups`, its result is compared with theirs, too."""

    config: int
    budget: Budget = Budget()
    groups: tuple[Group, ...] | None = None


@dataclass(frozen=True)
class Compile:
    """Compile a config. The bytes are what `Resolve` answers with."""


@dataclass(frozen=True)
class Release:
    """Forget the call or kernel, and exit if no job comes for `idle_s` seconds."""

    idle_s: float = IDLE_EXIT_S


Job = Start | Prepare | Resolve | Measure | Compile | Release
_JOBS: dict[str, type[Job]] = {
    kind.__name__.lower(): kind for kind in (Start, Prepare, Resolve, Measure, Compile, Release)
}


@dataclass(frozen=True)
class Answer:
    """What a child says to one job.

    Attributes:
        outcome: ok, or what went wrong.
        report: of a `Measure` with groups, if the outcome is ok.
        shared_bytes: of a `Compile`, the shared memory that a launch needs.
    """

    outcome: Outcome
    report: OutputReport | None = None
    shared_bytes: int = 0


#: The answer to a job that has been done and has no result.
DONE = Answer(Outcome(Verdict.OK))


def job_header(job: Job, number: int) -> dict[str, Any]:
    """Return a job as plain JSON data; its answer will have the same number."""
    return {"op": type(job).__name__.lower(), "number": number, "job": asdict(job)}


def job_of(header: dict[str, Any]) -> tuple[Job, int]:
    """Return the job in a header that a parent sent, and its number."""
    fields = dict(header["job"])
    if header["op"] == "measure":
        groups = fields["groups"]
        fields["budget"] = Budget(**fields["budget"])
        fields["groups"] = None if groups is None else tuple(map(Group.of, groups))
    return _JOBS[header["op"]](**fields), int(header["number"])


def answer_header(answer: Answer, number: int) -> dict[str, Any]:
    """Return the answer to a job as plain JSON data."""
    outcome = answer.outcome
    return {
        "number": number,
        "verdict": outcome.verdict.value,
        "timing": None if outcome.timing is None else vars(outcome.timing),
        "detail": outcome.detail,
        "message": outcome.message,
        "gpu_uuid": outcome.gpu_uuid,
        "marks": list(outcome.marks),
        "report": None if answer.report is None else asdict(answer.report),
        "shared_bytes": answer.shared_bytes,
    }


def answer_of(header: dict[str, Any], number: int) -> Answer:
    """Return the answer in a header that a child sent.

    Raises:
        ProtocolError: it is anything but an answer to the job of this number.
    """
    try:
        if header["number"] != number:
            raise ValueError("the number of another job")
        timing, report = header["timing"], header["report"]
        outcome = Outcome(
            verdict=Verdict(header["verdict"]),
            timing=None if timing is None else _timing(timing),
            detail=str(header["detail"]),
            message=str(header["message"]),
            gpu_uuid=str(header["gpu_uuid"]),
            marks=tuple(str(mark) for mark in header["marks"]),
        )
        return Answer(
            outcome,
            report=None if report is None else OutputReport.of(report),
            shared_bytes=int(header["shared_bytes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"not an answer to job {number}: {str(header)[:80]}") from error


def _timing(data: dict[str, Any]) -> Timing:
    times = {name: float(data[name]) for name in ("median_ms", "p20_ms", "p80_ms")}
    if not all(math.isfinite(time) and time > 0 for time in times.values()):
        raise ValueError(f"times of {times}")
    return Timing(count=int(data["count"]), stage=str(data["stage"]), **times)


def kill_group(pid: int) -> None:
    """SIGKILL a child that leads its own process group, and all that it started."""
    for kill in (os.killpg, os.kill):  # by pid too: it may not have left our group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def send(
    sock: socket.socket,
    header: dict[str, Any],
    blob: bytes | memoryview = b"",
    *,
    fds: Sequence[int] = (),
    timeout_s: float | None = None,
) -> None:
    """Send one frame; raises `OSError` where the other end is gone, `TimeoutError` when it stalls.

    `fds` are passed along and stay open here.
    """
    text = json.dumps(header).encode()
    prefix = _PREFIX.pack(len(text), len(blob))
    sock.settimeout(timeout_s)
    if fds:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        sent = sock.sendmsg([prefix], rights)
        sock.sendall(prefix[sent:] + text)
    else:
        sock.sendall(prefix + text)
    if blob:
        sock.sendall(blob)


def receive(
    sock: socket.socket, timeout_s: float | None = None, ended: int | None = None
) -> tuple[dict[str, Any], bytes, list[int]]:
    """Return the next frame's header, bytes and file descriptors.

    `ended` is a pidfd of the sender: a copy that it forked may hold the pipe open after its end.

    Raises:
        EOFError: the other end closed before a frame began, or ended.
        TimeoutError: no whole frame within `timeout_s`.
        ProtocolError: the bytes are not a frame, or the other end closed in the middle of one.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if ended is not None:
        poll.register(ended, select.POLLIN)
    source = _Source(sock, poll, deadline)
    prefix = source.read(_PREFIX.size)
    header_size, blob_size = _PREFIX.unpack(prefix)
    if header_size > _MAX_HEADER or blob_size > _MAX_BLOB:
        raise ProtocolError(f"a frame of {header_size} + {blob_size} bytes was announced")
    text = source.read(header_size)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"not JSON: {text[:80]!r}") from error
    if not isinstance(header, dict):
        raise ProtocolError(f"not a JSON object: {text[:80]!r}")
    return header, source.read(blob_size), source.fds


class _Source:
    def __init__(self, sock: socket.socket, poll: select.poll, deadline: float | None) -> None:
        self._sock = sock
        self._poll = poll
        self._deadline = deadline
        self._received = 0
        self.fds: list[int] = []

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size > 0:
            self._wait()
            data, new_fds, _, _ = socket.recv_fds(self._sock, min(size, 1 << 20), _MAX_FDS)
            self.fds.extend(new_fds)
            if not data and self._received:
                raise ProtocolError(f"the pipe closed after {self._received} bytes of a frame")
            if not data:
                raise EOFError("the other end closed the pipe")
            self._received += len(data)
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    def _wait(self) -> None:
        ready: list[tuple[int, int]] = []
        while not ready:
            left = SIGNAL_S if self._deadline is None else self._deadline - time.monotonic()
            ready = self._poll.poll(max(0.0, min(left, SIGNAL_S)) * 1000)
            if not ready and left <= 0:
                raise TimeoutError("no answer in time")
        if all(fd != self._sock.fileno() for fd, _ in ready):
            raise EOFError("the other end is gone")
