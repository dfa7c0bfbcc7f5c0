"""Launch a tuned kernel for the first time while a graph is captured; argv: triton or safetune."""

import json
import sys

import torch
import triton
import triton.language as tl

import safetune

N = 10_000
tune = {"triton": triton.autotune, "safetune": safetune.autotune}[sys.argv[1]]


@tune(configs=[triton.Config({"BLOCK": block}) for block in (256, 512)], key=["n"])
@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask) + tl.load(y + offset, mask=mask)
    tl.store(out + offset, value, mask=mask)


x, y = (torch.randn(N, device="cuda") for _ in range(2))
out = torch.zeros_like(x)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
error = None
right = False
try:
    with torch.cuda.graph(graph):
        add_kernel[lambda m: (triton.cdiv(N, m["BLOCK"]),)](x, y, out, N)
    graph.replay()
    torch.cuda.synchronize()
    right = torch.equal(out, x + y)
except Exception as raised:
    error = f"{type(raised).__name__}: {raised}"
print(json.dumps({"error": error, "replay_right": right}))
