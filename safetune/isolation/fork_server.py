"""The parent side of the fork server, which starts at the first miss, never earlier.

The output of the server and its children goes to files in memory, which keep only its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from safetune import forks
from safetune.both import protocol
from safetune.errors import WorkerUnavailable, from_signal_handler

#: A cold page cache makes the first import of torch and triton take several seconds.
_START_S = 120.0
_ANSWER_S = 30.0
#: How long a server that is told to end may take before it is killed; it takes milliseconds.
_END_S = 1.0

#: What a child has printed is cut down to its end when it is more.
_MOST_BYTES = 1 << 20
#: The end that is shown.
_TAIL_BYTES = 2000

#: How an entry of `sys.path` ends that is not a path: setuptools has a hook for the namespace
#: packages of an editable install.
_HOOKED = ".__path_hook__"

#: Variables that give a process its rank. A tuning child is not a rank of the job:
#: with these variables it could join the job's rendezvous.
_RANK_VARIABLE = re.compile(
    r"^(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE"
    r"|ROLE_WORLD_SIZE|ROLE_NAME|MASTER_ADDR|MASTER_PORT|NODE_RANK|NNODES"
    r"|TORCHELASTIC_.*|OMPI_.*|PMI_.*|PMIX_.*|MPI_.*|MV2_.*|I_MPI_.*|SLURM_.*|JSM_.*|FLUX_.*)$"
)

#: `-c` puts the working directory first in the search path; nothing is imported while it is there.
#: The path to use may be longer than an argument can be, so it comes through a pipe.
_BOOTSTRAP = """
import sys
sys.path[:] = filter(None, sys.path)
import json
version, sys.path[:] = json.loads(sys.stdin.readline())
if sys.version != version:
    sys.exit(f"{sys.executable} is Python {sys.version}, and the program runs on {version}")
