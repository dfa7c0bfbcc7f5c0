"""The parent side of the fork server: started at the first miss, never before."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

from safetune import forks
from safetune.errors import WorkerUnavailable
from safetune.isolation import protocol

#: A cold page cache makes the first import of torch and triton take several seconds.
_START_S = 120.0
_ANSWER_S = 30.0

#: Variables by which a launcher passes a process its rank. A tuning child is not a rank of the job:
#: with these variables it could join the job's rendezvous.
_RANK_VARIABLE = re.compile(
    r"^(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE"
    r"|ROLE_WORLD_SIZE|ROLE_NAME|MASTER_ADDR|MASTER_PORT|NODE_RANK|NNODES"
    r"|TORCHELASTIC_.*|OMPI_.*|PMI_.*|PMIX_.*|MPI_.*|MV2_.*|I_MPI_.*|SLURM_.*|JSM_.*|FLUX_.*)$"
)

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from safetune.child.server_main import main; main()"
)


class ForkServer:
    """A process that has imported `modules` and forks children; one per parent process.

    Safe to use from several threads. A process forked from this one starts a server of its own.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules
        #: How long it waits for the end of a child, which a driver call may hold.
        self.reap_s = 10.0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._output: IO[bytes] | None = None
        self._ready = False
        self._interpret: str | None = None
        self._closed = False
        forks.register("fork servers", after_in_child=self._forget, at_exit=self.stop)

    def start(self) -> None:
        """Start the server without waiting for it; a failure is raised by the next `fork`."""
        with self._lock, contextlib.suppress(WorkerUnavailable):
            self._collect()
            self._launched()

    def fork(self, pipe: socket.socket, output: IO[bytes]) -> int:
        """Fork a child that answers on `pipe` and prints to `output`; return its pid.

        Raises `WorkerUnavailable` where the server does not start or no process can be had.
        """
        reply = self._request({"op": "fork"}, (pipe.fileno(), output.fileno()))
        if "error" in reply:
            raise WorkerUnavailable(f"no child process could be forked: {reply['error']}")
        return int(reply["pid"])

    def collect(self) -> None:
        """Wait for the server if it has ended, so that it is not left as a zombie."""
        with self._lock:
            self._collect()

    def reap(self, pid: int, kill: bool) -> int | None:
        """Return the wait status of a child that has ended; with `kill`, it and its process group
        are killed first. None if it does not end.
        """
        request = {"op": "reap", "pid": pid, "kill": kill, "wait_s": self.reap_s}
        with contextlib.suppress(WorkerUnavailable):
            status: int | None = self._request(request)["status"]
            return status
        return None

    def stop(self) -> None:
        """End the server and with it every child."""
        self._kill()  # ends the wait of a thread that has the lock
        with self._lock:
            self._discard()

    def close(self) -> None:
        """End the server for good: this process is ending, and no tuning may start another."""
        self._closed = True
        self.stop()

    def _request(self, header: dict[str, Any], fds: tuple[int, ...] = ()) -> dict[str, Any]:
        forking = header["op"] == "fork"
        with self._lock:
            if not forking and self._control is None:
                raise WorkerUnavailable("the fork server has ended, and its children with it")
            for last in (not forking, True):  # it exits after an idle minute, which may be now
                control = self._running(anew=forking)
                try:
                    protocol.send(control, header, fds=fds, timeout_s=_ANSWER_S)
                    return protocol.receive(control, _ANSWER_S)[0]
                except (OSError, EOFError, protocol.ProtocolError) as error:
                    self._discard()
                    if last:
                        raise WorkerUnavailable(f"the fork server is gone: {error}") from error
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
            except (OSError, EOFError, protocol.ProtocolError) as error:
                tail = tail_of(self._output)
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
            raise WorkerUnavailable("no tuning process is started: this process is ending")
        self._control, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        self._ready, self._interpret = False, os.environ.get("TRITON_INTERPRET")
        command = [
            sys.executable or "python3",
            "-c",
            _BOOTSTRAP,
            json.dumps([path or os.getcwd() for path in sys.path]),
            str(theirs.fileno()),
            str(os.getpid()),
            json.dumps(self._modules),
        ]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=child_environment(),
                start_new_session=True,
            )
        except OSError as error:
            self._discard()
            raise WorkerUnavailable(f"no tuning process could be started: {error}") from error
        finally:
            theirs.close()
        return self._control

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

    def _forget(self) -> None:
        """In a forked child: the server and the state of the lock are the parent's."""
        self._lock = threading.Lock()
        self._forget_server()

    def _forget_server(self) -> None:
        for held in (self._control, self._output):
            if held is not None:
                held.close()
        self._process = self._control = self._output = None


server = ForkServer(("triton", "torch", "safetune.child.job_loop", "safetune.child.session"))
#: Importing torch takes seconds, and nothing that compiles needs it.
compile_server = ForkServer(("triton.compiler", "safetune.child.job_loop"))


def start_servers(compiling: bool) -> None:
    """Start both servers, or the measuring one alone, and wait for neither."""
    if compiling:
        compile_server.start()
    else:
        compile_server.collect()
    server.start()


def close_servers() -> None:
    """End both servers for good, because this process is ending."""
    compile_server.close()
    server.close()


def child_environment() -> dict[str, str]:
    """Return this process's environment without its rank in a job, and without SAFETUNE_INSTALL:
    a tuning process does not tune the kernels that it imports.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not _RANK_VARIABLE.match(name) and name != "SAFETUNE_INSTALL"
    }


def tail_of(output: IO[bytes] | None, start: int = 0, limit: int = 2000) -> str:
    """Return the last lines written to a child's output file after byte `start`."""
    if output is None:
        return ""
    with contextlib.suppress(OSError, ValueError):
        size = os.fstat(output.fileno()).st_size
        begin = max(start, size - limit)
        return os.pread(output.fileno(), limit, begin).decode(errors="replace").strip()
    return ""
