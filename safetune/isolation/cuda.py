"""The few calls of the CUDA driver that torch and Triton do not expose, through ctypes.

Every function works on a machine without the driver: nothing is captured there, no address is a
device's, no device is exclusive or shared, and there is none to name.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import uuid
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

# Values of cuda.h: CUdevice_attribute, CUpointer_attribute, CUstreamCaptureMode.
_ATTRIBUTE_COMPUTE_MODE = 20
_ATTRIBUTE_MPS_ENABLED = 133
_POINTER_MEMORY_TYPE = 2
_CAPTURE_RELAXED = 2
_CAPTURE_NONE = 0  # CUstreamCaptureStatus
_CAPTURE_ACTIVE = 1
_ERROR_CAPTURE_IMPLICIT = 906  # CUresult: the legacy stream, beside a capture that it would disturb
_STREAM_NON_BLOCKING = 1
#: CU_COMPUTEMODE_EXCLUSIVE, of drivers long gone.
_EXCLUSIVE_THREAD = 1


class ComputeMode(IntEnum):
    """How many processes may have a context on a device; values of `CUcomputemode`."""

    DEFAULT = 0
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


@functools.cache
def library() -> Any:
    """Return libcuda, or None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def device_attribute(attribute: int, index: int) -> int:
    """Return an attribute of the device with this index in this process; 0 where it is unknown."""
    cuda = library()
    device, value = ctypes.c_int(), ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index):
        return 0
    failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return 0 if failed else value.value


def compute_mode(index: int) -> ComputeMode:
    """Return the compute mode of a device."""
    mode = device_attribute(_ATTRIBUTE_COMPUTE_MODE, index)
    return ComputeMode.EXCLUSIVE_PROCESS if mode == _EXCLUSIVE_THREAD else ComputeMode(mode)


def is_shared_by_mps(index: int) -> bool:
    """Whether contexts on a device are clients of an MPS server; drivers before 12.0 do not say."""
    return bool(device_attribute(_ATTRIBUTE_MPS_ENABLED, index))


def device_uuids() -> tuple[str, ...]:
    """Return the UUID of each device of this process in order; none where one is a MIG partition.

    Torch counts by CUDA_VISIBLE_DEVICES as it is now; the driver listed its devices when it was
    initialised.
    """
    cuda = library()
    count, device = ctypes.c_int(), ctypes.c_int()
    name, identifier = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    found = []
    for index in range(count.value):
        if (
            cuda.cuDeviceGet(ctypes.byref(device), index)
            or cuda.cuDeviceGetName(name, len(name), device)
            or cuda.cuDeviceGetUuid(ctypes.byref(identifier), device)
            or b" MIG " in name.value
        ):
            return ()
        found.append(str(uuid.UUID(bytes=bytes(identifier))))
    return tuple(found)


def is_known_pointer(address: int) -> bool:
    """Whether the driver knows an address: device memory, or host memory that it has pinned."""
    cuda = library()
    kind = ctypes.c_uint()
    if cuda is None:
        return False
    pointer = ctypes.c_uint64(address)
    return cuda.cuPointerGetAttribute(ctypes.byref(kind), _POINTER_MEMORY_TYPE, pointer) == 0


def capture_id(stream: int) -> int:
    """Return the id of the graph capture that a stream is part of now; 0: it is part of none.

    -1 where there is one but no id of it: it has become invalid, or `stream` is the legacy one and
    a launch there would disturb the capture of another. Asking disturbs nothing.
    """
    cuda = library()
    if cuda is None:
        return 0
    status, identifier = ctypes.c_int(), ctypes.c_uint64()
    error = cuda.cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(identifier), None, None, None
    )
    if error == _ERROR_CAPTURE_IMPLICIT:
        return -1
    if error or status.value == _CAPTURE_NONE:  # an error: no context, so nothing to capture
        return 0
    return identifier.value if status.value == _CAPTURE_ACTIVE else -1


@functools.cache
def side_stream(index: int) -> int:
    """Return a stream of the current context, the same one for each device; 0 where none is made.

    The first `torch.cuda.Stream()` of a process makes 32, which take 70 MiB of an H100 for good.
    """
    cuda = library()
    stream = ctypes.c_void_p()
    if cuda is None or cuda.cuStreamCreate(ctypes.byref(stream), _STREAM_NON_BLOCKING):
        return 0
    return stream.value or 0


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread copy and allocate while another one captures a graph in global mode."""
    cuda = library()
    if cuda is None:
        yield
        return
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
