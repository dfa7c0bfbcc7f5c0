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
    sock: socket.socket, timeout_s: float | None = None
) -> tuple[dict[str, Any], bytes, list[int]]:
    """Return the next frame's header, bytes and file descriptors.

    Raises:
        EOFError: the other end closed before a whole frame had come.
        TimeoutError: no whole frame within `timeout_s`.
        ProtocolError: the bytes are not a frame.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    fds: list[int] = []
    prefix = _read(sock, _PREFIX.size, deadline, fds)
    header_size, blob_size = _PREFIX.unpack(prefix)
    if header_size > _MAX_HEADER or blob_size > _MAX_BLOB:
        raise ProtocolError(f"a frame of {header_size} + {blob_size} bytes was announced")
    text = _read(sock, header_size, deadline, fds)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"not JSON: {text[:80]!r}") from error
    if not isinstance(header, dict):
        raise ProtocolError(f"not a JSON object: {text[:80]!r}")
    return header, _read(sock, blob_size, deadline, fds), fds


def _read(sock: socket.socket, size: int, deadline: float | None, fds: list[int]) -> bytes:
    parts: list[bytes] = []
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while size > 0:
        remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not poll.poll(None if remaining is None else remaining * 1000):
            raise TimeoutError("no answer in time")
        data, new_fds, _, _ = socket.recv_fds(sock, min(size, 1 << 20), _MAX_FDS)
        fds.extend(new_fds)
        if not data:
            raise EOFError("the other end closed the pipe")
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
