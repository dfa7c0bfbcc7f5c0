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
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import device_time
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


def run_part(part: str, options: argparse.Namespace) -> list[Row]:
    """Measure both tuners on one kernel."""
    number, kernel = part.split(" ")
    rows = []
    for tuner in TUNERS if int(number) % 2 == 0 else TUNERS[::-1]:
        with tempfile.TemporaryDirectory(prefix="argument-size-") as folder:
            names = ("TRITON_CACHE_DIR", "SAFETUNE_CACHE_DIR")
            caches = {name: Path(folder) / name for name in names}
            task = ["--task", tuner, kernel, "--sizes", *options.sizes]
            report = fresh_process.run(__file__, task, caches, Path(folder), PROCESS_TIMEOUT_S)
        for row in report["rows"]:
            rows.append({"part": part, "kernel": kernel, "tuner": tuner, **row})
            print(f"{part}: {tuner} {row['size']}: {row['seconds']:.2f} s", flush=True)
    return rows


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
    device_time.synchronize()
    start = time.perf_counter()
    launch(tuner)
    device_time.synchronize()
    seconds = time.perf_counter() - start
    failed = tuners.failed(tuner)
    del filler, launch
    if not recording.interpreted():
        import torch

        torch.cuda.empty_cache()
    found = {"seconds": seconds, "config": str(tuner.best_config), "failed": failed}
    return {**found, **tuners.phases(tuner)}


def _fill(left: int) -> Any:
    """Return memory that leaves this number of bytes of the card."""
    import torch

    if recording.interpreted():
        return None
    torch.cuda.empty_cache()
    size = max(0, torch.cuda.mem_get_info()[0] - left)
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = recording.part_arguments(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--alternations", type=int, default=3, help="in all, earlier runs included")
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--task", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Run one task of a measuring process, or the parts that are still missing."""
    options = parse()
    if options.task:
        options.report.write_text(json.dumps(tune_each(*options.task, options.sizes)))
        return
    recording.require_device()
    folder = recording.output_folder(options)
    result = recording.begin("argument_size")
    if not options.fresh:
        recording.resume(result, [folder, recording.RESULTS])
    every = [f"{n} {kernel}" for n in range(options.alternations) for kernel in options.kernels]
    for part in recording.parts_to_run(every, result.rows, options, PART_S):
        result.rows += run_part(part, options)
        result.save(folder, figures)
    path = result.save(folder, figures)
    names = sorted({name for row in result.rows for name in row if name.startswith("phase_s_")})
    columns = ["part", "tuner", "size", "seconds", "failed", *names, "config"]
    print(recording.table(result.rows, columns))
    print()
    print(recording.figures_table(result, path))


if __name__ == "__main__":
    main()
