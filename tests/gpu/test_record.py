"""`SAFETUNE_MODE=record` on a GPU: launches are timed there, without waiting for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import safetune
from safetune.frontend import call_counts
from safetune.settings import Settings
from safetune.store.lookup import open_lookup

pytestmark = pytest.mark.gpu

#: A float32 element is read and written; no GPU moves 20 TB, nor less than 0.1 TB in a second.
BYTES, FASTEST, SLOWEST = 8, 20e12, 0.1e12


@safetune.autotune(configs=[triton.Config({"BLOCK": block}) for block in (512, 1024)], key=["n"])
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, tl.load(x + offset, mask=offset < n) * 2, mask=offset < n)


def launch(n: int, times: int) -> None:
    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(n, meta["BLOCK"]),)

    x = torch.ones(n, device="cuda")
    for _ in range(times):
        double[grid](x, n)


def test_launches_are_timed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETUNE_MODE", "record")
    small, large = 1 << 20, 1 << 28
    launch(small, 20)
    launch(large, 20)
    torch.cuda.synchronize()

    call_counts.end()

    calls = open_lookup(Settings.current()).store.calls()
    counts = {call.arguments["call"]["values"][0][1]: call.count for call in calls}
    assert {n: (count.calls, count.timed) for n, count in counts.items()} == {
        small: (20, 5),
        large: (20, 5),
    }
    seconds = (counts[large].each_ms or 0.0) / 1e3
    assert large * BYTES / FASTEST < seconds < large * BYTES / SLOWEST
    assert (counts[small].each_ms or 0.0) < (counts[large].each_ms or 0.0)


def test_a_capture_is_counted_once_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETUNE_MODE", "record")
    launch(4096, 1)
    graph, x = torch.cuda.CUDAGraph(), torch.ones(4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        double[(8,)](x, 4096)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()

    call_counts.end()

    (call,) = open_lookup(Settings.current()).store.calls()
    assert (call.count.calls, call.count.timed) == (2, 0)
