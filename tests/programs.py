"""What programs that tests run begin with, as text: a kernel that copies, and its tuner."""

from __future__ import annotations

#: Defines `copy_kernel`, its `grid`, and `tuner(*hooks, **options)`: a config for each hook.
COPY = """
import torch, triton, triton.language as tl
from safetune import safetune

@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)

def tuner(*hooks, **options):
    configs = [triton.Config({"BLOCK": 16 << i}, pre_hook=hook) for i, hook in enumerate(hooks)]
    return safetune(configs=configs, key=["n"], **options)(copy_kernel)
"""
