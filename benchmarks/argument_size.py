"""How long a further key takes to tune, by the size of the arguments: against triton.autotune.

Each measurement is a fresh process. It tunes one small key, so that the configs are compiled and
what a tuner starts has started; then one key for each size. The time is from just before the first
call of a key until the device has finished it. There are three kernels of 8 configs (a vector add,
a row softmax, an update in place); a figure is that of the worst of them. `6GiB_short` is 6 GiB on
a card with 10 GiB free besides.

One part is one kernel on both tuners, which change who goes first; parts are kept as they end.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fresh_process
import recording
import tuners
from recording import Figures, Row
from tuners import TUNERS

KERNELS = ("add", "softmax", "in_place")
MIB = 1 << 20
SIZES = {"12MiB": 12 * MIB, "192MiB": 192 * MIB, "768MiB": 768 * MIB}
SIZES |= {"3GiB": 3072 * MIB, "6GiB": 6144 * MIB, "6GiB_short": 6143 * MIB}  # each its own key
#: What is free on the card, besides the arguments, for the sizes that are short of memory.
SHORT_BYTES = 10 << 30
SMALL = 1 * MIB
PROCESS_TIMEOUT_S = 240.0
#: What the first part of a run is expected to take on an H100 with 16 cores.
PART_S = 60.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return for each size the ratio of medians of the worst kernel, and all medians."""
    found: Figures = {}
    times = recording.medians(rows, "seconds", "kernel", "size", "tuner")
    for (kernel, size, tuner), seconds in times.items():
        found[f"seconds_{size}_{kernel}_{tuner}"] = seconds
    for size in SIZES:
        ratios = [
            times[kernel, size, "safetune"] / times[kernel, size, "triton"]
            for kernel in KERNELS
            if all((kernel, size, tuner) in times for tuner in TUNERS)
        ]
        if len(ratios) == len(KERNELS):
            found[f"ratio_{size}"] = max(ratios)
    found["alternations"] = float(len({row["part"] for row in rows}) // len(KERNELS))
    return found


def run_part(part: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure both tuners on one kernel."""
    number, kernel = part.split(" ")
    for tuner in recording.in_turn(TUNERS, int(number)):
        with tempfile.TemporaryDirectory(prefix="argument-size-") as folder:
            report = fresh_process.run(
                tune_each,
                *(tuner, kernel, options.sizes),
                variables=tuners.caches(Path(folder), tuner, "cold"),
                limit_s=PROCESS_TIMEOUT_S,
            )
        for row in report["rows"]:
            print(f"{part}: {tuner} {row['size']}: {row['seconds']:.2f} s", flush=True)
            yield {"part": part, "kernel": kernel, "tuner": tuner, **row}


def tune_each(tuner_name: str, kernel: str, sizes: Sequence[str]) -> dict[str, Any]:
    """In a fresh process: tune a small key, and then one for each size."""
    import argument_kernels

    problem = argument_kernels.PROBLEMS[kernel]
    tuner = tuners.tuned(tuner_name, problem.kernel, problem.configs, ["n"])
    _tune(tuner, problem, SMALL)
    rows = [{"size": size, **_tune(tuner, problem, SIZES[size], "short" in size)} for size in sizes]
    return {"rows": rows}


def _tune(tuner: Any, problem: Any, size: int, short: bool = False) -> dict[str, Any]:
    launch = problem.call(size, recording.torch_device())
    filler = _fill(SHORT_BYTES) if short else None
    found = tuners.tune(tuner, functools.partial(launch, tuner))
    del filler, launch
    if not recording.interpreted():
        import torch

        torch.cuda.empty_cache()
    return found


def _fill(left: int) -> Any:
    """Return memory that leaves this number of bytes of the card."""
    import torch

    if recording.interpreted():
        return None
    torch.cuda.empty_cache()
    size = max(0, torch.cuda.mem_get_info()[0] - left)
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def main() -> None:
    """Run the parts that are still missing, print and record."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--alternations", type=int, default=3, help="in all, earlier runs included")
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    options = parser.parse_args()
    recording.run_parts(
        recording.begin("argument_size"),
        [f"{n} {kernel}" for n in range(options.alternations) for kernel in options.kernels],
        lambda part: run_part(part, options),
        figures,
        options,
        PART_S,
        ["part", "tuner", "size", "seconds", "failed", "config"],
    )


if __name__ == "__main__":
    main()
