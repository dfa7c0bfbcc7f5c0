"""The spaces on which ways of searching are compared: five kernels, each with several keys.

`fused_moe_bf16` and `fused_moe_fp8` are SGLang's kernel for a mixture of experts, 1,920 configs for
18 batch sizes; only where Python finds `sglang`. `matmul` is a plain product with the same configs
and sizes. The others have a few hundred configs: attention, layer norm backward, and the output of
a chunk of gated linear attention.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import choice_problems
import grouped_matmul
import torch
import triton
import triton.language as tl
from choice_problems import Problem, Work

SIZE = 4096
#: Positions of one chunk.
CHUNK = 64


@triton.jit
def chunk_kernel(
    q_pointer,
    gate_pointer,
    state_pointer,
    scores_pointer,
    v_pointer,
    o_pointer,
    length,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    CHUNK: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Compute O = scale (Q exp G) H + A V of one chunk, for BV of its columns: H is the state
    before the chunk, A the lower triangle of scores within it.
    """
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    head, chunk = tl.program_id(2).to(tl.int64), tl.program_id(1)
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    state = (head * (length // CHUNK) + chunk) * K * V
    accumulator = tl.zeros((CHUNK, BV), dtype=tl.float32)
    for start in range(0, K, BK):
        lane = start + tl.arange(0, BK)
        tile = head * length * K + row[:, None] * K + lane[None, :]
        gated = tl.load(q_pointer + tile) * tl.exp(tl.load(gate_pointer + tile)) * scale
        h = tl.load(state_pointer + state + lane[:, None] * V + column[None, :])
        accumulator = tl.dot(gated.to(h.dtype), h, accumulator)
    within = tl.arange(0, CHUNK)
    scores = tl.load(scores_pointer + (head * length + row[:, None]) * CHUNK + within[None, :])
    scores = tl.where(within[:, None] >= within[None, :], scores, 0.0)
    tile = head * length * V + row[:, None] * V + column[None, :]
    v = tl.load(v_pointer + tile)
    accumulator = tl.dot(scores.to(v.dtype), v, accumulator)
    tl.store(o_pointer + tile, accumulator.to(o_pointer.dtype.element_ty))


def _chunk(shape: Sequence[int], device: str) -> Work:
    heads, length, width = shape
    q, v = (torch.randn(heads, length, width, device=device).half() for _ in range(2))
    gate = -torch.rand(heads, length, width, device=device)
    state = torch.randn(heads, length // CHUNK, width, width, device=device).half()
    scores = torch.randn(heads, length, CHUNK, device=device).half()
    o = torch.full_like(v, math.nan)
    gated = (q.float() * gate.exp() * width**-0.5).half().view(heads, -1, CHUNK, width)
    lower = scores.view(heads, -1, CHUNK, CHUNK).tril()
    expected = gated @ state + lower @ v.view(heads, -1, CHUNK, width)
    constants = {"K": width, "V": width, "CHUNK": CHUNK}

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (width // meta["BV"], length // CHUNK, heads)

    args = (q, gate, state, scores, v, o, length, width**-0.5)
    return Work(grid, args, constants, o, expected.view_as(o).float())


def _grouped_matmul(shape: Sequence[int], device: str) -> Work:
    m, size = shape
    a, b, c = grouped_matmul.operands(m, size, device)

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (triton.cdiv(m, meta["BM"]) * triton.cdiv(size, meta["BN"]),)

    args = (a, b, c, m, size, size, *a.stride(), *b.stride(), *c.stride())
    return Work(grid, args, {}, c, a.float() @ b.float())


def _configs(
    values: Mapping[str, Iterable[int]], warps: Iterable[int], stages: Iterable[int]
) -> tuple[triton.Config, ...]:
    return tuple(
        triton.Config(dict(zip(values, chosen, strict=True)), num_warps=w, num_stages=s)
        for *chosen, w, s in itertools.product(*values.values(), warps, stages)
    )


def _known(start: str) -> Problem:
    return next(each for each in choice_problems.PROBLEMS if each.name.startswith(start))


def _of_shapes(problem: Problem, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Problem]:
    return {name: replace(problem, name=name, shape=shape) for name, shape in shapes.items()}


def spaces() -> dict[str, dict[str, Problem]]:
    """Return the problem of each key of each space."""
    tiles = (16, 32, 64, 128, 256)
    attention = replace(
        _known("attention"),
        configs=tuple(
            config
            for config in _configs({"BM": tiles, "BN": tiles}, (2, 4, 8, 16), (1, 2, 3, 4))
            if config.kwargs["BM"] * (128 + config.kwargs["BN"]) <= 256 * 32 * config.num_warps
        ),
        tiny=(1, 1, 256, 16),
    )
    norm = replace(
        _known("layer-norm-backward"),
        configs=_configs(
            {"PROGRAMS": (64, 128, 256, 384, 512, 1024), "ROWS": (1, 2, 4, 8)},
            *((4, 8, 16, 32), (1, 2, 3)),
        ),
    )
    chunk = Problem(
        "chunk",
        *(chunk_kernel, ("length",)),
        _configs({"BK": (16, 32, 64, 128), "BV": (16, 32, 64, 128)}, (1, 2, 4, 8), (1, 2, 3, 4)),
        *((64, 4096, 128), (1, 128, 128), _chunk),
    )
    matmul = Problem(
        "matmul",
        *(grouped_matmul.grouped_matmul_kernel, tuple(grouped_matmul.KEY)),
        tuple(grouped_matmul.configs()),
        *((SIZE, SIZE), (32, 256), _grouped_matmul),
    )
    lengths = ((128, 512), (64, 1024), (32, 2048), (8, 8192))
    columns = ((65536, 256), (65536, 512), (32768, 1024), (16384, 2048))
    chunks = ((256, 256), (128, 1024), (32, 4096), (8, 16384))
    found = {
        "matmul": _of_shapes(matmul, {f"M={m}": (m, SIZE) for m in grouped_matmul.BATCHES}),
        "attention": _of_shapes(attention, {f"length={n}": (1, h, n, 128) for h, n in lengths}),
        "norm_backward": _of_shapes(norm, {f"COLUMNS={c}": (rows, c) for rows, c in columns}),
        "chunk": _of_shapes(chunk, {f"length={n}": (h, n, 128) for h, n in chunks}),
    }
    if importlib.util.find_spec("sglang") is not None:
        import fused_moe

        for name, dtype in zip(("bf16", "fp8"), fused_moe.DTYPES, strict=True):
            found[f"fused_moe_{name}"] = fused_moe.problems(dtype)
    return found
