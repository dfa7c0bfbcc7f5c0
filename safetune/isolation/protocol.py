"""Frames on the private pipe between the parent and its children.

A frame is a JSON header and an optional block of bytes, both with their length in front. What a
child sends is parsed as JSON and never unpickled: a candidate config has had the run of that
process. What the parent sends may be pickled: the child trusts it as it trusts its own code.
"""

from __future__ import annotations

import array
import json
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

_PREFIX = struct.Struct("!IQ")
_MAX_HEADER = 1 << 24
_MAX_BLOB = 1 << 34
_MAX_FDS = 4

#: A Ctrl-C that comes just before a wait, or to another thread, does not end that wait; Python
#: looks for it after this long.
SIGNAL_S = 1.0


class ProtocolError(Exception):
    """What arrived is not a frame."""


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
