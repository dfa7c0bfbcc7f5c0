"""How good the configs are that safetune and triton.autotune choose, on seven problems and twelve
short ones.

For each problem, in one process on one GPU:

- *compile*: one tuning of safetune's, whose pool fills the compile cache. It is not counted.
- *truth*: every config is launched in rounds over all configs from a cold L2, until it has run for
  400 ms on the device; its time is the median. Each round has an order of its own: what ran before
  decides how warm the card is, and by that the clock. (With one order, turned by one place each
  round, two matmuls that are equal differed by 2.6 %.) A config that takes more than three times as
  long as the best cannot be the best, and stops after 40 ms.
- *tunings*: ten choices of each tuner with the compile cache warm, each by a fresh tuner,
  safetune's with an empty store. Half of safetune's come before triton.autotune's and half after,
  so that a drift of the clock hits both.

A choice's regret is its true time over that of the best config, less one. Every choice counts as
much as any other. A problem judges nothing if good configs are easy to find: a space needs 24
configs, and a median of at least 1.3 times the best; `narrow_spaces` counts those that are not so.

*Short problems* (`short_problems.py`) have another truth, in place of the first: a launch in a CUDA
graph, as in a model (`deployed_time.py`). Of each the median regret of five tunings by each tuner
is a figure. `--short` runs them alone, and `--measure` says how safetune times their finals.

One problem is one part (about a minute on an H100); parts are kept as they end, so that the script
can be run again and goes on: `--parts 3 --budget 240`.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deployed_time
import device_time
import recording
import tuners
from recording import Figures, Row
from tuners import TUNERS

if TYPE_CHECKING:
    from choice_problems import Problem, Work

ERROR_LIMIT = 2e-2

#: Of the truth: kernel time in all, in one round, and of a config over HOPELESS times the best.
TRUTH_MS, ROUND_MS, HOPELESS_MS = 400.0, 10.0, 40.0
HOPELESS = 3.0
ROUND_LAUNCHES = 2000
ESTIMATE_LAUNCHES = 5

#: Tunings of a short problem by each tuner.
SHORT_REPETITIONS = 5

LEAST_CONFIGS, LEAST_SPREAD = 24, 1.3

#: Below this a mean regret is noise, and a ratio of two says nothing.
REGRET_FLOOR = 1e-4

#: What one problem is expected to take on an H100 with 16 cores.
PART_S = 70.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return shares, regrets and how often the same config was chosen; triton's with a suffix."""
    found: Figures = {}
    for tuner in TUNERS:
        regrets = [row["regret"] for row in judged(rows) if row["tuner"] == tuner]
        if not regrets:
            continue
        suffix = "" if tuner == "safetune" else f"_{tuner}"
        found[f"share_within_2pct{suffix}"] = _share(regret <= 0.02 for regret in regrets)
        found[f"share_within_1pct{suffix}"] = _share(regret <= 0.01 for regret in regrets)
        found[f"mean_regret{suffix}"] = statistics.fmean(regrets)
        found[f"worst_regret{suffix}"] = max(regrets)
        found[f"most_common_share{suffix}"] = _most_common_share(judged(rows), tuner)
        seconds = [row["seconds"] for row in judged(rows) if row["tuner"] == tuner]
        found[f"median_tuning_s{suffix}"] = statistics.median(seconds)
    if {"mean_regret", "mean_regret_triton"} <= set(found):
        ours, theirs = found["mean_regret"], found["mean_regret_triton"]
        found["mean_regret_ratio"] = max(ours, REGRET_FLOOR) / max(theirs, REGRET_FLOOR)
    for row in summary(rows, "deployed"):
        for tuner, suffix in (("safetune", ""), ("triton", "_triton")):
            found[f"deployed_regret{suffix}_{row['problem']}"] = row[f"median_{tuner}"]
    spaces = summary(rows)
    found["problems"] = float(len(spaces))
    found["narrow_spaces"] = float(
        sum(s["configs"] < LEAST_CONFIGS or s["median_to_best"] < LEAST_SPREAD for s in spaces)
    )
    return found


def judged(rows: Sequence[Row], truth: str = "truth") -> list[Row]:
    """Return the choices on the problems that have this truth, each with its `regret`."""
    times = _truth(rows, truth)
    return [
        {
            **row,
            "regret": times[row["part"]][row["config"]] / min(times[row["part"]].values()) - 1.0,
        }
        for row in rows
        if row["kind"] == "choice" and row["part"] in times
    ]


