"""What a child prints: a file in memory, of which the end is kept."""

from __future__ import annotations

import contextlib
import fcntl
import os

#: What a child has printed is cut down to its end when it is more.
_MOST_BYTES = 1 << 20
#: The end that is shown.
_TAIL_BYTES = 2000


class Output:
    """The standard output and error of one process. It needs no directory, and has no name."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("safetune-output", os.MFD_CLOEXEC)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)  # a cut leaves no hole
        self._begin = 0
        self._kept = b""

    def fileno(self) -> int:
        """Return the descriptor, which a process inherits."""
        return self._fd

    def mark(self) -> None:
        """Count what is printed from here on as that of another job."""
        self.cut()
        self._begin, self._kept = os.fstat(self._fd).st_size, b""

    def cut(self) -> None:
        """Forget all but the end, if it is much."""
        if os.fstat(self._fd).st_size > _MOST_BYTES:
            self._kept, self._begin = self._end(), 0
            os.ftruncate(self._fd, 0)

    def tail(self) -> str:
        """Return the last lines of the job."""
        with contextlib.suppress(OSError):
            return self._end().decode(errors="replace").strip()
        return ""

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _end(self) -> bytes:
        begin = max(self._begin, os.fstat(self._fd).st_size - _TAIL_BYTES)
        return (self._kept + os.pread(self._fd, _TAIL_BYTES, begin))[-_TAIL_BYTES:]
