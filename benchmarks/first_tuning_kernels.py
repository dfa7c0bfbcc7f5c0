"""Three kernels with four or sixteen configs: a vector add, one with heuristics, and one that gets
tensor descriptors from the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from startup_kernels import add_kernel


@triton.heuristics(
    {
        "HAS_BIAS": lambda arguments: arguments["bias_pointer"] is not None,
        "HAS_WEIGHT": lambda arguments: arguments["weight_pointer"] is not None,
        "RECOMPUTE": lambda arguments: arguments["out_pointer"] is not None,
    }
)
@triton.jit
def norm_backward_kernel(
    x_pointer,
    weight_pointer,
    bias_pointer,
    out_pointer,
    dout_pointer,
    dx_pointer,
    dweight_pointer,
    rows,
    D: tl.constexpr,
    BD: tl.constexpr,
    BT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    RECOMPUTE: tl.constexpr,
):
    """The gradients of out = x / rms(x) * weight: dx, and of each program its part of dweight."""
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    column = tl.arange(0, BD)
    mask = (row < rows)[:, None] & (column < D)[None, :]
    place = row[:, None] * D + column[None, :]
    x = tl.load(x_pointer + place, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_pointer + place, mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / D + 1e-6)[:, None]
    normal = x * inverse
    if HAS_WEIGHT:
        weight = tl.load(weight_pointer + column, mask=column < D, other=0.0).to(tl.float32)[
            None, :
        ]
    else:
        weight = tl.full((1, BD), 1.0, tl.float32)
    if RECOMPUTE:
        out = normal * weight
        if HAS_BIAS:
            out += tl.load(bias_pointer + column, mask=column < D, other=0.0)[None, :]
        tl.store(out_pointer + place, out, mask=mask)
    scaled = dout * weight
    mean = tl.sum(normal * scaled, axis=1)[:, None] / D
    tl.store(dx_pointer + place, (scaled - normal * mean) * inverse, mask=mask)
    tl.atomic_add(dweight_pointer + column, tl.sum(normal * dout, axis=0), mask=column < D)


@triton.jit
def described_kernel(a, b, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """C = A B^T, from descriptors, as in Triton's tutorial 09."""
    tiles = tl.cdiv(N, BN)
    row, column = tl.program_id(0) // tiles * BM, tl.program_id(0) % tiles * BN
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for inner in range(0, K, BK):
        total = tl.dot(a.load([row, inner]), b.load([column, inner]).T, total)
    c.store([row, column], total.to(tl.float16))


@dataclass(frozen=True)
class Call:
    """A kernel, the settings of its tuner, and a launch; `right` says whether its result is."""

    kernel: Any
    configs: list[Any]
    key: list[str]
    arguments: tuple[Any, ...]
    grid: Callable[[dict[str, Any]], tuple[int, ...]]
    right: Callable[[], bool]
    settings: dict[str, Any]


def add(count: int, device: str) -> Call:
    """One Mi elements; fewer in the interpreter, which takes seconds for those."""
    sizes = itertools.product((256, 512, 1024, 2048), (2, 4, 8, 1))
    configs = [triton.Config({"BLOCK": b}, num_warps=w) for b, w in sizes]
    x, y = torch.randn(2, 1 << (12 if device == "cpu" else 20), device=device)
    out = torch.empty_like(x)
    return Call(
        *(add_kernel, configs[:: len(configs) // count], ["count"]),
        *((x, y, out, out.numel()), lambda m: (triton.cdiv(m["count"], m["BLOCK"]),)),
        *(lambda: torch.equal(out, x + y), {}),
    )


def norm(count: int, device: str) -> Call:
    """4096 rows of 1024 bfloat16; 16 in the interpreter."""
    rows, d = 16 if device == "cpu" else 4096, 1024
    sizes = itertools.product((1, 2, 4, 8), (4, 8, 2, 16))
    configs = [triton.Config({"BT": b}, num_warps=w) for b, w in sizes]
    x, dout = torch.randn(2, rows, d, device=device, dtype=torch.bfloat16)
    weight, out = torch.randn(d, device=device), torch.empty_like(x)
    dx, dweight = torch.empty_like(x), torch.zeros(d, device=device)

    def right() -> bool:
        normal = x.float() * (x.float().square().mean(1, keepdim=True) + 1e-6).rsqrt()
        return torch.allclose(out.float(), normal * weight, atol=0.1, rtol=0.02)

    return Call(
        *(norm_backward_kernel, configs[:: len(configs) // count], ["D"]),
        (x, weight, None, out, dout, dx, dweight, rows, d, 1024),
        *(lambda m: (triton.cdiv(rows, m["BT"]),), right, {"reset_to_zero": ["dweight_pointer"]}),
    )


def _set_blocks(arguments: dict[str, Any]) -> None:
    bm, bn, bk = arguments["BM"], arguments["BN"], arguments["BK"]
    for name, block in (("a", [bm, bk]), ("b", [bn, bk]), ("c", [bm, bn])):
        arguments[name].block_shape = block


def described(count: int, device: str) -> Call:
    """A matmul of 1024 x 1024 x 1024 in float16; of 128 in the interpreter."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    sizes = itertools.product((64, 128), (64, 128), (32, 64), (4, 8))
    configs = [
        triton.Config({"BM": m, "BN": n, "BK": k}, num_warps=w, pre_hook=_set_blocks)
        for m, n, k, w in sizes
    ]
    size = 128 if device == "cpu" else 1024
    a, b = torch.randn(2, size, size, device=device, dtype=torch.float16)
    c = torch.empty_like(a)
    made = [TensorDescriptor.from_tensor(each, [1, 1]) for each in (a, b, c)]
    return Call(
        *(described_kernel, configs[:: len(configs) // count], ["N", "K"], (*made, size, size)),
        lambda m: (triton.cdiv(size, m["BM"]) * triton.cdiv(size, m["BN"]),),
        *(lambda: torch.allclose(c.float(), a.float() @ b.float().T, atol=0.5, rtol=0.02), {}),
    )


CALLS = {"add": add, "norm": norm, "described": described}