def summary(rows: Sequence[Row], truth: str = "truth") -> list[Row]:
    """Return one line for each problem: its space, and what each tuner made of it."""
    lines = []
    choices = judged(rows, truth)
    for part, times in _truth(rows, truth).items():
        best = min(times, key=lambda config: times[config])
        line = {
            "problem": part,
            "configs": len(times),
            "best_ms": times[best],
            "median_to_best": statistics.median(times.values()) / times[best],
            "within_2pct": sum(time_ms <= 1.02 * times[best] for time_ms in times.values()),
        }
        for tuner in TUNERS:
            own = [row for row in choices if row["part"] == part and row["tuner"] == tuner]
            if own:
                line[f"regret_{tuner}"] = statistics.fmean(row["regret"] for row in own)
                line[f"median_{tuner}"] = statistics.median(row["regret"] for row in own)
                line[f"worst_{tuner}"] = max(row["regret"] for row in own)
                line[f"seconds_{tuner}"] = statistics.median(row["seconds"] for row in own)
        lines.append({**line, "best": best})
    return lines


def _truth(rows: Sequence[Row], kind: str = "truth") -> dict[str, dict[str, float]]:
    """Return each problem's times in milliseconds by config, of the configs that run."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == kind and "median_ms" in row:
            times.setdefault(row["part"], {})[row["config"]] = row["median_ms"]
    return times


def _share(flags: Iterable[bool]) -> float:
    return statistics.fmean(map(float, flags))


def _most_common_share(rows: Sequence[Row], tuner: str) -> float:
    """Return how often a problem's most common choice was chosen, on average over problems."""
    chosen: dict[str, list[str]] = {}
    for row in rows:
        if row["kind"] == "choice" and row["tuner"] == tuner:
            chosen.setdefault(row["part"], []).append(row["config"])
    return statistics.fmean(
        Counter(configs).most_common(1)[0][1] / len(configs) for configs in chosen.values()
    )


def run_part(
    problem: Problem, options: argparse.Namespace, folder: Path, short: bool = False
) -> list[Row]:
    """Measure one problem: compile, find the truth, and let both tuners choose."""
    work = problem.prepare(recording.torch_device())
    configs = problem.configs[: options.configs]
    most = SHORT_REPETITIONS if short else options.repetitions
    repetitions = min(options.repetitions, most)
    stores = (folder / f"{problem.name}-{number}" for number in range(repetitions + 1))
    seconds = {}
    ours = {"measure": options.measure} if short else {}

    start = time.monotonic()
    _choose("safetune", problem, work, configs, next(stores), **ours)
    seconds["compile"] = time.monotonic() - start
    print(f"{problem.name}: compile: {seconds['compile']:.1f} s", flush=True)

    start = time.monotonic()
    launches, failed = _launches(problem, configs, work)
    if short:
        times = deployed_time.medians(work, launches)
        rows = [{"kind": "deployed", "config": c, "median_ms": ms} for c, ms in times.items()]
    else:
        samples = _samples(work, launches, options.truth_ms)
        rows = [{"kind": "truth", "config": c, **_summarized(s)} for c, s in samples.items()]
    rows += [{"kind": rows[0]["kind"], "config": c, "failed": why} for c, why in failed.items()]
    seconds["truth"] = time.monotonic() - start
    print(f"{problem.name}: truth: {seconds['truth']:.1f} s", flush=True)

    for number, tuner in enumerate(_turns(repetitions)):
        start = time.monotonic()
        store = next(stores) if tuner == "safetune" else None
        choice = _choose(tuner, problem, work, configs, store, **ours)
        seconds[tuner] = seconds.get(tuner, 0.0) + time.monotonic() - start
        rows.append({"kind": "choice", "tuner": tuner, "order": number, **choice})
    spent = {f"{name}_s": value for name, value in seconds.items()}
    rows.append({"kind": "cost", **spent, "part_s": sum(seconds.values())})
    print(f"{problem.name}: {sum(seconds.values()):.1f} s in all", flush=True)
    return [{"part": problem.name, **row} for row in rows]


def _turns(repetitions: int) -> list[str]:
    """Return whose turn it is: half of safetune's, all of Triton's, the other half."""
    before = (repetitions + 1) // 2
    return ["safetune"] * before + ["triton"] * repetitions + ["safetune"] * (repetitions - before)


