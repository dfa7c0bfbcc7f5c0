"""Pinned host memory as an argument: a child measures on a pinned copy of its own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import TuningWarning, safetune
from safetune.miss.resolve import Miss
from safetune.settings import Settings
from safetune.store.lookup import open_lookup

pytestmark = pytest.mark.gpu

N = 1 << 16


@pytest.fixture(autouse=True)
def _needs_a_gpu(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU: the interpreter pins nothing")


@triton.jit
def scale_kernel(w, x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(w + at, mask=at < n) * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def add_kernel(w, x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(w + at, tl.load(w + at, mask=at < n) + tl.load(x + at, mask=at < n), mask=at < n)


def decorated(function: Any, **options: Any) -> Any:
    configs = [triton.Config({"BLOCK": block}) for block in (256, 1024)]
    return safetune(configs, ["n"], **options)(function)


def verdicts(kernel: Any, *args: Any) -> list[str]:
    request = Miss(kernel, args, {"grid": (1,)}).request()
    stored = open_lookup(Settings.current()).store.trials(request.key.digest)
    return [trial.outcome.label for trial in stored]


def grid(meta: Any) -> tuple[int]:
    return (triton.cdiv(N, meta["BLOCK"]),)


@pytest.mark.parametrize("first", [True, False], ids=["first", "behind"])
def test_a_kernel_that_reads_pinned_memory_is_tuned(first: bool) -> None:
    """It may be the first tensor of the call, which otherwise names the device."""
    kernel = decorated(scale_kernel)
    w, x = torch.randn(N).pin_memory(), torch.randn(N, device="cuda")
    args = (w, x) if first else (x, w)
    y = torch.zeros(N, device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel[grid](*args, y, N)
    assert torch.allclose(y, w.cuda() * x)
    assert verdicts(kernel, *args, y, N) == ["ok", "ok"]


def test_what_a_config_writes_there_stays_in_the_child() -> None:
    kernel = decorated(add_kernel)
    w, x = torch.zeros(N).pin_memory(), torch.ones(N, device="cuda")
    y = torch.zeros(1, device="cuda")
    kernel[grid](w, x, y, N)
    torch.cuda.synchronize()
    assert w.unique().tolist() == [1.0]
    assert verdicts(kernel, w, x, y, N) == ["ok", "ok"]


def test_a_child_with_torch_has_it_too() -> None:
    def reference(named: dict[str, Any]) -> dict[str, Any]:
        return {"y": named["w"].cuda() * named["x"]}

    kernel = decorated(scale_kernel, reference=reference)
    w, x = torch.randn(N).pin_memory(), torch.randn(N, device="cuda")
    y = torch.zeros(N, device="cuda")
    kernel[grid](w, x, y, N)
    assert verdicts(kernel, w, x, y, N) == ["ok", "ok"]


def test_beyond_the_limit_it_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETUNE_COPY_LIMIT", str(4 * N - 1))
    kernel = decorated(scale_kernel)
    w, x = torch.randn(N).pin_memory(), torch.randn(N, device="cuda")
    y = torch.zeros(N, device="cuda")
    with pytest.warns(TuningWarning, match="^safetune: w: .* bytes of pinned host memory"):
        kernel[grid](w, x, y, N)
    assert torch.allclose(y, w.cuda() * x)
    assert verdicts(kernel, w, x, y, N) == []
    assert len(kernel.configs_timings) == 2
