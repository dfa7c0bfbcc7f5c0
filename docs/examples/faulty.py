"""A vector addition with two bad configs: one kills its process, one never ends.

safetune tune docs/examples/faulty.py
"""

import ctypes

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune


def crash(arguments):
    """Read address 0: a real SIGSEGV, in whatever process runs this."""
    ctypes.string_at(0)


@safetune(
    configs=[
        triton.Config({"BLOCK": 128, "HANGS": False}),
        triton.Config({"BLOCK": 256, "HANGS": False}),
        triton.Config({"BLOCK": 512, "HANGS": False}, pre_hook=crash),
        triton.Config({"BLOCK": 1024, "HANGS": True}),
        triton.Config({"BLOCK": 1024, "HANGS": False}),
    ],
    key=["count"],
    run_timeout_s=3,
)
@triton.jit
def add_kernel(
    left_pointer, right_pointer, sum_pointer, count, HANGS: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    if HANGS:
        word = tl.load(sum_pointer, volatile=True)
        while word == 0.0:  # no program writes it
            word = tl.load(sum_pointer, volatile=True)
    left = tl.load(left_pointer + offsets, mask=mask)
    right = tl.load(right_pointer + offsets, mask=mask)
    tl.store(sum_pointer + offsets, left + right, mask=mask)


def grid(arguments):
    return (triton.cdiv(arguments["count"], arguments["BLOCK"]),)


@add_kernel.workload
def additions(device: torch.device, dtype: torch.dtype):
    count = 1000 if device.type == "cpu" else 1 << 24
    left = torch.randn(count, device=device, dtype=dtype)
    right = torch.randn(count, device=device, dtype=dtype)
    yield Workload(f"{count}", grid, (left, right, torch.zeros_like(left), count))


def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left + right, from the kernel."""
    result = torch.zeros_like(left)
    add_kernel[grid](left, right, result, left.numel())
    return result
