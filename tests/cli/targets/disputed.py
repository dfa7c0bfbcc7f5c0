"""A kernel whose two configs compute another result each."""

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune


@safetune(configs=[triton.Config({"BLOCK": 64, "BY": by}) for by in (2, 3)], key=["n"])
@triton.jit
def scale(x, out, n, BLOCK: tl.constexpr, BY: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x + offset, mask=offset < n) * BY, mask=offset < n)


@scale.workload
def vectors(device, dtype):
    x = torch.ones(100, device=device, dtype=dtype)
    yield Workload("small", (2,), (x, torch.zeros_like(x), 100))


def run():
    x = torch.ones(100)
    scale[(2,)](x, torch.zeros_like(x), 100)
