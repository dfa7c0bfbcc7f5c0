"""How long `safetune tune --budget` takes for all batch sizes of a fused mixture of experts.

A part is one dtype: the command begins with an empty store and an empty compile cache.

`--exhaustive` measures all configs, in parts: a part is stopped `--budget` seconds after the start,
and the same command goes on from the store in `--caches`. The result is `fused_moe_exhaustive`,
whose time is that of all parts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import fused_moe_exhaustive
import recording
from fused_moe_exhaustive import SPACES
from recording import Figures, Row


def figures(rows: Sequence[Row]) -> Figures:
    """Return for each dtype the seconds of the whole command, its configs, and its regrets."""
    found: Figures = {}
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        of_dtype = [row for row in rows if row["dtype"] == dtype]
        name = SPACES[dtype]
        found[f"{name}_wall_s"] = of_dtype[0]["wall_s"]
        found[f"{name}_keys"] = len(of_dtype)
        found[f"{name}_configs"] = sum(row["measured"] for row in of_dtype)
        if regrets := [row["regret"] for row in of_dtype if row.get("regret") is not None]:
            found[f"{name}_regret_keys"] = len(regrets)
            found[f"{name}_regret_median"] = statistics.median(regrets)
            found[f"{name}_regret_worst"] = max(regrets)
    return found


def run_part(dtype: str, options: argparse.Namespace) -> list[Row]:
    """Tune all batch sizes of a dtype within the time."""
    target = Path(__file__).with_name("fused_moe.py")
    command = [sys.executable, "-m", "safetune", "tune", str(target), "--dtype", dtype, "--json"]
    command += [word for tokens in options.tokens or () for word in ("--shape", tokens)]
    with tempfile.TemporaryDirectory(prefix="fused-moe-") as name:
        caches = {"TRITON_CACHE_DIR": f"{name}/triton", "SAFETUNE_CACHE_DIR": f"{name}/store"}
        paths = [str(target.parent), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, **caches, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        start = time.monotonic()
        done = subprocess.run(
            [*command, "--budget", options.time], env=env, stdout=subprocess.PIPE, text=True
        )
        wall_s = round(time.monotonic() - start, 1)
    if done.returncode:
        raise SystemExit(f"safetune tune ended with {done.returncode}")
    rows = []
    for tuning in json.loads(done.stdout)["tunings"]:
        row = {"part": dtype, "dtype": dtype, "time": options.time, "wall_s": wall_s}
        row |= {"tokens": int(tuning["shape"]), "choice": tuning["choice"]}
        row |= {name: tuning[name] for name in ("measured", "median_ms")}
        row["phases"] = {name: round(s, 2) for name, s in tuning["phases"].items() if s >= 0.01}
        rows.append(row)
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = recording.part_arguments(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("dtypes", nargs="*", metavar="DTYPE", help="default: both")
    parser.add_argument("--time", default="170s", help="of all batch sizes of a dtype")
    parser.add_argument("--tokens", nargs="+", metavar="N", help="some batch sizes only")
    parser.add_argument("--exhaustive", action="store_true", help="measure all configs, in parts")
    parser.add_argument(
        "--caches",
        type=Path,
        help="what --exhaustive goes on from, 1 GB a dtype; default: `caches` in --out",
    )
    parser.add_argument("--configs", type=int, default=0, help="fewer, for a trial run")
    return parser.parse_args(argv)


def main() -> None:
    """Tune the dtypes that are still missing."""
    start, options = time.monotonic(), parse()
    recording.require_device()
    folder = recording.output_folder(options)
    if options.exhaustive:
        every = options.dtypes or [*SPACES]
        fused_moe_exhaustive.run(every, options, folder, start + options.budget)
        return
    result = recording.begin("fused_moe_sweep")
    folders = [folder, recording.RESULTS]
    if not options.fresh:
        recording.resume(result, folders)
    every = options.dtypes or [*SPACES]
    for dtype in recording.parts_to_run(every, result.rows, options, 200.0):
        result.rows += run_part(dtype, options)
        result.save(folder, figures)
    path = result.save(folder, figures)
    print(recording.table(result.rows, ["dtype", "tokens", "measured", "median_ms", "regret"]))
    print(recording.figures_table(result, path))


if __name__ == "__main__":
    main()
