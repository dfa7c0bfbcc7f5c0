"""Tunes a kernel on an AMD GPU that a library of C stands for; memory of the host is its memory.

    python amd.py WARPS...

Prints the warps of the choice, and whether the results of two calls are right.
"""

import sys

import torch
import triton
import triton.language as tl

import safetune
from safetune import triton_launch


@triton.jit
def doubled(x, y, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offset, 2 * tl.load(x + offset, mask=offset < n), mask=offset < n)


def do_bench(launch, quantiles):
    launch()
    return [1.0, 1.0, 1.0]


isolated, *warps = sys.argv[1:]
configs = [triton.Config({"BLOCK": 64}, num_warps=int(count)) for count in warps]
hooks = {} if isolated == "isolated" else {"do_bench": do_bench}
kernel = safetune.autotune(configs=configs, key=["n"], **hooks)(doubled)
triton_launch.use_amd_device_without_torch(0)
x = torch.arange(1000.0)
for y in (torch.zeros(1000), torch.zeros(1000)):
    kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, 1000)
    print(kernel.best_config.num_warps, bool((y == 2 * x).all()))
