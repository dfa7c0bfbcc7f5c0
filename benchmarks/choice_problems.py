"""The seven problems that choices are judged on, each with a space of 24 configs or a few more.

A space holds several configs that are nearly as good as the best, which a noisy measurement
confuses, and enough bad ones for its median to be at least 1.3 times the best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import choice_kernels as kernels
import torch
import triton

Grid = Callable[[dict[str, Any]], tuple[int, ...]]

#: How many times the multiprocessors of an H100 a layer norm backward may have programs.
PROGRAMS = (128, 256, 1024)


@dataclass(frozen=True)
class Work:
    """What one launch takes, and how to tell that it did what it should.

    Attributes:
        output: the tensor that the kernel writes.
        expected: what it should hold, in fp32.
    """

    grid: Grid
    args: tuple[Any, ...]
    constants: dict[str, Any]
    output: torch.Tensor
    expected: torch.Tensor

    def launch(self, kernel: Any, **options: Any) -> None:
        """Launch a kernel, tuned or not."""
        kernel[self.grid](*self.args, **self.constants, **options)

    def error(self) -> float:
        """Return how far the output is from what it should be, relative; NaN where it has one."""
        difference = (self.output.float() - self.expected).norm()
        return float(difference / self.expected.norm())


@dataclass(frozen=True)
class Problem:
    """One kernel on one shape, and the space of configs to choose from.

    Attributes:
        shape, tiny: the sizes on a GPU, and in Triton's interpreter.
        work: makes the operands for a shape on a device.
        scratch: arguments that do not hold a result.
    """

    name: str
    kernel: Any
    key: tuple[str, ...]
    configs: tuple[triton.Config, ...]
    shape: tuple[int, ...]
    tiny: tuple[int, ...]
    work: Callable[[Sequence[int], str], Work]
    scratch: tuple[str, ...] = ()

    def prepare(self, device: str) -> Work:
        """Return operands on a device; on the CPU small ones."""
        torch.manual_seed(0)
        return self.work(self.tiny if device == "cpu" else self.shape, device)


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Return random values."""
    return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)


def unwritten(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return an output full of NaN: an element that is not written shows."""
    return torch.full(shape or like.shape, math.nan, dtype=like.dtype, device=like.device)


def matmul_work(shape: Sequence[int], device: str) -> Work:
    """Return the operands of a product."""
    m, n, k = shape
    a, b = normal(m, k, device=device), normal(k, n, device=device)
    c = unwritten(a, m, n)

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)

    args = (a, b, c, m, n, k, k, n, n)
    return Work(grid, args, {"EVEN_K": k % 256 == 0}, c, (a @ b).float())


def softmax_work(shape: Sequence[int], device: str) -> Work:
    """Return the operands of a softmax."""
    rows, columns = shape
    x = normal(rows, columns, device=device)
    y = unwritten(x)
    return Work(lambda meta: (rows,), (x, y, columns), {}, y, torch.softmax(x.float(), dim=1))


def _layer_norm_backward(shape: Sequence[int], device: str) -> Work:
    rows, columns = shape
    dy, x = (normal(rows, columns, device=device) for _ in range(2))
    weight = normal(columns, device=device)
    dx = unwritten(x)
    xs = x.float()
    mean = xs.mean(dim=1)
    rstd = torch.rsqrt(xs.var(dim=1, unbiased=False) + 1e-5)
    partials = [torch.zeros(max(PROGRAMS), columns, device=device) for _ in range(2)]
    scaled = (xs - mean[:, None]) * rstd[:, None]
    slope = dy.float() * weight.float()
    along = (slope * scaled).mean(dim=1, keepdim=True)
    expected = (slope - scaled * along - slope.mean(dim=1, keepdim=True)) * rstd[:, None]
    args = (dy, x, weight, mean, rstd, dx, *partials, rows)
    return Work(lambda meta: (meta["PROGRAMS"],), args, {"COLUMNS": columns}, dx, expected)


def _attention(shape: Sequence[int], device: str) -> Work:
    batch, heads, length, head = shape
    q, k, v = (normal(batch * heads, length, head, device=device) for _ in range(3))
    o = unwritten(q)

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (length // meta["BM"], batch * heads)

    args = (q, k, v, o, length, head**-0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).float()
    return Work(grid, args, {"HEAD": head}, o, expected)


def _tiles(
    tiles: Iterable[tuple[int, int]],
    inner: Iterable[int],
    warps: Iterable[int] = (4, 8),
    stages: Iterable[int] = (3,),
) -> list[triton.Config]:
    return [
        triton.Config({"BM": bm, "BN": bn, "BK": bk}, num_warps=w, num_stages=s)
        for (bm, bn), bk, w, s in itertools.product(tiles, inner, warps, stages)
    ]


LARGE = (
    *_tiles([(64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128)], [32, 64]),
    *_tiles([(128, 256), (256, 128)], [64], warps=[8], stages=[4]),
)
# The last line is half of them: tiles so short, in so few stages, wait for what they load.
DECODE = (
    *_tiles(itertools.product([16], [32, 64, 128]), [128, 256]),
    *_tiles([(16, 32)], [256], warps=[4], stages=[4]),
    *_tiles(itertools.product([16], [32, 64, 128, 256]), [32, 64], stages=[2]),
)
ODD = tuple(
    _tiles([(32, 32), (32, 64), (64, 64), (64, 128), (128, 64), (128, 128)], [32, 64], stages=[2])
)
SOFTMAX = tuple(
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block, warps in itertools.product((128, 256, 512, 1024, 4096), (2, 4, 8, 16, 32))
)
LAYER_NORM = tuple(
    triton.Config({"PROGRAMS": programs, "ROWS": rows}, num_warps=warps)
    for programs, rows, warps in itertools.product(PROGRAMS, (1, 2, 4), (4, 8, 16))
)
ATTENTION = tuple(
    triton.Config({"BM": bm, "BN": bn}, num_warps=warps, num_stages=stages)
    for bm, bn, warps, stages in itertools.product((32, 64, 128), (64, 128), (4, 8), (2, 3))
)


def _product(
    name: str, configs: Iterable[triton.Config], shape: tuple[int, ...], tiny: tuple[int, ...]
) -> Problem:
    key = ("M", "N", "K")
    return Problem(name, kernels.matmul_kernel, key, tuple(configs), shape, tiny, matmul_work)


PROBLEMS = (
    _product("matmul-4096x4096x4096", LARGE, (4096, 4096, 4096), (64, 64, 256)),
    _product("matmul-8192x512x4096", LARGE, (8192, 512, 4096), (128, 32, 256)),
    _product("matmul-16x4096x4096", DECODE, (16, 4096, 4096), (16, 64, 256)),
    _product("matmul-1000x1000x1000", ODD, (1000, 1000, 1000), (50, 50, 50)),
    Problem(
        "softmax-8192x4096",
        kernels.softmax_kernel,
        ("columns",),
        SOFTMAX,
        (8192, 4096),
        (4, 256),
        softmax_work,
    ),
    Problem(
        "layer-norm-backward-32768x1024",
        kernels.layer_norm_backward_kernel,
        ("COLUMNS",),
        LAYER_NORM,
        (32768, 1024),
        (64, 64),
        _layer_norm_backward,
        scratch=("weight_partials_pointer", "bias_partials_pointer"),
    ),
    Problem(
        "attention-4x32x2048x128",
        kernels.attention_kernel,
        ("length", "HEAD"),
        ATTENTION,
        (4, 32, 2048, 128),
        (1, 2, 128, 16),
        _attention,
    ),
)
