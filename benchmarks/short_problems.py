"""The twelve problems below 50 us that choices are judged on, as they are deployed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import choice_kernels
import short_kernels as kernels
import torch
import triton
from choice_problems import Problem, Work, matmul_work, normal, softmax_work, unwritten
from startup_kernels import add_kernel


def _attention(shape: Sequence[int], device: str) -> Work:
    rows, length, head = shape
    q = normal(rows, 1, head, device=device)
    k, v = (normal(rows, length, head, device=device) for _ in range(2))
    o = unwritten(q)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).float()
    args = (q, k, v, o, length, head**-0.5)
    return Work(lambda meta: (rows,), args, {"HEAD": head}, o, expected)


def _add(shape: Sequence[int], device: str) -> Work:
    (count,) = shape
    x, y = (normal(count, device=device, dtype=torch.float32) for _ in range(2))
    z = unwritten(x)
    return Work(lambda meta: (triton.cdiv(count, meta["BLOCK"]),), (x, y, z, count), {}, z, x + y)


def _rms_norm(shape: Sequence[int], device: str) -> Work:
    rows, columns = shape
    x, weight = normal(rows, columns, device=device), normal(columns, device=device)
    y, wide = unwritten(x), x.float()
    expected = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * weight.float()
    return Work(lambda meta: (rows,), (x, weight, y, columns), {}, y, expected)


def _rope(shape: Sequence[int], device: str) -> Work:
    tokens, heads, half = shape
    x = normal(tokens, heads, 2 * half, device=device)
    cos, sin = (normal(tokens, half, device=device, dtype=torch.float32) for _ in range(2))
    y, (first, second) = unwritten(x), x.float().split(half, dim=2)
    c, s = cos[:, None], sin[:, None]
    expected = torch.cat([first * c - second * s, second * c + first * s], dim=2)

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (tokens, triton.cdiv(heads, meta["ROWS"]))

    return Work(grid, (x, cos, sin, y, heads), {"HALF": half}, y, expected)


def _quantize(shape: Sequence[int], device: str) -> Work:
    rows, columns = shape
    x = normal(rows, columns, device=device)
    y, scale = (
        torch.zeros(rows, columns, dtype=torch.int8, device=device),
        normal(rows, device=device),
    )
    scale = scale.float()
    wide = x.float()
    expected = torch.floor(wide / (wide.abs().amax(1, keepdim=True) / 127.0) + 0.5)
    return Work(lambda meta: (rows,), (x, y, scale, columns), {}, y, expected)


def _configs(
    sizes: dict[str, Iterable[int]], warps: Iterable[int], stages: Iterable[int] = (3,)
) -> tuple[triton.Config, ...]:
    names = [*sizes]
    return tuple(
        triton.Config(dict(zip(names, values, strict=True)), num_warps=w, num_stages=s)
        for *values, w, s in itertools.product(*sizes.values(), warps, stages)
    )


DECODE = _configs(
    {"BM": [16], "BN": [16, 32, 64, 128], "BK": [64, 128, 256]}, warps=(4, 8), stages=(2, 4)
)
SIXTY_FOUR = _configs(
    {"BM": [16, 32, 64], "BN": [32, 64, 128], "BK": [64, 128]}, warps=(4, 8), stages=(2, 4)
)
ROWS = _configs({"BLOCK": (256, 512, 1024, 2048, 4096)}, warps=(1, 2, 4, 8, 16))
ELEMENTS = _configs({"BLOCK": (128, 256, 512, 1024, 2048, 4096)}, warps=(1, 2, 4, 8))
HEADS = _configs({"ROWS": (1, 2, 4, 8, 16, 32)}, warps=(1, 2, 4, 8))
KEYS = _configs({"BN": (16, 32, 64, 128)}, warps=(2, 4, 8), stages=(2, 3, 4))


def _matmul(rows: int, configs: tuple[triton.Config, ...] = DECODE) -> Problem:
    shape, tiny = (rows, 4096, 4096), (min(rows, 16), 64, 256)
    key = ("M", "N", "K")
    kernel = choice_kernels.matmul_kernel
    return Problem(f"matmul_m{rows}", kernel, key, configs, shape, tiny, matmul_work)


_softmax, _norm, _quant = (
    choice_kernels.softmax_kernel,
    kernels.rms_norm_kernel,
    kernels.quantize_kernel,
)
_attend, _columns, _tiny = kernels.decode_attention_kernel, ("columns",), (4, 256)

SHORT = (
    _matmul(1),
    _matmul(8),
    _matmul(16),
    _matmul(64, SIXTY_FOUR),
    Problem("attention", _attend, ("length",), KEYS, (64, 512, 128), (2, 32, 16), _attention),
    Problem("softmax_16", _softmax, _columns, ROWS, (16, 4096), _tiny, softmax_work),
    Problem("softmax_256", _softmax, _columns, ROWS, (256, 4096), _tiny, softmax_work),
    Problem("rms_norm", _norm, _columns, ROWS, (64, 4096), _tiny, _rms_norm),
    Problem("add_64k", add_kernel, ("count",), ELEMENTS, (1 << 16,), (300,), _add),
    Problem("add_1m", add_kernel, ("count",), ELEMENTS, (1 << 20,), (300,), _add),
    Problem("rope", kernels.rope_kernel, ("heads",), HEADS, (64, 32, 64), (2, 4, 8), _rope),
    Problem(
        "quantize",
        _quant,
        _columns,
        ROWS,
        (64, 4096),
        _tiny,
        _quantize,
        scratch=("scale_pointer",),
    ),
)
