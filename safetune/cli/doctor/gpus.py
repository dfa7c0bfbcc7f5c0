"""Checks of NVIDIA's driver and GPUs."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetune.both import cuda, cuda_driver
from safetune.cli.doctor.report import Check, check
from safetune.errors import BackendError

_ELSEWHERE = "safetune isolates configs on NVIDIA GPUs only; tune on a machine that has one"
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def gpus() -> Iterator[Check]:
    """Check the driver, and each GPU for its compute mode, MPS and MIG."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield check("GPU", "TRITON_INTERPRET=1 is set", warn="unset it to use the GPU")
    try:
        driver = cuda_driver.load()
    except BackendError as error:
        yield check("driver", str(error), warn=_ELSEWHERE)
        return
    number = ctypes.c_int()
    try:
        driver.call("cuInit", 0)
        driver.call("cuDriverGetVersion", ctypes.byref(number))
        version = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
        driver.call("cuDeviceGetCount", ctypes.byref(number))
    except (BackendError, AttributeError) as error:
        yield check(
            "driver",
            str(error),
            fail="run nvidia-smi; if it fails too, reload or reinstall NVIDIA's driver",
        )
        return
    yield check("driver", f"{version}{_kernel_module()}")
    if not number.value:
        hidden = os.environ.get(cuda.VISIBLE)
        fix = (
            _ELSEWHERE if hidden is None else f"{cuda.VISIBLE}={hidden!r} hides all GPUs: unset it"
        )
        yield check("GPU", "the driver reports no device", warn=fix)
        return
    found = cuda.make()
    for index in range(number.value):
        yield _gpu(found, driver.describe(index), index)
    yield _torch_sees(number.value)


def _gpu(back_end: cuda.Cuda, device: cuda_driver.Description, index: int) -> Check:
    mode = back_end.compute_mode(index).name.lower().replace("_", " ")
    server = back_end.mps_server(index)
    words = f"{device.name}, sm_{device.capability}, compute mode {mode}"
    words += f", MPS ({server})" if server else ", without MPS"
    words += ", a MIG partition" if " MIG " in device.name else ", without MIG"
    return check(f"GPU {index}", words, fail=back_end.why_not_shared(index) or "")


def _torch_sees(count: int) -> Check:
    import torch

    if torch.cuda.is_available():
        return check("torch's CUDA", f"{torch.version.cuda}, {torch.cuda.device_count()} devices")
    build = f"torch {torch.__version__} sees none of the driver's {count} devices"
    state = "warn" if os.environ.get("TRITON_INTERPRET") == "1" else "fail"
    return check("torch's CUDA", build, **{state: "install a build of torch for CUDA"})


def _kernel_module() -> str:
    try:
        found = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", _DRIVER_FILE.read_text())
    except OSError:
        return ""
    return f", kernel module {found[1]}" if found else ""
