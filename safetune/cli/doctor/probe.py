"""The kernel that `safetune doctor` tunes: of its configs one works, and the others must fail."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune


def _crash(_: dict[str, Any]) -> None:
    """Read address 0: a real SIGSEGV, in whatever process runs this."""
    ctypes.string_at(0)


_CONFIGS = [triton.Config({"FAULT": 0}), triton.Config({"FAULT": 1}, pre_hook=_crash)]
if os.environ.get("TRITON_INTERPRET") != "1":
    _CONFIGS.append(triton.Config({"FAULT": 2}))


@safetune(configs=_CONFIGS, key=["count"])
@triton.jit
def probe_kernel(values, count, FAULT: tl.constexpr):
    """Add 1; FAULT=2 writes far outside of all memory."""
    offsets = tl.arange(0, 64)
    far = (1 << 46) * (FAULT == 2)
    value = tl.load(values + offsets, mask=offsets < count)
    tl.store(values + far + offsets, value + 1, mask=offsets < count)


@probe_kernel.workload
def one(device: torch.device, dtype: torch.dtype) -> Iterator[Workload]:
    """One small launch."""
    yield Workload("one", (1,), (torch.zeros(64, device=device, dtype=dtype), 64))
