"""Tune a kernel, one of whose configs stores out of bounds, with triton.autotune; report in JSON.

argv: how many elements away it stores.
"""

import json
import os
import sys

import torch
import triton
import triton.language as tl

FAR = int(sys.argv[1])
N = 1 << 16


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 256, "SHIFT": 0}),
        triton.Config({"BLOCK": 512, "SHIFT": FAR}),
    ],
    key=["n"],
)
@triton.jit
def add_kernel(x, y, out, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask) + tl.load(y + offset, mask=mask)
    tl.store(out + offset + SHIFT, value, mask=mask)


def error_of(action):
    """Return what an action raises, as text; nothing if it works."""
    try:
        action()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


x, y = (torch.randn(N, device="cuda") for _ in range(2))
out = torch.zeros_like(x)
raised = error_of(lambda: add_kernel[lambda m: (triton.cdiv(N, m["BLOCK"]),)](x, y, out, N))
later = {
    "synchronize": error_of(torch.cuda.synchronize),
    "copy to the host": error_of(x.cpu),
    "torch operation": error_of(lambda: x + y),
    "new tensor": error_of(lambda: torch.ones(1 << 20, device="cuda")),
}
print(json.dumps({"raised": raised, "later": later}), flush=True)
os._exit(0)  # torch's own exit would touch the dead context
