"""Faults that only a device, or a compiler for one, has: each costs its config alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune

pytestmark = pytest.mark.gpu

N = 1 << 14
FAR: tl.constexpr = tl.constexpr(1 << 40)
GOOD, BAD, ALSO_GOOD = 256, 512, 1024


@triton.jit(debug=True)
def faulty_kernel(x, out, count, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """out = x + 1 and count += 1, and what FAULT says."""
    program = tl.program_id(0)
    offset = program * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask, other=0.0)
    if FAULT == "ptxas":
        value = tl.inline_asm_elementwise(
            "bogus.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    if FAULT == "llvm":
        value = tl.inline_asm_elementwise(
            "mov.b32 $9, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    if FAULT == "static":
        tl.static_assert(BLOCK < 8, "a block of 8")
    if FAULT == "assert":
        tl.device_assert(value > 1000.0, "not large enough")
    if FAULT == "misaligned":
        odd = (x.to(tl.int64) + 2).to(tl.pointer_type(tl.float32))
        value += tl.load(odd + offset, mask=offset < n - 1, other=0.0)
    tl.store(out + offset, value + 1, mask=mask)
    if program == 0:
        launches = tl.load(count)
        tl.store(count, launches + 1)
        if FAULT == "late":
            tl.store(out + FAR, 1.0, mask=launches > 20)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@pytest.mark.parametrize(
    ("fault", "verdict", "message"),
    [
        pytest.param("ptxas", "compile_error", "ptxas", marks=pytest.mark.fault("ptxas-failure")),
        pytest.param("llvm", "compile_crash", "SIGABRT", marks=pytest.mark.fault("compiler-abort")),
        pytest.param(
            "static", "compile_error", "a block of 8", marks=pytest.mark.fault("static-assert")
        ),
        pytest.param(
            "assert", "illegal_access", "assert", marks=pytest.mark.fault("device-assert")
        ),
        pytest.param(
            "misaligned",
            "illegal_access",
            "misaligned",
            marks=pytest.mark.fault("misaligned-address"),
        ),
        pytest.param("late", "illegal_access", "illegal", marks=pytest.mark.fault("late-fault")),
    ],
)
def test_a_fault_of_a_kernel(fault: str, verdict: str, message: str, harmless: Any) -> None:
    configs = [
        triton.Config({"BLOCK": block, "FAULT": fault if block == BAD else "no"})
        for block in (GOOD, BAD, ALSO_GOOD)
    ]
    kernel = safetune(configs=configs, key=["n"])(faulty_kernel)
    x = torch.randn(N, device="cuda")
    out, count = torch.zeros_like(x), torch.zeros(1, dtype=torch.int32, device="cuda")
    trials = harmless.check(
        lambda: kernel[grid](x, out, count, N),
        {GOOD: "ok", BAD: verdict, ALSO_GOOD: "ok"},
        after={
            "x": (x, x.clone()),
            "out": (out, x + 1),
            "count": (count, torch.ones_like(count)),
        },
    )
    assert message in trials[BAD].message.lower() + trials[BAD].message
    if fault == "llvm":
        assert "LLVM ERROR" in trials[BAD].stderr


@pytest.mark.fault("no-memory")
def test_no_memory_is_tried_again(harmless: Any, tmp_path: Path) -> None:
    """One config finds no memory the first time, another never does: neither is its own fault."""
    parent, flag = os.getpid(), str(tmp_path / "tried")

    def once(arguments: dict[str, Any]) -> None:
        if os.getpid() != parent and not os.path.exists(flag):
            with open(flag, "w"):
                pass
            torch.empty(1 << 46, dtype=torch.uint8, device="cuda")

    def always(arguments: dict[str, Any]) -> None:
        if os.getpid() != parent:
            torch.empty(1 << 46, dtype=torch.uint8, device="cuda")

    hooks = {GOOD: None, BAD: always, ALSO_GOOD: once}
    configs = [
        triton.Config({"BLOCK": block, "FAULT": "no"}, pre_hook=hook)
        for block, hook in hooks.items()
    ]
    kernel = safetune(configs=configs, key=["n"])(faulty_kernel)
    x = torch.randn(N, device="cuda")
    out, count = torch.zeros_like(x), torch.zeros(1, dtype=torch.int32, device="cuda")
    trials = harmless.check(
        lambda: kernel[grid](x, out, count, N),
        {GOOD: "ok", BAD: "no_memory", ALSO_GOOD: "ok"},
        after={"x": (x, x.clone()), "out": (out, x + 1)},
    )
    assert "out of memory" in trials[BAD].message.lower()
    assert os.path.exists(flag)
