"""Device time of layer and RMS norm, bf16: ours, torch, torch.compile, FLA, Liger, quack.

Forward and backward, all systems in one process, taking turns, as replays of CUDA graphs over
rotating operands. Shares are of the bandwidth of `copy_`, measured in the same run; the bytes are
those of the matrices that must be read or written once. `--residual` measures the forward pass that
adds a residual (prenorm) and its backward pass instead, and has a result of its own,
norms_residual.json. What a call costs the host is in norms_host.py.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Sequence

import norm_calls
import norm_systems
import norm_timing
import recording
from norm_systems import SYSTEMS
from recording import Figures, Row

#: With as many elements, what counts is bandwidth.
LARGE = 2**25
NORMS = ("ln", "rms")

#: Matrices of 256 MiB in bf16, so that the start of a kernel does not count.
SHAPES = tuple((2**27 // columns, columns) for columns in (2**power for power in range(8, 16)))

#: How many matrices each operation must read or write.
MATRICES = {"forward": 2, "backward": 3, "prenorm": 4, "dresidual": 4}

#: With less, an H100 is not the machine that the bars are for.
LEAST_H100_TB_PER_S = 2.9

#: What a part takes where nothing is compiled or tuned, and where all is compiled.
PART_S = 60.0
WARM_PART_S = 10.0


def parts() -> list[str]:
    """Return the names of all parts."""
    shapes = [f"{norm}-{rows}x{columns}" for rows, columns in SHAPES for norm in NORMS]
    return ["copy", *shapes]


def figures(rows: Sequence[Row]) -> Figures:
    """Return shares of copy bandwidth, and ratios to the best peer."""
    found: Figures = {}
    bandwidth = max((row["tb_per_s"] for row in rows if row["part"] == "copy"), default=0.0)
    if bandwidth:
        found["copy_tb_per_s"] = bandwidth
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if "microseconds" in row:
            case = (row["norm"], row["shape"], row["op"])
            times.setdefault(case, {})[row["system"]] = row["microseconds"]
    for (norm, shape, op), by_system in times.items():
        if "ours" not in by_system:
            continue
        height, columns = map(int, shape.split("x"))
        large = height * columns >= LARGE
        name = f"D{columns}_{norm}" if large else f"{shape}_{norm}"
        if large and bandwidth:
            moved = MATRICES[op] * height * columns * 2
            found[f"{op}_share_{name}"] = moved / by_system["ours"] / 1e6 / bandwidth
        peers = [value for system, value in by_system.items() if system != "ours"]
        if peers:
            found[f"{op}_vs_best_peer_{name}"] = min(peers) / by_system["ours"]
    return found


def copy_rows() -> list[Row]:
    """Return the bandwidth of `copy_`; ends the program where it is not the machine's."""
    rows = [
        {"part": "copy", "gib": size, "tb_per_s": norm_timing.copy_bandwidth(size)}
        for size in (1, 2, 4)
    ]
    best = max(row["tb_per_s"] for row in rows)
    if "H100" in recording.device_name() and best < LEAST_H100_TB_PER_S:
        sys.exit(f"copy_ reaches {best:.2f} TB/s, below {LEAST_H100_TB_PER_S}: a run here is void")
    return rows


