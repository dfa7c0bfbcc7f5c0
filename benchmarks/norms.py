"""Device time of layer and RMS norm, bf16: ours, torch, torch.compile, FLA, Liger, quack.

Forward, backward, forward with a residual (prenorm) and its backward, all systems in one process,
taking turns, as replays of CUDA graphs over rotating operands. Shares are of the bandwidth of
`copy_`, measured in the same run; the bytes are those of the matrices that must be read or written
once. Also what one call of a module costs the host.

`--sweep` prints the time of each config of our kernels instead, with nothing tuned.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import device_time
import norm_calls
import norm_systems
import norm_timing
import norms_sweep
import recording
from norm_systems import SYSTEMS
from recording import Figures, Row

LARGE = norms_sweep.SHAPES
SMALL = ((450, 256), (4096, 4096))
NORMS = ("ln", "rms")

#: An operation and a system.
Case = tuple[str, str]

#: How many matrices each operation must read or write.
MATRICES = {"forward": 2, "backward": 3, "prenorm": 4, "dresidual": 4}

#: With less, an H100 is not the machine that the bars are for.
LEAST_H100_TB_PER_S = 2.9

#: What a part takes where nothing is compiled or tuned, and where all is compiled.
PART_S = 60.0
WARM_PART_S = 15.0


def parts() -> list[str]:
    """Return the names of all parts; those that bars ask for come first."""
    shapes = [f"{norm}-{rows}x{columns}" for rows, columns in LARGE + SMALL for norm in NORMS]
    return ["copy", *shapes, *(f"host-{norm}" for norm in NORMS)]


def figures(rows: Sequence[Row]) -> Figures:
    """Return shares of copy bandwidth, ratios to the best peer, and the host's microseconds."""
    found: Figures = {}
    bandwidth = max((row["tb_per_s"] for row in rows if row["part"] == "copy"), default=0.0)
    if bandwidth:
        found["copy_tb_per_s"] = bandwidth
    times: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if "microseconds" in row:
            case = (row["norm"], row.get("shape", ""), row["op"])
            times.setdefault(case, {})[row["system"]] = row["microseconds"]
    for (norm, shape, op), by_system in times.items():
        if not shape:
            for system, microseconds in by_system.items():
                found[f"host_us_{op}_{system}_{norm}"] = microseconds
            if {"ours", "fla"} <= by_system.keys():
                found[f"host_{op}_vs_fla_{norm}"] = by_system["fla"] / by_system["ours"]
            continue
        if "ours" not in by_system:
            continue
        height, columns = map(int, shape.split("x"))
        large = (height, columns) in LARGE
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

    The operations are a forward pass and its backward pass: a system compiles and tunes once.
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


def host_rows(part: str, systems: Sequence[str]) -> list[Row]:
    """Return what a forward and a backward call of a module on 16 rows cost the host."""
    import torch

    norm, device = part.split("-")[1], recording.torch_device()
    rows: list[Row] = []
    for system in [s for s in systems if s in ("ours", "torch", "fla")]:
        common = {"part": part, "norm": norm, "system": system}
        try:
            module = norm_systems.make_module(system, 1024, norm == "rms", device)
            x = torch.randn(16, 1024, device=device, dtype=torch.bfloat16, requires_grad=True)
            y, leaves = module(x), [x, *module.parameters()]
            dy = torch.randn_like(y)
            backward = functools.partial(torch.autograd.grad, y, leaves, dy, retain_graph=True)
            for op, call in (("forward", functools.partial(module, x)), ("backward", backward)):
                rows.append({**common, "op": op, "microseconds": _host_us(call)})
        except Exception as error:
            rows.append({**common, "error": f"{type(error).__name__}: {str(error)[:300]}"})
    return rows


def _host_us(call: Callable[[], object], batches: int = 30, size: int = 100) -> float:
    """Return the median host time of a call, over batches that start on an idle device."""
    if recording.interpreted():
        batches, size = 1, 1
    times = []
    for _ in range(batches):
        call()
        device_time.synchronize()
        began = time.perf_counter()
        for _ in range(size):
            call()
        times.append((time.perf_counter() - began) / size * 1e6)
        device_time.synchronize()
    return statistics.median(times)


def unmeasured(part: str, options: argparse.Namespace, rows: Sequence[Row]) -> list[Case]:
    """Return which operations, of which systems, a part has no rows of yet.

    Rows of another command count, so what takes long can be measured by several.
    """
    done = {(row.get("op"), row.get("system")) for row in rows if row["part"] == part}
    if "x" not in part:
        return [] if done else [("", "")]
    every = itertools.product(options.ops, options.systems)
    return [case for case in every if case not in done]


def run_part(part: str, cases: Sequence[Case], options: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield the rows of one part, as they come."""
    if part == "copy":
        yield copy_rows()
    elif part.startswith("host"):
        yield host_rows(part, options.systems)
    else:
        for ops in norm_calls.op_pairs(options.ops):
            systems = [s for s in options.systems if any((op, s) in cases for op in ops)]
            if not systems:
                continue
            yield measure(part, ops, systems, options.replays)
            gc.collect()
            if not recording.interpreted():
                import torch

                torch.cuda.empty_cache()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = recording.part_arguments(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sweep", action="store_true", help="each config, nothing tuned")
    parser.add_argument("--warm", action="store_true", help="first, compile in parallel")
    parser.add_argument("--quick", action="store_true", help="2 replays, no max-autotune")
    parser.add_argument("--columns", type=int, nargs="+", help="only shapes with so many columns")
    parser.add_argument("--kinds", nargs="+", help="kernels of the sweep")
    parser.add_argument("--workers", type=int, default=14, help="compiling processes")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--ops", nargs="+", default=list(MATRICES), choices=list(MATRICES))
    parser.add_argument("--replays", type=int, default=15)
    options = parser.parse_args(argv)
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
    recording.require_device()
    folder = recording.output_folder(options)
    if options.sweep:
        norms_sweep.sweep(options)
        return
    result = recording.begin("norms")
    if not options.fresh:
        recording.resume(result, [folder, recording.RESULTS])
    path = result.save(folder, figures)
    wanted = wanted_parts(options)
    cases = {part: unmeasured(part, options, result.rows) for part in wanted}
    left = [part for part in wanted if cases[part]]
    if options.warm:
        # The longest to compile first.
        shapes = sorted((p for p in left if "x" in p), key=lambda p: -int(p.rpartition("x")[2]))
        norm_calls.warm_all(shapes, options)
    expected_s = WARM_PART_S if options.warm else PART_S
    print(f"{len(left)} parts left, of about {expected_s:.0f} s each at most", flush=True)
    for part in recording.parts_to_run(left, [], options, expected_s):
        began = time.monotonic()
        for rows in run_part(part, cases[part], options):
            columns = ["part", "op", "system", "microseconds", "least", "most", "error"]
            print(recording.table(rows, columns) if part != "copy" else rows, flush=True)
            result.rows += rows
            result.save(folder, figures)
        print(f"{part} took {time.monotonic() - began:.1f} s", flush=True)
    print(recording.figures_table(result, path))


if __name__ == "__main__":
    main()
