"""Processes that launch one kernel at the same moment: forks of one that has imported everything.

Each line on standard input is one round: how many processes, a directory, their environment, and
whether they launch twice. They print a line of JSON for each launch: the process, the config that
it launched, how many configs it measured, and its warnings. The second launch waits for an empty
line, and by its clock what was postponed is due. When all have ended, a line `null` follows.

While the file `hold` is in the directory, the first measurement of the third config takes it away,
and ends when the pipe `gate` has been written to.
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
from safetune.miss import failures

SIZE = 100
BLOCKS = (16, 32, 64, 128)


def hold(arguments: dict[str, object], reset_only: bool = False) -> None:
    folder = Path(os.environ["HERD_FOLDER"])
    try:
        os.unlink(folder / "hold")
    except FileNotFoundError:
        return
    with open(folder / "gate") as gate:
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


def launch(heard: Heard) -> dict[str, object]:
    heard.lines = []
    x = torch.ones(SIZE)
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        double[lambda meta: (triton.cdiv(SIZE, meta["BLOCK"]),)](x, SIZE)
    assert (x == 2).all()
    measured = [re.search(r"(\d+) of \d+ configs measured", line) for line in heard.lines]
    return {
        "pid": os.getpid(),
        "block": double.best_config.kwargs["BLOCK"],
        "measured": sum(int(found[1]) for found in measured if found),
        "started": len(started),
        "seconds": time.monotonic() - begin,
        "warnings": [str(each.message) for each in caught],
    }


def work(heard: Heard, signals: list[int]) -> None:
    for number, signal in enumerate(signals):
        os.read(signal, 1)  # until the last writer is gone
        if number:
            failures.clock = lambda: time.monotonic() + 2 * failures.RETRY_S
        os.write(1, (json.dumps(launch(heard)) + "\n").encode())


def play(count: int, environment: dict[str, str], twice: bool, heard: Heard) -> None:
    pipes = [os.pipe() for _ in range(1 + twice)]
    children = []
    for _ in range(count):
        if not (pid := os.fork()):
            for _, writer in pipes:
                os.close(writer)
            os.environ.update(environment)
            work(heard, [reader for reader, _ in pipes])
            sys.exit(0)
        children.append(pid)
    for number, (_, writer) in enumerate(pipes):
        if number:
            sys.stdin.readline()
        os.close(writer)
    for pid in children:
        os.waitpid(pid, 0)
    for reader, _ in pipes:
        os.close(reader)


def main() -> None:
    torch.set_num_threads(1)
    heard = Heard()
    logger = logging.getLogger("safetune")
    logger.setLevel(logging.INFO)
    logger.addHandler(heard)
    while line := sys.stdin.readline():
        count, folder, environment, twice = json.loads(line)
        environment = {**environment, "HERD_FOLDER": folder}
        environment["SAFETUNE_CACHE_DIR"] = str(Path(folder, "store"))
        play(count, environment, twice, heard)
        os.write(1, b"null\n")


if __name__ == "__main__":
    main()
