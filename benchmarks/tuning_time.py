"""How long the first call of a kernel with 72 configs takes: safetune against triton.autotune.

Each measurement is a fresh process with nothing started beforehand: `cold` with an empty compile
cache and an empty store, `warm` with the compile cache that the same tuner's cold process filled
and an empty store. The two tuners alternate, and change who goes first. The time is from just
before the first call until the device has finished it. What each tuner chose is then timed long,
in turns, in one process.

The cold process goes on to two further keys, for which every config is compiled: half the rows, and
an output of 128 MiB.

One alternation is one part (under three minutes); parts are kept as they end, so that the script
can be run again and goes on: `--parts 1 --budget 450`. One part more, with `--isolation-cost`, is a
cold tuning with a fresh process for every config; it is in no ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import device_time
import fresh_process
import recording
import tuners
from recording import Figures, Row
from tuners import TUNERS

STATES = ("cold", "warm")
PROCESS_TIMEOUT_S = 240.0

#: What the first part of a run is expected to take on an H100 with 16 cores.
PART_S = 150.0
ISOLATION_PART = "isolation"

#: safetune with a fresh process for every config.
ISOLATED = "safetune-isolated"
ERROR_LIMIT = 1e-2

#: M and N of the further keys, in the size of the first.
FURTHER = {"further_key": (0.5, 1), "further_key_128MiB": (2, 2)}

#: The long measurement: rounds in turns, each of ROUND_LAUNCHES from a cold L2.
ROUNDS = 20
ROUND_LAUNCHES = 50


def figures(rows: Sequence[Row]) -> Figures:
    """Return ratios of medians, the medians, and how much slower a choice is than the better."""
    found: Figures = {}
    further = [row for row in rows if row["kind"] == "further_key"]
    seconds = recording.medians(further, "seconds", "key", "tuner")
    for key in FURTHER:
        if all((key, tuner) in seconds for tuner in TUNERS):
            found[f"{key}_ratio"] = seconds[key, "safetune"] / seconds[key, "triton"]
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
    for state, name, seconds in _phase_medians(firsts):
        found[f"{name}_{state}"] = seconds
    if isolated := [row for row in rows if row["kind"] == "isolation"]:
        found["first_call_s_cold_isolated"] = recording.medians(isolated, "first_call_s")[()]
    found["alternations"] = float(len({row["part"] for row in firsts}))
    return found


def _phase_medians(firsts: Sequence[Row]) -> Iterator[tuple[str, str, float]]:
    """Yield (state, column, seconds) for each phase of safetune's that was recorded."""
    names = sorted({name for row in firsts for name in row if name.startswith("phase_s_")})
    for name in names:
        timed = [row for row in firsts if name in row]
        for (state,), seconds in recording.medians(timed, name, "state").items():
            yield state, name, seconds


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


def run_isolation_part(options: argparse.Namespace) -> list[Row]:
    """Measure once, from empty caches, what a fresh process for every config costs."""
    with tempfile.TemporaryDirectory(prefix="tuning-time-") as folder:
        row = _measure_first_call(ISOLATED, "cold", Path(folder), options)
    print(f"a process for every config: {row['first_call_s']:.2f} s", flush=True)
    return [{"kind": "isolation", "part": ISOLATION_PART, **row}]


def run_part(part: int, options: argparse.Namespace) -> list[Row]:
    """Measure both tuners once, cold and warm, and time what they chose."""
    tuners = TUNERS if part % 2 == 0 else TUNERS[::-1]
    rows = []
    with tempfile.TemporaryDirectory(prefix="tuning-time-") as folder:
        for state in STATES:
            for order, tuner in enumerate(tuners):
                row = _measure_first_call(tuner, state, Path(folder), options)
                further = row.pop("further", {})
                rows.append({"kind": "first_call", "part": part, "order": order, **row})
                rows += [
                    {"kind": "further_key", "part": part, "key": key, "tuner": tuner, **found}
                    for key, found in further.items()
                ]
                print(f"part {part}: {tuner} {state}: {row['first_call_s']:.2f} s", flush=True)
        chosen = {row["tuner"]: row["config"] for row in rows if row.get("state") == "cold"}
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
    caches = {"TRITON_CACHE_DIR": compile_cache, "SAFETUNE_CACHE_DIR": store}
    task = "keys" if state == "cold" and tuner in TUNERS else "first-call"
    report = _in_fresh_process([task, tuner], caches, folder, options)
    report["process_s"] -= sum(found["seconds"] for found in report.get("further", {}).values())
    return {"tuner": tuner, "state": state, **report}


