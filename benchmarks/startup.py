"""How long a model's start-up takes: 60 small tunings in a row, safetune against triton.autotune.

Twelve small kernels with four configs each are called with five shapes each, one call after the
other, in a fresh process with nothing started beforehand: `cold` with an empty compile cache and an
empty store, `warm` (with `--warm`) with the compile cache that the same tuner's cold process filled
and an empty store. The time is from just before the first call until the device has finished the
last. The two tuners alternate, and change who goes first.

One alternation is one part (under 100 seconds on an H100 with 16 cores, without `--warm`); parts
are kept as they end, so that the script can be run again and goes on.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fresh_process
import recording
import tuners
from recording import Figures, Row
from tuners import TUNERS

STATES = ("cold", "warm")
PROCESS_TIMEOUT_S = 240.0

#: What the first part of a run is expected to take on an H100 with 16 cores.
PART_S = 110.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return the ratio of medians and the medians, by how many tunings there were in a row."""
    found: Figures = {}
    times = recording.medians(rows, "seconds", "tunings", "state", "tuner")
    for count, state, tuner in sorted(times):
        suffix = "" if state == "cold" else f"_{state}"
        seconds = times[count, state, tuner]
        found[f"startup_{count}_s_{tuner}{suffix}"] = seconds
        if tuner == "safetune" and (count, state, "triton") in times:
            ratio = seconds / times[count, state, "triton"]
            found[f"startup_{count}_ratio{suffix}"] = ratio
    found["alternations"] = float(len({row["part"] for row in rows}))
    return found


def run_part(part: int, options: argparse.Namespace) -> Iterator[Row]:
    """Measure both tuners once in each state."""
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        for state in STATES[: 1 + options.warm]:
            for order, tuner in enumerate(recording.in_turn(TUNERS, part)):
                variables = tuners.caches(Path(folder), tuner, state)
                report = fresh_process.run(
                    start_up, tuner, options.tunings, variables=variables, limit_s=PROCESS_TIMEOUT_S
                )
                print(f"part {part}: {tuner} {state}: {report['seconds']:.2f} s", flush=True)
                yield {"part": part, "order": order, "state": state, "tuner": tuner, **report}


def start_up(tuner_name: str, most: int) -> dict[str, Any]:
    """In a fresh process: make every tuner and tune each shape once; say how long that took."""
    import startup_kernels
    import torch

    torch.manual_seed(0)
    device = recording.torch_device()
    tiny = recording.interpreted()
    columns = startup_kernels.TINY_COLUMNS if tiny else startup_kernels.COLUMNS
    work = []
    for layer in startup_kernels.LAYERS:
        tuner = tuners.tuned(tuner_name, layer.kernel, layer.configs, layer.key)
        work += [(tuner, call) for call in layer.calls(device, columns)]
    # By shape and not by kernel, as layers of a model follow each other.
    shapes = len(columns)
    work = [pair for shape in range(shapes) for pair in work[shape::shapes]][:most]
    began = time.perf_counter()
    found = [tuners.tune(tuner, functools.partial(call.launch, tuner)) for tuner, call in work]
    seconds = time.perf_counter() - began
    each = [row["seconds"] for row in found]
    for tuner, call in work:
        if not torch.allclose(call.output, call.expected(), rtol=1e-3, atol=1e-3):
            raise SystemExit(f"{tuner_name} gave a wrong result of {tuner.base_fn.__name__}")
    return {
        "tunings": len(work),
        "seconds": seconds,
        "first_s": each[0],
        "median_s": statistics.median(each),
        "longest_s": max(each),
        "failed": sum(row["failed"] for row in found),
    }


def main() -> None:
    """Run the parts that are still missing, print and record."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--alternations", type=int, default=3, help="in all, earlier runs included")
    parser.add_argument("--warm", action="store_true", help="measure with warm compile caches, too")
    parser.add_argument("--tunings", type=int, default=60, help="fewer, for a trial run")
    options = parser.parse_args()
    recording.run_parts(
        recording.begin("startup"),
        range(options.alternations),
        lambda part: run_part(part, options),
        figures,
        options,
        PART_S,
        ["part", "state", "tuner", "tunings", "seconds", "first_s", "median_s", "longest_s"],
    )


if __name__ == "__main__":
    main()
