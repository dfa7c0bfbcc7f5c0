"""Two kernels of two configs each; one has two shapes, the other one."""

import os
import sys
import warnings

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune

CONFIGS = [triton.Config({"BLOCK": size}) for size in (64, 128)]

if "TEST_PRINTS" in os.environ:
    print("printed while it was imported")
    warnings.warn("something is old", stacklevel=1)


def grid(meta):
    return (triton.cdiv(meta["N"], meta["BLOCK"]),)


def note_process(arguments):
    """A hook, which is a part of each config."""


def make_twice():
    @safetune(configs=CONFIGS, key=["N"])
    @triton.jit
    def kernel(x, N, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < N
        tl.store(x + offsets, tl.load(x + offsets, mask=mask) * 2, mask=mask)

    return kernel


#: A kernel whose attribute is not the name of its function.
twice = make_twice()


@safetune(configs=CONFIGS, key=["N"], pre_hook=note_process)
@triton.jit
def add_one(x, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    tl.store(x + offsets, tl.load(x + offsets, mask=mask) + 1, mask=mask)


@add_one.workload
def vectors(device, dtype):
    if "TEST_PRINTS" in os.environ:
        print("printed by the workload")
        sys.stdout.flush()
    for name, count in {"small": 100, "large": 300}.items():
        yield Workload(name, grid, (torch.zeros(count, device=device, dtype=dtype), count))


@twice.workload(dtypes=("float16",))
def one_vector(device, dtype):
    yield Workload("small", grid, (torch.zeros(100, device=device, dtype=dtype), 100))


#: No workload.
unused = make_twice()
