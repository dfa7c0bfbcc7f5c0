"""The back end for AMD GPUs: HIP's library, called as the CUDA driver's is.

No AMD GPU has run it yet: it is an experiment, and used only under SAFETUNE_EXPERIMENTAL_HIP=1.

Most functions of libamdhip64 have the arguments, the handles and the errors of their namesakes in
libcuda. Memory is handed to children through the host, and they work on its bytes with torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from safetune import triton_launch
from safetune.errors import BackendError
from safetune.isolation.cuda import Cuda
from safetune.isolation.cuda_driver import Driver
from safetune.settings import Settings

#: Functions whose names differ in more than the first letters and the version at the end.
_NAMES = {
    "cuCtxSynchronize": "hipDeviceSynchronize",
    "cuDeviceGetCount": "hipGetDeviceCount",
    "cuEventCreate": "hipEventCreateWithFlags",
    "cuGetErrorName": "hipDrvGetErrorName",
    "cuLaunchKernel": "hipModuleLaunchKernel",
    "cuMemAlloc_v2": "hipMalloc",
    "cuMemFreeHost": "hipHostFree",
    "cuMemFree_v2": "hipFree",
    "cuMemHostAlloc": "hipHostMalloc",
    "cuStreamCreate": "hipStreamCreateWithFlags",
    "cuStreamGetCaptureInfo_v2": "hipStreamGetCaptureInfo_v2",
}
#: A core file of a device takes minutes, and may go to a program, which no limit of its size stops
#: (github.com/ROCm/rocm-systems/issues/6206).
_NO_CORE = {"HSA_DISABLE_COREDUMP_ON_EXCEPTION": "1"}
_ANY_DIRECTION = 4  # hipMemcpyDefault
#: As the runtimes print it: `GPU-` and 16 digits of these. Some cards have none.
_UUID = re.compile(r"[0-9a-f]{16}", re.IGNORECASE)


def make() -> Hip:
    """Return the back end; raises `BackendError` where it is not asked for or cannot be had."""
    if not Settings.current().experimental_hip:
        raise BackendError("there is no isolation for the hip back end yet")
    try:
        return Hip(ctypes.CDLL(triton_launch.hip_library()))
    except (OSError, RuntimeError) as error:
        raise BackendError(f"HIP's library cannot be loaded ({error})") from error


def named(function: str) -> str:
    """Return what HIP calls a function of the CUDA driver."""
    return _NAMES.get(function) or re.sub(r"^cu(\w+?)(_v2)?$", r"hip\1", function)


class _Library:
    """libamdhip64, under the names of libcuda."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, named(name))


class _HipDriver(Driver):
    """What differs in more than a name: a thread has a current device, and no context."""

    def call(self, function: str, *arguments: Any, known: Collection[int] = ()) -> int:
        return super().call(named(function), *arguments, known=known)

    def use(self, index: int) -> None:
        self.call("cuSetDevice", index)

    @contextlib.contextmanager
    def on(self, index: int) -> Iterator[None]:
        before = self._made("cuGetDevice", ctypes.c_int)
        self.use(index)
        try:
            yield
        finally:
            self.use(before)

    def copy(self, target: int, source: int, size: int, stream: int = 0) -> None:
        self.call("cuMemcpyAsync", target, source, size, _ANY_DIRECTION, stream)

    def can_share(self, index: int) -> bool:
        return False

    def l2_bytes(self, index: int) -> int:
        return 0  # behind it is a larger cache, of which HIP does not tell

    def module(self, image: bytes) -> NoReturn:
        raise BackendError("the kernels that come as PTX are not for AMD GPUs")


class Hip(Cuda):
    """AMD GPUs, as `backend.Backend` describes them; torch names them as those of CUDA."""

    # An empty HIP_VISIBLE_DEVICES hides nothing (github.com/ROCm/hip/issues/3001).
    hidden: Mapping[str, str] = {"ROCR_VISIBLE_DEVICES": ""}
    needs_torch = True

    def __init__(self, library: Any) -> None:
        super().__init__(_HipDriver(_Library(library)))

    def visible_environment(self) -> dict[str, str]:
        torch = sys.modules.get("torch")
        listed = torch is not None and torch.cuda.is_initialized()
        return {**visible_devices(self.device_uuids() if listed else ()), **_NO_CORE}

    def why_not_shared(self, index: int) -> str:
        return ""  # HIP has neither exclusive modes nor a server that all processes share

    def device_name(self, index: int) -> str:
        return self._driver.device_name(index)

    def device_uuids(self) -> tuple[str, ...]:
        """Return the UUID of each device of this process in order; empty for one without."""
        return tuple(map(self._uuid, range(self._driver.device_count())))

    def use(self, index: int) -> str:
        self._driver.use(index)
        torch = sys.modules.get("torch")
        if torch is not None and torch.version.hip:
            torch.cuda.set_device(index)
        else:
            triton_launch.use_amd_device_without_torch(index)
        self._in_use = True
        return self._uuid(index)

    def _uuid(self, index: int) -> str:
        found = self._driver.device_uuid(index).rstrip(b"\0").decode(errors="replace")
        return f"GPU-{found}" if _UUID.fullmatch(found) else ""


def visible_devices(uuids: Sequence[str]) -> dict[str, str]:
    """Return the variables under which a child sees this process's devices in order.

    ROCR_VISIBLE_DEVICES chooses among the devices of the machine, by number or by UUID.
    HIP_VISIBLE_DEVICES chooses among those that are left, numbered anew; where it is not set or is
    empty, CUDA_VISIBLE_DEVICES does. See
    https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html and, for the order of the
    last two, rocclr/device/rocm/rocdevice.cpp in github.com/ROCm/clr.

    Args:
        uuids: those of this process's devices, in order; empty where it has not listed them yet.
            Unless each has its own, which partitions of a card may not, the child gets the
            variables as they are: this process may have listed its devices under others.
    """
    if not uuids or "" in uuids or len({*uuids}) < len(uuids):
        return {}
    all_of_them = ",".join(map(str, range(len(uuids))))
    hip = dict.fromkeys(("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), all_of_them)
    return {"ROCR_VISIBLE_DEVICES": ",".join(uuids), **hip}
