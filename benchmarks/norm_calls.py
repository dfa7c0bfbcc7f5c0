"""The calls that are compared, on their operands, and how to have all of them compiled before.

FLA compiles each config of each shape one after the other, torch.compile each shape: with sixteen
CPUs, a minute in parallel instead of ten.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Sequence

import device_time
import norm_systems
import norm_timing
import recording
from norm_systems import Operands

#: A forward pass and its backward pass; and those that add a residual first.
OPS = ("forward", "backward")
RESIDUAL_OPS = ("prenorm", "dresidual")

#: The systems, that whose calls take the longest to compile first.
SLOWEST_FIRST = ("compile_max", "fla", "compile", "ours", "liger", "quack", "torch")

#: What is not measured: one of the configs of FLA, of two warps, takes a minute to compile there.
LEFT_OUT = {("fla", "32768")}


def systems_of(part: str, systems: Sequence[str]) -> list[str]:
    """Return the systems that are measured in a part."""
    columns = part.rpartition("x")[2]
    return [system for system in systems if (system, columns) not in LEFT_OUT]


def calls_of(
    op: str, norm: norm_systems.Norm, operands: Sequence[Operands]
) -> list[norm_timing.Call]:
    """Return one call for each set of operands; for the gradients, forward has run already."""
    import torch

    def gradient(given: Operands) -> norm_timing.Call:
        leaves = [t for t in (given.x, given.weight, given.bias) if t is not None]
        outputs, incoming = norm(given), [given.dy]
        if op == "dresidual":
            leaves.append(given.residual)
            incoming.append(given.dresidual)
        return lambda: torch.autograd.grad(outputs, leaves, incoming, retain_graph=True)

    def result(given: Operands) -> norm_timing.Call:
        return lambda: norm(given)

    return [(result if op in ("forward", "prenorm") else gradient)(given) for given in operands]


def operands_of(part: str) -> list[Operands]:
    """Return the sets of operands that the calls of one part go round."""
    norm, shape = part.split("-")
    height, columns = map(int, shape.split("x"))
    if recording.interpreted():
        height, columns = min(height, 8), min(columns, 64)
    count = norm_timing.operand_sets(2 * height * columns * 2)
    device = recording.torch_device()
    return [Operands.random(height, columns, norm == "rms", device) for _ in range(count)]


def warm(part: str, ops: Sequence[str], system: str) -> str:
    """Compile what a system needs for a part, into the caches on disk; time nothing."""
    began, problem = time.monotonic(), ""
    try:
        function = norm_systems.make(system, part.startswith("rms"), ops == RESIDUAL_OPS)
        for op in ops:
            calls_of(op, function, operands_of(part)[:1])[0]()
        device_time.synchronize()
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    return f"{part} {system} {time.monotonic() - began:.0f} s {problem}"


def warm_all(parts: Sequence[str], options: argparse.Namespace) -> None:
    """Compile for these parts in parallel. Choices that were made meanwhile are not kept."""
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        options.workers, mp_context=context, initializer=_one_thread
    ) as pool:
        jobs = [
            pool.submit(warm, part, options.ops, system)
            for system in sorted(options.systems, key=SLOWEST_FIRST.index)
            for part in parts
            if system in systems_of(part, options.systems)
        ]
        for job in concurrent.futures.as_completed(jobs):
            print(f"{time.monotonic() - began:4.0f} s", job.exception() or job.result(), flush=True)


def _one_thread() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # Ours: the shipped choice, or else the first config. A tuning compiles in parallel as it is.
    os.environ["SAFETUNE_MODE"] = "frozen"
