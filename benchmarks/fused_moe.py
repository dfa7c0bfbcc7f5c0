"""The matrix product of SGLang's fused mixture of experts: its 1,920 configs and 18 batch sizes.

The kernel is the one of the `sglang` that Python finds: its wheel, installed or unpacked. Of that
the kernel's file is run and nothing else: importing the package needs a GPU and much besides. The
tokens are sorted for a config's BLOCK_SIZE_M, so a small kernel calls SGLang's with the sorting of
its config. The layer is the first of the two products of Qwen3-30B-A3B: 128 experts, 8 for a token.

    PYTHONPATH=benchmarks safetune tune benchmarks/fused_moe.py --dtype bfloat16 --budget 3m

In Triton's interpreter the layer is small, and bfloat16 is float16. FUSED_MOE_CONFIGS=8 leaves 8
configs of the list, for a trial run.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import math
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from choice_problems import Work
from matmul import BATCHES, spread

from safetune import Workload, safetune, space

FILE = "kernels/ops/moe/fused_moe_triton_kernels.py"
DTYPES = ("bfloat16", "float8_e4m3fn")
TOP_K = 8
#: Experts, and the width of their weights; a small layer for Triton's interpreter.
LAYER, SMALL_LAYER = (128, 1536, 2048), (16, 64, 256)
TILES = (16, 32, 64, 128, 256)
EVERY_CONFIG = space(
    BLOCK_SIZE_M=TILES,
    BLOCK_SIZE_N=[32, 64, 128, 256],
    BLOCK_SIZE_K=[64, 128, 256],
    GROUP_SIZE_M=[1, 16, 32, 64],
    num_warps=[4, 8],
    num_stages=[2, 3, 4, 5],
)
CONFIGS = spread(EVERY_CONFIG, int(os.environ.get("FUSED_MOE_CONFIGS", "0")))


class _Absent(types.ModuleType):
    """Stands in for a module of SGLang that the kernel itself does not use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        return False


def _library_kernel() -> Any:
    """Return SGLang's kernel."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("no sglang: pip install --no-deps sglang, or unpack its wheel")
    path = Path(next(iter(package.submodule_search_locations))) / FILE
    names = [node.module for node in ast.walk(ast.parse(path.read_text())) if _is_of_sglang(node)]
    spec = importlib.util.spec_from_file_location("sglang_fused_moe", path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {name: _Absent(name) for name in names}):
        spec.loader.exec_module(module)
    return module.fused_moe_kernel


def _is_of_sglang(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and str(node.module).startswith("sglang.")


library_kernel = _library_kernel()


@triton.jit(do_not_specialize=["tokens"])  # one compilation serves all batch sizes
def fused_moe_kernel(
    a_pointer,
    b_pointer,
    c_pointer,
    a_scale_pointer,
    b_scale_pointer,
    sorted_pointer,
    experts_pointer,
    padded_pointer,
    tokens,
    N,
    K,
    stride_am,
    stride_be,
    stride_bn,
    stride_cm,
    stride_sorted,
    stride_experts,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_FP8: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """Call SGLang's kernel with what its Python code passes for this config."""
    row: tl.constexpr = BLOCK_SIZE_M // 16
    valid = tokens * TOP_K
    padded = tl.minimum(valid * BLOCK_SIZE_M, valid + (EXPERTS + 1) * (BLOCK_SIZE_M - 1))
    library_kernel(
        a_pointer,
        None,
        b_pointer,
        None,
        None,
        c_pointer,
        a_scale_pointer,
        b_scale_pointer,
        None,
        sorted_pointer + row * stride_sorted,
        experts_pointer + row * stride_experts,
        padded_pointer + row,
        None,
        N,
        K,
        (padded + 3) // 4 * 4,
        valid,
        stride_am,
        1,
        stride_be,
        1,
        stride_bn,
        0,
        0,
        stride_cm,
        1,
        0,
        0,
        0,
        0,
        0,
        group_n=0,
        group_k=0,
        BLOCK_SIZE_M=BLOCK_SIZE_M,
        BLOCK_SIZE_N=BLOCK_SIZE_N,
        BLOCK_SIZE_K=BLOCK_SIZE_K,
        GROUP_SIZE_M=GROUP_SIZE_M,
        MUL_ROUTED_WEIGHT=False,
        top_k=TOP_K,
        compute_type=c_pointer.dtype.element_ty,
        use_fp8_w8a8=IS_FP8,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        per_channel_quant=False,
        even_Ks=True,
        c_sorted=False,
        swap_ab=IS_FP8 and BLOCK_SIZE_M < 64 and BLOCK_SIZE_N >= 64,
        FUSE_ADD_TO_OUTPUT=False,
        MASK_OUTPUT=False,
        FUSE_SUM_ALL_REDUCE=False,
        ROUTER_TOPK=1,
    )


