"""Calls with nothing to do: empty tensors, a zero in the grid, no tensors at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import safetune as package
from safetune import safetune
from safetune.compilers.resolve import resolve
from safetune.errors import NothingToMeasure
from safetune.miss import background, failures
from safetune.offline.tasks import find_kernels, tune_task
from safetune.offline.tasks import tasks as tasks_of
from safetune.settings import Settings
from safetune.store.lookup import open_lookup

BLOCKS = (16, 32, 64)


@triton.jit
def copy_kernel(dst, src, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK * WIDTH + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


@triton.jit
def plain_kernel(n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    tl.device_assert(n + BLOCK + WIDTH > 0)


def tuner(kernel: Any = copy_kernel, **options: Any) -> Any:
    """A kernel whose key says nothing of the size of a call."""
    configs = [triton.Config({"BLOCK": block}) for block in BLOCKS]
    return safetune(configs=configs, key=["WIDTH"], **options)(kernel)


def programs(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def copy(kernel: Any, n: int, grid: Any = programs) -> int:
    """Copy n elements, and return the BLOCK that was launched."""
    src, dst = torch.arange(n + 1.0)[1:], torch.zeros(n)
    kernel[grid](dst, src, n, WIDTH=1)
    assert grid is not programs or torch.equal(src, dst)
    return kernel.best_config.kwargs["BLOCK"]


def stored() -> tuple[int, int, int]:
    """Return how many keys with trials, choices and recorded calls there are."""
    store = open_lookup(Settings.current()).store
    return len(store.trials_of()), len(store.choices()), len(store.calls())


CALLS: dict[str, Callable[[Any], object]] = {
    "empty tensors": lambda kernel: copy(kernel, 0),
    "empty tensors, and programs": lambda kernel: copy(kernel, 0, grid=(3,)),
    "an empty tensor and None": lambda kernel: kernel[(0,)](torch.zeros(0, 4), None, 0, WIDTH=1),
    "a zero in the grid": lambda kernel: copy(kernel, 9, grid=(0,)),
    "a zero in its second place": lambda kernel: copy(kernel, 9, grid=lambda meta: (4, 0, 1)),
    "fewer than no programs": lambda kernel: copy(kernel, 9, grid=(-1,)),
}


class TestWithoutAChoice:
    @pytest.mark.fault("empty-call")
    @pytest.mark.parametrize("what", CALLS)
    def test_the_first_config_is_launched_and_nothing_stays(self, what: str) -> None:
        kernel = tuner()
        CALLS[what](kernel)
        assert kernel.best_config.kwargs["BLOCK"] == BLOCKS[0]
        assert stored() == (0, 0, 0)
        assert [state.decision(capture=None) for state in kernel.states] == [None]

    def test_of_a_kernel_without_tensors(self) -> None:
        kernel = tuner(plain_kernel)
        kernel[(1,)](5, WIDTH=1)
        assert kernel.best_config.kwargs["BLOCK"] == BLOCKS[0]
        assert stored() == (0, 0, 0)

    @pytest.mark.parametrize("mode", ["background", "record", "frozen"])
    def test_in_every_mode(self, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", mode)
        kernel = tuner()
        assert copy(kernel, 0) == BLOCKS[0]
        assert [state.decision(capture=None) for state in kernel.states] == [None]
        assert not any(map(background.wait, kernel.states))
        if mode != "frozen":
            assert stored() == (0, 0, 0)

    def test_inline(self) -> None:
        kernel = tuner(isolation="inline", do_bench=lambda call, quantiles: pytest.fail("measured"))
        assert copy(kernel, 0) == BLOCKS[0]
        assert kernel.cache == {}

    def test_what_pruning_leaves_of_it_is_not_the_choice(self) -> None:
        def prune(configs: Any, arguments: Any, **_: Any) -> Any:
            return configs if arguments["n"] else configs[-1:]

        kernel = tuner(prune_configs_by={"early_config_prune": prune})
        assert copy(kernel, 0) == BLOCKS[-1]
        assert kernel.cache == {}

    def test_of_a_compiler_or_jax(self) -> None:
        kernel = tuner()
        empty = torch.zeros(0)
        found = resolve(kernel, (empty, empty, 0), {"WIDTH": 1}, grid=(1,))
        assert (found.provenance, found.config) == ("fallback", kernel.configs[0])
        assert stored() == (0, 0, 0)

    def test_offline_it_is_an_error(self) -> None:
        kernel = tuner()

        @kernel.workload
        def workload(device: Any, dtype: Any) -> Any:
            empty = torch.zeros(0, device=device)
            yield package.Workload("empty", (1,), (empty, empty, 0), {"WIDTH": 1})

        (task,) = tasks_of(*find_kernels({"kernel": kernel}), None, ())
        with pytest.raises(NothingToMeasure, match="its tensors are empty, or its grid has a zero"):
            tune_task(task, lambda tally: None)


class TestTheKeyAfterwards:
    def test_the_next_call_with_work_is_tuned(self) -> None:
        kernel = tuner()
        copy(kernel, 0)
        copy(kernel, 9, grid=(0,))
        copy(kernel, 100)
        assert len(kernel.configs_timings) == len(BLOCKS)
        assert stored() == (1, 1, 0)

    def test_a_choice_is_launched_and_stays(self) -> None:
        tuned = tuner()
        chosen = copy(tuned, 100)
        assert copy(tuned, 0) == chosen
        another = tuner()
        assert copy(another, 0) == chosen, "out of the store"
        assert list(another.cache.values()) == [another.best_config]

    def test_a_fallback_is_launched_and_is_still_due(self) -> None:
        kernel = tuner()
        copy(kernel, 0)
        (state,) = kernel.states
        again = failures.Retry(delay_s=-1.0)
        state.set_fallback(kernel.configs[1], again)
        assert copy(kernel, 0) == BLOCKS[1]
        assert state.decision().retry is again


def test_a_config_that_alone_launches_nothing_is_not_chosen() -> None:
    """It would be the fastest; what it computes may even be right, by chance."""
    kernel = tuner(do_bench=lambda call, quantiles: [call() or 1.0] * 3)
    assert copy(kernel, 40, grid=lambda meta: (40 // meta["BLOCK"],)) != BLOCKS[-1]
    store = open_lookup(Settings.current()).store
    ((_, trials),) = store.trials_of()
    assert {trial.config["BLOCK"] for trial in trials} == {*BLOCKS[:-1]}, "no child has tried it"
