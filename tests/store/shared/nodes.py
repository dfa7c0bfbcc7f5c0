"""Several "nodes" of one cluster: process trees with a HOME and a cache directory of their own.

    nodes.py DIRECTORY PROCESSES SECONDS URL [URL ...]

One node per URL of the shared store, for which a process waits a number of seconds. Each line on
standard input is a JSON list of numbers: every process launches the kernel for each, and one line
comes back: for each process its node, the config of each number, its warnings and the seconds it
took.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.store.shared import layer, postgres, puller


@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


def bench(launch: Any, quantiles: Any) -> list[float]:
    """No two nodes measure alike: which config is fastest is drawn."""
    launch()
    return [1.0 + int.from_bytes(os.urandom(1), "big")] * 3


kernel = safetune(
    configs=[triton.Config({"BLOCK": block}) for block in (16, 32, 64, 128)],
    key=["n"],
    do_bench=bench,
)(copy_kernel)


def launch(n: int) -> int:
    src, dst = torch.arange(n, dtype=torch.float32), torch.zeros(n)
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](dst, src, n)
    assert torch.equal(dst, src)
    return int(kernel.best_config.kwargs["BLOCK"])


def process(node: int, home: Path, wait_s: float, url: str, commands: Any, answers: Any) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: gone with the launcher
    layer.ANSWER_S = puller.FIRST_S = postgres.FULL_FOR_S = wait_s
    postgres._DEFAULTS["connect_timeout"] = str(int(wait_s))
    os.environ.update(HOME=str(home), SAFETUNE_CACHE_DIR=str(home / "cache"), SAFETUNE_SHARED=url)
    while (numbers := commands.recv()) is not None:
        begin = time.monotonic()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = {number: launch(number) for number in numbers}
        seconds = time.monotonic() - begin
        answers.send(
            {
                "node": node,
                "found": found,
                "said": [str(e.message) for e in said if e.category is not ResourceWarning],
                "seconds": seconds,
            }
        )


def main() -> None:
    directory, count = Path(sys.argv[1]), int(sys.argv[2])
    nodes = zip(map(float, sys.argv[3::2]), sys.argv[4::2], strict=True)
    fork = multiprocessing.get_context("fork")
    running = []
    for node, (wait_s, url) in enumerate(nodes):
        home = directory / f"node{node}"
        home.mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            (commands, theirs), (answers, mine) = fork.Pipe(), fork.Pipe()
            child = fork.Process(target=process, args=(node, home, wait_s, url, theirs, mine))
            child.start()
            running.append((child, commands, answers))
    for line in sys.stdin:
        for _, commands, _ in running:
            commands.send(json.loads(line))
        print(json.dumps([answers.recv() for _, _, answers in running]), flush=True)
    for child, commands, _ in running:
        commands.send(None)
        child.join()


if __name__ == "__main__":
    main()
