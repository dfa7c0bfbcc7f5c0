"""How long the first call of a kernel with 72 configs takes: safetune against triton.autotune.

Each measurement is a fresh process with nothing started beforehand: `cold` with an empty compile
cache and an empty store, `warm` with the compile cache that the same tuner's cold process filled
and an empty store. The two tuners alternate, and change who goes first. The time is from just
before the first call until the device has finished it. What each tuner chose is then timed long,
in turns, in one process.

One alternation is one part (about two minutes); parts are kept as they end, so that the script can
be run again and goes on: `--parts 1 --budget 450`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import recording
from recording import Figures, Row

TUNERS = ("safetune", "triton")
STATES = ("cold", "warm")
PROCESS_TIMEOUT_S = 240.0
ERROR_LIMIT = 1e-2

#: The long measurement: rounds in turns, each of so many launches from a cold L2.
ROUNDS = 20
ROUND_LAUNCHES = 50


def figures(rows: Sequence[Row]) -> Figures:
    """Return ratios of medians, the medians, and how much slower a choice is than the better."""
    found: Figures = {}
    firsts = [row for row in rows if row["kind"] == "first_call"]
    times = recording.medians(firsts, "first_call_s", "state", "tuner")
    whole = recording.medians(firsts, "process_s", "state", "tuner")
    for state in STATES:
        for tuner in TUNERS:
            if (state, tuner) in times:
                found[f"first_call_s_{state}_{tuner}"] = times[state, tuner]
                found[f"process_s_{state}_{tuner}"] = whole[state, tuner]
        if all((state, tuner) in times for tuner in TUNERS):
            found[f"wall_ratio_{state}"] = times[state, "safetune"] / times[state, "triton"]
            found[f"process_ratio_{state}"] = whole[state, "safetune"] / whole[state, "triton"]
    for tuner, regrets in _regrets(rows).items():
        found[f"regret_median_{tuner}"] = statistics.median(regrets)
        found[f"regret_worst_{tuner}"] = max(regrets)
    found["alternations"] = float(len({row["part"] for row in firsts}))
    return found


def _regrets(rows: Sequence[Row]) -> dict[str, list[float]]:
    """For each part: the chosen config's long time over the best time of that part, less one."""
    choices = [row for row in rows if row["kind"] == "choice"]
    found: dict[str, list[float]] = {}
    for part in sorted({row["part"] for row in choices}):
        times = recording.medians(
            [row for row in choices if row["part"] == part], "median_ms", "tuner"
        )
        best = min(times.values())
        for (tuner,), median_ms in times.items():
            found.setdefault(tuner, []).append(median_ms / best - 1.0)
    return found


def run_part(part: int, options: argparse.Namespace) -> list[Row]:
    """Measure both tuners once, cold and warm, and time what they chose."""
    tuners = TUNERS if part % 2 == 0 else TUNERS[::-1]
    rows = []
    with tempfile.TemporaryDirectory(prefix="tuning-time-") as folder:
        for state in STATES:
            for order, tuner in enumerate(tuners):
                row = _measure_first_call(tuner, state, Path(folder), options)
                rows.append({"kind": "first_call", "part": part, "order": order, **row})
                print(f"part {part}: {tuner} {state}: {row['first_call_s']:.2f} s", flush=True)
        chosen = {row["tuner"]: row["config"] for row in rows if row["state"] == "cold"}
        rows += [
            {"kind": "choice", "part": part, **choice}
            for choice in _measure_choices(chosen, Path(folder), options)
        ]
    return rows


