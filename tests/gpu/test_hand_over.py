"""Arguments handed to a child on the device: they are right, cannot be written, and are freed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import safetune as package
from safetune import safetune
from safetune.child.arguments import Arguments
from safetune.inputs import hand_over
from safetune.inputs.snapshot import Snapshot

pytestmark = pytest.mark.gpu

MIB = 1 << 20

#: Maps shared memory as a child does, and writes to it with a kernel.
WRITER = """
import sys
from safetune.both.cuda_driver import DriverError, load
from safetune.both.device_bytes import DeviceBytes, View
fd, size, offset = map(int, sys.argv[1:])
where = DeviceBytes(load(), 0, "cuda:0")
mapped = where.mapped(fd, size)
print(where.read(mapped.address + offset, 4).hex(), flush=True)
try:
    where.fill(View.of(mapped.address + offset, 4, (1,), (1,)), 0)
    print(where.read(mapped.address + offset, 4).hex())
except DriverError as error:
    print(str(error).rpartition(" ")[2])
"""


@pytest.fixture(autouse=True)
def _needs_a_gpu(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs a GPU: the interpreter's arguments are on the host")


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[hand_over.HandOver]:
    """What was handed over on the device since the test began."""
    found = []
    copied = hand_over.copied

    def noting(*args: Any) -> hand_over.HandOver:
        found.append(copied(*args))
        return found[-1]

    monkeypatch.setattr(hand_over, "copied", noting)
    return found


def tune(kernels: Any, n: int, *hooks: Any) -> tuple[torch.Tensor, ...]:
    configs = [triton.Config({"BLOCK": 1024}, num_warps=4, pre_hook=hook) for hook in hooks]
    configs += [triton.Config({"BLOCK": block}) for block in (256, 512)]
    kernel = safetune(configs=configs, key=["n"])(kernels.add_kernel)
    x, y = (torch.randn(n, device="cuda") for _ in range(2))
    out = torch.full((n,), 7.0, device="cuda")
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n)
    assert torch.equal(out, x + y)
    return x, y, out


def free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def test_all_of_it_is_freed_when_the_tuning_and_its_child_have_ended(
    kernels: Any,
    handed_over: list[hand_over.HandOver],
    trials: Callable[[], list[Any]],
    children_end: Callable[[float], list[int]],
) -> None:
    """Also where a config has killed the child, and the next one got the same bits."""

    def die(arguments: dict[str, Any]) -> None:
        os.kill(os.getpid(), 9)

    tune(kernels, MIB, die)  # what this process needs itself is loaded
    assert children_end(30.0) == []
    before = free()
    held = tune(kernels, 64 * MIB, die)
    handed = handed_over[-1]
    assert sum(memory.size for _, memory in handed.memories) >= 3 * 256 * MIB
    assert sorted(trial.verdict for trial in trials()) == ["died"] * 2 + ["ok"] * 4
    del held
    assert children_end(30.0) == []
    assert before - free() < 64 * MIB


def test_no_kernel_of_a_child_can_write_to_it() -> None:
    x = torch.arange(1, 100_000, device="cuda", dtype=torch.int32)
    snapshot = Snapshot([x], rooms={"cuda:0": 1 << 30})
    (fd,), ((_, size),) = snapshot.shared_fds, snapshot.layout.shared
    offset = snapshot.layout.blocks[0].place.offset
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", WRITER, *map(str, (fd, size, offset))],
            pass_fds=[fd],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1])},
        )
        said.append(done.stdout.split())
    snapshot.close()
    assert said == [["01000000", "CUDA_ERROR_ILLEGAL_ADDRESS"]] * 2
    assert torch.equal(x.cpu(), torch.arange(1, 100_000, dtype=torch.int32))


def test_beside_a_capture_and_behind_what_is_queued(context_answers: Callable[[], None]) -> None:
    x = torch.zeros(1 << 20, device="cuda")
    captured = torch.ones(16, device="cuda")
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        captured += 1
        snapshots: list[Snapshot] = []

        def copy() -> None:
            with torch.cuda.stream(stream):
                snapshots.append(Snapshot([x, x[1:]], rooms={"cuda:0": 1 << 30}))

        thread = threading.Thread(target=copy)
        thread.start()
        thread.join(60)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, torch.full_like(captured, 2.0))
    (snapshot,) = snapshots
    layout = replace(snapshot.layout, fds=tuple(map(os.dup, snapshot.shared_fds)))
    assert layout.shared
    tensors = Arguments(layout, os.dup(snapshot.fd)).tensors
    snapshot.close()
    assert not tensors[0].any()
    assert tensors[1].shape == x[1:].shape
    context_answers()
