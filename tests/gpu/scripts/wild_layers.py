"""Layers of FLA and Liger whose kernels are autotuned, forward and backward.

    python wild_layers.py [--first-config] [--save FILE] [LAYER ...]

Knows nothing of safetune: run it with `safetune run`, or without. With `--first-config` every tuner
has its first config only, so that stock Triton takes no time to tune. Prints as JSON the layers
that were run, and those that failed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, T, H, K, D = 2, 512, 4, 64, 1024
Leaves = dict[str, torch.Tensor]


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_()


def heads() -> Leaves:
    return {name: leaf(B, T, H, K) for name in "qkv"}


def decay(*shape: int) -> torch.Tensor:
    drawn = torch.randn(*shape, device=DEVICE)
    return torch.nn.functional.logsigmoid(drawn).detach().requires_grad_()


def planted() -> tuple[torch.Tensor, Leaves]:
    """A kernel of which one config is wrong: the judge must say so."""
    configs = [triton.Config({"BLOCK": 64 << i, "BY": 3 if i == 3 else 2}) for i in range(4)]
    n = 1000
    x, out = torch.arange(n, device=DEVICE, dtype=torch.float32), torch.zeros(n, device=DEVICE)
    tuner = triton.autotune(configs, key=["n"])(planted_kernel)
    tuner[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n)
    return out.requires_grad_(), {}


@triton.jit
def planted_kernel(x, out, n, BLOCK: tl.constexpr, BY: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(x + offset, mask=offset < n) * BY, mask=offset < n)


def fla_layer_norm() -> tuple[torch.Tensor, Leaves]:
    from fla.modules.norm.layernorm import LayerNorm

    norm = LayerNorm(D, bias=True, device=DEVICE, dtype=torch.float32)
    x = leaf(B * T, D)
    return norm(x), {"x": x, "weight": norm.weight, "bias": norm.bias}


def fla_l2norm() -> tuple[torch.Tensor, Leaves]:
    from fla.modules.norm.l2norm import l2norm

    x = leaf(B, T, H, K)
    return l2norm(x), {"x": x}


def fla_simple_gla() -> tuple[torch.Tensor, Leaves]:
    from fla.ops.simple_gla import chunk_simple_gla

    leaves = {**heads(), "g": decay(B, T, H)}
    return chunk_simple_gla(**leaves)[0], leaves


def fla_gla() -> tuple[torch.Tensor, Leaves]:
    from fla.ops.gla import chunk_gla

    leaves = {**heads(), "g": decay(B, T, H, K)}
    return chunk_gla(**leaves)[0], leaves


def _delta(leaves: Leaves) -> Leaves:
    normal = torch.nn.functional.normalize(leaves["k"].detach().float(), dim=-1)
    beta = torch.rand(B, T, H, device=DEVICE).to(torch.bfloat16).requires_grad_()
    return {**leaves, "k": normal.to(torch.bfloat16).requires_grad_(), "beta": beta}


def fla_delta_rule() -> tuple[torch.Tensor, Leaves]:
    from fla.ops.delta_rule import chunk_delta_rule

    leaves = _delta(heads())
    return chunk_delta_rule(**leaves)[0], leaves


def fla_gated_delta_rule() -> tuple[torch.Tensor, Leaves]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    leaves = {**_delta(heads()), "g": decay(B, T, H)}
    return chunk_gated_delta_rule(**leaves)[0], leaves


def liger_dyt() -> tuple[torch.Tensor, Leaves]:
    from liger_kernel.ops.dyt import LigerDyTFunction

    leaves = {"x": leaf(B * T, 4096), "alpha": leaf(1, dtype=torch.float32)}
    leaves |= {name: leaf(4096, dtype=torch.float32) for name in ("gamma", "beta")}
    return LigerDyTFunction.apply(*leaves.values()), leaves


LAYERS: dict[str, Callable[[], Any]] = {
    layer.__name__: layer
    for layer in (
        planted,
        fla_l2norm,
        liger_dyt,
        fla_layer_norm,
        fla_gla,
        fla_delta_rule,
        fla_simple_gla,
        fla_gated_delta_rule,
    )
}


def run(name: str) -> dict[str, torch.Tensor]:
    """One forward and backward of a layer, from the same bits each time."""
    torch.manual_seed(0)
    output, leaves = LAYERS[name]()
    (output.float() - torch.randn_like(output, dtype=torch.float32)).square().mean().backward()
    gradients = {f"{name} d{leaf}": value.grad for leaf, value in leaves.items()}
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    found = {f"{name} output": output.detach(), **gradients}
    return {key: value.cpu() for key, value in found.items() if value is not None}


def first_config_only() -> None:
    """Let every tuner have its first config only."""
    stock = triton.autotune

    def autotune(configs: Any, *args: Any, **kwargs: Any) -> Any:
        return stock(list(configs)[:1], *args, **kwargs)

    triton.autotune = autotune


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-config", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--report", type=Path)
    parser.add_argument("layers", nargs="*", default=list(LAYERS))
    options = parser.parse_args()
    if options.first_config:
        first_config_only()
    results: dict[str, torch.Tensor] = {}
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name in options.layers:
        started = time.perf_counter()
        try:
            results.update(run(name))
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            seconds[name] = time.perf_counter() - started
    text = json.dumps({"seconds": seconds, "left": [], "failed": failed})
    print(text)
    if options.report:
        options.report.write_text(text)
    if options.save:
        torch.save(results, options.save)


if __name__ == "__main__":
    main()
