"""A function of a benchmark in a process of its own, with nothing started beforehand."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def run(
    function: Callable[..., Mapping[str, Any]],
    *arguments: Any,
    variables: Mapping[str, str],
    limit_s: float,
) -> dict[str, Any]:
    """Call a module's function; return what it returned, and the process's time, `process_s`.

    Args:
        variables: of the process's environment, its own caches among them.

    Raises:
        SystemExit: the process failed, or ran longer than `limit_s`; it and all that it started
            are gone.
    """
    task = f"{function.__name__}{arguments}"
    with tempfile.TemporaryDirectory(prefix="task-") as folder:
        report = Path(folder) / "report.json"
        called = [inspect.getfile(function), function.__name__, json.dumps(arguments)]
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, __file__, str(report), *called],
            env=environment(variables),
            start_new_session=True,
        )
        status = end_of(process, limit_s)
        seconds = time.monotonic() - start
        if status is None:
            raise SystemExit(f"{task} took more than {limit_s:g} s")
        if status != 0:
            raise SystemExit(f"{task} ended with {status}")
        return {"process_s": seconds, **json.loads(report.read_text())}


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with some variables, and no other SAFETUNE_*."""
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("SAFETUNE_")}
    return {**inherited, **variables}


def caches(triton: Path, store: Path) -> dict[str, str]:
    """Return the variables that name a compile cache and a store."""
    return {"TRITON_CACHE_DIR": str(triton), "SAFETUNE_CACHE_DIR": str(store)}


def end_of(process: subprocess.Popen[Any], limit_s: float) -> int | None:
    """Wait for a process with a session of its own, then end all that it has started.

    Returns its exit code; None where it ran longer than `limit_s`.
    """
    try:
        return process.wait(max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def output_of(
    command: Sequence[str], env: Mapping[str, str], limit_s: float, cwd: Path | None = None
) -> tuple[int | None, str]:
    """Run a program; return its exit code, None where it took too long, and what it printed."""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=printed, stderr=printed, start_new_session=True
        )
        status = end_of(process, limit_s)
        printed.seek(0)
        return status, printed.read()


def _call(report: str, file: str, name: str, arguments: str) -> None:
    sys.path.insert(0, str(Path(file).parent))
    function = getattr(importlib.import_module(Path(file).stem), name)
    Path(report).write_text(json.dumps(function(*json.loads(arguments))))


if __name__ == "__main__":
    _call(*sys.argv[1:])
