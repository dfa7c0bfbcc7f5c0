"""What programs and tools do with a tuner beside launches: as with Triton's, or as documented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import autotuner as triton_autotuner

import safetune


@triton.jit
def add_kernel(x, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < N) + 1, mask=offsets < N)


def configs(*blocks: int) -> list[triton.Config]:
    return [triton.Config({"BLOCK": block}) for block in blocks]


def same_time(launch: Callable[[], object], quantiles: Any) -> list[float]:
    launch()
    return [1.0, 1.0, 1.0]


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["N"], meta["BLOCK"]),)


@pytest.mark.parametrize("tune", [triton.autotune, safetune.safetune], ids=["triton", "safetune"])
def test_a_config_that_is_appended_to_the_list_is_tried_for_the_next_key(tune: Any) -> None:
    """Regression: the decorator kept a copy of the list."""
    given = configs(32, 64)
    kernel = tune(given, ["N"], do_bench=same_time)(add_kernel)
    kernel[grid](torch.zeros(100), 100)
    assert len(kernel.configs_timings) == 2
    given += configs(128)
    kernel[grid](torch.zeros(101), 101)
    assert len(kernel.configs_timings) == 3


@pytest.mark.parametrize("tune", [triton.autotune, safetune.safetune], ids=["triton", "safetune"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_prune_function_that_wraps_the_one_before(tune: Any, first: int) -> None:
    """As in attention-gym's tests. It wrapped the one for torch.compile, which leaves one."""
    by = {"early_config_prune": lambda given, named, **kwargs: given[first:]} if first else None
    kernel = tune(configs(16, 32, 64, 128), ["N"], by, do_bench=same_time)(add_kernel)
    before = kernel.early_config_prune

    def fewer(given: Any, named: Any, **kwargs: Any) -> Any:
        return (before(given, named, **kwargs) if before else given)[:2]

    kernel.early_config_prune = fewer
    x = torch.zeros(100)
    kernel[grid](x, 100)
    assert {*kernel.configs_timings} == {*kernel.configs[first : first + 2]}


def test_a_tool_that_replaces_run_sees_the_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Triton's tuner class from the next miss on, of safetune's from the next launch on."""
    seen: list[str] = []

    def watch(owner: type[Any], name: str) -> None:
        run = owner.run

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return run(self, *args, **kwargs)

        monkeypatch.setattr(owner, "run", watched)

    kernel = safetune.safetune(configs(32, 64), ["N"], do_bench=same_time)(add_kernel)
    watch(triton_autotuner.Autotuner, "triton's")
    kernel[grid](torch.zeros(100), 100)
    assert seen == ["triton's"]
    watch(safetune.Autotuner, "safetune's")
    for _ in range(3):  # known launches too
        kernel[grid](torch.zeros(100), 100)
    assert seen[1:] == ["safetune's", "triton's"] * 3
    monkeypatch.undo()
    seen.clear()
    kernel[grid](torch.zeros(100), 100)
    assert seen == []
    assert type(kernel) is safetune.Autotuner


def test_the_arguments_of_a_launch_are_given_and_not_left_on_the_tuner() -> None:
    """Triton sets `nargs` for the time of a launch; another thread may launch meanwhile."""
    seen: list[tuple[bool, bool]] = []

    def asked(meta: dict[str, Any]) -> tuple[int]:
        seen.append((kernel.nargs is not None, "x" in meta))
        return grid(meta)

    kernel = safetune.safetune(configs(32), ["N"])(add_kernel)
    for n in (100, 101, 100):
        kernel[asked](torch.zeros(n), n)
    assert seen == [(False, True)] * 3
