"""How long a tuning of 1,920 configs takes: the grid that SGLang sweeps, on a matrix product.

One part is a fresh process with nothing started beforehand, an empty compile cache and an empty
store: it tunes M = 4096 (the first key), then M = 64 (a further key: all configs are compiled). The
choice of each key is then timed long, in turns with the configs that were nearly as fast, so that
fewer seconds cannot hide a worse choice. A part takes about three minutes; parts are kept as they
end, so that the script can be run again and goes on.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
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

KEYS = {"first": 4096, "further": 64}
PROCESS_TIMEOUT_S = 420.0

#: What the first part of a run is expected to take on an H100 with 16 cores.
PART_S = 200.0
ERROR_LIMIT = 2e-2

#: The long measurement: RIVALS configs in turns, ROUND_LAUNCHES each from a cold L2.
RIVALS = 16
ROUNDS = 20
ROUND_LAUNCHES = 20


def figures(rows: Sequence[Row]) -> Figures:
    """Return the medians of both keys' seconds, and how far a choice was from the best at most."""
    found: Figures = {}
    for (key,), seconds in recording.medians(rows, "seconds", "key").items():
        found[f"{key}_key_s"] = seconds
        of_key = [row for row in rows if row["key"] == key]
        found[f"{key}_key_regret_worst"] = max(row["regret"] for row in of_key)
        for name in sorted({name for row in of_key for name in row if name.startswith("phase_s_")}):
            timed = [row for row in of_key if name in row]
            found[f"{name}_{key}"] = statistics.median(row[name] for row in timed)
    found["sweeps"] = float(len({row["part"] for row in rows}))
    return found


def run_part(part: int, options: argparse.Namespace) -> list[Row]:
    """Tune both keys once, from empty caches."""
    with tempfile.TemporaryDirectory(prefix="sweep-") as name:
        folder = Path(name)
        caches = {"TRITON_CACHE_DIR": folder / "triton", "SAFETUNE_CACHE_DIR": folder / "store"}
        size = ["--size", str(options.size), "--configs", str(options.configs)]
        report = fresh_process.run(
            __file__, [*size, "--task", "sweep"], caches, folder, PROCESS_TIMEOUT_S
        )
    rows = [{"part": part, **row} for row in report["rows"]]
    for row in rows:
        print(f"part {part}: {row['key']} key: {row['seconds']:.2f} s", flush=True)
    return rows


def sweep(options: argparse.Namespace) -> dict[str, Any]:
    """In a fresh process: tune both keys, and say how long that took."""
    import grouped_matmul

    device, every = recording.torch_device(), grouped_matmul.configs(options.configs)
    kernel = grouped_matmul.grouped_matmul_kernel
    tuner = tuners.tuned("safetune", kernel, every, grouped_matmul.KEY)
    rows = []
    for key, m in KEYS.items():
        operands = grouped_matmul.operands(min(m, options.size), options.size, device)
        device_time.synchronize()
        start = time.perf_counter()
        grouped_matmul.launch(tuner, *operands)
        device_time.synchronize()
        row = {"key": key, "seconds": time.perf_counter() - start, "configs": len(every)}
        a, b, c = operands
        error = float((c.float() - a.float() @ b.float()).norm() / c.float().norm())
        if not error < ERROR_LIMIT:
            raise SystemExit(f"a wrong product: relative error {error}")
        row |= {"failed": tuners.failed(tuner), "config": str(tuner.best_config)}
        rows.append({**row, **tuners.phases(tuner), "regret": _regret(tuner, operands)})
    return {"rows": rows}


def _regret(tuner: Any, operands: Any) -> float:
    """Return how much slower the choice is than the best of the configs that were fast."""
    import grouped_matmul

    times = {config: timing[0] for config, timing in tuner.configs_timings.items()}
    fast = sorted(times, key=times.__getitem__)[:RIVALS]
    rivals = [config for config in fast if math.isfinite(times[config])]
    rivals = list(dict.fromkeys([tuner.best_config, *rivals]))
    launches = 1 if recording.interpreted() else ROUND_LAUNCHES
    samples: dict[Any, list[float]] = {config: [] for config in rivals}
    for turn in range(2 if recording.interpreted() else ROUNDS):
        for config in (*rivals[turn % len(rivals) :], *rivals[: turn % len(rivals)]):
            launch = functools.partial(
                grouped_matmul.launch,
                *(grouped_matmul.grouped_matmul_kernel, *operands),
                **config.all_kwargs(),
            )
            samples[config] += device_time.timed(launch, launches)
    medians = {config: statistics.median(found) for config, found in samples.items()}
    return float(medians[tuner.best_config] / min(medians.values()) - 1.0)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = recording.part_arguments(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sweeps", type=int, default=2, help="in all, earlier runs included")
    parser.add_argument("--size", type=int, default=4096, help="N = K, and the most of M")
    parser.add_argument("--configs", type=int, default=1920, help="fewer, for a trial run")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Run the task of a measuring process, or the parts that are still missing."""
    options = parse()
    if options.task:
        options.report.write_text(json.dumps(sweep(options)))
        return
    recording.require_device()
    folder = recording.output_folder(options)
    result = recording.begin("sweep")
    if not options.fresh:
        recording.resume(result, [folder, recording.RESULTS])
    for part in recording.parts_to_run(range(options.sweeps), result.rows, options, PART_S):
        result.rows += run_part(part, options)
        result.save(folder, figures)
    path = result.save(folder, figures)
    print(recording.table(result.rows, ["part", "key", "seconds", "failed", "regret", "config"]))
    print()
    print(recording.figures_table(result, path))


if __name__ == "__main__":
    main()
