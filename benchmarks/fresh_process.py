"""A task of a benchmark in a process of its own, with nothing started beforehand."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run(
    script: str,
    arguments: Sequence[str],
    variables: Mapping[str, str | Path],
    folder: Path,
    timeout_s: float,
) -> dict[str, Any]:
    """Run a script with `--report FILE` added; return what it wrote there, and `process_s`.

    Args:
        variables: the process's environment, its own caches among it; every other SAFETUNE_* is
            taken away.

    Raises:
        SystemExit: the process failed, or ran longer than `timeout_s`; it and all that it started
            are gone.
    """
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, script, "--report", str(report), *arguments]
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("SAFETUNE_")}
    env = {**inherited, **{name: str(value) for name, value in variables.items()}}
    start = time.monotonic()
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{arguments} took more than {timeout_s:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seconds = time.monotonic() - start
    if status != 0:
        raise SystemExit(f"{arguments} ended with {status}")
    return {"process_s": seconds, **json.loads(report.read_text())}
