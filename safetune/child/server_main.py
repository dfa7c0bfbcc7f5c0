"""The fork server, and the children that it forks.

The server imports triton once, and torch or a compiler if children need it. It never touches CUDA,
so it can fork a child within milliseconds, and the child makes its own context. It runs no user
code, not even the user's `__main__`. It answers two requests, `fork` and `reap`, and ends with the
process that started it, however that ends. A forked child leads its own session and dies with the
server.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from safetune.both import protocol

#: Without a child and a request for this long the server exits; the next miss starts another.
_IDLE_EXIT_S = 60.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the parent is gone. argv: control socket, parent's pid, modules to import."""
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ignored one outlives exec
    # Core files of children would be as large as the device's memory, in the program's directory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for module in json.loads(sys.argv[3]):
        importlib.import_module(module)
    protocol.send(control, {"ready": True})
    _Server(control, parent).serve()


class _Server:
    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._children: dict[int, int] = {}  # a pidfd for each pid
        self._ended: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._parent = -1
        with contextlib.suppress(OSError, AttributeError):
            # A process that the parent forked may hold a copy of its end of the control socket;
            # the pidfd still shows that the parent itself has ended.
            self._parent = os.pidfd_open(parent)
            self._poll.register(self._parent, select.POLLIN)

    def serve(self) -> NoReturn:
        signal.signal(signal.SIGTERM, lambda number, frame: self._end())
        while True:
            ready = {fd for fd, _ in self._poll.poll(_IDLE_EXIT_S * 1000)}
            if self._parent in ready or not (ready or self._children):
                self._end()
            for pid, handle in list(self._children.items()):
                if handle in ready:  # it exited by itself
                    self._ended[pid] = self._wait(pid)
            if self._control.fileno() in ready:
                self._answer()

    def _answer(self) -> None:
        try:
            request, _, fds = protocol.receive(self._control)
        except protocol.WireError:
            self._end()
        if request["op"] == "fork":
            reply = self._fork(request["modules"], fds)
        else:
            reply = self._reap(request["pid"], request["kill"], request["wait_s"])
        for fd in fds:
            os.close(fd)
        protocol.send(self._control, reply)

    def _fork(self, modules: list[str], fds: list[int]) -> dict[str, Any]:
        for module in modules:
            with contextlib.suppress(ImportError):  # the child needs another one, or none
                importlib.import_module(module)
        server = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _become_child(self._control, server, *fds)
            self._children[pid] = os.pidfd_open(pid)
        except OSError as error:
            return {"error": str(error)}
        self._poll.register(self._children[pid], select.POLLIN)
        return {"pid": pid, "server": server}

    def _reap(self, pid: int, kill: bool, wait_s: float) -> dict[str, Any]:
        """Wait for a child that is ending, but not forever: it may be stuck in a driver call."""
        if pid not in self._children:
            return {"status": self._ended.pop(pid, None)}
        if kill:
            protocol.kill_group(pid)
        ended = protocol.has_ended(self._children[pid], wait_s)
        return {"status": self._wait(pid) if ended else None}

    def _wait(self, pid: int) -> int:
        protocol.kill_group(pid)  # the processes that it started, while its number is still its own
        handle = self._children.pop(pid)
        self._poll.unregister(handle)
        os.close(handle)
        return os.waitpid(pid, 0)[1]

    def _end(self) -> NoReturn:
        """Kill the children, with all that they started, and exit."""
        for pid in self._children:
            protocol.kill_group(pid)
        os._exit(0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends; exit now if it has already ended."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become_child(control: socket.socket, server: int, pipe_fd: int, output_fd: int) -> NoReturn:
    """Turn the forked process into a child of its own session and run its jobs; never returns."""
    code = 1
    try:
        os.setsid()
        die_with_parent(server)
        control.close()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        os.close(output_fd)
        from safetune.child import job_loop

        job_loop.serve(socket.socket(fileno=pipe_fd))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
