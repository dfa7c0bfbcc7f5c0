"""Checks of NVIDIA's driver and GPUs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

from safetune.both import cuda, cuda_driver
from safetune.cli.doctor.report import Check, check
from safetune.errors import BackendError

_ELSEWHERE = "safetune isolates configs on NVIDIA GPUs only; tune on a machine that has one"


def gpus() -> Iterator[Check]:
    """Check the driver, and each GPU for its compute mode, MPS and MIG."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield check("GPU", "TRITON_INTERPRET=1 is set", warn="unset it to use the GPU")
        return
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
        fix = "run nvidia-smi; if it fails too, reload or reinstall NVIDIA's driver"
        yield check("driver", str(error), fail=fix)
        return
    yield check("driver", version)
    if not number.value:
        hidden = f"{cuda.VISIBLE}={os.environ.get(cuda.VISIBLE)!r} hides all GPUs: unset it"
        fix = hidden if cuda.VISIBLE in os.environ else _ELSEWHERE
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
    return check("torch's CUDA", build, fail="install a build of torch for CUDA")