def _choose(
    name: str,
    problem: Problem,
    work: Work,
    configs: Sequence[Any],
    store: Path | None,
    **ours: Any,
) -> dict[str, Any]:
    """Tune once with a fresh tuner and, for safetune, an empty store; return what it chose."""
    ours = {**ours} if name == "safetune" else {}
    if name == "safetune":
        assert store is not None
        assert not store.exists(), "an independent tuning needs an empty store"
        os.environ["SAFETUNE_CACHE_DIR"] = str(store)
        ours["scratch"] = problem.scratch
    tuner = tuners.tuned(name, problem.kernel, configs, problem.key, **ours)
    found = tuners.tune(tuner, lambda: work.launch(tuner))
    _check(work, f"{name}'s choice for {problem.name}, {tuner.best_config}")
    return found


def _check(work: Work, what: str) -> None:
    error = work.error()
    if not error < ERROR_LIMIT:
        raise SystemExit(f"{what}, is wrong: relative error {error}")


def _launches(
    problem: Problem, configs: Sequence[Any], work: Work
) -> tuple[dict[str, Callable[[Work], object]], dict[str, str]]:
    """Return what launches each config that fits on the device, and why others do not."""
    from triton.runtime.errors import OutOfResources

    launches: dict[str, Callable[[Work], object]] = {}
    failed = {}
    for config in configs:
        launch = functools.partial(_launch, problem.kernel, config.all_kwargs())
        try:
            launch(work)
        except OutOfResources as error:
            failed[str(config)] = str(error)
        else:
            _check(work, f"{problem.name}, {config}")
            launches[str(config)] = launch
    return launches, failed


def _launch(kernel: Any, chosen: Mapping[str, Any], work: Work) -> None:
    work.launch(kernel, **chosen)


def _samples(
    work: Work, launches: Mapping[str, Callable[[Work], object]], truth_ms: float
) -> dict[str, list[float]]:
    """Return the times of each config in rounds over all, from a cold L2."""
    bound = {config: functools.partial(launch, work) for config, launch in launches.items()}
    estimates = {
        config: statistics.median(device_time.timed(launch, ESTIMATE_LAUNCHES))
        for config, launch in bound.items()
    }
    samples: dict[str, list[float]] = {config: [] for config in bound}
    order = random.Random(0)
    while wanting := list(_wanting(samples, truth_ms)):
        for config in order.sample(wanting, len(wanting)):
            count = max(1, min(ROUND_LAUNCHES, round(ROUND_MS / estimates[config])))
            samples[config] += device_time.timed(bound[config], count)
    return samples


def _wanting(samples: dict[str, list[float]], truth_ms: float) -> Iterator[str]:
    """Yield the configs that have not run for long enough."""
    best = min((statistics.median(times) for times in samples.values() if times), default=0.0)
    for text, times in samples.items():
        hopeless = times and statistics.median(times) > HOPELESS * best
        if sum(times) < (min(HOPELESS_MS, truth_ms) if hopeless else truth_ms):
            yield text


def _summarized(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median_ms": statistics.median(ordered),
        "p20_ms": ordered[int(0.2 * (len(ordered) - 1))],
        "p80_ms": ordered[int(0.8 * (len(ordered) - 1))],
        "launches": len(ordered),
        "measured_ms": sum(ordered),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--repetitions", type=int, default=10, help="tunings by each tuner")
    parser.add_argument("--configs", type=int, default=None, help="fewer, for a trial run")
    parser.add_argument(
        "--truth-ms", type=float, default=TRUTH_MS, help="kernel time of each config"
    )
    parser.add_argument("--short", action="store_true", help="the short problems alone")
    parser.add_argument("--measure", default=None, help="safetune's policy on short problems")
    return parser.parse_args(argv)


def main() -> None:
    """Run the parts that are still missing, print and record."""
    options = parse()
    result = recording.begin("choice_quality")
    with tempfile.TemporaryDirectory(prefix="choice-quality-") as caches:
        os.environ["TRITON_CACHE_DIR"] = str(Path(caches) / "triton")
        import choice_problems
        import short_problems

        short = {problem.name: problem for problem in short_problems.SHORT}
        long = {problem.name: problem for problem in choice_problems.PROBLEMS}
        every = short if options.short else {**long, **short}
        recording.run_parts(
            result,
            every,
            lambda part: run_part(every[part], options, Path(caches), part in short),
            figures,
            options,
            PART_S,
        )
    told = [f"{w}_{t}" for t in TUNERS for w in ("regret", "median", "worst", "seconds")]
    columns = ["problem", "configs", "best_ms", "median_to_best", "within_2pct", *told, "best"]
    for truth in ("truth", "deployed"):
        print(recording.table(summary(result.rows, truth), columns), end="\n\n")


if __name__ == "__main__":
    main()
