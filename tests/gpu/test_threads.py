"""Hits and misses of one kernel from eight threads at once, each on a stream of its own."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

from safetune import safetune

pytestmark = pytest.mark.gpu

THREADS = 8
LAUNCHES = 60
SIZES = (1000, 4096, 10_000, 65_536, 100_003)


def test_eight_threads_hit_and_miss(
    kernels: Any,
    device: str,
    tunings: Callable[[], list[str]],
    choices: Callable[[], list[Any]],
    trials: Callable[[], list[Any]],
    context_answers: Callable[[], None],
) -> None:
    """Every result is right, and every key was tuned once, by whichever thread came first."""
    launches = LAUNCHES if device == "cuda" else 2
    configs = [triton.Config({"BLOCK": block}) for block in (256, 512, 1024)]
    kernel = safetune(configs=configs, key=["n"])(kernels.add_kernel)
    barrier = threading.Barrier(THREADS)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        order = random.Random(number)
        try:
            barrier.wait(60)
            for _ in range(launches):
                _launch_and_check(kernel, device, order.choice(SIZES), order.random())
        except BaseException as error:  # a thread's exception is the test's
            errors.append(error)

    def on_a_stream(number: int) -> None:
        if device == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                work(number)
        else:
            work(number)

    threads = [threading.Thread(target=on_a_stream, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not [thread for thread in threads if thread.is_alive()]
    assert not errors, errors

    keys = [key for key, _ in choices()]
    assert len(keys) == len(set(keys)) == len(tunings())
    assert all(measured == len(configs) for _, measured in choices())
    assert len(trials()) == len(keys) * len(configs)
    assert {trial.verdict for trial in trials()} == {"ok"}
    if device == "cuda":
        assert len(keys) == len(SIZES)
    context_answers()


def _launch_and_check(kernel: Any, device: str, n: int, value: float) -> None:
    x = torch.full((n,), value, device=device)
    y = torch.arange(n, device=device, dtype=torch.float32)
    out = torch.full((n + 16,), -1.0, device=device)
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n)
    assert torch.equal(out[:n], x + y)
    assert torch.equal(out[n:], torch.full_like(out[n:], -1.0))
