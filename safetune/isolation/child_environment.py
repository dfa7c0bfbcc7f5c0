"""What a child takes over from this process when it starts, and whenever it is used again."""

from __future__ import annotations

import os
import re
import sys

from safetune import triton_internals
from safetune.isolation import backend, devices
from safetune.isolation.protocol import Start

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


def start_job(gpu_blind: bool, memory_bytes: int = 0) -> Start:
    """Return the job with the environment, the paths, the program's arguments and Triton's knobs
    that this process has now.

    `memory_bytes` limits what the child, and each process that it starts, may allocate, if not 0.
    """
    environment = child_environment()
    if gpu_blind:
        environment.update(backend.hidden_environment())
    else:
        environment.update(devices.child_visibility())
    return Start(
        environment=environment,
        path=[path or os.getcwd() for path in sys.path],
        argv=[str(argument) for argument in getattr(sys, "argv", [])],
        directory=os.getcwd(),
        knobs=triton_internals.knobs_set_in_code(),
        memory_bytes=memory_bytes,
    )
