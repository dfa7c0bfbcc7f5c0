"""Twelve small kernels as a model has them at its start, each with five shapes to be tuned for.

Three have the length of a row as a constexpr and compile for every length; the others take it as an
integer and compile once per config.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_pointer, y_pointer, out_pointer, count, BLOCK: tl.constexpr):
    """out = x + y."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_pointer + i, mask=i < count)
    y = tl.load(y_pointer + i, mask=i < count)
    tl.store(out_pointer + i, x + y, mask=i < count)


@triton.jit
def gated_kernel(x_pointer, y_pointer, out_pointer, count, BLOCK: tl.constexpr):
    """out = silu(x) * y."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_pointer + i, mask=i < count)
    y = tl.load(y_pointer + i, mask=i < count)
    tl.store(out_pointer + i, x * tl.sigmoid(x) * y, mask=i < count)


@triton.jit
def squared_relu_kernel(x_pointer, y_pointer, out_pointer, count, BLOCK: tl.constexpr):
    """out = max(x, 0) ** 2 + y."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.maximum(tl.load(x_pointer + i, mask=i < count), 0.0)
    y = tl.load(y_pointer + i, mask=i < count)
    tl.store(out_pointer + i, x * x + y, mask=i < count)


@triton.jit
def lerp_kernel(x_pointer, y_pointer, out_pointer, count, BLOCK: tl.constexpr):
    """out = x + 0.25 * (y - x)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_pointer + i, mask=i < count)
    y = tl.load(y_pointer + i, mask=i < count)
    tl.store(out_pointer + i, x + 0.25 * (y - x), mask=i < count)


@triton.jit
def row_sum_kernel(x_pointer, out_pointer, columns, BLOCK: tl.constexpr):
    """out[row] = sum(x[row])."""
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(x_pointer + row * columns + i, mask=i < columns, other=0.0)
    tl.store(out_pointer + row, tl.sum(total, axis=0))


@triton.jit
def row_largest_kernel(x_pointer, out_pointer, columns, BLOCK: tl.constexpr):
    """out[row] = max(abs(x[row])), as a quantizer needs it."""
    row = tl.program_id(0)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_pointer + row * columns + i, mask=i < columns, other=0.0)
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(out_pointer + row, tl.max(largest, axis=0))


@triton.jit
def row_norm_kernel(x_pointer, out_pointer, columns, BLOCK: tl.constexpr):
    """out[row] = sqrt(sum(x[row] ** 2)), as gradient clipping needs it."""
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_pointer + row * columns + i, mask=i < columns, other=0.0)
        total += x * x
    tl.store(out_pointer + row, tl.sqrt(tl.sum(total, axis=0)))


@triton.jit
def rotate_kernel(x_pointer, out_pointer, columns, BLOCK: tl.constexpr):
    """out[row] = the second half of x[row] negated, then the first: half of a rotary embedding."""
    row = tl.program_id(0)
    half = columns // 2
    for start in range(0, half, BLOCK):
        i = start + tl.arange(0, BLOCK)
        base = row * columns + i
        first = tl.load(x_pointer + base, mask=i < half)
        second = tl.load(x_pointer + base + half, mask=i < half)
        tl.store(out_pointer + base, -second, mask=i < half)
        tl.store(out_pointer + base + half, first, mask=i < half)


@triton.jit
def softmax_kernel(x_pointer, out_pointer, COLUMNS: tl.constexpr):
    """Softmax of each row; COLUMNS is a power of two."""
    i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_pointer + i)
    x = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_pointer + i, x / tl.sum(x, axis=0))


@triton.jit
def rms_norm_kernel(x_pointer, out_pointer, COLUMNS: tl.constexpr):
    """RMS norm of each row; COLUMNS is a power of two."""
    i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_pointer + i)
    tl.store(out_pointer + i, x / tl.sqrt(tl.sum(x * x, axis=0) / COLUMNS + 1e-5))


@triton.jit
def layer_norm_kernel(x_pointer, out_pointer, COLUMNS: tl.constexpr):
    """Layer norm of each row; COLUMNS is a power of two."""
    i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_pointer + i)
    x -= tl.sum(x, axis=0) / COLUMNS
    tl.store(out_pointer + i, x / tl.sqrt(tl.sum(x * x, axis=0) / COLUMNS + 1e-5))


@triton.jit
def matmul_kernel(a_pointer, b_pointer, c_pointer, M, N, K, BM: tl.constexpr, BN: tl.constexpr):
    """C = A B in fp32 without tensor cores' short cuts; 16 divides K."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, 16)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, 16):
        a = a_pointer + row[:, None] * K + start + inner[None, :]
        b = b_pointer + (start + inner)[:, None] * N + column[None, :]
        a_tile = tl.load(a, mask=(row < M)[:, None], other=0.0)
        b_tile = tl.load(b, mask=(column < N)[None, :], other=0.0)
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
    mask = (row < M)[:, None] & (column < N)[None, :]
    tl.store(c_pointer + row[:, None] * N + column[None, :], total, mask=mask)


