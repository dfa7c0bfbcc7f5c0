"""The back end for NVIDIA GPUs, through torch and the few CUDA driver calls that torch lacks."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path

from safetune import triton_launch
from safetune.both import cuda_driver
from safetune.both.backend import Memory
from safetune.both.cuda_driver import INVALID_CONTEXT, NO_CONTEXT, Driver
from safetune.both.device_bytes import DeviceBytes
from safetune.errors import BackendError

VISIBLE = "CUDA_VISIBLE_DEVICES"

# Values of cuda.h: CUdevice_attribute, CUpointer_attribute, CUstreamCaptureMode.
COMPUTE_MODE = 20
_MAJOR, _MINOR = 75, 76  # the compute capability
MPS_ENABLED = 133
_POINTER_MEMORY_TYPE = 2
_CAPTURE_NONE = 0  # CUstreamCaptureStatus
_CAPTURE_ACTIVE = 1

# CUresult.
_INVALID_VALUE = 1
_NOT_INITIALIZED = 3
_CAPTURE_IMPLICIT = 906  # the legacy stream, beside a capture that it would disturb

_MPS_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
_MPS_DEFAULT = "/tmp/nvidia-mps"
_OFFLINE = (
    "Tune on another GPU of the same model, with `safetune tune` or by running the program there; "
    "this process then uses those choices"
)


class ComputeMode(IntEnum):
    """How many processes may have a context on a device; values of `CUcomputemode`."""

    DEFAULT = 0
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


def make() -> Cuda:
    """Return the back end; raises `BackendError` if the driver's library cannot be loaded."""
    return Cuda(cuda_driver.load())


