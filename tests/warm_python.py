"""A process that has imported torch and Triton, and forks one for each program that it is to run.

Importing both takes longer than most of the programs that tests run in processes of their own. A
program here begins with both imported and safetune not; all else is as in a fresh interpreter: its
environment, working directory, arguments, `__main__`, its session, and how it ends. What an
interpreter does before that is not repeated: sitecustomize and PYTHON* variables but PYTHONPATH.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__)


class WarmPython:
    """The test process's side; what a program reads from TRITON_INTERPRET is set for good."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        self._received = b""
        bare = {name: text for name, text in environment.items() if not name.startswith("PYTHON")}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE), str(theirs.fileno())],
            env=bare,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def start(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> int:
        """Start `script argument …` or `-c code argument …`; return its pid."""
        request = {"program": program, "environment": dict(environment), "cwd": str(directory)}
        message = json.dumps(request).encode()
        files = array.array("i", [stdout.fileno(), stderr.fileno()])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
        self._control.sendmsg([len(message).to_bytes(8, "big")], rights)
        self._control.sendall(message)
        return self._answer()

    def wait(self, timeout_s: float) -> int:
        """Return the program's exit code, or minus the signal that ended it.

        Raises:
            TimeoutError: it has not ended in that time.
        """
        self._control.settimeout(timeout_s)
        try:
            return os.waitstatus_to_exitcode(self._answer())
        finally:
            self._control.settimeout(None)

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._control.close()

    def _answer(self) -> int:
        while b"\n" not in self._received:
            received = self._control.recv(64)
            if not received:
                raise RuntimeError(f"the warm Python ended with {self._process.wait()}")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return int(line)


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Run programs in forks until the tests end; in such a fork, return its request."""
    while header := control.recvmsg(8, socket.CMSG_SPACE(8)):
        size, ancillary, _, _ = header
        if not size:
            return None
        stdout, stderr = array.array("i", ancillary[0][2])
        request = b""
        while len(request) < int.from_bytes(size, "big"):
            request += control.recv(1 << 20)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            for each in (control.detach(), stdout, stderr):
                os.close(each)
            return json.loads(request)
        os.close(stdout)
        os.close(stderr)
        control.sendall(f"{pid}\n".encode())
        control.sendall(f"{os.waitpid(pid, 0)[1]}\n".encode())
    return None


def _become(request: dict[str, Any]) -> tuple[str, str]:
    """Make this process what a fresh one would be; return the program's text and file name."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    first, *rest = request["program"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-c":
        text, *arguments = rest
        sys.argv, name, folder = ["-c", *arguments], "<string>", ""
    else:
        text = Path(first).read_text(encoding="utf-8")
        sys.argv, name, folder = [first, *rest], first, str(Path(first).resolve().parent)
        main.__file__ = first
    python_path = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [folder, *filter(None, python_path.split(os.pathsep)), *sys.path[1:]]
    return text, name


if __name__ == "__main__":
    import torch  # noqa: F401
    import triton
    import triton.language  # noqa: F401

    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        sys.exit()
    text, name = _become(request)
    try:
        exec(compile(text, name, "exec"), vars(sys.modules["__main__"]))
    except Exception as error:
        trace = error.__traceback__
        error = error.with_traceback(trace and trace.tb_next)  # without this file's own frame
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
