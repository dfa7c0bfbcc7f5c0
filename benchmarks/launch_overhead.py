"""Host time of one launch with 3, 13 and 24 arguments: triton.jit, triton.autotune, safetune, bare.

All in one process, on the same tensors, with every choice known: the time of a batch of
asynchronous launches over its size, the device idle before each batch, and the batch short enough
that the launch queue does not fill. The variants take turns, another one first each round; a figure
is a ratio of medians.

With `heuristics`, one sets a constant: above triton.jit, below safetune's tuner, and above it.

`run` is the compiled kernel's own launcher, the least a launch from Python can cost;
`compiled` is `compiled_kernel[grid](...)`. Both skip what tells one specialisation from another.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import recording
from recording import Figures, Row

COUNTS = (3, 13, 24)
VARIANTS = (
    "jit",
    "autotune",
    "safetune",
    "heuristics_jit",
    "safetune_heuristics",
    "heuristics_safetune",
    "compiled",
    "run",
)
STYLES = ("positional", "keyword")
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
    positional = [row for row in rows if row["style"] == "positional"]
    times = recording.medians(positional, "microseconds", "arguments", "variant")
    for count in COUNTS:
        if (count, "jit") not in times:
            continue
        for variant, name in (("safetune", "ratio_to_jit"), ("autotune", "autotune_ratio_to_jit")):
            if (count, variant) in times:
                found[f"{name}_{count}"] = times[count, variant] / times[count, "jit"]
        for variant in VARIANTS:
            if (count, variant) in times:
                found[f"us_{variant}_{count}"] = times[count, variant]
    return found


def variants_of(case: Case, style: str) -> dict[str, Launch]:
    """Return a function that launches the kernel once, for each way of launching it."""
    import triton

    from safetune import safetune

    configs = [triton.Config({"BLOCK": BLOCK}, num_warps=warps) for warps in (4, 8)]
    stock = triton.autotune(configs=configs, key=list(case.key), do_bench=_no_bench)
    ours = safetune(configs=configs, key=list(case.key))
    fixed = {"BLOCK": BLOCK, "num_warps": 4}
    found = {
        "jit": _launcher(case.kernel, case, style, fixed),
        "autotune": _launcher(stock(case.kernel), case, style, {}),
        "safetune": _launcher(ours(case.kernel), case, style, {}),
    }
    if style == "positional":
        found.update(_with_heuristics(case, configs, fixed))
        if not recording.interpreted():
            found.update(_bare(case))
    for launch in found.values():
        launch()  # compiles, and tunes
    return found


def _with_heuristics(case: Case, configs: list[Any], fixed: dict[str, Any]) -> dict[str, Launch]:
    """The same with a constant that a heuristic sets: none, above or below the tuner."""
    import triton

    from safetune import safetune

    if "HAS_BIAS" not in case.constants:
        return {}
    set_by = triton.heuristics({"HAS_BIAS": lambda named: named["bias"] is not None})
    tune = safetune(configs=configs, key=[name for name in case.key if name != "HAS_BIAS"])
    constants = {name: case.constants[name] for name in case.constants if name != "HAS_BIAS"}
    left = dataclasses.replace(case, constants=constants)
    kernels = {
        "heuristics_jit": (set_by(case.kernel), fixed),
        "safetune_heuristics": (tune(set_by(case.kernel)), {}),
        "heuristics_safetune": (set_by(tune(case.kernel)), {}),
    }
    return {
        name: _launcher(kernel, left, "positional", options)
        for name, (kernel, options) in kernels.items()
    }


def _launcher(kernel: Any, case: Case, style: str, options: dict[str, Any]) -> Launch:
    grid = (1,)
    if style == "positional":
        return lambda: kernel[grid](*case.values, **case.constants, **options)
    named = dict(zip(case.kernel.arg_names, case.values, strict=False))
    return lambda: kernel[grid](**named, **case.constants, **options)


def _bare(case: Case) -> dict[str, Launch]:
    """The compiled kernel's launchers; constexprs are among their arguments, and are ignored."""
    import torch
    from triton import knobs

    launch = _launcher(case.kernel, case, "positional", {"BLOCK": BLOCK, "num_warps": 4})
    compiled: Any = launch()
    every = (*case.values, *case.constants.values(), BLOCK)
    stream = torch.cuda.current_stream().cuda_stream
    hooks = (None, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    start = (1, 1, 1, stream, compiled.function, compiled.packed_metadata, *hooks)
    return {
        "compiled": lambda: compiled[(1, 1, 1)](*every),
        "run": lambda: compiled.run(*start, *every),
    }


def _no_bench(launch: Launch, quantiles: Any) -> list[float]:
    """The hit path is timed here: any choice will do, and a quick one saves the GPU's time."""
    launch()
    return [1.0, 1.0, 1.0]


def measure(options: argparse.Namespace) -> list[Row]:
    """Return one row for each round, case, style and variant."""
    rows = []
    gc.collect()
    gc.disable()  # a collection takes longer than a batch
    for case in cases(recording.torch_device()):
        for style in STYLES:
            variants = variants_of(case, style)
            names = [name for name in VARIANTS if name in variants]
            for name in names:
                _batch(variants[name], options.launches)
            for turn in range(options.rounds):
                for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
                    rows.append(
                        {
                            "arguments": case.count,
                            "style": style,
                            "variant": name,
                            "round": turn,
                            "microseconds": _batch(variants[name], options.launches),
                        }
                    )
    gc.enable()
    return rows


def _batch(launch: Launch, launches: int) -> float:
    """Return the host's microseconds per launch, over a batch that starts on an idle device."""
    synchronize()
    start = time.perf_counter()
    for _ in range(launches):
        launch()
    seconds = time.perf_counter() - start
    synchronize()
    return seconds / launches * 1e6


def synchronize() -> None:
    """Wait for the device."""
    import torch

    if not recording.interpreted():
        torch.cuda.synchronize()


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return one line for each case, style and variant."""
    groups: dict[tuple[int, str, str], list[float]] = {}
    for row in rows:
        group = (row["arguments"], row["style"], row["variant"])
        groups.setdefault(group, []).append(row["microseconds"])
    return [
        {
            "arguments": count,
            "style": style,
            "variant": variant,
            "median_us": statistics.median(times),
            "least_us": min(times),
            "most_us": max(times),
            "rounds": len(times),
        }
        for (count, style, variant), times in groups.items()
    ]


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


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = recording.arguments(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=60, help="batches of each variant")
    parser.add_argument("--launches", type=int, default=200, help="launches per batch")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print and record."""
    options = parse()
    recording.require_device()
    folder = recording.output_folder(options)
    result = recording.begin("launch_overhead")
    result.rows = measure(options)
    path = result.save(folder, figures)
    columns = ["arguments", "style", "variant", "median_us", "least_us", "most_us", "rounds"]
    print(recording.table(summary(result.rows), columns))
    print()
    print(recording.figures_table(result, path))


if __name__ == "__main__":
    main()
