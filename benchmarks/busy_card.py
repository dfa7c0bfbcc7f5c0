"""How good choices are that were made on a busy card: eight processes tune eight keys at once.

The keys are those of a matrix product of 10 to 40 us. The truth is the time of every config as it
is deployed, on the idle card (`deployed_time`): the median of three processes, as a time depends on
where a process's tensors lie. Every round begins with an empty store; compiled kernels stay.
`alone`: one process tunes one key after the other. `tunings`: eight processes tune one key each.
`program`: beside these another program launches, without a pause, a kernel that fills half of the
multiprocessors. After a busy round one more process looks all keys up: `after` is what it launches.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fresh_process
import recording
from recording import Figures, Row

HEIGHTS = (512, 1024, 1536, 2048, 3072, 4096, 5120, 6144)
BESIDE = ("alone", "tunings", "program")
TINY = (32, 64)  # the heights in Triton's interpreter
LIMIT_S = 240.0
PROCESSES = 3  # that measure the truth

#: `busy_truth_spread` is how far these times lie apart, of configs at most this much slower than
#: the best.
NEAR_BEST = 1.03

#: The nanoseconds for which the other program's kernel keeps its multiprocessors.
HELD_NS = 200_000


def figures(rows: Sequence[Row]) -> Figures:
    """Return how much slower than the best the worst choice of each kind is, and the median."""
    measured: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        if row["kind"] == "truth":
            measured.setdefault((row["height"], row["config"]), []).append(row["median_ms"])
    truth = {case: statistics.median(times) for case, times in measured.items()}
    best: dict[int, float] = {}
    for (height, _), time_ms in truth.items():
        best[height] = min(time_ms, best.get(height, time_ms))
    spreads = [
        max(times) / min(times) - 1
        for (height, config), times in measured.items()
        if truth[height, config] <= best[height] * NEAR_BEST
    ]
    found: Figures = {"busy_truth_spread": max(spreads)}
    regrets: dict[str, list[float]] = {}
    for row in rows:
        if row["kind"] == "choice":
            regret = truth[row["height"], row["config"]] / best[row["height"]] - 1
            regrets.setdefault(row["beside"] + "_after" * row["after"], []).append(regret)
    for kind, values in regrets.items():
        found[f"busy_worst_{kind}"] = max(values)
        found[f"busy_median_{kind}"] = statistics.median(values)
        found[f"busy_choices_{kind}"] = float(len(values))
        found[f"busy_over_1pct_{kind}"] = float(sum(value > 0.01 for value in values))
    for beside in {row["beside"] for row in rows if row["kind"] == "round"}:
        marked = [r["contended"] for r in rows if r["kind"] == "round" and r["beside"] == beside]
        found[f"busy_contended_{beside}"] = float(sum(marked))
    return found


def configs() -> list[Any]:
    """Return the configs: tiles of which several are nearly as good as the best."""
    import triton

    if recording.interpreted():
        return [triton.Config({"BM": m, "BN": 32, "BK": 32}) for m in (16, 32)]
    return [
        triton.Config({"BM": m, "BN": n, "BK": k}, num_warps=warps, num_stages=stages)
        for m, n, k, warps, stages in itertools.product(
            (64, 128), (64, 128), (32, 64), (4, 8), (3, 4)
        )
    ]


def work_of(height: int) -> Any:
    """Return the operands of one key."""
    import choice_problems
    import torch

    torch.manual_seed(height)
    device, side = ("cpu", 32) if recording.interpreted() else ("cuda", 1024)
    return choice_problems.matmul_work((height, side, side), device)


def heights() -> tuple[int, ...]:
    """Return the keys."""
    return TINY if recording.interpreted() else HEIGHTS


def choose(keys: Sequence[int]) -> dict[str, str]:
    """Launch each key once; return what was launched, by key."""
    import choice_kernels

    from safetune import safetune

    tuner = safetune(configs=configs(), key=["M", "N", "K"])(choice_kernels.matmul_kernel)
    chosen = {}
    for height in keys:
        work_of(height).launch(tuner)
        chosen[str(height)] = str(tuner.best_config)
    return chosen


def hold() -> None:
    """Launch a kernel that holds half of the multiprocessors, until this process is killed."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def held(out, NANOSECONDS: tl.constexpr):
        began = tl.extra.cuda.globaltimer()
        now = began
        while now - began < NANOSECONDS:
            now = tl.extra.cuda.globaltimer()
        tl.store(out + tl.program_id(0), now)

    half = torch.cuda.get_device_properties().multi_processor_count // 2
    out = torch.zeros(half, dtype=torch.int64, device="cuda")
    print("ready", flush=True)
    while True:
        for _ in range(100):
            held[(half,)](out, HELD_NS, num_warps=32)
        torch.cuda.synchronize()


