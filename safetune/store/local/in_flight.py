"""Configs in flight: each has a row from before its first launch until its outcome replaces the
row.

Whatever takes the machine down leaves no outcome. So the row says `died(machine)` from the start,
and where it was written: the boot of the machine and, for a config that runs in the caller, the
process. A row of this boot says nothing unless its process is known to have ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from safetune.outcome import Outcome, Verdict
from safetune.store.records import TrialRecord

#: How long a config that took its machine or process down is not tried.
SKIPPED_S = 30 * 86_400.0

#: Another text after each start of the machine.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the id of this boot of the machine; empty if unknown."""
    return _read(BOOT_ID)


@functools.cache
def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def here(inline: bool = False) -> str:
    """Return where a config is about to run, for `TrialRecord.flight`; empty if unknown.

    Args:
        inline: it runs in this process, not in a child.
    """
    boot = boot_id()
    return f"{boot} {_process(os.getpid())}" if boot and inline else boot


def landed(trials: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return trials without those in flight, except the ones that died."""
    found = []
    for trial in trials:
        if not trial.flight:
            found.append(trial)
            continue
        with contextlib.suppress(ValueError, OverflowError, OSError):  # another program wrote it
            if (died := _died(trial)) is not None:
                found.append(died)
                continue
        if trial.elsewhere:
            *others, last = trial.elsewhere
            before = replace(trial, outcome=last.outcome, created=last.created, flight="")
            found.append(replace(before, elsewhere=tuple(others)))
    return found


def _died(trial: TrialRecord) -> TrialRecord | None:
    what = _ended(trial.flight)
    until = trial.created + SKIPPED_S
    if not what or time.time() > until:
        return None
    dates = [time.strftime("%Y-%m-%d", time.localtime(date)) for date in (trial.created, until)]
    ended = "the machine went down" if what == "machine" else "the process ended"
    message = f"{ended} while it ran, on {dates[0]}; it is not tried until {dates[1]}"
    return replace(trial, outcome=Outcome(Verdict.DIED, detail=what, message=message), flight="")


def _ended(flight: str) -> str:
    """Return the crash since a config began to run: `machine`, `process` or nothing."""
    boot, _, process = flight.partition(" ")
    if boot != (boot_id() or boot):
        return "machine"
    if not process:
        return ""
    pid, _, namespace = process.split("/")
    if namespace != _namespace():  # of another container: not known
        return ""
    return "" if _process(int(pid)) == process else "process"


def _process(pid: int) -> str:
    """Return a process's identity among all of a boot; empty if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    started = fields[18]
    return "" if state in ("Z", "X") else f"{pid}/{started}/{_namespace()}"


def _namespace() -> str:
    """Return the namespace of this process's numbers of processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
