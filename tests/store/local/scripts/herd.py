"""Processes that launch one kernel at the same moment: forks of one that has imported everything.

argv: how many; a directory; seconds of a heartbeat; the sizes that each launches, one key each.
Each prints a line of JSON for each of its launches: who it is, what it launched with, how many
configs it measured, and what it was told. While the file `hold` is in the directory, the first
measurement of the third config takes it away, and ends when the pipe `gate` has been written to.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import warnings
from pathlib import Path

import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.store.local import lease

COUNT, PLACE, HEARTBEAT_S = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
SIZES = [int(size) for size in sys.argv[4:]]
BLOCKS = (16, 32, 64, 128)


def hold(arguments: dict[str, object], reset_only: bool = False) -> None:
    try:
        os.unlink(PLACE / "hold")
    except FileNotFoundError:
        return
    with open(PLACE / "gate") as gate:
        gate.read()


@safetune(
    configs=[triton.Config({"BLOCK": n}, pre_hook=hold if n == 64 else None) for n in BLOCKS],
    key=["n"],
)
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n)
    tl.store(x + offsets, 2 * value, mask=offsets < n)


#: What this process has started.
started: list[str] = []
sys.addaudithook(lambda event, _: started.append(event) if event == "subprocess.Popen" else None)


class Heard(logging.Handler):
    """What the log says of tunings."""

    lines: list[str]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def launch(size: int, heard: Heard) -> dict[str, object]:
    heard.lines = []
    x = torch.ones(size)
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        double[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](x, size)
    assert (x == 2).all()
    measured = [re.search(r"(\d+) of \d+ configs measured", line) for line in heard.lines]
    return {
        "pid": os.getpid(),
        "size": size,
        "block": double.best_config.kwargs["BLOCK"],
        "measured": sum(int(found[1]) for found in measured if found),
        "started": len(started),
        "seconds": time.monotonic() - begin,
        "warnings": [str(each.message) for each in caught],
    }


def main() -> None:
    lease.HEARTBEAT_S = HEARTBEAT_S
    torch.set_num_threads(1)
    heard = Heard()
    logger = logging.getLogger("safetune")
    logger.setLevel(logging.INFO)
    logger.addHandler(heard)
    go, start = os.pipe()
    children = []
    for _ in range(COUNT):
        if not (pid := os.fork()):
            os.close(start)
            os.read(go, 1)  # until the last writer is gone
            for size in SIZES:
                os.write(1, (json.dumps(launch(size, heard)) + "\n").encode())
            sys.stdout.flush()
            sys.exit(0)
        children.append(pid)
    os.close(start)
    for pid in children:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