def measure(part: str, ops: Sequence[str], systems: Sequence[str], replays: int) -> list[Row]:
    """Return a row for each operation and system: the median of replays in turns, or its error.

    A system compiles and tunes once for a forward pass and its backward pass.
    """
    norm, shape = part.split("-")
    operands = norm_calls.operands_of(part)
    with_residual = ops[0] in norm_calls.RESIDUAL_OPS
    ready: dict[tuple[str, str], norm_timing.Replay] = {}
    found: list[Row] = []
    for system in systems:
        try:
            function = norm_systems.make(system, norm == "rms", with_residual)
            for op in ops:
                make = functools.partial(norm_calls.calls_of, op, function, operands)
                ready[op, system] = norm_timing.Replay(make)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:300]}"
            found += [{"system": system, "op": op, "error": text} for op in ops]
    for replay in ready.values():
        replay.warm_up()
    times: dict[tuple[str, str], list[float]] = {case: [] for case in ready}
    for _ in range(replays):
        for case, replay in ready.items():
            times[case].append(replay.microseconds())
    for (op, system), values in times.items():
        found.append(
            {
                "system": system,
                "op": op,
                "microseconds": statistics.median(values),
                "least": min(values),
                "most": max(values),
                "calls": len(ready[op, system].calls),
            }
        )
    return [{"part": part, "norm": norm, "shape": shape, **row} for row in found]


def unmeasured(part: str, systems: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the systems that a part has no rows of yet.

    Rows of another command count, so what takes long can be measured by several.
    """
    done = {row.get("system", "") for row in rows if row["part"] == part}
    wanted = norm_calls.systems_of(part, systems) if "x" in part else [""]
    return [system for system in wanted if system not in done]


def run_part(part: str, systems: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """Return the rows of one part."""
    if part == "copy":
        return copy_rows()
    found = measure(part, options.ops, systems, options.replays)
    gc.collect()
    if not recording.interpreted():
        import torch

        torch.cuda.empty_cache()
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--warm", action="store_true", help="first, compile in parallel")
    parser.add_argument("--quick", action="store_true", help="2 replays, no max-autotune")
    parser.add_argument(
        "--columns", type=int, nargs="+", help="only shapes with these numbers of columns"
    )
    parser.add_argument("--workers", type=int, default=14, help="compiling processes")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--residual", action="store_true", help="with a residual, into its file")
    parser.add_argument("--result", metavar="NAME", help="of another file, for other systems")
    parser.add_argument("--replays", type=int, default=15)
    options = parser.parse_args(argv)
    options.ops = norm_calls.RESIDUAL_OPS if options.residual else norm_calls.OPS
    if options.quick:
        options.replays = 2
        options.systems = [s for s in options.systems if s != "compile_max"]
    return options


def wanted_parts(options: argparse.Namespace) -> list[str]:
    """Return the parts that `--columns` leaves."""
    if not options.columns:
        return parts()
    return ["copy", *(p for p in parts() if p.rpartition("x")[2] in map(str, options.columns))]


def main() -> None:
    """Run the parts that are still missing, print and record."""
    options = parse()
    # What torch.compile chose on a GPU that others used is not chosen again.
    os.environ["TORCHINDUCTOR_AUTOTUNE_LOCAL_CACHE"] = "0"
    folder = recording.output_folder(options)
    result = recording.begin(options.result or ("norms_residual" if options.residual else "norms"))
    if not options.fresh:
        recording.resume(result, [folder, recording.RESULTS])
    path = result.save(folder, figures)
    wanted = wanted_parts(options)
    missing = {part: unmeasured(part, options.systems, result.rows) for part in wanted}
    left = [part for part in wanted if missing[part]]
    if options.warm:
        # The longest to compile first.
        shapes = sorted((p for p in left if "x" in p), key=lambda p: -int(p.rpartition("x")[2]))
        norm_calls.warm_all(shapes, options)
    expected_s = WARM_PART_S if options.warm else PART_S
    print(f"{len(left)} parts left, of about {expected_s:.0f} s each at most", flush=True)
    for part in recording.parts_to_run(left, [], options, expected_s):
        began = time.monotonic()
        rows = run_part(part, missing[part], options)
        columns = ["part", "op", "system", "microseconds", "least", "most", "error"]
        print(recording.table(rows, columns) if part != "copy" else rows, flush=True)
        result.rows += rows
        result.save(folder, figures)
        print(f"{part} took {time.monotonic() - began:.1f} s", flush=True)
    recording.report(result, path)


if __name__ == "__main__":
    main()
