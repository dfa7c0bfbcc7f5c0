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
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
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


def run_part(part: int, options: argparse.Namespace) -> Iterator[Row]:
    """Tune both keys once, from empty caches."""
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        report = fresh_process.run(
            sweep,
            *(options.size, options.configs),
            variables=tuners.caches(Path(folder), "safetune", "cold"),
            limit_s=PROCESS_TIMEOUT_S,
        )
    for row in report["rows"]:
        print(f"part {part}: {row['key']} key: {row['seconds']:.2f} s", flush=True)
        yield {"part": part, **row}


def sweep(size: int, configs: int) -> dict[str, Any]:
    """In a fresh process: tune both keys, and say how long that took."""
    import matmul

    device, every = recording.torch_device(), matmul.grouped_configs(configs)
    tuner = tuners.tuned("safetune", matmul.grouped_matmul_kernel, every, matmul.KEY)
    rows = []
    for key, m in KEYS.items():
        operands = matmul.grouped_operands(min(m, size), size, device)
        found = tuners.tune(tuner, functools.partial(matmul.launch, tuner, *operands))
        error = matmul.relative_error(*operands)
        if not error < ERROR_LIMIT:
            raise SystemExit(f"a wrong product: relative error {error}")
        row = {"key": key, **found, "configs": len(every)}
        rows.append({**row, "regret": _regret(tuner, operands)})
    return {"rows": rows}


def _regret(tuner: Any, operands: Any) -> float:
    """Return how much slower the choice is than the best of the configs that were fast."""
    import matmul

    times = {config: timing[0] for config, timing in tuner.configs_timings.items()}
    fast = sorted(times, key=times.__getitem__)[:RIVALS]
    rivals = [tuner.best_config, *(config for config in fast if math.isfinite(times[config]))]
    launch = functools.partial(matmul.launch, matmul.grouped_matmul_kernel, *operands)
    launches = {str(config): functools.partial(launch, **config.all_kwargs()) for config in rivals}
    medians = device_time.medians_in_turns(launches, ROUNDS, ROUND_LAUNCHES)
    return medians[str(tuner.best_config)] / min(medians.values()) - 1.0


def main() -> None:
    """Run the parts that are still missing, print and record."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--sweeps", type=int, default=2, help="in all, earlier runs included")
    parser.add_argument("--size", type=int, default=4096, help="N = K, and the most of M")
    parser.add_argument("--configs", type=int, default=1920, help="fewer, for a trial run")
    options = parser.parse_args()
    recording.run_parts(
        recording.begin("sweep"),
        range(options.sweeps),
        lambda part: run_part(part, options),
        figures,
        options,
        PART_S,
        ["part", "key", "seconds", "failed", "regret", "config"],
    )


if __name__ == "__main__":
    main()