from safetune.child.server_main import main
main()
"""

#: The file name of a Python interpreter.
_PYTHON = re.compile(r"\.?(python|pypy)")


class Output:
    """The standard output and error of one process, in a file without a name or directory."""

    def __init__(self) -> None:
        self._file = io.FileIO(os.memfd_create("safetune-output"), "r+")
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)  # a cut leaves no hole
        self._begin = 0

    def fileno(self) -> int:
        """Return the descriptor for a process to inherit."""
        return self._file.fileno()

    def mark(self) -> None:
        """Attribute later output to the next job."""
        self.cut()
        self._begin = os.fstat(self.fileno()).st_size

    def cut(self) -> None:
        """Drop all but the end of long output."""
        if os.fstat(self.fileno()).st_size > _MOST_BYTES:
            end, self._begin = self._end(), 0
            self._file.truncate(0)
            self._file.write(end)

    def tail(self) -> str:
        """Return the last output lines of the job."""
        with contextlib.suppress(OSError, ValueError):  # also of a closed file
            return self._end().decode(errors="replace").strip()
        return ""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _end(self) -> bytes:
        begin = max(self._begin, os.fstat(self.fileno()).st_size - _TAIL_BYTES)
        return os.pread(self.fileno(), _TAIL_BYTES, begin)


class ForkServer:
    """A process that has imported `modules` and forks children; one per parent process.

    Thread-safe. A fork of this process starts its own server.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules
        #: How long it waits for the end of a child, which a driver call may hold.
        self.reap_s = 10.0
        self._lock = forks.lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._output: Output | None = None
        self._ready = False
        self._interpret: str | None = None
        self._closed = False
        forks.register("fork servers", after_in_child=self._forget_server, at_exit=self.stop)

    def start(self, needed: bool = True) -> None:
        """Start the server without waiting for it; the next `fork` raises if that fails.

        If the server has ended and is not `needed`, reap it, so that no zombie is left.
        """
        with self._lock, contextlib.suppress(WorkerUnavailable):
            self._collect()
            if needed:
                self._launched()

    def fork(
        self, pipe: socket.socket, output: Output, modules: tuple[str, ...] = ()
    ) -> tuple[int, int]:
        """Fork a child that answers on `pipe` and prints to `output`; return its pid and the
        server's. The server first imports `modules`, for all later children, too.

        Raises `WorkerUnavailable` if the server does not start or cannot fork.
        """
        request = {"op": "fork", "modules": modules}
        reply = self._request(request, (pipe.fileno(), output.fileno()))
        if "error" in reply:
            raise WorkerUnavailable(f"cannot fork a child process: {reply['error']}")
        return int(reply["pid"]), int(reply["server"])

    def reap(self, pid: int, parent: int, kill: bool) -> int | None:
        """Return the wait status of a child that has ended; None if it does not end. With `kill`,
        kill it and its process group first.

        Raises `WorkerUnavailable` if its server `parent` has ended, and the child with it.
        """
        request = {"op": "reap", "server": parent, "pid": pid, "kill": kill, "wait_s": self.reap_s}
        status: int | None = self._request(request)["status"]
        return status

    def is_running(self, pid: int) -> bool:
        """Whether this process is the current server and has not ended; does not block."""
        started = self._process
        return started is not None and started.pid == pid and started.poll() is None

    def stop(self) -> None:
        """End the server, all its children, and all processes that they started."""
        if self._ready and (started := self._process) is not None:
            started.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(_END_S)
        self._kill()  # ends the wait of a thread that has the lock
        with self._lock:
            self._discard()

    def close(self) -> None:
        """End the server permanently: this process is exiting, and no tuning may start another."""
        self._closed = True
        self.stop()

    def _request(self, header: dict[str, Any], fds: tuple[int, ...] = ()) -> dict[str, Any]:
        forking = header["op"] == "fork"
        with self._lock:
            if not forking and (self._process is None or self._process.pid != header["server"]):
                raise WorkerUnavailable("the fork server and its children have exited")
            for last in (not forking, True):  # it exits after an idle minute, which may be now
                control = self._running(anew=forking)
                try:
                    protocol.send(control, header, fds=fds, timeout_s=_ANSWER_S)
                    return protocol.receive(control, _ANSWER_S)[0]
                except protocol.WireError as error:
                    self._discard()
                    if last:
                        raise WorkerUnavailable(f"the fork server has exited: {error}") from error
                except BaseException:  # the next request would read the answer to this one
                    self._discard()
                    raise
        raise AssertionError("unreachable")

    def _running(self, anew: bool) -> socket.socket:
        """Return the control socket of a server that is ready.

        With `anew`, a server that was started under another TRITON_INTERPRET is replaced: the
        variable decides, when Triton is imported, whether Triton's own kernels are interpreted.
        """
        if anew:
            self._collect()
            if self._control is not None and self._interpret != os.environ.get("TRITON_INTERPRET"):
                self._discard()
        control = self._launched()
        if not self._ready:
            try:
                protocol.receive(control, _START_S)
            except protocol.WireError as error:
                tail = self._output.tail() if self._output is not None else ""
                self._discard()
                raise WorkerUnavailable(
                    f"the tuning process did not start ({error}); its output: {tail or 'empty'}"
                ) from error
            self._ready = True
        return control

    def _launched(self) -> socket.socket:
        if self._control is not None:
            return self._control
        if self._closed:
            raise WorkerUnavailable("cannot start a tuning process: this process is exiting")
        with system_errors(), contextlib.ExitStack() as ours:
            output = ours.enter_context(contextlib.closing(Output()))
            control, far_end = socket.socketpair()
            ours.enter_context(control)
            with far_end:
                self._process = subprocess.Popen(
                    [
                        *(_python(), "-c", _BOOTSTRAP),
                        *(str(far_end.fileno()), str(os.getpid()), json.dumps(self._modules)),
                    ],
                    pass_fds=[far_end.fileno()],
                    stdin=subprocess.PIPE,
                    stdout=output.fileno(),
                    stderr=output.fileno(),
                    env=child_environment(),
                    cwd="/",  # nothing relative to the program's directory is meant for a server
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self._process.stdin as settings:
                settings.write(json.dumps([sys.version, search_path()]).encode() + b"\n")
            ours.pop_all()
        self._control, self._output = control, output
        self._ready, self._interpret = False, os.environ.get("TRITON_INTERPRET")
        return control

    def _collect(self) -> None:
        """Wait for a server that has exited after an idle minute; until then it is a zombie."""
        if self._process is not None and self._process.poll() is not None:
            self._discard()

    def _kill(self) -> subprocess.Popen[bytes] | None:
        """Kill the server if it has not been waited for; then its pid may be another's."""
        started = self._process
        if started is None or started.returncode is not None:
            return None
        protocol.kill_group(started.pid)
        return started

    def _discard(self) -> None:
        if started := self._kill():
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(_ANSWER_S)
        self._forget_server()

    def _forget_server(self) -> None:
        """Forget the server: it has ended, or this process is forked and it is the parent's."""
        for held in (self._control, self._output):
            if held is not None:
                held.close()
        self._process = self._control = self._output = None


#: Compiling imports Gluon as well. A child that finds all in Triton's disk cache needs neither.
COMPILER = "triton.compiler.code_generator"

#: Importing torch takes longer than tuning a small kernel.
plain_server = ForkServer(("triton.compiler", "safetune.child.job_loop", "safetune.child.session"))
server = ForkServer(("triton", "torch", "safetune.child.job_loop", "safetune.child.session"))


def start_servers(compiling: bool, with_torch: bool) -> None:
    """Start the servers that a tuning needs, without waiting."""
    plain_server.start(compiling)
    server.start(with_torch)


def close_servers() -> None:
    """End both servers permanently, because this process is exiting."""
    plain_server.close()
    server.close()


def child_environment() -> dict[str, str]:
    """Return this process's environment without its rank in a job.

    A tuning process tunes no kernel that it imports or that a hook launches: it would wait for its
    own tuning to end.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not _RANK_VARIABLE.match(name) and name != "SAFETUNE_INSTALL"
    }
    return {**kept, "SAFETUNE_MODE": "frozen"}


def search_path() -> list[str]:
    """Return `sys.path` for another process: absolute, without entries that are ignored there."""
    found = []
    for entry in sys.path:
        with contextlib.suppress(FileNotFoundError):  # the working directory has been deleted
            if isinstance(entry, str):
                as_it_is = os.path.isabs(entry) or entry.endswith(_HOOKED)
                found.append(str(entry) if as_it_is else os.path.abspath(entry))
    return found


def _python() -> str:
    """Return the Python that starts servers.

    Raises `WorkerUnavailable` where that is a program of its own, which would run a second time.
    """
    from multiprocessing import spawn  # by set_executable a program names a Python

    for path in (sys.executable or "", os.fsdecode(spawn.get_executable() or "")):
        if _PYTHON.match(os.path.basename(path)):
            return os.path.abspath(path)
    raise WorkerUnavailable(
        "found no Python executable to start tuning processes with ("
        f"{sys.executable or 'sys.executable is empty'}): set one of the same version with "
        "multiprocessing.set_executable(path), or tune offline"
    )


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Raise `WorkerUnavailable` if the system refuses a resource that a tuning needs: a descriptor,
    file memory, /proc. Connection errors pass through; pipes to children have their own errors.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, (ConnectionError, TimeoutError)) or from_signal_handler(error):
            raise
        raise WorkerUnavailable(f"the system refused to start a process: {error}") from error
