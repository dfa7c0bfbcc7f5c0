"""Kernels that hang in a child: how long they are waited for, and which run all the same."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import NoWorkingConfig, TuningWarning, safetune
from safetune.miss import reporting, resolve
from safetune.miss.resolve import Miss
from safetune.outcome import Outcome, Verdict
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from safetune.tuning.requests import Limits

LIMIT_S = 2.0
N = 32


@triton.jit
def by_load(ask, flag, y, n, BLOCK: tl.constexpr):
    tl.store(ask, 1)
    while tl.load(flag) == 0:
        pass
    tl.store(y + tl.arange(0, 32), 1.0, mask=tl.arange(0, 32) < n)


@triton.jit
def by_lock(ask, flag, y, n, BLOCK: tl.constexpr):
    tl.store(ask, 1)
    while tl.atomic_cas(flag, 1, 2) == 0:
        pass
    tl.store(y + tl.arange(0, 32), 1.0, mask=tl.arange(0, 32) < n)


@triton.jit
def _peek(flag):
    return tl.load(flag, volatile=True)


@triton.jit
def by_callee(ask, flag, y, n, BLOCK: tl.constexpr):
    tl.store(ask, 1)
    ready = _peek(flag)
    while ready == 0:
        ready = _peek(flag)
    tl.store(y + tl.arange(0, 32), 1.0, mask=tl.arange(0, 32) < n)


@triton.jit
def stuck(y, n, BLOCK: tl.constexpr):
    at = 0
    while at < n:
        at += 0 * BLOCK
    tl.store(y + tl.arange(0, 32), 1.0, mask=tl.arange(0, 32) < n)


@triton.jit
def stuck_below_64(y, n, BLOCK: tl.constexpr):
    at = 0
    while at + BLOCK < 64:
        at += 0
    tl.store(y + tl.arange(0, 32), 1.0, mask=tl.arange(0, 32) < n)


def decorated(function: Any, *blocks: int, limit_s: float = LIMIT_S, **options: Any) -> Any:
    configs = [triton.Config({"BLOCK": block}) for block in blocks]
    return safetune(configs, ["n"], run_timeout_s=limit_s, **options)(function)


def details(kernel: Any, *args: Any) -> list[str]:
    """What is stored of each config, in the order of the list."""
    request = Miss(kernel, args, {"grid": (1,)}).request()
    trials = open_lookup(Settings.current()).store.trials(request.key.digest)
    stored = {trial.config_digest: trial.outcome for trial in trials}
    return [
        outcome.detail if outcome.verdict is Verdict.TIMEOUT else outcome.label
        for outcome in (stored[digest] for digest in request.by_digest if digest in stored)
    ]


@pytest.fixture
def peer() -> Iterator[Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """A question and its answer, which another thread of this process gives, and no child."""
    over = threading.Event()
    threads = []

    def begin() -> tuple[torch.Tensor, torch.Tensor]:
        ask, flag = torch.zeros(2, 1, dtype=torch.int32)

        def answer() -> None:
            while not over.wait(0.001):
                flag.copy_(ask)

        threads.append(threading.Thread(target=answer))
        threads[-1].start()
        return ask, flag

    yield begin
    over.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("function", [by_load, by_lock, by_callee])
def test_a_kernel_that_waits_runs_in_the_caller(peer: Any, function: Any) -> None:
    """The first launch warns once; later ones, of other calls of the key too, are at once."""
    kernel = decorated(function, 16, 32)
    y = torch.zeros(N)
    with pytest.warns(TuningWarning, match="first config") as caught:
        kernel[(1,)](*peer(), y, N)
    assert y.unique().tolist() == [1.0]
    [warning] = [w for w in caught if issubclass(w.category, TuningWarning)]
    name = function.fn.__name__
    assert "no answer within 2 s" in str(warning.message)
    assert f"SAFETUNE_LEAVE={name}" in str(warning.message)

    begun = reporting.tunings.begun
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (N, N + 1):
            y = torch.zeros(size)
            kernel[(1,)](*peer(), y, N)
            assert y[:N].unique().tolist() == [1.0]
    assert reporting.tunings.begun == begun
    assert kernel.best_config is kernel.configs[0]


def test_the_search_for_one_that_answers_ends() -> None:
    """After the first that hangs the others have a share, and in all twice the limit."""
    kernel = decorated(stuck, *range(1, 13))
    args = torch.zeros(N), N
    with pytest.raises(NoWorkingConfig, match="SAFETUNE_LEAVE=stuck leaves it") as raised:
        kernel[(1,)](*args)

    assert details(kernel, *args) == ["2 s", "1 s", "1 s", *["0 s"] * 9]
    messages = [outcome.message for _, outcome in raised.value.outcomes]
    assert messages[:2] == ["no answer within 2 s", "no answer within 1 s"]
    assert {*messages[3:]} == {"not tried: no config answered within 4 s"}
    assert raised.value.measured == 3


def test_a_search_within_a_budget_ends_too() -> None:
    kernel = decorated(stuck, *range(1, 41), budget=20)
    args = torch.zeros(N), N
    with pytest.raises(NoWorkingConfig) as raised:
        kernel[(1,)](*args)

    assert raised.value.measured == 3
    assert sorted(details(kernel, *args)) == sorted(["2 s", "1 s", "1 s", *["0 s"] * 37])


def test_one_that_answers_is_chosen_and_the_others_get_their_time_once() -> None:
    blocks = (16, 32, 64, 128)
    args = torch.zeros(N), N
    kernel = decorated(stuck_below_64, *blocks)
    kernel[(1,)](*args)
    assert kernel.best_config.kwargs["BLOCK"] in (64, 128)
    assert details(kernel, *args) == ["2 s", "1 s", "ok", "ok"]

    kernel = decorated(stuck_below_64, *blocks)
    kernel[(1,)](*args)
    assert details(kernel, *args) == ["2 s", "2 s", "ok", "ok"]

    begun = reporting.tunings.begun
    kernel = decorated(stuck_below_64, *blocks)
    kernel[(1,)](*args)
    assert reporting.tunings.begun == begun


def test_a_tuning_that_was_asked_for_never_launches() -> None:
    """No thread answers here: a launch in this process would not end."""
    kernel = decorated(by_load, 16, 32)
    with resolve.waiting(), pytest.raises(NoWorkingConfig):
        kernel[(1,)](*torch.zeros(2, 1, dtype=torch.int32), torch.zeros(N), N)


def hung(seconds: float) -> Outcome:
    return Outcome(Verdict.TIMEOUT, detail=f"{seconds:g} s")


OK, FAILED = Outcome(Verdict.OK), Outcome(Verdict.LAUNCH_ERROR)
SLOW = Outcome(Verdict.COMPILE_TIMEOUT, detail="300 s")


@pytest.mark.parametrize(
    ("limit_s", "outcomes", "next_s"),
    [
        (30.0, [], 30.0),
        (30.0, [FAILED, SLOW, SLOW], 30.0),  # a compile timeout says nothing of the launch
        (30.0, [hung(30)], 3.0),
        (30.0, [hung(30), FAILED, hung(3)], 3.0),
        (30.0, [hung(30), *[hung(3)] * 9], 3.0),
        (30.0, [hung(30), *[hung(3)] * 10], 0.0),
        (30.0, [hung(30), OK], 30.0),
        (30.0, [hung(30), *[hung(3)] * 10, OK], 30.0),
        (5.0, [hung(5)], 1.0),
        (0.5, [hung(0.5)], 0.5),
        (0.5, [hung(0.5), hung(0.5)], 0.0),
        (60.0, [hung(30)], 6.0),
    ],
)
def test_the_time_that_the_next_config_gets(
    limit_s: float, outcomes: list[Outcome], next_s: float
) -> None:
    assert Limits(run_timeout_s=limit_s).to_answer(outcomes) == next_s
