"""How long the first tuning of a process takes: safetune against triton.autotune.

A fresh process with nothing started beforehand tunes one kernel, with 4 or 16 configs: `cold` with
an empty compile cache and an empty store, `warm` with the compile cache that the same tuner's cold
process filled and an empty store. The time is from just before the first call until the device has
finished. The two tuners alternate, and change who goes first. The figures are those of the worst of
three kernels.

One alternation of one kernel is one part (under 60 seconds on an H100 with 16 cores); parts are
kept as they end, so that the script can be run again and goes on. `--short` runs one alternation of
the vector add with 4 configs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fresh_process
import recording
import tuners
from recording import Figures, Row
from tuners import TUNERS

STATES = ("cold", "warm")
KERNELS = ("add", "norm", "described")
COUNTS = (4, 16)
PROCESS_TIMEOUT_S = 120.0

#: What the first part of a run is expected to take on an H100 with 16 cores.
PART_S = 60.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return the ratios of medians, of each kernel and of the worst, and safetune's phases."""
    found: Figures = {}
    times = recording.medians(rows, "seconds", "configs", "state", "kernel", "tuner")
    for count, state, kernel, tuner in sorted(times):
        if tuner == "safetune" and (count, state, kernel, "triton") in times:
            ratio = times[count, state, kernel, tuner] / times[count, state, kernel, "triton"]
            name = f"ratio_{state}_{count}"
            found[f"{name}_{kernel}"] = ratio
            found[name] = max(ratio, found.get(name, 0.0))
        found[f"s_{state}_{count}_{kernel}_{tuner}"] = times[count, state, kernel, tuner]
    found["alternations"] = float(min(_alternations(rows).values(), default=0))
    return found


def _alternations(rows: Sequence[Row]) -> dict[tuple[str, int], int]:
    parts: dict[tuple[str, int], set[str]] = {}
    for row in rows:
        parts.setdefault((row["kernel"], row["configs"]), set()).add(row["part"])
    return {name: len(found) for name, found in parts.items()}


def run_part(part: str) -> list[Row]:
    """Measure both tuners once in each state; a part is `kernel-configs-alternation`."""
    kernel, count, alternation = part.split("-")
    rows = []
    with tempfile.TemporaryDirectory(prefix="first-tuning-") as name:
        folder = Path(name)
        for state in STATES:
            for tuner in TUNERS if int(alternation) % 2 == 0 else TUNERS[::-1]:
                compile_cache = folder / f"triton-{tuner}"
                store = folder / f"store-{tuner}-{state}"
                caches = {"TRITON_CACHE_DIR": compile_cache, "SAFETUNE_CACHE_DIR": store}
                task = ["--kernel", kernel, "--configs", count, "--task", tuner]
                report = fresh_process.run(__file__, task, caches, folder, PROCESS_TIMEOUT_S)
                row = {"part": part, "kernel": kernel, "configs": int(count), "state": state}
                rows.append({**row, "tuner": tuner, **report})
                print(f"{part}: {tuner} {state}: {report['seconds']:.2f} s", flush=True)
    return rows


def tune_first(tuner_name: str, kernel: str, count: int) -> dict[str, Any]:
    """In a fresh process: tune a kernel, and say how long that took and where it went."""
    import device_time
    import first_tuning_kernels
    import torch

    torch.manual_seed(0)
    call = first_tuning_kernels.CALLS[kernel](count, recording.torch_device())
    tuner = tuners.tuned(tuner_name, call.kernel, call.configs, call.key, call.settings)
    device_time.synchronize()
    start = time.perf_counter()
    tuner[call.grid](*call.arguments)
    device_time.synchronize()
    seconds = time.perf_counter() - start
    if not call.right():
        raise SystemExit(f"{tuner_name} gave a wrong result of {kernel}")
    phases = tuners.phases(tuner)
    return {"seconds": seconds, "failed": tuners.failed(tuner), **phases}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = recording.part_arguments(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--alternations", type=int, default=3, help="in all, earlier runs included")
    parser.add_argument("--short", action="store_true", help="one kernel, 4 configs, once")
    parser.add_argument("--kernel", choices=KERNELS, help=argparse.SUPPRESS)
    parser.add_argument("--configs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--task", choices=TUNERS, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Run the task of a measuring process, or the parts that are still missing."""
    options = parse()
    if options.task:
        report = tune_first(options.task, options.kernel, options.configs)
        options.report.write_text(json.dumps(report))
        return
    recording.require_device()
    folder = recording.output_folder(options)
    result = recording.begin("first_tuning")
    if not options.fresh:
        recording.resume(result, [folder, recording.RESULTS])
    parts = [
        f"{kernel}-{count}-{alternation}"
        for alternation in range(options.alternations)
        for count in COUNTS
        for kernel in KERNELS
    ]
    parts = parts[:1] if options.short else parts
    for part in recording.parts_to_run(parts, result.rows, options, PART_S):
        result.rows += run_part(part)
        result.save(folder, figures)
    path = result.save(folder, figures)
    print(recording.table(result.rows, ["part", "state", "tuner", "seconds", "failed"]))
    print()
    print(recording.figures_table(result, path))


if __name__ == "__main__":
    main()
