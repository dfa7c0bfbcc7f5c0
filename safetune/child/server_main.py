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
    # Core files of children would be as large as the device's memory, in the program's directory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for module in json.loads(sys.argv[3]):
        importlib.import_module(module)
    protocol.send(control, {"ready": True})
    _Server(control, parent).serve()


class _Server:
    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._children: set[int] = set()
        self._ended: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        with contextlib.suppress(OSError, AttributeError):
            # A process that the parent forked may hold a copy of its end of the control socket;
            # the pidfd still shows that the parent itself has ended.
            self._poll.register(os.pidfd_open(parent), select.POLLIN)
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        self._poll.register(self._ends[0], select.POLLIN)

    def serve(self) -> NoReturn:
        # A child that exits by itself is waited for at once, not at the next request.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: self._end())
        signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        while True:
            ready = {fd for fd, _ in self._poll.poll(_IDLE_EXIT_S * 1000)}
            if self._ends[0] in ready:
                os.read(self._ends[0], 4096)
            if ready - {self._ends[0], self._control.fileno()}:  # the parent has ended
                self._end()
            if self._control.fileno() in ready:
                self._answer()
            self._collect()
            if not ready and not self._children:
                self._end()

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
        except OSError as error:
            return {"error": str(error)}
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for end in self._ends:
                os.close(end)
            _become_child(self._control, server, *fds)
        self._children.add(pid)
        return {"pid": pid, "server": server}

    def _collect(self) -> None:
        """Wait for the children that have exited by themselves."""
        for pid in list(self._children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self._ended[pid] = self._wait(pid)

    def _reap(self, pid: int, kill: bool, wait_s: float) -> dict[str, Any]:
        """Wait for a child that is ending, but not forever: it may be stuck in a driver call."""
        if pid not in self._children:
            return {"status": self._ended.pop(pid, None)}
        if kill:
            protocol.kill_group(pid)
        handle = os.pidfd_open(pid)
        try:
            if not protocol.has_ended(handle, wait_s):
                return {"status": None}
        finally:
            os.close(handle)
        return {"status": self._wait(pid)}

    def _wait(self, pid: int) -> int:
        protocol.kill_group(pid)  # the processes that it started, while its number is still its own
        self._children.discard(pid)
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
