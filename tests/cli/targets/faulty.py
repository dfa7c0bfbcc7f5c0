"""Kernels with bad configs: one that has no other, and one that works all the same."""

import ctypes
import signal

import torch
import triton
from plain import add_one, grid

from safetune import Workload, safetune


def crash(arguments):
    """Read address 0."""
    ctypes.string_at(0)


def hang(arguments):
    while True:
        signal.pause()


#: 48 is not a power of two.
HOPELESS = [triton.Config({"BLOCK": 48}), triton.Config({"BLOCK": 64}, pre_hook=crash)]

hopeless = safetune(configs=HOPELESS, key=["N"])(add_one)

mixed = safetune(
    configs=[
        triton.Config({"BLOCK": 32}),
        triton.Config({"BLOCK": 48}),
        triton.Config({"BLOCK": 64}, pre_hook=crash),
        triton.Config({"BLOCK": 128}, pre_hook=hang),
        triton.Config({"BLOCK": 256}),
    ],
    key=["x", "N"],
    run_timeout_s=5,
)(add_one)


@hopeless.workload
def for_hopeless(device, dtype):
    yield Workload("hopeless", grid, (torch.zeros(100, device=device, dtype=dtype), 100))


@mixed.workload
def for_mixed(device, dtype):
    yield Workload("mixed", grid, (torch.zeros(1000, device=device, dtype=dtype), 1000))
