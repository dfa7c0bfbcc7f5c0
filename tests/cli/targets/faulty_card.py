"""A kernel of two keys, of which no launch works in the second worker of `--devices`: its card is
broken. `broken_card/sitecustomize.py` breaks torch there."""

import os

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune


def parent_of(process):
    with open(f"/proc/{process}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def fail_on_the_second_card(arguments):
    with open(f"/proc/{parent_of(os.getppid())}/cmdline") as words:
        if "--worker=2/" in words.read():
            raise RuntimeError("CUDA error: unspecified launch failure")


@safetune(
    configs=[triton.Config({"BLOCK": size}) for size in (64, 128)],
    key=["N"],
    pre_hook=fail_on_the_second_card,
)
@triton.jit
def add_one(x, N, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N) + 1, mask=offsets < N)


@add_one.workload
def vectors(device, dtype):
    for count in (40, 50):
        yield Workload(f"{count}", (1,), (torch.zeros(count, device=device, dtype=dtype), count))
