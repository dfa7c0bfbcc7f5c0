"""Compile kernels without a GPU and print the scratch memory that their metadata asks for, as JSON.

Run by `test_scratch.py` in a process of its own, where nothing is interpreted.

    python compile_scratch.py CAPABILITY...
    python compile_scratch.py resolved CAPABILITY...
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from safetune import safetune, triton_internals
from tests.compilers import traced


@triton.jit
def plain_kernel(x, y, M, N, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offset, tl.load(x + offset, mask=offset < M), mask=offset < M)


@triton.jit
def load_kernel(x, y, M, N, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BLOCK, BLOCK])
    tile = source.load([tl.program_id(0) * BLOCK, 0])
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    tl.store(y + row * N + column, tile)


@triton.jit
def copy_kernel(x, y, M, N, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BLOCK, BLOCK])
    target = tl.make_tensor_descriptor(y, [M, N], [N, 1], [BLOCK, BLOCK])
    start = tl.program_id(0) * BLOCK
    target.store([start, 0], source.load([start, 0]))


@triton.jit
def sum_kernel(x, y, M, N, BLOCK: tl.constexpr):
    """Makes its descriptor anew in each turn, so that it needs one for each stage."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in tl.range(0, M, BLOCK):
        source = tl.make_tensor_descriptor(x + start * N, [M, N], [N, 1], [BLOCK, BLOCK])
        other = tl.load(x + (start + row) * N + column)
        total = tl.dot(source.load([0, 0]), other, total)
    tl.store(y + row * N + column, total.to(tl.float16))


@triton.jit
def branch_kernel(x, y, M, N, BLOCK: tl.constexpr):
    """With a BLOCK of 64 and more, with a descriptor."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    if BLOCK >= 64:
        source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BLOCK, BLOCK])
        tile = source.load([0, 0])
    else:
        tile = tl.load(x + row * N + column)
    tl.store(y + row * N + column, tile)


def scratch_of(kernel: Any, capability: int, **options: int) -> list[int]:
    """Return [bytes for each program, alignment]."""
    block = options.pop("BLOCK", 64)
    source = ASTSource(
        kernel,
        {"x": "*fp16", "y": "*fp16", "M": "i32", "N": "i32", "BLOCK": "constexpr"},
        {"BLOCK": block},
        {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
        | {(3,): [["tt.divisibility", 16]]},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return [compiled.metadata.global_scratch_size, compiled.metadata.global_scratch_align]


def resolved(capability: int) -> dict[int, int]:
    """Return the bytes that a resolved `branch_kernel` says, by the BLOCK that is its choice."""
    branch_kernel.device_caches.clear()
    found, x = {}, torch.zeros(64, 64, dtype=torch.float16)
    tuner = safetune(configs=traced.configs(32, 64), key=["M"])(branch_kernel)
    with traced.a_gpu_to_trace_for(capability):
        for config in tuner.configs:
            traced.choose(tuner, config, x, x, 64, 64)
            record = tuner.resolve(x, x, 64, 64, grid=(1,))
            found[record.metaparams["BLOCK"]] = record.scratch_bytes
    return found


def main() -> None:
    """Print {capability: {kernel: [bytes, alignment]}}, or {capability: {BLOCK: bytes}}."""
    if sys.argv[1] == "resolved":
        sys.stdout.write(json.dumps({each: resolved(int(each)) for each in sys.argv[2:]}))
        return
    found = {}
    for capability in map(int, sys.argv[1:]):
        found[capability] = {
            "plain": scratch_of(plain_kernel, capability),
            "load": scratch_of(load_kernel, capability),
            "copy": scratch_of(copy_kernel, capability),
            "branch not taken": scratch_of(branch_kernel, capability, BLOCK=32),
            "branch taken": scratch_of(branch_kernel, capability, BLOCK=64),
        }
        if triton_internals.version() >= (3, 9):  # the pipeliner of older ones fails on it
            found[capability]["two stages"] = scratch_of(sum_kernel, capability, num_stages=2)
            found[capability]["four stages"] = scratch_of(sum_kernel, capability, num_stages=4)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
