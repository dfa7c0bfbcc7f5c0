"""What a child takes over from this process at its start and whenever it is used again."""

from __future__ import annotations

import os
import sys

from safetune import triton_internals
from safetune.isolation import backend, devices, process
from safetune.isolation.protocol import Start


def start_job(gpu_blind: bool, memory_bytes: int = 0) -> Start:
    """Return the job that puts a child where this process is now: environment,
    paths, arguments of the program, Triton's knobs.

    `memory_bytes` limits what the child, and each process that it starts, may allocate; 0 does not.
    """
    environment = process.child_environment()
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
