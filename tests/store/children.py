"""Python processes that a test starts, and that are gone at its end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Children:
    """Processes in sessions of their own, which can import safetune and these tests."""

    def __init__(self, preamble: str = "") -> None:
        """Put `preamble` before each script."""
        self._preamble = preamble
        self._running: list[subprocess.Popen[str]] = []

    def start(self, script: str | Path, *arguments: object, **env: str) -> subprocess.Popen[str]:
        what = [str(script)] if isinstance(script, Path) else ["-c", self._preamble + script]
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        child = subprocess.Popen(
            [sys.executable, *what, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **env},
        )
        self._running.append(child)
        return child

    def run(self, script: str | Path, *arguments: object, **env: str) -> str:
        """Return what a script prints; fails with its traceback."""
        return self.end(self.start(script, *arguments, **env))

    def end(self, child: subprocess.Popen[str], line: str | None = None) -> str:
        output, errors = child.communicate(line, timeout=120)
        assert child.returncode == 0, errors
        return output

    def race(self, script: str, *arguments: object, count: int) -> list[str]:
        """Return what `count` processes print that go on together once each has said `ready`.

        The last argument of each is its number; they wait for a line.
        """
        children = [self.start(script, *arguments, number) for number in range(count)]
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n", child.communicate()[1]
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        return [self.end(child) for child in children]

    def stop(self) -> None:
        for child in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, 9)
            child.communicate(timeout=60)
