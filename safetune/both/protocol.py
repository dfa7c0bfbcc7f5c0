"""The protocol between a parent and its children.

A frame on the private pipe is a JSON header and an optional block of bytes, each preceded by its
length, and may carry file descriptors. A job goes to a child as a pickle: the child trusts the
parent like its own code. An answer comes back as JSON and is never unpickled, because a candidate
config has had control of that process.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import reprlib
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from safetune import forks
from safetune.errors import from_signal_handler
from safetune.frozen import dataclass
from safetune.outcome import Binary, Effects, Group, Outcome, OutputReport, Verdict

#: A child without work exits after this time, so that its context does not occupy the caller's
#: device memory. The parent stops reusing it a little earlier.
IDLE_EXIT_S = 2.0

#: A Ctrl-C that comes just before a wait, or to another thread, does not end that wait; Python
#: looks for it after this long.
SIGNAL_S = 1.0

#: A graph that is replayed to time a kernel has at least this many launches, and as many of each
#: copy of the arguments.
GRAPH_LAUNCHES = 20

Result = TypeVar("Result")

_PREFIX = struct.Struct("!IQ")
_MAX_HEADER = 1 << 24
_MAX_BLOB = 1 << 34
_MAX_FDS = 32


class WireError(Exception):
    """The base of the errors of `send` and `receive`; no user program raises one."""


class Closed(WireError):
    """The other end of the pipe is gone."""


class Stalled(WireError):
    """The other end has not read or written in time."""


class ProtocolError(WireError):
    """The received bytes are not a frame, or not an answer."""


@dataclass(frozen=True)
class Budget:
    """How much to measure.

    Attributes:
        least, most: launches, unless the config is dropped as slower than one with the median
            `best_ms`.
        time_ms: kernel time to spend on a config, beyond the least launches.
        watch: also check whether other work is on the device now.
        way: a `MeasurePolicy`; all but `events` count graph replays, not launches.
    """

    least: int = 5
    most: int = 50
    time_ms: float = 20.0
    best_ms: float | None = None
    way: str = "events"
    watch: bool = False


@dataclass(frozen=True)
class Start:
    """Take over the parent's environment.

    Attributes:
        knobs: the Triton knobs set in code, by group.
        backend_hashes, files_hash: see `triton_internals`; a child computes a missing `files_hash`.
        memory_bytes: the limit for the child and for each process that it starts; 0: no limit.
        kernel: for `Compile` jobs, see `compile_spec.pack_for_compiler`.
    """

    environment: dict[str, str]
    path: list[str]
    argv: list[str]
    directory: str
    knobs: dict[str, dict[str, Any]]
    backend_hashes: dict[tuple[str, Any], str]
    files_hash: str = ""
    memory_bytes: int = 0
    kernel: bytes = b""


@dataclass(frozen=True)
class Prepare:
    """Rebuild a call. The descriptors are the memory file with its tensors, and the layout's shared
    memory.
    """

    packed: bytes  # the call and its configs
    layout: Any  # the `spans.Layout` of the memory file
    index: int  # the device's index; -1 in the interpreter
    grids: list[tuple[int, ...]]  # one for each config of the call
    effects: Effects  # what the kernel's text says of its atomic operations and its outputs
    backend: str = ""  # the name of the device's back end; empty in the interpreter
    view: bytes = b""  # a packed `caller_view.CallerView`; empty for a call without hooks


@dataclass(frozen=True)
class Specify:
    """Answer with the compiler's input for a config, as bytes."""

    config: int


@dataclass(frozen=True)
class Measure:
    """Run and time a config. With `groups`, also compare its result with theirs; without a budget,
    do not time it.
    """

    config: int
    budget: Budget | None = Budget()
    groups: tuple[Group, ...] | None = None


@dataclass(frozen=True)
class Repeat:
    """Launch a config a few more times, for this long if it is quick."""

    config: int
    time_ms: float


@dataclass(frozen=True)
class Bits:
    """Launch a config on the caller's inputs, and on other float inputs; see `Answer.bits`."""

    config: int


@dataclass(frozen=True)
class Compile:
    """Compile a config from the answer to `Specify`.

    `most_shared`: see `triton_compile.compiled_binary`. `launcher`: also build the launcher.
    """

    spec: bytes
    most_shared: int = 0
    launcher: bool = False


@dataclass(frozen=True)
class Release:
    """Forget the call or kernel; exit if no job arrives within `IDLE_EXIT_S`."""


OfCall = Specify | Measure | Repeat | Bits
Job = Start | Prepare | OfCall | Compile | Release


@dataclass(frozen=True)
class Answer:
    """A child's answer to one job."""

    outcome: Outcome  # ok, or what went wrong
    report: OutputReport | None = None  # of a `Measure` with groups, if the outcome is ok
    binary: Binary | None = None  # of a `Compile`, if the outcome is ok
    #: Of a `Repeat`, what launches of a config have left other bits in than launches before: the
    #: config, the position among the compared tensors, and the name.
    varied: tuple[tuple[int, int, str], ...] = ()
    #: Of a `Bits`, what launches leave in the compared tensors, as checksums.
    bits: tuple[int, ...] = ()
    #: Of a `Prepare`, whether the call was rebuilt with torch; of a job on a call, that
    #: only a child which has imported torch can do this.
    torch: bool = False


