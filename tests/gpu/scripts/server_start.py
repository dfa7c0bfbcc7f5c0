"""Start as a server of language models does, and report what safetune did at each step.

Profile the memory, take what is left of 95 % of the card, warm up, capture 20 sizes, replay them.
"""

import json
import os
import warnings
from pathlib import Path

import torch
import triton
import triton.language as tl

import safetune

SIZES = [1000 * number for number in range(1, 21)]


@safetune.safetune(
    configs=[triton.Config({"BLOCK": block}) for block in (256, 512, 1024)], key=["n"]
)
@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask) + tl.load(y + offset, mask=mask)
    tl.store(out + offset, value, mask=mask)


def step(n):
    add_kernel[lambda m: (triton.cdiv(n, m["BLOCK"]),)](x, y, out, n)


def beside_torch():
    """Bytes of the card that torch's allocator does not account for."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def measuring_children():
    """The processes that a fork server of ours with torch has forked: they may have a context."""
    parents, torches = {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if state not in "ZX":
            parents[int(folder.name)] = int(parent)
            if b"worker_main" in command and b'"torch"' in command:
                torches.add(int(folder.name))
    return [p for p in torches if parents[p] in torches and parents[parents[p]] == os.getpid()]


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x, y = (torch.randn(SIZES[-1], device="cuda") for _ in range(2))
    out = torch.zeros_like(x)
    expected = x + y
    torch.equal(out, expected)
    torch.cuda.synchronize()
    before = beside_torch()

    safetune.prepare(step, SIZES[-1])
    children, beside = len(measuring_children()), beside_torch() - before

    free, total = torch.cuda.mem_get_info()
    cache = torch.empty(int(0.95 * total) - (total - free), dtype=torch.uint8, device="cuda")
    filled = 1 - torch.cuda.mem_get_info()[0] / total

    warmed = safetune.prepare(lambda: [step(n) for n in SIZES])

    pool = torch.cuda.graph_pool_handle()
    graphs, reports = [], []
    for n in reversed(SIZES):
        graph = torch.cuda.CUDAGraph()
        with safetune.graph(graph, pool=pool, name=f"size {n}") as captured:
            step(n)
        graphs.append((n, graph))
        reports.append(captured.report)

    wrong = []
    for n, graph in graphs:
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        if not (torch.equal(out[:n], expected[:n]) and not out[n:].any()):
            wrong.append(n)

report = {
    "children_at_profiling": children,
    "unaccounted_bytes_at_profiling": beside,
    "filled": filled,
    "tunings_at_warm_up": warmed.tunings,
    "unsettled": [key.key for key in warmed.unsettled],
    "captured": len(graphs),
    "misses": sum(len(each.misses) for each in reports),
    "tunings_during_capture": sum(each.tunings for each in reports),
    "scratch_allocations": sum(each.scratch_allocations for each in reports),
    "warnings": [str(warning.message) for warning in caught],
    "wrong": wrong,
}
print(json.dumps(report))
