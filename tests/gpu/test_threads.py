"""Tuning from several threads: eight at once, autograd's, and one beside a graph capture."""

from __future__ import annotations

import random
import threading
import warnings
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


@pytest.mark.fault("two-threads")
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


@pytest.mark.fault("autograd-backward")
def test_a_backward_pass_tunes_on_autograd_s_thread(
    kernels: Any,
    device: str,
    trials: Callable[[], list[Any]],
    context_answers: Callable[[], None],
) -> None:
    """The thread that starts the child is autograd's own, and so is the stream."""
    configs = [triton.Config({"BLOCK": block}) for block in (256, 512)]
    kernel = safetune(configs=configs, key=["n"])(kernels.add_kernel)
    threads: list[int] = []

    class Add(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            threads.append(threading.get_ident())
            out, n = torch.zeros_like(gradient), gradient.numel()
            kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](gradient, gradient, out, n)
            return out, None

    incoming = torch.randn(SIZES[0], device=device)
    for _ in range(2):
        x = torch.randn(SIZES[0], device=device, requires_grad=True)
        Add.apply(x, x.detach()).backward(incoming)
        assert x.grad is not None
        assert torch.equal(x.grad, incoming * 2)
    assert (threading.get_ident() in threads) == (device == "cpu")
    assert [trial.verdict for trial in trials()] == ["ok"] * len(configs)
    context_answers()


@pytest.mark.fault("capture-elsewhere")
def test_beside_a_capture_in_global_mode(
    kernels: Any,
    device: str,
    trials: Callable[[], list[Any]],
    context_answers: Callable[[], None],
) -> None:
    """In that mode CUDA refuses every thread what might wait for the device; the capture and the
    tuning both finish, and the graph replays what was captured.
    """
    if device == "cpu":
        pytest.skip("needs a GPU: there is nothing to capture")
    captured = torch.ones(1000, device=device)
    x, y = (torch.randn(SIZES[0], device=device) for _ in range(2))
    out = torch.zeros_like(x)
    ours, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    captured.add_(1).mul_(2).fill_(1)  # their kernels are loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    capturing, tuned = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def capture() -> None:
        try:
            with torch.cuda.graph(graph, stream=theirs, capture_error_mode="global"):
                captured.add_(1)
                capturing.set()
                assert tuned.wait(120)
                captured.mul_(2)
        except BaseException as error:  # a thread's exception is the test's
            errors.append(error)
        finally:
            capturing.set()

    configs = [triton.Config({"BLOCK": block}) for block in (256, 512)]
    kernel = safetune(configs=configs, key=["n"])(kernels.add_kernel)
    thread = threading.Thread(target=capture)
    thread.start()
    try:
        assert capturing.wait(60)
        with torch.cuda.stream(ours), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernel[lambda meta: (triton.cdiv(SIZES[0], meta["BLOCK"]),)](x, y, out, SIZES[0])
    finally:
        tuned.set()
        thread.join(120)
    assert not errors, (errors, [str(each.message) for each in caught])
    assert [str(each.message) for each in caught if "not tuned" in str(each.message)] == []
    assert [trial.verdict for trial in trials()] == ["ok"] * len(configs)
    torch.cuda.synchronize()
    assert torch.equal(out, x + y)
    graph.replay()
    assert torch.equal(captured, torch.full_like(captured, 4.0))
    context_answers()


def _launch_and_check(kernel: Any, device: str, n: int, value: float) -> None:
    x = torch.full((n,), value, device=device)
    y = torch.arange(n, device=device, dtype=torch.float32)
    out = torch.full((n + 16,), -1.0, device=device)
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n)
    assert torch.equal(out[:n], x + y)
    assert torch.equal(out[n:], torch.full_like(out[n:], -1.0))