def _most(tokens: int, experts: int, block: int) -> int:
    """Return the most sorted tokens that there may be, as SGLang rounds it."""
    valid = tokens * TOP_K
    return -(-min(valid * block, valid + (experts + 1) * (block - 1)) // 4) * 4


def _padded(counts: Sequence[int]) -> int:
    return -(-max(counts) // 16) * 16


def _sorted(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, ...]:
    """Return the tokens sorted by their expert, the expert of each block, and how many there are.

    Row n holds those for blocks of 16 n tokens: each expert's tokens are filled up to whole blocks.
    Rows are as long as a multiple of 16, of which Triton makes a binary of its own.
    """
    tokens, device = chosen.shape[0], chosen.device
    valid = chosen.numel()
    rows = max(TILES) // 16 + 1
    most = [_most(tokens, experts, block) for block in TILES]
    blocks = [triton.cdiv(count, block) for count, block in zip(most, TILES, strict=True)]
    table = torch.full((rows, _padded(most)), valid, dtype=torch.int32, device=device)
    of_blocks = torch.zeros((rows, _padded(blocks)), dtype=torch.int32, device=device)
    padded = torch.zeros(rows, dtype=torch.int32, device=device)
    flat, order = chosen.flatten().sort(stable=True)
    counts = torch.bincount(flat, minlength=experts)
    for block in TILES:
        filled = (counts + block - 1) // block * block
        start = filled.cumsum(0) - filled
        place = torch.arange(valid, device=device) - (counts.cumsum(0) - counts)[flat] + start[flat]
        table[block // 16, place] = order.int()
        owners = torch.repeat_interleave(torch.arange(experts, device=device), filled // block)
        of_blocks[block // 16, : len(owners)] = owners.int()
        padded[block // 16] = filled.sum()
    return table, of_blocks, padded


@functools.lru_cache(maxsize=1)
def _weights(
    experts: int, width: int, hidden: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Return the experts' weights: one tensor for all batch sizes."""
    weights = torch.empty(experts, width, hidden, dtype=dtype, device=device)
    for expert in weights:  # one at a time: as fp32 all of them take gigabytes
        expert.copy_(torch.randn(width, hidden, device=device))
    return weights


def work(shape: Sequence[int], device: str, dtype: torch.dtype, expect: bool = True) -> Work:
    """Return a launch for a number of tokens, and what it computes if that is expected."""
    tokens, experts, width, hidden = shape
    torch.manual_seed(0)
    is_fp8 = dtype == torch.float8_e4m3fn
    if device == "cpu" and not is_fp8:
        dtype = torch.float16  # Triton cannot interpret bfloat16
    b = _weights(experts, width, hidden, dtype, device)
    a = torch.randn(tokens, hidden, device=device).to(dtype)
    chosen = torch.rand(tokens, experts, device=device).topk(TOP_K).indices
    out = torch.bfloat16 if is_fp8 else dtype
    c = torch.full((tokens * TOP_K, width), math.nan, dtype=out, device=device)
    a_scale = torch.full((1,), 0.5, device=device) if is_fp8 else None
    b_scale = torch.full((experts,), 0.5, device=device) if is_fp8 else None
    table, of_blocks, padded = _sorted(chosen, experts)

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        block = meta["BLOCK_SIZE_M"]
        rows = triton.cdiv(_most(tokens, experts, block), block)
        return (rows * triton.cdiv(width, meta["BLOCK_SIZE_N"]),)

    strides = (a.stride(0), b.stride(0), b.stride(1), c.stride(0))
    strides += (table.stride(0), of_blocks.stride(0))
    args = (a, b, c, a_scale, b_scale, table, of_blocks, padded, tokens, width, hidden, *strides)
    constants = {"EXPERTS": experts, "TOP_K": TOP_K, "IS_FP8": is_fp8}
    expected = _expected(a, b, chosen, 0.25 if is_fp8 else 1.0) if expect else c
    return Work(grid, args, constants, c, expected)


def _expected(a: torch.Tensor, b: torch.Tensor, chosen: torch.Tensor, scale: float) -> torch.Tensor:
    found = torch.empty(chosen.numel(), b.shape[1], device=a.device)
    flat = chosen.flatten()
    for expert in flat.unique().tolist():
        places = (flat == expert).nonzero()[:, 0]
        found[places] = a[places // TOP_K].float() @ b[expert].float().T * scale
    return found


product = safetune(configs=CONFIGS, key=["tokens"])(fused_moe_kernel)


@product.workload(dtypes=DTYPES)
def batches(device: torch.device, dtype: torch.dtype) -> Iterator[Workload]:
    """Yield SGLang's batch sizes."""
    layer = SMALL_LAYER if device.type == "cpu" else LAYER
    for tokens in BATCHES:
        made = work((tokens, *layer), str(device), dtype, expect=False)
        yield Workload(str(tokens), made.grid, made.args, made.constants)
