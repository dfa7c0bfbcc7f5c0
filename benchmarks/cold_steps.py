"""First steps of libraries with autotuned kernels, as they are, with gradients where there are any.

    python cold_steps.py LIBRARY FILE

Knows nothing of safetune: run it with `safetune run`, or without. Writes to FILE, as JSON, the
seconds to the first result at each size, the median milliseconds of a later step, and a checksum.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

os.environ.setdefault("CCE_AUTOTUNE", "1")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LATER = 10

#: A step on one size: what it computes, gradients included.
Step = Callable[[], Iterable[torch.Tensor]]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return drawn numbers."""
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def trained(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Step:
    """Return a forward and backward pass."""
    for leaf in leaves:
        leaf.requires_grad_()

    def step() -> Iterable[torch.Tensor]:
        output = function(*leaves)
        gradients = torch.autograd.grad(output.float().square().sum(), leaves, allow_unused=True)
        return [output, *(g for g in gradients if g is not None)]

    return step


def mlstm(length: int) -> Step:
    """Return the parallel kernels of mLSTM."""
    from mlstm_kernels.torch.parallel.triton_limit_headdim import mlstm_parallel__limit_headdim

    vectors = [normal(2, 8, length, 128) for _ in range(3)]
    # With these in bf16, two configs of the forward kernel abort LLVM in Triton 3.6.
    gates = [normal(2, 8, length) for _ in range(2)]
    return trained(mlstm_parallel__limit_headdim, *vectors, *gates)


def gemlite(rows: int) -> Step:
    """Return two layers with 8-bit weights."""
    from gemlite.helper import A16W8_INT8, A8W8_INT8_dynamic

    linear = torch.nn.Linear(4096, 4096, bias=False, device=DEVICE, dtype=torch.float16)
    kinds = (A16W8_INT8, A8W8_INT8_dynamic)
    layers = [kind(device=DEVICE).from_linear(linear, del_orig=False) for kind in kinds]
    x = normal(rows, 4096, dtype=torch.float16)
    return lambda: [layer(x) for layer in layers]


def adasplash(length: int) -> Step:
    """Return attention with sparse weights."""
    from adasplash import adasplash as attention

    return trained(attention, *(normal(1, 8, length, 64) for _ in range(3)))


def cut_cross_entropy(tokens: int) -> Step:
    """Return a loss over 32,768 classes."""
    from cut_cross_entropy import linear_cross_entropy

    targets = torch.randint(0, 32768, (tokens,), device=DEVICE)

    def loss(embedded: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(embedded, classes, targets)

    return trained(loss, normal(tokens, 2048), normal(32768, 2048))


def mase(count: int) -> Step:
    """Return random flips of bits."""
    from mase_triton.random_bitflip.functional import random_bitflip_fn

    x = normal(count, dtype=torch.float32)
    return lambda: [random_bitflip_fn(x, 10, 10, 1, 1, None)[0]]


def flash_sparse_attention(length: int) -> Step:
    """Return causal attention that skips small weights."""
    from flash_sparse_attn.ops.triton.interface import flash_sparse_attn_func

    def attention(*vectors: torch.Tensor) -> torch.Tensor:
        return flash_sparse_attn_func(*vectors, is_causal=True, softmax_threshold=1.0)

    return trained(attention, *(normal(2, length, heads, 128) for heads in (32, 8, 8)))


def liger_dyt(rows: int) -> Step:
    """Return Liger's dynamic tanh."""
    from liger_kernel.ops.dyt import LigerDyTFunction

    parameters = [torch.ones(n, device=DEVICE) for n in (1, 4096, 4096)]
    return trained(LigerDyTFunction.apply, normal(rows, 4096), *parameters)


def fla_gla(length: int) -> Step:
    """Return FLA's gated linear attention."""
    from fla.layers import GatedLinearAttention

    return _layer(GatedLinearAttention(hidden_size=1024, num_heads=4), length)


def fla_gsa(length: int) -> Step:
    """Return FLA's gated slot attention."""
    from fla.layers import GatedSlotAttention

    return _layer(GatedSlotAttention(hidden_size=1024, num_heads=4, num_slots=64), length)


def fla_kda(length: int) -> Step:
    """Return FLA's Kimi delta attention."""
    from fla.layers import KimiDeltaAttention

    return _layer(KimiDeltaAttention(hidden_size=1024, num_heads=8, head_dim=128), length)


def _layer(layer: torch.nn.Module, length: int) -> Step:
    layer = layer.to(DEVICE, torch.bfloat16)
    return trained(lambda x: layer(x)[0], normal(2, length, 1024))


#: Each with its sizes, and the distributions whose versions a result names.
LIBRARIES: dict[str, tuple[Callable[[int], Step], tuple[int, ...], str]] = {
    "mlstm": (mlstm, (1024, 2048), "mlstm-kernels"),
    "gemlite": (gemlite, (1, 16, 1024), "gemlite"),
    "adasplash": (adasplash, (2048, 4096), "adasplash"),
    "cut_cross_entropy": (cut_cross_entropy, (2048, 8192), "cut-cross-entropy"),
    "mase": (mase, (1 << 20, 8 << 20), "mase-triton"),
    "flash_sparse_attention": (flash_sparse_attention, (4096,), "flash-sparse-attn"),
    "liger_dyt": (liger_dyt, (1024, 4096), "liger-kernel"),
    "fla_gla": (fla_gla, (2048,), "fla-core"),
    "fla_gsa": (fla_gsa, (2048,), "fla-core"),
    "fla_kda": (fla_kda, (2048,), "fla-core"),
}


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Run one library's steps, one size after the other."""
    name, report = sys.argv[1:]
    make, sizes, _ = LIBRARIES[name]
    steps = []
    for size in sizes:
        torch.manual_seed(0)
        step = make(size)
        _synchronize()
        start = time.perf_counter()
        results = list(step())
        _synchronize()
        first_s = time.perf_counter() - start
        # Flipped bits make infinities, which JSON has not.
        finite = [r.detach().double().nan_to_num(0.0, 0.0, 0.0) for r in results]
        checksum = sum(r.abs().mean().item() for r in finite)
        later = []
        for _ in range(LATER):
            start = time.perf_counter()
            step()
            _synchronize()
            later.append(1e3 * (time.perf_counter() - start))
        steps.append(
            {
                "size": size,
                "first_s": first_s,
                "later_ms": statistics.median(later),
                "sum": checksum,
            }
        )
        Path(report).write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
