"""Whether a card works at all: another process adds two tensors there."""

from __future__ import annotations

import sys

from safetune.isolation import elsewhere

#: How long that may take, with the import of torch, on however slow a file system.
_LIMIT_S = 180.0

_PROGRAM = """
import sys, torch
index = int(sys.argv[1])
x = torch.arange(1 << 20, device="cpu" if index < 0 else index)
found = int((x + x).sum())
sys.exit(0 if found == (1 << 20) * ((1 << 20) - 1) else f"it adds wrong: {found}")
"""


def why_broken(index: int, limit_s: float = _LIMIT_S) -> str:
    """Return why nothing works on a device, in a line; empty where something does.

    Args:
        index: torch's; -1 for the CPU.
    """
    command = [sys.executable, "-c", _PROGRAM, str(index)]
    try:
        done = elsewhere.ask(command, limit_s)
    except OSError as error:
        return str(error)
    if not done.returncode:
        return ""
    return next(reversed(done.stderr.split("\n")[:-1]), f"exit code {done.returncode}")
