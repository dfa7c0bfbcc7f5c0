"""Kernels whose calls a test records, and the calls."""

import torch
import triton
import triton.language as tl

from safetune import safetune

CONFIGS = [triton.Config({"BLOCK": size}) for size in (64, 128)]


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@triton.heuristics({"ZERO": lambda arguments: not arguments["factors"].any()})
@safetune(configs=CONFIGS, key=["n", "DTYPE", "ZERO"])
@triton.jit
def scale(x, factors, n, by, DTYPE: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    if ZERO:
        by = 0.0
    value = tl.load(x + offset, mask=mask) * tl.load(factors + offset, mask=mask) * by
    tl.store(x + offset, value.to(DTYPE), mask=mask)


@triton.jit
def gather(dst, src, index, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    tl.store(dst + offset, tl.load(src + tl.load(index + offset, mask=mask), mask=mask), mask=mask)


def make_inputs(arguments):
    count = arguments["n"]
    made = {"dst": torch.zeros(count), "src": torch.ones(count), "index": torch.arange(count)}
    return {name: value.to(arguments[name].dtype) for name, value in made.items()}


gather_plain = safetune(configs=CONFIGS, key=["n"])(gather)
gather_made = safetune(configs=CONFIGS, key=["n"], inputs=make_inputs)(gather)


def nested():
    @safetune(configs=CONFIGS, key=["n"])
    @triton.jit
    def inner(x, n, BLOCK: tl.constexpr):
        offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + offset, 1.0, mask=offset < n)

    return inner


def call_all():
    memory = torch.zeros(400)
    for n in (100, 100, 200):
        scale[grid](memory[1 : n + 1], memory[200:], n, 2.0, DTYPE=tl.float32)
    values = torch.randn(100)
    index = torch.randint(0, 100, (100,))
    for kernel in (gather_plain, gather_made):
        kernel[grid](torch.empty(100), values, index, 100)
    nested()[grid](torch.empty(64), 64)


if __name__ == "__main__":
    call_all()
