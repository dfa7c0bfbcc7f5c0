"""Whether a card works at all: another process adds two tensors there."""

from __future__ import annotations

import subprocess
import sys

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
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {limit_s:g} s"
    if not done.returncode:
        return ""
    return next(reversed(done.stderr.split("\n")[:-1]), f"exit code {done.returncode}")