class Cuda:
    """NVIDIA GPUs, as `backend.Backend` describes them.

    Args:
        mps_directory: the default directory of an MPS server's pipes; the environment may override
            it.
    """

    torch_type = "cuda"

    def __init__(self, driver: Driver, mps_directory: str = _MPS_DEFAULT) -> None:
        self._driver = driver
        self._in_use = False
        self._mps_directory = mps_directory
        self._bytes: dict[int, DeviceBytes] = {}

    def launch_stream(self) -> int:
        """Return the handle of torch's current stream; 0, the default stream, without torch."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return 0
        return int(torch.cuda.current_stream().cuda_stream)

    def capture_id(self, stream: int) -> int:
        """See `Backend`.

        -1 if the capture has become invalid, or if `stream` is the legacy stream and a launch there
        would disturb a capture on another stream.
        """
        status, identifier = ctypes.c_int(), ctypes.c_uint64()
        error = self._driver.call(
            "cuStreamGetCaptureInfo_v2",
            ctypes.c_void_p(stream),
            ctypes.byref(status),
            ctypes.byref(identifier),
            None,
            None,
            None,
            known=NO_CONTEXT | {_CAPTURE_IMPLICIT},
        )
        if error == _CAPTURE_IMPLICIT:
            return -1
        if error or status.value == _CAPTURE_NONE:  # without a context nothing can be captured
            return 0
        return identifier.value if status.value == _CAPTURE_ACTIVE else -1

    def relaxed_capture(self) -> contextlib.AbstractContextManager[None]:
        return self._driver.relaxed()

    @contextlib.contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """See `Backend`. Copies contiguous bytes without allocating on the device.

        The first `torch.cuda.Stream()` of a process makes 32; they keep 70 MiB of an H100 for good.
        """
        import torch

        with self.relaxed_capture(), torch.cuda.device(index):
            current = torch.cuda.current_stream()
            side = torch.cuda.ExternalStream(self.bytes_of(current.device_index).side_stream)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                yield

    def is_known_pointer(self, address: int) -> bool:
        kind = ctypes.c_uint()
        ask = functools.partial(
            self._driver.call,
            "cuPointerGetAttribute",
            ctypes.byref(kind),
            _POINTER_MEMORY_TYPE,
            ctypes.c_uint64(address),
        )
        error = ask(known={_INVALID_VALUE, INVALID_CONTEXT, _NOT_INITIALIZED})
        if error == INVALID_CONTEXT:  # a thread that has not used its device yet
            self._bind_context()
            error = ask(known={_INVALID_VALUE})
        return not error

    def visible_environment(self) -> dict[str, str]:
        """See `Backend`. Torch reads the variable once, when it lists its devices."""
        import torch

        uuids = self.device_uuids() if torch.cuda.is_initialized() else ()
        variable = visible_devices(os.environ.get(VISIBLE), uuids)
        return {} if variable is None else {VISIBLE: variable}

    def why_not_shared(self, index: int) -> str:
        """See `Backend`.

        A child has its own context. Some devices allow only one, and with MPS all contexts may be
        clients of one server, which dies with any of them.
        """
        mode = self.compute_mode(index)
        if mode is not ComputeMode.DEFAULT:
            return (
                f"device {index} is in compute mode {mode.name}, so no second process can open a "
                f"context on it. {_OFFLINE}. Or change the mode with "
                "`nvidia-smi --compute-mode=DEFAULT`"
            )
        if server := self.mps_server(index):
            return (
                f"device {index} is shared through MPS ({server}), where one config's fault would "
                f"end the context of every client, including this process. {_OFFLINE}. Or stop "
                "MPS with `echo quit | nvidia-cuda-mps-control`"
            )
        return ""

    def device_name(self, index: int) -> str:
        import torch

        return str(torch.cuda.get_device_name(index))

    def memory(self, index: int) -> Memory:
        import torch

        with self.relaxed_capture():
            free, total = torch.cuda.mem_get_info(index)
        unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        return Memory(int(free), int(total), int(unused))

    def release_unused(self, index: int) -> None:
        """See `Backend`. Torch refuses during a graph capture and keeps its blocks."""
        import torch

        with contextlib.suppress(RuntimeError), self.relaxed_capture(), torch.cuda.device(index):
            torch.cuda.empty_cache()

    def bytes_of(self, index: int) -> DeviceBytes:
        if index not in self._bytes:
            self._bytes[index] = DeviceBytes(self._driver, index, f"cuda:{index}")
        return self._bytes[index]

    def synchronize(self) -> None:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def use(self, index: int) -> str:
        """See `Backend`. Without torch, Triton makes all launches of the process."""
        driver = self._driver
        driver.use(index)
        if torch := sys.modules.get("torch"):
            torch.cuda.set_device(index)
        else:
            capability = driver.attribute(_MAJOR, index), driver.attribute(_MINOR, index)
            triton_launch.use_device_without_torch(index, capability)
        self._in_use = True
        return str(uuid.UUID(bytes=driver.device_uuid(index)))

    def works(self) -> bool:
        if not self._in_use:
            return True
        try:
            self._driver.synchronize()
            self._driver.free(self._driver.allocate(1))
        except BackendError:
            return False
        return True

    def compute_mode(self, index: int) -> ComputeMode:
        """Return the compute mode of a device."""
        return ComputeMode(self._attribute(COMPUTE_MODE, index))

    def mps_server(self, index: int) -> str:
        """Return the evidence that contexts on a device are MPS clients; empty without any."""
        control = Path(os.environ.get(_MPS_DIRECTORY) or self._mps_directory, "control")
        if _is_served(control):
            return f"its control pipe is {control}"
        return "the driver reports it" if self._attribute(MPS_ENABLED, index) else ""

    def device_uuids(self) -> tuple[str, ...]:
        """Return the UUIDs of this process's devices, in order; empty if one is a MIG partition."""
        devices, driver = range(self._driver.device_count()), self._driver
        if any(" MIG " in driver.device_name(index) for index in devices):
            return ()
        return tuple(str(uuid.UUID(bytes=driver.device_uuid(index))) for index in devices)

    def _attribute(self, attribute: int, index: int) -> int:
        """Return an attribute of a device; 0 where the driver is too old to have it."""
        return self._driver.attribute(attribute, index, known={_INVALID_VALUE})

    def _bind_context(self) -> None:
        import torch

        self.memory(torch.cuda.current_device())


def _is_served(control: Path) -> bool:
    """Whether a daemon reads a control pipe; one that was killed leaves its pipe behind."""
    try:
        if not control.is_fifo():
            return False
        os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK))
    except PermissionError:
        return True  # it is there, and may be served
    except OSError:
        return False  # it is not there, or nothing reads it
    return True


def visible_devices(variable: str | None, uuids: Sequence[str]) -> str | None:
    """Return the CUDA_VISIBLE_DEVICES that shows a child this process's devices in order.

    Args:
        variable: its current value in this process; None if unset. This process may have listed its
            devices before the variable was set.
        uuids: of this process's devices, in order; empty if it has not listed them yet.
    """
    partitioned = variable is not None and "MIG-" in variable  # a partition has an id of its own
    if partitioned or not uuids:
        return variable
    return ",".join(f"GPU-{uuid}" for uuid in uuids)
