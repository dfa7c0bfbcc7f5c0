"""A kernel one of whose configs waits in its hook until the test lets it go (see conftest.Fifo)."""

import os

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune


def wait_for_the_test(arguments):
    """Tell the test who runs this, and wait; return at once where no test waits."""
    there, back = os.environ["TEST_THERE"], os.environ["TEST_BACK"]
    if not os.path.exists(there):
        return
    with open(there, "w") as fifo:
        fifo.write(f"{os.getpid()} {os.getppid()} ")
    with open(back) as fifo:
        fifo.read()


def grid(meta):
    return (triton.cdiv(meta["N"], meta["BLOCK"]),)


@safetune(
    configs=[
        triton.Config({"BLOCK": 32}),
        triton.Config({"BLOCK": 48}),  # no power of two
        triton.Config({"BLOCK": 128}),
        triton.Config({"BLOCK": 64}, pre_hook=wait_for_the_test),
    ],
    key=["N"],
    run_timeout_s=200,
)
@triton.jit
def slow_to_end(x, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    tl.store(x + offsets, tl.load(x + offsets, mask=mask) + 1, mask=mask)


@slow_to_end.workload
def vectors(device, dtype):
    yield Workload("vector", grid, (torch.zeros(100, device=device, dtype=dtype), 100))
