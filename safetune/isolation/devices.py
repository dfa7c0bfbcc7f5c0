"""Which devices a child sees, and whether it may use one of them."""

from __future__ import annotations

import os
import select

from safetune.errors import DeviceUnavailable
from safetune.isolation import backend

#: How long the kernel may take to end a child whose server has exited; it takes microseconds.
_END_MS = 2000

#: For each device, a pidfd of a child on it that SIGKILL did not end.
_stuck: dict[int, int] = {}


def child_visibility() -> dict[str, str]:
    """Return the variables with which an index means the same device in a measuring child."""
    found = backend.current()
    return {} if found is None else dict(found.visible_environment())


def check(index: int) -> None:
    """Raise where a child must not use a device; -1 is the interpreter.

    The caller has a context on the device, or will need one for the launch that follows.

    Raises:
        DeviceUnavailable: a fault there could reach this process, or a killed child is stuck.
        BackendError: the driver does not answer.
    """
    if _has_stuck_child(index):
        place = "" if index < 0 else f" on device {index}"
        raise DeviceUnavailable(
            f"a tuning process{place} does not end though it was killed; it is probably stuck in a "
            "call of the driver. Nothing is tuned there until it has ended"
        )
    if index < 0:
        return
    if reason := backend.required().why_not_shared(index):
        raise DeviceUnavailable(reason)


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
