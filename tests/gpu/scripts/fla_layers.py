"""FLA's layers forward and backward, as a training step has them; argv: where results go.

Prints when the first and the second step were done, in seconds after the imports. Knows nothing of
safetune: run it with `safetune run`, or without.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from fla.modules.norm.layernorm import LayerNorm
from fla.ops.delta_rule import chunk_delta_rule
from fla.ops.gla import chunk_gla

B, T, H, K, D = 2, 512, 4, 64, 1024


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def step() -> dict[str, torch.Tensor]:
    """One forward and backward of each layer, from the same bits each time."""
    torch.manual_seed(0)
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, output: Any, **leaves: torch.Tensor) -> None:
        output.float().square().mean().backward()
        found[f"{name} output"] = output.detach()
        found.update({f"{name} d{leaf}": value.grad for leaf, value in leaves.items()})

    norm = LayerNorm(D, bias=True, device="cuda", dtype=torch.float32)
    x = leaf(B * T, D)
    keep("layer_norm", norm(x), x=x, weight=norm.weight, bias=norm.bias)

    q, k, v = (leaf(B, T, H, K) for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, H, K, device="cuda")).requires_grad_()
    keep("gla", chunk_gla(q, k, v, g)[0], q=q, k=k, v=v, g=g)

    q, v = leaf(B, T, H, K), leaf(B, T, H, K)
    k = torch.nn.functional.normalize(torch.randn(B, T, H, K, device="cuda"), dim=-1)
    k = k.to(torch.bfloat16).requires_grad_()
    beta = torch.rand(B, T, H, device="cuda").to(torch.bfloat16).requires_grad_()
    keep("delta_rule", chunk_delta_rule(q, k, v, beta)[0], q=q, k=k, v=v, beta=beta)
    torch.cuda.synchronize()
    return found


torch.cuda.init()
begin = time.perf_counter()
results = step()
first_s = time.perf_counter() - begin
step()
print(json.dumps({"first_s": first_s, "both_s": time.perf_counter() - begin}))
if len(sys.argv) > 1:
    torch.save({name: value.cpu() for name, value in results.items()}, sys.argv[1])
