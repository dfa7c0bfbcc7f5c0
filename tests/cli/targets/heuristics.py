"""A kernel under `@triton.heuristics`, whose keys are what the heuristics make of the call."""

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune


@triton.heuristics({"EVEN": lambda arguments: arguments["N"] % 128 == 0})
@safetune(configs=[triton.Config({"BLOCK": size}) for size in (64, 128)], key=["EVEN"])
@triton.jit
def add_one(x, N, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(x + offsets, tl.load(x + offsets) + 1)
    else:
        mask = offsets < N
        tl.store(x + offsets, tl.load(x + offsets, mask=mask) + 1, mask=mask)


@add_one.fn.workload
def vectors(device, dtype):
    for count in (256, 384, 500):
        x = torch.zeros(count, device=device, dtype=dtype)
        yield Workload(
            f"{count}", lambda meta: (triton.cdiv(meta["N"], meta["BLOCK"]),), (x, count)
        )
