"""A program that knows nothing of safetune: `safetune run docs/examples/unmodified.py`."""

import torch
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"BLOCK": b}) for b in (128, 256)], key=["n", "unused"])
@triton.jit
def scale_kernel(x, n, unused, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, 2 * tl.load(x + offset, mask=offset < n), mask=offset < n)


x = torch.ones(1000, device="cuda" if torch.cuda.is_available() else "cpu")
scale_kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, 1000, 3)
assert (x == 2).all()  # in place, and scaled once: tuning worked on copies