@dataclass(frozen=True)
class Call:
    """One launch that needs a tuning of its own, and what it should write."""

    grid: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    output: torch.Tensor
    expected: Callable[[], torch.Tensor]

    def launch(self, kernel: Any, **options: Any) -> None:
        """Launch a kernel, tuned or not."""
        kernel[self.grid](*self.args, **self.constants, **options)


@dataclass(frozen=True)
class Layer:
    """A kernel, what to tune it over, and a call for each of its shapes."""

    kernel: Any
    key: tuple[str, ...]
    configs: tuple[triton.Config, ...]
    calls: Callable[[str, Sequence[int]], Iterator[Call]]


BLOCKS = tuple(
    triton.Config({"BLOCK": block}, num_warps=warps)
    for block, warps in ((256, 4), (512, 4), (1024, 4), (1024, 8))
)
WARPS = tuple(triton.Config({}, num_warps=warps) for warps in (2, 4, 8, 16))
TILES = tuple(
    triton.Config({"BM": bm, "BN": bn}, num_warps=4)
    for bm, bn in itertools.product((16, 32), (32, 64))
)

#: Rows of a matrix, and its columns one after the other; the interpreter gets short ones.
ROWS = 4096
COLUMNS = (256, 512, 1024, 2048, 4096)
TINY_ROWS = 4
TINY_COLUMNS = (32, 64, 128, 256, 512)


def _matrices(device: str, columns: Sequence[int]) -> Iterator[tuple[int, int, torch.Tensor]]:
    rows = TINY_ROWS if device == "cpu" else ROWS
    for count in columns:
        yield rows, count, torch.randn(rows, count, device=device)


def _pairwise(expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    def calls(device: str, columns: Sequence[int]) -> Iterator[Call]:
        for _, _, x in _matrices(device, columns):
            y, out, count = torch.randn_like(x), torch.empty_like(x), x.numel()

            def grid(meta: dict[str, Any], count: int = count) -> tuple[int]:
                return (triton.cdiv(count, meta["BLOCK"]),)

            args = (x, y, out, count)
            yield Call(grid, args, {}, out, lambda x=x, y=y: expected(x, y))

    return calls


def _rowwise(
    expected: Callable[[torch.Tensor], torch.Tensor], reduces: bool = False, constexpr: bool = False
) -> Any:
    def calls(device: str, columns: Sequence[int]) -> Iterator[Call]:
        for rows, count, x in _matrices(device, columns):
            out = x.new_empty(rows) if reduces else torch.empty_like(x)
            args = (x, out) if constexpr else (x, out, count)
            constants = {"COLUMNS": count} if constexpr else {}
            yield Call((rows,), args, constants, out, lambda x=x: expected(x))

    return calls


def _products(device: str, columns: Sequence[int]) -> Iterator[Call]:
    size = 32 if device == "cpu" else 256
    for inner in columns:
        a, b = torch.randn(size, inner, device=device), torch.randn(inner, size, device=device)
        out = a.new_empty(size, size)

        def grid(meta: dict[str, Any]) -> tuple[int, int]:
            return triton.cdiv(size, meta["BM"]), triton.cdiv(size, meta["BN"])

        yield Call(grid, (a, b, out, size, size, inner), {}, out, lambda a=a, b=b: a @ b)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=1)
    return torch.cat((-second, first), dim=1)


def _layer_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[1:])


def _rms_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(dim=1, keepdim=True) + 1e-5)


LAYERS = (
    Layer(add_kernel, ("count",), BLOCKS, _pairwise(torch.add)),
    Layer(gated_kernel, ("count",), BLOCKS, _pairwise(lambda x, y: x * x.sigmoid() * y)),
    Layer(squared_relu_kernel, ("count",), BLOCKS, _pairwise(lambda x, y: x.relu() ** 2 + y)),
    Layer(lerp_kernel, ("count",), BLOCKS, _pairwise(lambda x, y: torch.lerp(x, y, 0.25))),
    Layer(row_sum_kernel, ("columns",), BLOCKS, _rowwise(lambda x: x.sum(1), reduces=True)),
    Layer(row_largest_kernel, ("columns",), BLOCKS, _rowwise(lambda x: x.abs().amax(1), True)),
    Layer(row_norm_kernel, ("columns",), BLOCKS, _rowwise(lambda x: x.norm(dim=1), True)),
    Layer(rotate_kernel, ("columns",), BLOCKS, _rowwise(_rotated)),
    Layer(
        softmax_kernel,
        ("COLUMNS",),
        WARPS,
        _rowwise(lambda x: torch.softmax(x, 1), constexpr=True),
    ),
    Layer(rms_norm_kernel, ("COLUMNS",), WARPS, _rowwise(_rms_norm, constexpr=True)),
    Layer(layer_norm_kernel, ("COLUMNS",), WARPS, _rowwise(_layer_norm, constexpr=True)),
    Layer(matmul_kernel, ("M", "N", "K"), TILES, _products),
)