def _measure_first_call(
    tuner: str, state: str, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    compile_cache = folder / f"triton-{tuner}"
    if state == "cold":
        assert not compile_cache.exists(), "a cold process needs an empty compile cache"
    store = folder / f"store-{tuner}-{state}"
    cache = {"TRITON_CACHE_DIR": str(compile_cache), "SAFETUNE_CACHE_DIR": str(store)}
    start = time.monotonic()
    report = _in_fresh_process(["first-call", tuner], cache, folder, options)
    return {"tuner": tuner, "state": state, "process_s": time.monotonic() - start, **report}


def _measure_choices(
    chosen: dict[str, str], folder: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    cache = {"TRITON_CACHE_DIR": str(folder / "triton-safetune")}
    report = _in_fresh_process(["choices", json.dumps(chosen)], cache, folder, options)
    return [
        {"tuner": tuner, "config": config, "median_ms": report["median_ms"][config]}
        for tuner, config in chosen.items()
    ]


def _in_fresh_process(
    task: list[str], cache: dict[str, str], folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run this script on a task in a process, and a session, of its own; return its report."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    size = ["--size", str(options.size), "--configs", str(options.configs)]
    command = [sys.executable, __file__, *size, "--report", str(report), "--task", *task]
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("SAFETUNE_")}
    process = subprocess.Popen(command, env={**inherited, **cache}, start_new_session=True)
    try:
        status = process.wait(PROCESS_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{task} took more than {PROCESS_TIMEOUT_S:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status != 0:
        raise SystemExit(f"{task} ended with {status}")
    return dict(json.loads(report.read_text()))


def first_call(tuner_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """In a fresh process: tune the product once, and say how long that took."""
    import matmul

    device = recording.torch_device()
    tuner = _tuner(tuner_name, matmul, options)
    a, b, c = matmul.operands(options.size, device)
    _synchronize()
    began = time.time()
    start = time.perf_counter()
    matmul.launch(tuner, a, b, c)
    _synchronize()
    seconds = time.perf_counter() - start
    error = matmul.relative_error(a, b, c)
    if not error < ERROR_LIMIT:
        raise SystemExit(f"{tuner_name} gave a wrong product: relative error {error}")
    return {
        "first_call_s": seconds,
        "config": str(tuner.best_config),
        "configs": len(tuner.configs),
        "failed": sum(not math.isfinite(_median(t)) for t in tuner.configs_timings.values()),
        **_phases(began, began + seconds),
    }


def _tuner(name: str, matmul: Any, options: argparse.Namespace) -> Any:
    import triton

    configs = matmul.configs(options.configs)
    if name == "safetune":
        from safetune import safetune

        return safetune(configs=configs, key=matmul.KEY)(matmul.matmul_kernel)
    settings = {}
    if recording.interpreted():  # where triton.autotune itself needs a GPU to take times

        def do_bench(launch: Any, quantiles: Any) -> list[float]:
            start = time.perf_counter()
            launch()
            return [(time.perf_counter() - start) * 1e3] * 3

        settings["do_bench"] = do_bench
    return triton.autotune(configs=configs, key=matmul.KEY, **settings)(matmul.matmul_kernel)


def _phases(began: float, ended: float) -> dict[str, float]:
    """Return where safetune's time went, from when it stored each outcome; empty for Triton."""
    database = Path(os.environ["SAFETUNE_CACHE_DIR"]) / "safetune.db"
    if not database.exists():
        return {}
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    with contextlib.closing(connection):
        stored = connection.execute("SELECT created, stage FROM trial ORDER BY created").fetchall()
    created = [moment for moment, _ in stored]
    screened = [moment for moment, stage in stored if stage != "final"]
    return {
        "until_first_outcome_s": created[0] - began,
        "until_last_screened_s": (screened or created)[-1] - began,
        "until_last_outcome_s": created[-1] - began,
        "after_last_outcome_s": ended - created[-1],
    }


def time_choices(chosen: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """In a fresh process: time the chosen configs long and in turns."""
    import matmul

    a, b, c = matmul.operands(options.size, recording.torch_device())
    by_text = {str(config): config for config in matmul.configs(options.configs)}
    texts = sorted(set(chosen.values()))
    samples: dict[str, list[float]] = {text: [] for text in texts}
    for turn in range(ROUNDS):
        for text in (*texts[turn % len(texts) :], *texts[: turn % len(texts)]):
            settings = by_text[text].all_kwargs()
            launch = functools.partial(matmul.launch, matmul.matmul_kernel, a, b, c, **settings)
            samples[text] += _timed(launch)
    return {"median_ms": {text: statistics.median(times) for text, times in samples.items()}}


def _timed(launch: Any) -> list[float]:
    """Return the device milliseconds of ROUND_LAUNCHES launches, L2 flushed before each."""
    if recording.interpreted():
        start = time.perf_counter()
        launch()
        return [(time.perf_counter() - start) * 1e3]
    import torch
    from triton.runtime import driver

    flush_buffer = driver.active.get_empty_cache_for_benchmark()
    spans = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(ROUND_LAUNCHES)
    ]
    launch()
    for start, end in spans:
        driver.active.clear_cache(flush_buffer)
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in spans]


def _synchronize() -> None:
    import torch

    if not recording.interpreted():
        torch.cuda.synchronize()


def _median(timing: Any) -> float:
    return float(timing[0] if isinstance(timing, (list, tuple)) else timing)


def _parts_to_run(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[int]:
    """Yield the parts still to run, at most `--parts`, while the longest so far fits the budget."""
    start, longest = time.monotonic(), 0.0
    done = {row["part"] for row in rows}
    missing = [part for part in range(options.alternations) if part not in done]
    for part in missing[: options.parts]:
        began = time.monotonic()
        if began - start + longest > options.budget:
            print(f"{options.budget:g} s are used up: run again for the rest")
            return
        yield part
        longest = max(longest, time.monotonic() - began)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = recording.arguments(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--alternations", type=int, default=3, help="in all, earlier runs included")
    parser.add_argument("--parts", type=int, default=None, help="alternations to run now, at most")
    parser.add_argument(
        "--budget", type=float, default=1e9, metavar="SECONDS", help="begin no part past it"
    )
    parser.add_argument("--fresh", action="store_true", help="do not go on with earlier rows")
    parser.add_argument("--size", type=int, default=4096, help="M = N = K")
    parser.add_argument("--configs", type=int, default=72, help="fewer, for a trial run")
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    """Run one task of a measuring process, or the parts that are still missing."""
    options = parse()
    if options.task:
        kind, argument = options.task
        report = (
            first_call(argument, options)
            if kind == "first-call"
            else time_choices(json.loads(argument), options)
        )
        options.report.write_text(json.dumps(report))
        return
    recording.require_device()
    folder = recording.output_folder(options)
    result = recording.begin("tuning_time")
    if not options.fresh:
        recording.resume(result, [folder, recording.RESULTS])
    for part in _parts_to_run(result.rows, options):
        result.rows += run_part(part, options)
        result.save(folder, figures)
    path = result.save(folder, figures)
    timed = ["first_call_s", "process_s", "until_first_outcome_s", "until_last_screened_s"]
    columns = ["kind", "part", "state", "tuner", *timed, "failed", "median_ms", "config"]
    print(recording.table(result.rows, columns))
    print()
    print(recording.figures_table(result, path))


if __name__ == "__main__":
    main()
