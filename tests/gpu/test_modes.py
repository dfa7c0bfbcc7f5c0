"""On a real device: a choice that cannot be launched with some arguments, and tuning meanwhile."""

from __future__ import annotations

import queue
import warnings
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure

from safetune import safetune
from safetune.launch.key_state import KeyState, KeyStates
from safetune.outcome import Mark
from safetune.settings import Settings
from safetune.store.lookup import open_lookup

pytestmark = pytest.mark.gpu

SOON_S = 120.0


@triton.jit
def product_kernel(out, a, b, k, BIG: tl.constexpr, BLOCK: tl.constexpr):
    """Copies a tile; with BIG it multiplies, with a pipeline of BLOCK stages of 32 KiB."""
    row, column = tl.arange(0, 128)[:, None], tl.arange(0, 128)[None, :]
    total = tl.zeros((128, 128), tl.float32)
    if BIG:
        for start in tl.range(0, k, 64, num_stages=BLOCK):
            inner = start + tl.arange(0, 64)
            left = tl.load(a + row * k + inner[None, :])
            total = tl.dot(left, tl.load(b + inner[:, None] * 128 + column), total)
    else:
        total += tl.load(a + row * k + column)
    tl.store(out + row * 128 + column, total)


@triton.jit
def asserting_kernel(out, a, n, ODD: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(not ODD or BLOCK < 512, "ODD needs a BLOCK under 512")
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offset, tl.load(a + offset, mask=offset < n), mask=offset < n)


class Timed:
    """Configs of which the one declared last is the fastest; `compiled` counts in this process."""

    def __init__(self, *blocks: int) -> None:
        self.configs = [
            triton.Config({"BLOCK": block}, pre_hook=self._hook(block)) for block in blocks
        ]

    @staticmethod
    def _hook(block: int) -> Any:
        def hook(arguments: dict[str, Any]) -> None:
            import builtins

            builtins.safetune_test_block = block  # of the process that measures

        return hook

    @staticmethod
    def bench(launch: Any, quantiles: Any) -> list[float]:
        import builtins

        launch()
        return [1000.0 / builtins.safetune_test_block] * 3


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Attempts to compile in this process, the failing ones too."""
    from triton.runtime import jit

    attempts: list[Any] = []
    compile_it = jit.JITFunction._do_compile

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        attempts.append(args)
        return compile_it(self, *args, **kwargs)

    monkeypatch.setattr(jit.JITFunction, "_do_compile", counted)
    return attempts


@pytest.mark.fault("stored-choice-fails")
def test_out_of_shared_memory_with_a_flag_set(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(2, 4, 12)  # twelve stages are 384 KiB
    kernel = safetune(configs=timed.configs, key=["k"], do_bench=timed.bench)(product_kernel)
    k = 1024
    a = torch.randn(128, k, device=device, dtype=torch.float16)
    b = torch.randn(k, 128, device=device, dtype=torch.float16)
    out = torch.zeros(128, 128, device=device)
    kernel[(1,)](out, a, b, k, BIG=False)
    assert kernel.best_config.kwargs["BLOCK"] == 12
    attempts = compilations(monkeypatch)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            kernel[(1,)](out, a, b, k, BIG=True)

    assert kernel.best_config.kwargs["BLOCK"] == 4
    (text,) = [str(w.message) for w in caught if "product_kernel" in str(w.message)]
    assert "BLOCK=12 " in text.partition(";")[0]
    assert "OutOfResources" in text
    assert "BLOCK=4 " in text.partition(";")[2]
    assert len(attempts) == 2, "12 and 4, once each"
    assert torch.allclose(out, a.float() @ b.float(), atol=0.5)
    kernel[(1,)](out, a, b, k, BIG=False)
    assert kernel.best_config.kwargs["BLOCK"] == 12
    assert torch.equal(out, a[:, :128].float())


@pytest.mark.fault("stored-choice-fails")
def test_a_static_assertion_with_a_flag_set(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(128, 256, 512, 1024)
    kernel = safetune(configs=timed.configs, key=["n"], do_bench=timed.bench)(asserting_kernel)
    a = torch.randn(10_000, device=device)
    out = torch.zeros_like(a)
    grid = lambda meta: (triton.cdiv(10_000, meta["BLOCK"]),)  # noqa: E731
    kernel[grid](out, a, 10_000, ODD=False)
    assert kernel.best_config.kwargs["BLOCK"] == 1024
    attempts = compilations(monkeypatch)

    with pytest.warns(UserWarning, match="ODD needs a BLOCK under 512"):
        kernel[grid](out, a, 10_000, ODD=True)
    kernel[grid](out, a, 10_000, ODD=True)

    assert kernel.best_config.kwargs["BLOCK"] == 256
    assert torch.equal(out, a)
    assert len(attempts) == 3

    never = safetune(configs=Timed(512, 1024).configs, key=["n"])(asserting_kernel)
    never[grid](out, a, 10_000, ODD=False)
    attempts.clear()
    for _ in range(2):
        with pytest.raises((CompilationError, CompileTimeAssertionFailure)):
            never[grid](out, a, 10_000, ODD=True)
    assert len(attempts) == 2, "each of the two once"
    never[grid](out, a, 10_000, ODD=False)


def test_a_background_tuning_replaces_the_fallback(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAFETUNE_MODE", "background")
    timed = Timed(128, 256)
    kernel = safetune(configs=timed.configs, key=["n"], do_bench=timed.bench)(asserting_kernel)
    written: queue.Queue[Any] = queue.Queue()

    class Swaps(KeyStates):
        def publish(self, state: KeyState) -> None:
            super().publish(state)
            if state.hit is not None:
                written.put(state.hit.kwargs["BLOCK"])

    kernel.states = Swaps(kernel)
    a = torch.randn(10_000, device=device)
    out = torch.zeros_like(a)
    grid = lambda meta: (triton.cdiv(10_000, meta["BLOCK"]),)  # noqa: E731

    kernel[grid](out, a, 10_000, ODD=False)
    assert kernel.best_config.kwargs["BLOCK"] == 128
    assert torch.equal(out, a)
    a.zero_()
    assert [written.get(timeout=SOON_S), written.get(timeout=SOON_S)] == [128, 256]

    kernel[grid](out, a, 10_000, ODD=False)
    assert kernel.best_config.kwargs["BLOCK"] == 256
    assert torch.equal(out, a)
    ((_, trials),) = open_lookup(Settings.current()).store.trials_of("asserting_kernel")
    assert all(trial.outcome.marked(Mark.CONTENDED) for trial in trials), "what else ran is unknown"
