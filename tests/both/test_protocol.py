"""Frames between parent and child are whole and in time; answers are checked before use."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import threading
from dataclasses import asdict
from typing import Any

import pytest

from safetune.both import protocol
from safetune.both.protocol import (
    Answer,
    Bits,
    Budget,
    Compile,
    Job,
    Measure,
    Prepare,
    ProtocolError,
    Release,
    Repeat,
    Specify,
    Start,
)
from safetune.outcome import (
    Binary,
    Difference,
    Effects,
    Group,
    GroupDifference,
    Mark,
    Outcome,
    OutputReport,
    Timing,
    Verdict,
)


@pytest.fixture
def pipe():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_frame_arrives_as_it_was_sent(pipe):
    ours, theirs = pipe
    blob = os.urandom(3 << 20)  # more than a socket buffer holds
    sender = threading.Thread(target=protocol.send, args=(ours, {"op": "x", "n": [1, None]}, blob))
    sender.start()
    header, received, fds = protocol.receive(theirs, 10)
    sender.join()
    assert header == {"op": "x", "n": [1, None]}
    assert received == blob
    assert fds == []


def test_file_descriptors_travel_with_the_frame(pipe, tmp_path):
    ours, theirs = pipe
    with open(tmp_path / "file", "w+") as file:
        file.write("through the pipe")
        file.flush()
        protocol.send(ours, {}, fds=(file.fileno(),))
        _, _, (fd,) = protocol.receive(theirs, 10)
    assert os.pread(fd, 100, 0) == b"through the pipe"
    os.close(fd)


@pytest.mark.parametrize("size", [1, 12, 15, 22])
def test_half_a_frame_is_an_error(pipe, size):
    ours, theirs = pipe
    whole = protocol._PREFIX.pack(10, 3) + b'{"a": 1}  ' + b"bytes"
    ours.sendall(whole[:size])
    ours.close()
    with pytest.raises(protocol.ProtocolError, match=f"closed after {size} bytes"):
        protocol.receive(theirs, 10)


def test_an_end_between_frames_is_an_end(pipe):
    ours, theirs = pipe
    protocol.send(ours, {})
    ours.close()
    assert protocol.receive(theirs, 10)[0] == {}
    with pytest.raises(protocol.Closed):
        protocol.receive(theirs, 10)


class Interrupted(socket.socket):
    """A socket that gets a signal as soon as it has sent or read something."""

    def sendmsg(self, *args: Any) -> int:
        sent = super().sendmsg(*args)
        signal.raise_signal(signal.SIGUSR1)
        return sent

    def recvmsg(self, *args: Any) -> Any:
        got = super().recvmsg(*args)
        signal.raise_signal(signal.SIGUSR1)
        return got


@pytest.mark.parametrize("kind", [TimeoutError, BlockingIOError, OSError])
def test_what_a_signal_handler_raises_is_no_end_of_the_pipe(pipe, kind):
    """It may come in the short time between a system call and the wait for the next."""

    def deadline(number, frame):
        raise kind("the program's own")

    before = signal.signal(signal.SIGUSR1, deadline)
    try:
        ours, theirs = pipe
        with Interrupted(fileno=os.dup(theirs.fileno())) as interrupted:
            with pytest.raises(kind, match="own"):
                protocol.send(interrupted, {}, timeout_s=10)
            protocol.send(ours, {})
            with pytest.raises(kind, match="own"):
                protocol.receive(interrupted, 10)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_stalled_frame_times_out(pipe):
    ours, theirs = pipe
    ours.sendall(b"\0" * 3)
    with pytest.raises(protocol.Stalled):
        protocol.receive(theirs, 0.05)


@pytest.mark.parametrize(
    "data",
    [
        protocol._PREFIX.pack(1 << 30, 0),  # a header larger than any
        protocol._PREFIX.pack(2, 1 << 60),
        protocol._PREFIX.pack(4, 0) + b"oops",
        protocol._PREFIX.pack(2, 0) + b"[]",
        protocol._PREFIX.pack(2, 0) + b"\xff\xff",
        protocol._PREFIX.pack(200_000, 0) + b"[" * 100_000 + b"]" * 100_000,
    ],
)
def test_garbage_is_named_as_such(pipe, data):
    ours, theirs = pipe
    ours.sendall(data)
    with pytest.raises(protocol.ProtocolError):
        protocol.receive(theirs, 10)


BINARY = Binary(7, "digest")
TIMING = Timing(median_ms=2.0, p20_ms=1.5, p80_ms=3.0, count=7, stage="screen")


REPORT = OutputReport(
    1,
    Group(1, (0, 2), (0, 2**64 - 1), (3, 4)),
    (GroupDifference(0, (Difference(3, 2, 5, float("inf")), Difference())),),
    spread=(0.0, 0.5),
    written=(3, 4),
    sums=(0, 2**64 - 1),
    unowned=("x",),
    difference="d",
)


def answer(outcome: Outcome) -> Answer:
    return Answer(outcome, REPORT, BINARY, varied=((1, 0, "out"),))


def header(outcome: Outcome) -> dict[str, Any]:
    """Return an answer as the parent gets it."""
    return json.loads(json.dumps(protocol.answer_header(answer(outcome), number=1)))


def test_an_answer_survives_the_pipe() -> None:
    outcome = Outcome(
        Verdict.OK, timing=TIMING, message="m", gpu_uuid="u", marks=(Mark.UNOWNED.of("x"),)
    )
    assert protocol.answer_of(header(outcome), 1) == answer(outcome)


@pytest.mark.parametrize(
    "job",
    [
        Start({"A": "b"}, ["p"], ["a", "v"], "d", {"runtime": {"debug": True}}, 5),
        Prepare(b"call", {"blocks": []}, -1, [(1, 2)], effects=Effects(True, True, ("out",))),
        Specify(3),
        Measure(3, Budget(best_ms=0.5), (REPORT.new_group,)),
        Measure(3),
        Repeat(3, 1.5),
        Bits(3),
        Compile(b"spec"),
        Release(),
    ],
    ids=lambda job: type(job).__name__,
)
def test_a_job_survives_the_pipe(pipe, job: Job) -> None:
    ours, theirs = pipe
    protocol.send(ours, {"number": 4}, pickle.dumps(job), timeout_s=10)
    header, pickled, fds = protocol.receive(theirs)
    assert (header, pickle.loads(pickled), fds) == ({"number": 4}, job, [])


def answered(**changes: Any) -> dict[str, Any]:
    """Return an answer with other fields for its outcome."""
    answer = header(Outcome(Verdict.OK, timing=TIMING))
    return answer | {"outcome": answer["outcome"] | changes}


@pytest.mark.parametrize(
    "answer",
    [
        answered(verdict="fine"),
        answered(verdict=None),
        answered(timing=3.0),
        answered(timing={"median_ms": 1.0}),
        answered(marks=None),
        answered(final=vars(TIMING)),  # which the parent makes of several times
        answered() | {"number": 2},
        answered() | {"outcome": None},
        answered() | {"binary": {"shared_bytes": "many", "digest": ""}},
        answered() | {"report": 3.0},
        *(
            answered() | {"report": asdict(REPORT) | {name: 3.0}}
            for name in ("new_group", "written")
        ),
        *(
            answered(timing=vars(TIMING) | {name: value})
            for name in ("median_ms", "p20_ms", "p80_ms")
            for value in (0.0, -1.0, float("nan"), float("inf"), "soon", None)
        ),
    ],
    ids=str,
)
def test_anything_else_is_a_protocol_error(answer: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="not an answer to job 1"):
        protocol.answer_of(answer, 1)


@pytest.mark.parametrize(
    "path",
    [
        *((name,) for name in sorted(answered())),
        *(("outcome", name) for name in sorted(answered()["outcome"])),
        *(("outcome", "timing", name) for name in sorted(vars(TIMING))),
        *(("report", name) for name in sorted(asdict(REPORT))),
    ],
    ids=".".join,
)
def test_a_missing_field_is_a_protocol_error(path: tuple[str, ...]) -> None:
    answer = answered()
    *above, name = path
    holder = answer
    for step in above:
        holder = holder[step]
    del holder[name]
    with pytest.raises(ProtocolError, match="not an answer to job 1"):
        protocol.answer_of(answer, 1)
