"""Times of launches on a card: where the device waited for the host, the time is left out."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from safetune.both import cuda_driver
from safetune.both.device_bytes import DeviceBytes
from safetune.both.protocol import Budget
from safetune.both.timing import measure
from safetune.child.device import DeviceTimer

pytestmark = pytest.mark.gpu

#: About 0.1 ms of a card.
CYCLES = 200_000
STALL_S = 0.02


@pytest.fixture
def timer(device: str) -> Iterator[DeviceTimer]:
    if device == "cpu":
        pytest.skip("needs a GPU: the interpreter has the wall clock")
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    where = DeviceBytes(cuda_driver.load(), 0, "cuda:0")
    with where.driver.on(0):
        yield DeviceTimer(where)


def launches(stalled: int) -> Callable[[], None]:
    """Return a launch that holds the host up the first times."""
    left = [STALL_S] * stalled

    def launch() -> None:
        begun = time.perf_counter()
        while left and time.perf_counter() - begun < left[-1]:
            pass
        torch.cuda._sleep(CYCLES)
        if left:
            left.pop()

    return launch


def test_a_sample_says_for_how_long_the_device_may_have_waited(timer: DeviceTimer) -> None:
    first, *others = timer.samples(launches(1), lambda: None, lambda: None, 10)
    in_time = [sample for sample in others if not sample.waited_ms]
    assert in_time, others
    shortest = min(sample.ms for sample in in_time)
    assert first.ms > 1e3 * STALL_S / 2 > shortest
    assert first.ms - first.waited_ms < shortest * 1.5


def test_a_stall_gives_no_config_up(timer: DeviceTimer) -> None:
    quiet = measure(launches(0), lambda: None, lambda: None, timer, Budget())
    stalled = Budget(best_ms=quiet.median_ms)
    found = measure(launches(2), lambda: None, lambda: None, timer, stalled)
    assert found.stage == "screen"
    assert found.median_ms < 1.5 * quiet.median_ms


#: Has the card without a pause, with kernels that fill half of it.
OTHER = """
import torch
half = torch.cuda.get_device_properties(0).multi_processor_count // 2
x = torch.randn(half, 1 << 16, device="cuda")
print("ready", flush=True)
while True:
    for _ in range(200):
        x.cumsum_(1)
    torch.cuda.synchronize()
"""


def test_another_program_on_the_card_is_seen(timer: DeviceTimer) -> None:
    timer.is_busy()  # loads the program
    calm = [timer.is_busy() for _ in range(20)]
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        beside = [timer.is_busy() for _ in range(20)]
        other.kill()
    assert sum(calm) <= 2, calm
    assert sum(beside) >= 16, beside
