"""The layer norms that are compared, each as functions of one set of operands: ours and others'.

A system is `(operands, is_rms_norm, with_residual) -> outputs`, differentiable; with a residual it
returns (y, x + residual). `make` raises where a system is not installed or has no such function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EPS = 1e-5
SYSTEMS = ("ours", "torch", "compile", "compile_max", "fla", "liger", "quack")


@dataclass(frozen=True)
class Operands:
    """One set of bf16 operands; the gradients are those that come in."""

    x: Any
    residual: Any
    weight: Any
    bias: Any
    dy: Any
    dresidual: Any

    @classmethod
    def random(cls, rows: int, columns: int, is_rms_norm: bool, device: str) -> Operands:
        """Return normal numbers; RMS norm goes without a bias."""
        import torch

        make = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
        matrices = [make(rows, columns) for _ in range(4)]
        vectors = [make(columns).requires_grad_() for _ in range(1 if is_rms_norm else 2)]
        return cls(
            matrices[0].requires_grad_(),
            matrices[1].requires_grad_(),
            vectors[0],
            None if is_rms_norm else vectors[1],
            matrices[2],
            matrices[3],
        )


Norm = Callable[[Operands], Any]


def make(system: str, is_rms_norm: bool, with_residual: bool) -> Norm:
    """Return one system's function; raises what its import raises, or `NotImplementedError`."""
    return _MAKERS[system](is_rms_norm, with_residual)


def _drop_in(module: Any, is_rms_norm: bool, with_residual: bool) -> Norm:
    """Ours and FLA's: functions of the same names and arguments."""
    norm = module.rms_norm if is_rms_norm else module.layer_norm

    def call(operands: Operands) -> Any:
        residual = operands.residual if with_residual else None
        return norm(
            operands.x, operands.weight, operands.bias, residual, EPS, prenorm=with_residual
        )

    return call


def _ours(is_rms_norm: bool, with_residual: bool) -> Norm:
    from safetune import kernels

    return _drop_in(kernels, is_rms_norm, with_residual)


def _fla(is_rms_norm: bool, with_residual: bool) -> Norm:
    from fla.modules import layernorm

    return _drop_in(layernorm, is_rms_norm, with_residual)


def _torch(is_rms_norm: bool, with_residual: bool) -> Norm:
    from torch.nn import functional

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        if is_rms_norm:
            return functional.rms_norm(x, weight.shape, weight, EPS)
        return functional.layer_norm(x, weight.shape, weight, bias, EPS)

    def call(operands: Operands) -> Any:
        if not with_residual:
            return norm(operands.x, operands.weight, operands.bias)
        added = operands.x + operands.residual
        return norm(added, operands.weight, operands.bias), added

    return call


def _compiled(mode: str | None) -> Callable[[bool, bool], Norm]:
    def maker(is_rms_norm: bool, with_residual: bool) -> Norm:
        import torch
        import torch._functorch.config

        # Gradients are taken several times of one forward pass.
        torch._functorch.config.donated_buffer = False
        torch._dynamo.reset()
        eager = _torch(is_rms_norm, with_residual)

        def tensors(x: Any, residual: Any, weight: Any, bias: Any) -> Any:
            return eager(Operands(x, residual, weight, bias, None, None))

        compiled = torch.compile(tensors, fullgraph=True, dynamic=False, mode=mode)
        return lambda o: compiled(o.x, o.residual if with_residual else None, o.weight, o.bias)

    return maker


def _liger(is_rms_norm: bool, with_residual: bool) -> Norm:
    from liger_kernel.transformers import functional

    if is_rms_norm and with_residual:
        return lambda o: functional.liger_fused_add_rms_norm(
            o.x, o.residual, o.weight, EPS, in_place=False
        )
    if with_residual:
        raise NotImplementedError("Liger has no layer norm with a residual")
    if is_rms_norm:
        return lambda o: functional.liger_rms_norm(o.x, o.weight, EPS, in_place=False)
    return lambda o: functional.liger_layer_norm(o.x, o.weight, o.bias, EPS)


def _quack(is_rms_norm: bool, with_residual: bool) -> Norm:
    from quack.rmsnorm import rmsnorm

    if not is_rms_norm:
        raise NotImplementedError("quack has no differentiable layer norm")
    if with_residual:
        return lambda o: rmsnorm(o.x, o.weight, residual=o.residual, eps=EPS, prenorm=True)
    return lambda o: rmsnorm(o.x, o.weight, eps=EPS)


_MAKERS = {
    "ours": _ours,
    "torch": _torch,
    "compile": _compiled(None),
    # Its own CUDA graphs are not needed in one.
    "compile_max": _compiled("max-autotune-no-cudagraphs"),
    "fla": _fla,
    "liger": _liger,
    "quack": _quack,
}


def make_module(system: str, columns: int, is_rms_norm: bool, device: str) -> Any:
    """Return a module of one system, for what a call of it costs the host."""
    import torch

    if system == "torch":
        kind = torch.nn.RMSNorm if is_rms_norm else torch.nn.LayerNorm
        return kind(columns, eps=EPS, device=device, dtype=torch.bfloat16)
    if system == "fla":
        from fla import modules
    else:
        from safetune import kernels as modules
    kind = modules.RMSNorm if is_rms_norm else modules.LayerNorm
    bias = {} if is_rms_norm else {"bias": True}
    return kind(columns, eps=EPS, device=device, dtype=torch.bfloat16, **bias)
