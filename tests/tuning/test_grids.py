"""Grids: the caller's code, computed once for a tuning and without a lock."""

from __future__ import annotations

from typing import Any

#: A grid launches another kernel, which a second thread has begun to tune.
SCRIPT = """
import sys, threading
import torch, triton, triton.language as tl
from safetune import safetune

def tuner(**options):
    @safetune(configs=[triton.Config({"BLOCK": 16 << i}) for i in range(2)], key=["n"], **options)
    @triton.jit
    def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
        offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)
    return copy_kernel

def programs(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)

def run(kernel, grid=programs, n=100):
    src, dst = torch.randn(n), torch.zeros(n)
    kernel[grid](dst, src, n)
    return torch.equal(dst, src)

def prune(configs, arguments, **_):
    begun.set()
    return configs

begun, results, threads = threading.Event(), [], []
inner = tuner(prune_configs_by={"early_config_prune": prune})

def start(*arguments):
    thread = threading.Thread(target=lambda: results.append(run(*arguments)), daemon=True)
    threads.append(thread)
    thread.start()

def grid(meta):
    if not begun.is_set():
        start(inner)
        begun.wait()
        results.append(run(inner))
    return programs(meta)

start(tuner(), grid)
threads[0].join(60)
threads[1].join(60)
print(results)
"""


def test_two_threads_and_a_grid_that_launches_another_kernel(fresh_process: Any) -> None:
    """Each thread tunes one kernel; neither waits for the other with a lock that it needs."""
    result = fresh_process(SCRIPT, warm=True)
    assert result.stdout.split("\n")[0] == "[True, True, True]", result.stderr