def truth(folder: Path) -> Iterator[Row]:
    """Yield the time of each config on each key, as it is deployed, in each process."""
    variables = fresh_process.caches(folder / "triton", folder / "none")
    for process in range(PROCESSES):
        times = fresh_process.run(deployed, variables=variables, limit_s=LIMIT_S)["times"]
        for height, config, median_ms in times:
            found = {"height": height, "config": config, "median_ms": median_ms}
            yield {"kind": "truth", "process": process, **found}


def deployed() -> dict[str, list[tuple[int, str, float]]]:
    """Return each key, config and its time in milliseconds."""
    import deployed_time

    times = []
    for height in heights():
        launches = {str(each): functools.partial(_launch, each.all_kwargs()) for each in configs()}
        medians = deployed_time.medians(work_of(height), launches)
        times += [(height, config, median_ms) for config, median_ms in medians.items()]
    return {"times": times}


def _launch(chosen: dict[str, Any], work: Any) -> None:
    import choice_kernels

    work.launch(choice_kernels.matmul_kernel, **chosen)


@contextlib.contextmanager
def program(beside: str) -> Iterator[None]:
    """Run the other program meanwhile, if there is one in this kind of round."""
    if beside != "program" or recording.interpreted():
        yield
        return
    command = [sys.executable, "-c", "import busy_card; busy_card.hold()"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent) as other:
        assert other.stdout is not None
        other.stdout.readline()
        yield
        other.kill()


def tune(beside: str, number: int, folder: Path) -> Iterator[Row]:
    """Tune all keys at once from an empty store; yield each choice."""
    store, found = folder / f"{beside}-{number}", {"beside": beside, "round": number}
    every = [*heights()]
    tasks = [every] if beside == "alone" else [[height] for height in every]
    variables = fresh_process.caches(folder / "triton", store)
    start = time.monotonic()
    with program(beside):
        yield from _choices(tasks, variables, {**found, "after": False})
    took = time.monotonic() - start
    yield {"kind": "round", **found, "seconds": took, "contended": _contended(store)}
    if beside != "alone":
        yield from _choices([every], variables, {**found, "after": True})


def _choices(tasks: Sequence[list[int]], variables: dict[str, str], found: Row) -> Iterator[Row]:
    """Run a process for each task, all at once; yield what each key launched."""

    def run(keys: list[int]) -> dict[str, Any]:
        return fresh_process.run(choose, keys, variables=variables, limit_s=LIMIT_S)

    with ThreadPoolExecutor(len(tasks)) as pool:
        for keys, chosen in zip(tasks, pool.map(run, tasks), strict=True):
            for height in keys:
                config = chosen[str(height)]
                yield {"kind": "choice", **found, "height": height, "config": config}


def _contended(store: Path) -> int:
    from safetune.outcome import Mark
    from safetune.store.local.store import Store

    opened = Store.open(store)
    try:
        return sum(bool(Mark.CONTENDED.reason_in(e.choice.marks)) for e in opened.choices())
    finally:
        opened.close()


def main(argv: Sequence[str] | None = None) -> None:
    """Run all rounds, print and record."""
    parser = recording.arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind")
    parsed = parser.parse_args(argv)
    result, folder = recording.begin("busy_card"), recording.output_folder(parsed)
    with tempfile.TemporaryDirectory(prefix="busy-card-") as place:
        os.environ["TRITON_CACHE_DIR"] = str(Path(place) / "triton")
        result.rows += truth(Path(place))
        for number, beside in itertools.product(range(parsed.rounds), BESIDE):
            result.rows += tune(beside, number, Path(place))
            path = result.save(folder, figures)
    recording.report(result, path)


if __name__ == "__main__":
    main()
