"""Host time of one launch with 3, 13 and 24 arguments: triton.jit, triton.autotune, safetune, bare.

All in one process, on the same tensors, with every choice known: the time of a batch of
asynchronous launches over its size, the device idle before each batch, and the batch short enough
that the launch queue does not fill. The variants take turns, another one first each round; a figure
is a ratio of medians.

`run` is the compiled kernel's own launcher, the least a launch from Python can cost: it skips what
tells one specialisation from another.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import device_time
import recording
from recording import Figures, Row

COUNTS = (3, 13, 24)
ELEMENTS = 1024
BLOCK = 128

Launch = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One kernel and what it is called with, without what a config sets (BLOCK and num_warps).

    Attributes:
        values: the arguments before the constexprs, in order.
        constants: the constexprs, BLOCK excepted; BLOCK is the kernel's last parameter.
    """

    kernel: Any
    values: tuple[Any, ...]
    constants: dict[str, Any]
    key: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many arguments the kernel has."""
        return len(self.kernel.arg_names)


def figures(rows: Sequence[Row]) -> Figures:
    """Return safetune's and triton.autotune's time over triton.jit's, and every median."""
    found: Figures = {}
    # Older results have launches with names, too.
    positional = [row for row in rows if row.get("style", "positional") == "positional"]
    times = recording.medians(positional, "microseconds", "arguments", "variant")
    for count in COUNTS:
        if (count, "jit") not in times:
            continue
        for variant, name in (("safetune", "ratio_to_jit"), ("autotune", "autotune_ratio_to_jit")):
            if (count, variant) in times:
                found[f"{name}_{count}"] = times[count, variant] / times[count, "jit"]
    for count, variant in times:
        found[f"us_{variant}_{count}"] = times[count, variant]
    return found


def variants_of(case: Case) -> dict[str, Launch]:
    """Return a function that launches the kernel once, for each way of launching it."""
    import triton

    from safetune import safetune

    configs = [triton.Config({"BLOCK": BLOCK}, num_warps=warps) for warps in (4, 8)]
    stock = triton.autotune(configs=configs, key=list(case.key), do_bench=_no_bench)
    ours = safetune(configs=configs, key=list(case.key))
    found = {
        "jit": _launcher(case.kernel, case, BLOCK=BLOCK, num_warps=4),
        "autotune": _launcher(stock(case.kernel), case),
        "safetune": _launcher(ours(case.kernel), case),
    }
    if not recording.interpreted():
        found["run"] = _bare(case)
    for launch in found.values():
        launch()  # compiles, and tunes
    return found


def _launcher(kernel: Any, case: Case, **options: Any) -> Launch:
    grid = (1,)
    return lambda: kernel[grid](*case.values, **case.constants, **options)


def _bare(case: Case) -> Launch:
    """The compiled kernel's launcher; constexprs are among its arguments, and are ignored."""
    import torch
    from triton import knobs

    compiled: Any = _launcher(case.kernel, case, BLOCK=BLOCK, num_warps=4)()
    every = (*case.values, *case.constants.values(), BLOCK)
    stream = torch.cuda.current_stream().cuda_stream
    hooks = (None, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    start = (1, 1, 1, stream, compiled.function, compiled.packed_metadata, *hooks)
    return lambda: compiled.run(*start, *every)


def _no_bench(launch: Launch, quantiles: Any) -> list[float]:
    """The hit path is timed here: any choice will do, and a quick one saves the GPU's time."""
    launch()
    return [1.0, 1.0, 1.0]


def measure(options: argparse.Namespace) -> list[Row]:
    """Return one row for each round, case and variant."""
    rows = []
    gc.collect()
    gc.disable()  # a collection takes longer than a batch
    for case in cases(recording.torch_device()):
        variants = variants_of(case)
        for launch in variants.values():
            device_time.host_us(launch, options.launches)
        for turn in range(options.rounds):
            for variant in recording.in_turn(list(variants), turn):
                microseconds = device_time.host_us(variants[variant], options.launches)
                row = {"arguments": case.count, "variant": variant, "round": turn}
                rows.append({**row, "microseconds": microseconds})
    gc.enable()
    return rows


@functools.cache
def _kernels() -> tuple[Any, Any, Any]:
    import launch_kernels as kernels

    return kernels.kernel_3, kernels.kernel_13, kernels.kernel_24


def cases(device: str) -> list[Case]:
    """Return the three kernels with pointers, integers, floats and constexprs to call them with."""
    import torch

    few, some, many = _kernels()
    data = [torch.zeros(ELEMENTS, device=device) for _ in range(10)]
    halves = [torch.zeros(ELEMENTS, device=device, dtype=torch.bfloat16) for _ in range(2)]
    return [
        Case(few, (data[0], ELEMENTS), {}, ("n",)),
        Case(
            some,
            (*data[:4], halves[0], ELEMENTS, 64, 128, 1e-5),
            {"D": 64, "HAS_BIAS": True, "ACTIVATION": "none"},
            ("n", "D", "HAS_BIAS"),
        ),
        Case(
            many,
            (*data[:8], *halves, ELEMENTS, 64, 1, 128, 256, 3, 1e-5, 0.5),
            {"D": 64, "G": 2, "HAS_BIAS": True, "HAS_RESIDUAL": False, "ACTIVATION": "none"},
            ("n", "D", "G", "HAS_BIAS", "HAS_RESIDUAL"),
        ),
    ]


def main() -> None:
    """Measure, print and record."""
    parser = recording.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=60, help="batches of each variant")
    parser.add_argument("--launches", type=int, default=200, help="launches per batch")
    options = parser.parse_args()
    result = recording.begin("launch_overhead")
    result.rows = measure(options)
    recording.report(result, result.save(recording.output_folder(options), figures))


if __name__ == "__main__":
    main()
