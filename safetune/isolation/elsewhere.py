"""A question to a process of its own: a broken device may keep that from ever ending."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

#: How long a process that is killed may take to end.
_END_S = 1.0

#: How long it may take to add two tensors, with the import of torch, on however slow a file system.
_ADDS_S = 180.0
_ADDS = """
import torch
index = int(sys.argv[1])
x = torch.arange(1 << 20, device="cpu" if index < 0 else index)
found = int((x + x).sum())
sys.exit(0 if found == (1 << 20) * ((1 << 20) - 1) else f"it adds wrong: {found}")
"""


#: `-c` puts the working directory first in the search path: a folder there may have the name of a
#: library. Nothing is imported before it is gone.
_LEAVE = "import sys\nsys.path[:] = [*{first}, *filter(None, sys.path), {root!r}]\n"


def python(code: str, *arguments: str) -> list[str]:
    """Return the command of a Python program that finds safetune, and for which `sys` is imported.

    It imports nothing from the working directory, unless `python -m` found this safetune there.
    """
    root = str(Path(__file__).parents[2])
    first = sys.path[:1] if sys.path[:1] == [root] else []
    return [sys.executable, "-c", _LEAVE.format(first=first, root=root) + code, *arguments]


def ask(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command, without input.

    Raises `OSError` where it cannot be started, and `TimeoutError`, which is one, where it takes
    longer. No more is waited for then: a signal does not end a process that waits in the kernel.
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
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        except BaseException as error:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            if isinstance(error, subprocess.TimeoutExpired):
                raise TimeoutError(f"no answer within {limit_s:g} s") from error
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def why_broken(index: int, limit_s: float = _ADDS_S) -> str:
    """Return why no tensors can be added on a device, in a line; empty where they can.

    Args:
        index: torch's; -1 for the CPU.
    """
    try:
        done = ask(python(_ADDS, str(index)), limit_s)
    except OSError as error:
        return str(error)
    if not done.returncode:
        return ""
    return next(reversed(done.stderr.split("\n")[:-1]), f"exit code {done.returncode}")
