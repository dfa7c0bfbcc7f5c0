"""Which environment a child gets, on how many CPUs, and how its end is described."""

from __future__ import annotations

import contextlib
import os
import re
import signal

#: Variables by which a launcher passes a process its rank. A tuning child is not a rank of the job:
#: with these variables it could join the job's rendezvous.
_RANK_VARIABLE = re.compile(
    r"^(RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE"
    r"|ROLE_WORLD_SIZE|ROLE_NAME|MASTER_ADDR|MASTER_PORT|NODE_RANK|NNODES"
    r"|TORCHELASTIC_.*|OMPI_.*|PMI_.*|PMIX_.*|MPI_.*|MV2_.*|I_MPI_.*|SLURM_.*|JSM_.*|FLUX_.*)$"
)


def child_environment() -> dict[str, str]:
    """Return this process's environment without its rank in a job, and without SAFETUNE_INSTALL:
    a tuning process does not tune the kernels that it imports.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not _RANK_VARIABLE.match(name) and name != "SAFETUNE_INSTALL"
    }


def usable_cpus() -> int:
    """Return how many CPUs this process may use: its affinity, cut by its cgroup's quota."""
    cpus = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/cpu.max") as quota_file:
            quota, period = quota_file.read().split()
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    return max(1, cpus)


def describe_exit(status: int | None) -> str:
    """Return a wait status in words: `SIGSEGV`, `exit code 3`."""
    if status is None:
        return "unknown"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return signal.Signals(number).name
        except ValueError:
            return f"signal {number}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"
