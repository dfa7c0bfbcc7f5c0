"""Two keys of five configs; at one config of the second key a hook waits for the test."""

import os

import plain
import torch
import triton

from safetune import Workload, safetune


def wait_for_the_test(arguments):
    """Tell the test who runs this, and wait; return at once where no test waits for this config."""
    wanted = (300, int(os.environ.get("TEST_WAIT_AT", "0")))
    if (arguments["N"], arguments["BLOCK"]) != wanted or not os.path.exists(
        os.environ["TEST_THERE"]
    ):
        return
    with open(os.environ["TEST_THERE"], "w") as fifo:
        fifo.write(f"{os.getpid()} {os.getppid()} ")
    with open(os.environ["TEST_BACK"]) as fifo:
        fifo.read()


BLOCKS = (64, 48, 4, 128, 256)  # 48 is not a power of two, and 4 is slow
CONFIGS = [triton.Config({"BLOCK": block}, pre_hook=wait_for_the_test) for block in BLOCKS]

add_one = safetune(configs=CONFIGS, key=["N"], run_timeout_s=200)(plain.add_one)


@add_one.workload
def vectors(device, dtype):
    for name, count in {"first": 100, "second": 300}.items():
        yield Workload(name, plain.grid, (torch.zeros(count, device=device, dtype=dtype), count))
