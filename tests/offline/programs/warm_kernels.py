"""Kernels whose winners are compiled ahead of time: one with all that a launch may do first."""

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune


def zero(arguments):
    arguments["y"].zero_()


@triton.heuristics({"EVEN": lambda arguments: arguments["N"] % 128 == 0})
@safetune(
    configs=[
        triton.Config({"BLOCK": block}, num_warps=warps, pre_hook=zero)
        for block in (64, 128)
        for warps in (2, 4)
    ],
    key=["N", "TAG"],
)
@triton.heuristics({"TWICE": lambda arguments: 2 * arguments["BLOCK"]})
@triton.jit
def add_one(x, y, N, TAG, EVEN: tl.constexpr, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (offsets < N) & (offsets < N + TWICE)
    if EVEN:
        tl.store(y + offsets, tl.load(x + offsets, mask=mask) + 1, mask=mask)
    else:
        tl.store(y + offsets, tl.load(x + offsets, mask=mask) - -1, mask=mask)


def grid(meta):
    return (triton.cdiv(meta["N"], meta["BLOCK"]),)


def arguments(count, dtype, device="cpu"):
    """A call whose output does not begin at a multiple of 16 bytes where the count is odd."""
    x = torch.zeros(count, dtype=dtype, device=device)
    y = torch.zeros(count + 1, dtype=dtype, device=device)[count % 2 :]
    return x, y, count, 7


@add_one.fn.workload
def vectors(device, dtype):
    for count in (256, 301):
        yield Workload(f"{count}", grid, arguments(count, dtype, device))


@safetune(
    configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 16}, num_warps=2)], key=["N"]
)
@triton.jit
def fill(x, N, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1, mask=tl.arange(0, BLOCK) < N)


def record_fill(device="cpu"):
    fill[(1,)](torch.zeros(40, device=device)[3:], 20)


@safetune(configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 16})], key=["N"])
@triton.jit
def broken(x, N, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 64, "too small")
    tl.store(x + tl.arange(0, BLOCK), 1, mask=tl.arange(0, BLOCK) < N)


def record_broken(device="cpu"):
    broken[(1,)](torch.zeros(40, device=device), 20)
