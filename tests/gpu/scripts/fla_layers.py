"""FLA's layers forward and backward, as a training step has them.

    python fla_layers.py [--save FILE] [LAYER ...]

Prints when the first and the second step were done, in seconds after the imports. Knows nothing of
safetune: run it with `safetune run`, or without.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fla.modules.norm.layernorm import LayerNorm
from fla.ops.delta_rule import chunk_delta_rule
from fla.ops.gla import chunk_gla

B, T, H, K, D = 2, 512, 4, 64, 1024


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def layer_norm() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    norm = LayerNorm(D, bias=True, device="cuda", dtype=torch.float32)
    x = leaf(B * T, D)
    return norm(x), {"x": x, "weight": norm.weight, "bias": norm.bias}


def gla() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    q, k, v = (leaf(B, T, H, K) for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, H, K, device="cuda")).requires_grad_()
    return chunk_gla(q, k, v, g)[0], {"q": q, "k": k, "v": v, "g": g}


def delta_rule() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    q, v = leaf(B, T, H, K), leaf(B, T, H, K)
    k = torch.nn.functional.normalize(torch.randn(B, T, H, K, device="cuda"), dim=-1)
    k = k.to(torch.bfloat16).requires_grad_()
    beta = torch.rand(B, T, H, device="cuda").to(torch.bfloat16).requires_grad_()
    return chunk_delta_rule(q, k, v, beta)[0], {"q": q, "k": k, "v": v, "beta": beta}


LAYERS: dict[str, Callable[[], Any]] = {
    layer.__name__: layer for layer in (layer_norm, gla, delta_rule)
}


def step(layers: list[str]) -> dict[str, torch.Tensor]:
    """One forward and backward of each layer, from the same bits each time.

    The loss has a target: without, a norm's gradient is that of a sum of squares which it keeps as
    it is, and so nothing but what was rounded.
    """
    found: dict[str, torch.Tensor] = {}
    for layer in layers:
        torch.manual_seed(0)
        output, leaves = LAYERS[layer]()
        (output.float() - torch.randn_like(output, dtype=torch.float32)).square().mean().backward()
        found[f"{layer} output"] = output.detach()
        found.update({f"{layer} d{name}": value.grad for name, value in leaves.items()})
    torch.cuda.synchronize()
    return found


parser = argparse.ArgumentParser()
parser.add_argument("--save", type=Path)
parser.add_argument("layers", nargs="*", default=list(LAYERS))
options = parser.parse_args()
torch.cuda.init()
# Else one full collection, tenths of a second, is by chance in the step of one program or another.
gc.collect()
begin = time.perf_counter()
results = step(options.layers)
first_s = time.perf_counter() - begin
step(options.layers)
both_s = time.perf_counter() - begin
print(json.dumps({"first_s": first_s, "both_s": both_s}))
if options.save:
    torch.save({name: value.cpu() for name, value in results.items()}, options.save)