def _measure_choices(
    chosen: dict[str, str], folder: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    caches = {"TRITON_CACHE_DIR": folder / "triton-safetune"}
    report = _in_fresh_process(["choices", json.dumps(chosen)], caches, folder, options)
    return [
        {"tuner": tuner, "config": config, "median_ms": report["median_ms"][config]}
        for tuner, config in chosen.items()
    ]


def _in_fresh_process(
    task: list[str], caches: dict[str, Path], folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    size = ["--size", str(options.size), "--configs", str(options.configs)]
    return fresh_process.run(__file__, [*size, "--task", *task], caches, folder, PROCESS_TIMEOUT_S)


def first_call(tuner_name: str, options: argparse.Namespace, further: bool) -> dict[str, Any]:
    """In a fresh process: tune the product once, and say how long that took.

    With `further`, tune the further keys, too.
    """
    import matmul

    tuner = tuners.tuned(
        tuner_name.removesuffix("-isolated"),
        matmul.matmul_kernel,
        matmul.configs(options.configs),
        matmul.KEY,
        **({"isolation": "config"} if tuner_name == ISOLATED else {}),
    )
    began = time.time()
    found = _tuned(tuner, tuner_name, options.size, options.size, options.size)
    seconds = found.pop("seconds")
    moments = _moments(began, began + seconds)
    shapes = FURTHER if further else {}
    return {
        "first_call_s": seconds,
        **found,
        **moments,
        "further": {
            key: _tuned(tuner, tuner_name, int(m * options.size), n * options.size, options.size)
            for key, (m, n) in shapes.items()
        },
    }


def _tuned(tuner: Any, name: str, m: int, n: int, k: int) -> dict[str, Any]:
    import matmul

    a, b, c = matmul.operands(m, n, k, recording.torch_device())
    device_time.synchronize()
    start = time.perf_counter()
    matmul.launch(tuner, a, b, c)
    device_time.synchronize()
    seconds = time.perf_counter() - start
    error = matmul.relative_error(a, b, c)
    if not error < ERROR_LIMIT:
        raise SystemExit(f"{name} gave a wrong product: relative error {error}")
    return {
        "seconds": seconds,
        "config": str(tuner.best_config),
        "configs": len(tuner.configs),
        "failed": tuners.failed(tuner),
        **tuners.phases(tuner),
    }


def _moments(began: float, ended: float) -> dict[str, float]:
    """Return when safetune stored its first and last outcomes; empty for Triton."""
    database = Path(os.environ["SAFETUNE_CACHE_DIR"]) / "safetune.db"
    if not database.exists():
        return {}
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    with contextlib.closing(connection):
        stage = "json_extract(record, '$.outcome.timing.stage')"
        query = f"SELECT created, {stage} FROM trial ORDER BY created"
        stored = connection.execute(query).fetchall()
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

    size = options.size
    a, b, c = matmul.operands(size, size, size, recording.torch_device())
    by_text = {str(config): config for config in matmul.configs(options.configs)}
    texts = sorted(set(chosen.values()))
    samples: dict[str, list[float]] = {text: [] for text in texts}
    launches = 1 if recording.interpreted() else ROUND_LAUNCHES
    for turn in range(ROUNDS):
        for text in (*texts[turn % len(texts) :], *texts[: turn % len(texts)]):
            settings = by_text[text].all_kwargs()
            launch = functools.partial(matmul.launch, matmul.matmul_kernel, a, b, c, **settings)
            samples[text] += device_time.timed(launch, launches)
    return {"median_ms": {text: statistics.median(times) for text, times in samples.items()}}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = recording.part_arguments(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--alternations", type=int, default=3, help="in all, earlier runs included")
    parser.add_argument("--isolation-cost", action="store_true", help="one part more: see above")
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
            first_call(argument, options, further=kind == "keys")
            if kind != "choices"
            else time_choices(json.loads(argument), options)
        )
        options.report.write_text(json.dumps(report))
        return
    recording.require_device()
    folder = recording.output_folder(options)
    result = recording.begin("tuning_time")
    if not options.fresh:
        recording.resume(result, [folder, recording.RESULTS])
    every = [*range(options.alternations), *[ISOLATION_PART] * options.isolation_cost]
    for part in recording.parts_to_run(every, result.rows, options, PART_S):
        isolated = part == ISOLATION_PART
        result.rows += run_isolation_part(options) if isolated else run_part(part, options)
        result.save(folder, figures)
    path = result.save(folder, figures)
    timed = ["first_call_s", "process_s", "until_first_outcome_s", "until_last_screened_s"]
    columns = ["kind", "part", "state", "tuner", *timed, "failed", "median_ms", "config"]
    print(recording.table(result.rows, columns))
    print()
    print(recording.figures_table(result, path))


if __name__ == "__main__":
    main()
