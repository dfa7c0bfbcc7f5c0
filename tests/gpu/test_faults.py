"""Configs that crash, hang and ask for too much, on a real GPU: each costs that config alone."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from safetune import NoWorkingConfig, safetune

pytestmark = pytest.mark.gpu

#: Elements of 4 bytes, so 4 TiB away: no allocation is there.
FAR = 1 << 40
N = 1 << 16

Trials = Callable[[], list[Any]]


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@pytest.fixture
def operands(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    x, y = (torch.randn(N, device=device, generator=generator) for _ in range(2))
    return x, y, torch.zeros_like(x)


@pytest.fixture
def next_tuning_works(
    kernels: Any, operands: Any, context_answers: Any, trials: Trials, harmless: Any
) -> Callable[[], None]:
    """A function that tunes another kernel and checks its result and the context."""

    def check() -> None:
        before = len(trials())
        configs = [triton.Config({"BLOCK": block}) for block in (256, 1024)]
        kernel = safetune(configs=configs, key=["n"])(kernels.add_kernel)
        x, y, out = (operand[: N // 2] for operand in operands)
        out.zero_()
        kernel[grid](x, y, out, N // 2)  # a key that no test has tuned yet
        assert torch.equal(out, x + y)
        assert [trial.verdict for trial in trials()[before:]] == ["ok", "ok"]
        context_answers()
        harmless.check_nothing_is_left()

    return check


def test_triton_autotune_is_poisoned_by_an_illegal_store(fresh_process: Any, scripts: Path) -> None:
    """What safetune is there for: the same configs under `triton.autotune`, in its own process."""
    result = fresh_process(scripts / "poisoned_by_autotune.py", FAR)
    report = json.loads(result.stdout.splitlines()[-1])
    assert "illegal memory access" in report["raised"]
    assert len(report["later"]) == 4
    assert all("illegal memory access" in error for error in report["later"].values()), report


@pytest.mark.fault("illegal-address")
def test_an_illegal_store_does_not_reach_the_caller(
    kernels: Any,
    operands: Any,
    trials: Trials,
    context_answers: Callable[[], None],
    next_tuning_works: Callable[[], None],
) -> None:
    configs = [
        triton.Config({"BLOCK": 256, "SHIFT": 0}),
        triton.Config({"BLOCK": 512, "SHIFT": FAR}),
        triton.Config({"BLOCK": 1024, "SHIFT": 0}),
        triton.Config({"BLOCK": 2048, "SHIFT": FAR}),
    ]
    kernel = safetune(configs=configs, key=["n"])(kernels.wild_kernel)
    x, y, out = operands
    kernel[grid](x, y, out, N)
    assert torch.equal(out, x + y)
    assert kernel.best_config.kwargs["SHIFT"] == 0
    verdicts = {trial.config: trial.verdict for trial in trials()}
    assert {("illegal_access" if str(FAR) in config else "ok") for config in verdicts} == {
        "illegal_access",
        "ok",
    }
    for config, verdict in verdicts.items():
        assert verdict == ("illegal_access" if str(FAR) in config else "ok"), verdicts
    context_answers()
    next_tuning_works()


@pytest.mark.fault("illegal-address")
def test_only_illegal_configs_raise_and_leave_the_context(
    kernels: Any, operands: Any, context_answers: Any, next_tuning_works: Any
) -> None:
    configs = [triton.Config({"BLOCK": block, "SHIFT": FAR}) for block in (256, 512)]
    kernel = safetune(configs=configs, key=["n"])(kernels.wild_kernel)
    with pytest.raises(NoWorkingConfig, match="illegal_access"):
        kernel[grid](*operands, N)
    context_answers()
    next_tuning_works()


@pytest.mark.fault("endless-loop")
def test_a_hang_is_a_timeout(
    kernels: Any, operands: Any, trials: Trials, next_tuning_works: Callable[[], None]
) -> None:
    """The kernel waits for a word of `out` to change, which is zero and stays so."""
    configs = [
        triton.Config({"BLOCK": 256, "HANGS": False}),
        triton.Config({"BLOCK": 512, "HANGS": True}),
        triton.Config({"BLOCK": 1024, "HANGS": False}),
    ]
    tuned = safetune(configs=configs, key=["n"], restore_value=["out"], run_timeout_s=4.0)
    kernel = tuned(kernels.hanging_kernel)
    x, y, out = operands
    kernel[grid](x, y, out, N)
    assert torch.equal(out, x + y)
    assert sorted(trial.verdict for trial in trials()) == ["ok", "ok", "timeout"]
    (hung,) = [trial for trial in trials() if trial.verdict == "timeout"]
    assert "4 s" in hung.message
    next_tuning_works()


@pytest.mark.fault("no-shared-memory")
def test_too_much_shared_memory_is_out_of_resources(
    kernels: Any, device: str, trials: Trials, next_tuning_works: Callable[[], None]
) -> None:
    """Six stages of two 128 x 128 tiles in fp16 are 384 KiB; an H100 has 227."""
    size, depth = 128, 1024
    configs = [
        triton.Config({"BK": 64}, num_warps=8, num_stages=2),
        triton.Config({"BK": 128}, num_warps=8, num_stages=6),
        triton.Config({"BK": 32}, num_warps=8, num_stages=2),
    ]
    kernel = safetune(configs=configs, key=["K"])(kernels.product_kernel)
    a = torch.randn(size, depth, device=device).half()
    b = torch.randn(depth, size, device=device).half()
    c = torch.full((size, size), float("nan"), device=device)
    kernel[(1,)](a, b, c, depth, SIZE=size)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-1)
    assert sorted(trial.verdict for trial in trials()) == ["ok", "ok", "out_of_resources"]
    (large,) = [trial for trial in trials() if trial.verdict == "out_of_resources"]
    assert "shared memory" in large.message
    next_tuning_works()


@pytest.mark.fault("segfault")
def test_a_segfault_in_a_hook_is_a_death(
    kernels: Any, operands: Any, trials: Trials, next_tuning_works: Callable[[], None]
) -> None:
    # Nested, so that it travels by value: the child cannot import this module.
    def crash(arguments: dict[str, Any]) -> None:
        ctypes.string_at(0)

    configs = [
        triton.Config({"BLOCK": 256}),
        triton.Config({"BLOCK": 512}, pre_hook=crash),
        triton.Config({"BLOCK": 1024}),
    ]
    kernel = safetune(configs=configs, key=["n"])(kernels.add_kernel)
    x, y, out = operands
    kernel[grid](x, y, out, N)
    assert torch.equal(out, x + y)
    assert sorted(trial.label for trial in trials()) == ["died(SIGSEGV)", "ok", "ok"]
    next_tuning_works()


@pytest.mark.parametrize("isolation", ["worker", "config"])
def test_nothing_is_left_three_seconds_after_tuning(
    kernels: Any, operands: Any, children_end: Callable[[float], list[int]], isolation: str
) -> None:
    """Neither a process nor GPU memory, although one config spoiled its context."""
    configs = [
        triton.Config({"BLOCK": 256, "SHIFT": 0}),
        triton.Config({"BLOCK": 512, "SHIFT": FAR}),
        triton.Config({"BLOCK": 1024, "SHIFT": 0}),
    ]
    kernel = safetune(configs=configs, key=["n"], isolation=isolation)(kernels.wild_kernel)
    x, y, out = operands
    assert children_end(3.0) == []  # those of an earlier test
    free_before = _free_memory()
    kernel[grid](x, y, out, N)
    assert torch.equal(out, x + y)
    assert children_end(3.0) == []
    # A child's context takes hundreds of MiB; the binary that was launched here takes a few.
    assert free_before - _free_memory() < 64 << 20


def _free_memory() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
