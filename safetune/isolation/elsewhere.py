"""A question to a process of its own: a broken device may keep that from ever ending."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: How long a process that is killed may take to end.
_END_S = 1.0


class Answer(NamedTuple):
    """How a process has ended, and what it has printed."""

    returncode: int
    stdout: str
    stderr: str


def ask(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> Answer:
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
    return Answer(process.returncode, stdout, stderr)
