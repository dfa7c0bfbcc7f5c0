"""Frames between parent and child: whole or not at all, in time or not at all."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from safetune.isolation import protocol


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
def test_half_a_frame_is_no_frame(pipe, size):
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
    with pytest.raises(EOFError):
        protocol.receive(theirs, 10)


def test_a_stalled_frame_times_out(pipe):
    ours, theirs = pipe
    ours.sendall(b"\0" * 3)
    with pytest.raises(TimeoutError):
        protocol.receive(theirs, 0.05)


@pytest.mark.parametrize(
    "data",
    [
        protocol._PREFIX.pack(1 << 30, 0),  # a header larger than any
        protocol._PREFIX.pack(2, 1 << 60),
        protocol._PREFIX.pack(4, 0) + b"oops",
        protocol._PREFIX.pack(2, 0) + b"[]",
        protocol._PREFIX.pack(2, 0) + b"\xff\xff",
    ],
)
def test_garbage_is_named_as_such(pipe, data):
    ours, theirs = pipe
    ours.sendall(data)
    with pytest.raises(protocol.ProtocolError):
        protocol.receive(theirs, 10)
