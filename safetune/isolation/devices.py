"""Which devices a child sees, and whether it may use one: what the fault of a config could reach.

A child has a context of its own. Where a device gives only one, or where all contexts are clients
of one server that dies with any of them, nothing is tuned in this process.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Sequence
from pathlib import Path

from safetune.errors import DeviceUnavailable
from safetune.isolation import cuda
from safetune.isolation.cuda import ComputeMode

VISIBLE = "CUDA_VISIBLE_DEVICES"

_MPS_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
_MPS_DEFAULT = "/tmp/nvidia-mps"
_OFFLINE = (
    "Fill the store elsewhere, with `safetune tune` or a run on a card of the same kind, and this "
    "process launches what is chosen there"
)

#: A child whose server has gone is ended by the kernel, in about no time.
_END_MS = 2000

#: For each device, a pidfd of a child on it that SIGKILL did not end.
_stuck: dict[int, int] = {}


def visible_devices(variable: str | None, uuids: Sequence[str]) -> str | None:
    """Return the CUDA_VISIBLE_DEVICES under which a child sees this process's devices in order.

    Args:
        variable: what it says here now; None where it is not set. This process may have listed its
            devices before that was written.
        uuids: those of this process's devices, in order; none where it has not listed them yet.
    """
    partitioned = variable is not None and "MIG-" in variable  # a partition has an id of its own
    if partitioned or not uuids:
        return variable
    return ",".join(f"GPU-{uuid}" for uuid in uuids)


def child_visibility() -> dict[str, str]:
    """Return what to set in a measuring child's environment, so that an index means one device."""
    import torch

    uuids = cuda.device_uuids() if torch.cuda.is_initialized() else ()
    variable = visible_devices(os.environ.get(VISIBLE), uuids)
    return {} if variable is None else {VISIBLE: variable}


def check(index: int) -> None:
    """Raise `DeviceUnavailable` where a child must not use a device; -1 is the interpreter.

    The caller has a context on the device, or will need one for the launch that follows.
    """
    if _has_stuck_child(index):
        place = "" if index < 0 else f" on device {index}"
        raise DeviceUnavailable(
            f"a tuning process{place} does not end though it was killed, most likely stuck in a "
            "call of the driver; nothing is tuned there until it has ended"
        )
    if index < 0:
        return
    mode = cuda.compute_mode(index)
    if mode is not ComputeMode.DEFAULT:
        raise DeviceUnavailable(
            f"device {index} is in compute mode {mode.name}, so no second process can have a "
            f"context beside this one's. {_OFFLINE}; or allow it with "
            "`nvidia-smi --compute-mode=DEFAULT`"
        )
    server = mps_server(index)
    if server:
        raise DeviceUnavailable(
            f"device {index} is shared through MPS ({server}), where the fault of one config would "
            f"end the context of every client, this process's too. {_OFFLINE}; or stop MPS with "
            "`echo quit | nvidia-cuda-mps-control`"
        )


def mps_server(index: int) -> str:
    """Return what shows that contexts on a device are clients of MPS; empty where nothing does."""
    control = Path(os.environ.get(_MPS_DIRECTORY) or _MPS_DEFAULT, "control")
    try:
        if stat.S_ISFIFO(control.stat().st_mode):
            return f"its control pipe is {control}"
    except OSError:
        pass
    return "says the driver" if cuda.is_shared_by_mps(index) else ""


def note_stuck(index: int, pid: int) -> None:
    """Tune nothing on a device while a child that was killed there has not ended."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # it has ended after all
        return
    previous = _stuck.pop(index, None)
    if previous is not None:
        os.close(previous)
    _stuck[index] = handle


def _has_stuck_child(index: int) -> bool:
    handle = _stuck.get(index)
    if handle is None:
        return False
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    if not poll.poll(_END_MS):
        return True
    os.close(_stuck.pop(index))
    return False
