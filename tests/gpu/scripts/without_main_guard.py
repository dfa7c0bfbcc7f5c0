"""A user's script as many are: the kernel and the work at top level. argv: a file to append to."""

import sys

import torch
import triton
import triton.language as tl

from safetune import safetune

with open(sys.argv[1], "a", encoding="utf-8") as journal:
    journal.write("the body ran\n")


@triton.jit
def double(value):
    return value + value


@safetune(configs=[triton.Config({"BLOCK": block}) for block in (128, 256, 512)], key=["n"])
@triton.jit
def double_kernel(x, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    tl.store(out + offset, double(tl.load(x + offset, mask=mask)), mask=mask)


n = 2000
x = torch.randn(n, device="cuda" if torch.cuda.is_available() else "cpu")
out = torch.zeros_like(x)
double_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
print("right" if torch.equal(out, x + x) else "wrong")
