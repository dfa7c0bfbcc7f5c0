"""Asks a separate process a question that may never return on a broken device."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

#: How long a process that is killed may take to end.
_END_S = 1.0

#: `-c` puts the working directory first in the search path: a folder there may have the name of a
#: library. Nothing is imported before it is gone.
_LEAVE = "import sys\nsys.path[:] = [*{first}, *filter(None, sys.path), {root!r}]\n"


def python(code: str, *arguments: str) -> list[str]:
    """Return the command of a Python program that can import safetune; `sys` is imported already.

    The program imports nothing from the working directory, unless `python -m` found this safetune
    there.
    """
    root = str(Path(__file__).parents[2])
    first = sys.path[:1] if sys.path[:1] == [root] else []
    return [sys.executable, "-c", _LEAVE.format(first=first, root=root) + code, *arguments]


def ask(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command without input.

    Raises `OSError` if it cannot be started, and `TimeoutError`, a subclass, if it exceeds the
    limit. It is then abandoned: a signal does not end a process that waits in the kernel.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except BaseException as error:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_END_S)  # and closes the pipes
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"no answer within {limit_s:g} s") from error
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