#: The answer to a job that has been done and has no result.
DONE = Answer(Outcome(Verdict.OK))


def answer_header(answer: Answer, number: int) -> dict[str, Any]:
    """Return the answer to a job as plain JSON data."""
    return {"number": number, **asdict(answer)}


#: msgspec looks at a type when it is first used, and two threads that do so at once would crash.
_converting = forks.lock()


def answer_of(header: dict[str, Any], number: int) -> Answer:
    """Return the answer in a header that a child sent.

    Raises:
        ProtocolError: it is not an answer to job `number`.
    """
    import msgspec  # children do without it

    with contextlib.suppress(msgspec.ValidationError, RecursionError):
        with _converting:
            answer = msgspec.convert(header, Answer)
        timing = answer.outcome.timing
        times = (timing.median_ms, timing.p20_ms, timing.p80_ms) if timing is not None else ()
        same = json.loads(json.dumps(answer_header(answer, number)))  # no field was filled in
        of_child = answer.outcome.verdict in {*Verdict} and answer.outcome.final is None
        if header == same and of_child and all(0 < time < math.inf for time in times):
            return answer
    shown = reprlib.repr(header)[:80]  # which goes no deeper than is safe
    raise ProtocolError(f"not an answer to job {number}: {shown}")


def kill_group(pid: int) -> None:
    """SIGKILL a child that leads its own process group, and all processes in it."""
    for kill in (os.killpg, os.kill):  # by pid too: it may not have left our group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def has_ended(pidfd: int, within_s: float = 0.0) -> bool:
    """Whether a process ends within this time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def send(
    sock: socket.socket,
    header: dict[str, Any],
    blob: bytes = b"",
    *,
    fds: Sequence[int] = (),
    timeout_s: float | None = None,
) -> None:
    """Send one frame; raises `Closed` and `Stalled`.

    `fds` are sent along and stay open here.
    """
    text = json.dumps(header).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    ready = _Ready(sock, select.POLLOUT, timeout_s)
    # NOSIGNAL: a program may have SIGPIPE end it, as command lines do.
    flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
    for data in (_PREFIX.pack(len(text), len(blob)) + text, blob):
        left = memoryview(data)
        while left:
            sent = ready.call(sock.sendmsg, [left], rights, flags)
            left, rights = left[sent:], []


def receive(
    sock: socket.socket,
    timeout_s: float | None = None,
    ended: int | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Any], bytes, list[int]]:
    """Return the next frame's header, bytes and file descriptors.

    Args:
        ended: a pidfd of the sender: a process that it forked may keep the pipe open after it ends.
        meanwhile: called every `SIGNAL_S` seconds while waiting.

    Raises:
        Closed: the other end closed before a frame began, or exited.
        Stalled: no complete frame arrived within `timeout_s`.
        ProtocolError: the bytes are not a frame, or the other end closed in the middle of one.
    """
    ready = _Ready(sock, select.POLLIN, timeout_s, ended, meanwhile)
    frame = bytearray()
    fds: list[int] = []

    def read(size: int) -> bytes:
        begin = len(frame)
        while missing := begin + size - len(frame):
            most = min(missing, 1 << 20)
            data, new_fds, *_ = ready.call(
                socket.recv_fds, sock, most, _MAX_FDS, socket.MSG_DONTWAIT
            )
            fds.extend(new_fds)
            if not data and frame:
                raise ProtocolError(f"the pipe closed after {len(frame)} bytes of a frame")
            if not data:
                raise Closed("the other end closed the pipe")
            frame.extend(data)
        return bytes(frame[begin:])

    header_size, blob_size = _PREFIX.unpack(read(_PREFIX.size))
    if header_size > _MAX_HEADER or blob_size > _MAX_BLOB:
        raise ProtocolError(f"a frame of {header_size} + {blob_size} bytes is too large")
    text = read(header_size)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {text[:80]!r}") from error
    if not isinstance(header, dict):
        raise ProtocolError(f"not a JSON object: {text[:80]!r}")
    return header, read(blob_size), fds


class _Ready:
    """Waits for a socket, and for the end of the process at its other end."""

    def __init__(
        self,
        sock: socket.socket,
        event: int,
        timeout_s: float | None,
        ended: int | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._fd = sock.fileno()
        self._poll = select.poll()
        self._poll.register(sock, event)
        if ended is not None:
            self._poll.register(ended, select.POLLIN)
        self._deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._meanwhile = meanwhile

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Return what a call on the socket returns once it need not wait; raises like `_wait`."""
        while True:
            self._wait()
            try:
                return function(*arguments)
            except OSError as error:
                if from_signal_handler(error):
                    raise
                if not isinstance(error, BlockingIOError):
                    raise Closed(str(error)) from error

    def _wait(self) -> None:
        """Return when the socket is ready; raises `Stalled`, and `Closed` where only the end is."""
        ready: list[tuple[int, int]] = []
        while not ready:
            left = self._deadline - time.monotonic()
            ready = self._poll.poll(max(0.0, min(left, SIGNAL_S)) * 1000)
            if not ready and left <= 0:
                raise Stalled("no answer in time")
            if not ready:
                self._meanwhile()
        if all(fd != self._fd for fd, _ in ready):
            raise Closed("the other end is gone")
