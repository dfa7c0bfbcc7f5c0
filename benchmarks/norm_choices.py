"""How far the choices for the norms' backward kernel are from the fastest config, in replays.

A tuning times launches one by one, a training step repeats them, and not always is the same config
the fastest. For each key that `safetune tune safetune.kernels.layer_norm --dtype bfloat16` tunes,
all configs that the current device may launch take turns, as replays of CUDA graphs with the
finalize kernel, over two sets of operands. A choice is that of the store or of a shipped pack, as
SAFETUNE_MODE=frozen takes it. `--all` adds the configs that pruning leaves on any card.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import random
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import norm_timing
import recording
from recording import Figures, Row

if TYPE_CHECKING:
    from safetune.kernels.launches import Launch
    from safetune.kernels.workloads import Problem

#: What a part takes on an H100, with everything compiled.
PART_S = 4.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return how much more time each choice takes than the fastest config, and the worst."""
    found: Figures = {}
    times: dict[str, list[Row]] = {}
    for row in rows:
        if "microseconds" in row:
            times.setdefault(row["part"], []).append(row)
    for part, measured in times.items():
        fastest = min(row["microseconds"] for row in measured)
        for row in measured:
            if row["chosen"]:
                found[f"regret_{part}"] = row["microseconds"] / fastest - 1
    worst, choices = max(found.values(), default=0.0), float(len(found))
    return {**found, "regret_worst": worst, "choices": choices}


def problems() -> dict[str, Problem]:
    """Return the problems that are tuned, by the names that `safetune tune` prints."""
    import torch

    from safetune.kernels import workloads

    device = torch.device(recording.torch_device())
    return {found.name: found for found in workloads.problems(device, torch.bfloat16)}


def configs_of(launch: Launch, take_all: bool) -> list[Any]:
    """Return the configs that the current device may launch, or any may."""
    import torch

    from safetune.kernels.configs import backward_configs, has_fast_memory

    if torch.cuda.is_available():
        torch.cuda.init()
    fast_memory = take_all or has_fast_memory()
    return backward_configs(launch.kernel.configs, fast_memory, **launch.kwargs)


def compile_one(job: tuple[Problem, int]) -> str:
    """Compile one config into Triton's cache, in a process of its own; return what went wrong."""
    import torch

    from safetune.kernels.workloads import backward_of

    problem, number = job
    _, launch = backward_of(dataclasses.replace(problem, device=torch.device("meta")), pinned=True)
    args = [a.dtype if isinstance(a, torch.Tensor) else a for a in launch.args]
    options = launch.kernel.configs[number].all_kwargs()
    try:
        launch.kernel.fn.warmup(*args, grid=(1,), **launch.kwargs, **options)
    except Exception as error:
        return f"{problem.name} {options}: {type(error).__name__}: {str(error)[-200:]}"
    return ""


def compile_all(wanted: Sequence[Problem], options: argparse.Namespace) -> None:
    """Compile in parallel what the measurement then finds in Triton's cache."""
    import torch

    from safetune.kernels.workloads import backward_of

    jobs = []
    for problem in wanted:
        shape = dataclasses.replace(problem, device=torch.device("meta"))
        _, launch = backward_of(shape, pinned=True)
        left = configs_of(launch, options.all)
        jobs += [(problem, n) for n, c in enumerate(launch.kernel.configs) if c in left]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        for failed in filter(None, pool.map(compile_one, jobs)):
            print(failed, flush=True)


def choice_of(launch: Launch) -> Any:
    """Return the config that a launch takes where nothing is tuned."""
    launch.kernel[launch.grid](*launch.args, **launch.kwargs)
    return launch.kernel.best_config


def measure(problem: Problem, options: argparse.Namespace) -> list[Row]:
    """Return a row for each config: the median of replays in random order, or its error."""
    import torch

    from safetune.config import config_digest, config_text
    from safetune.kernels import launches
    from safetune.kernels.workloads import backward_of

    made = [backward_of(problem) for _ in range(1 if recording.interpreted() else 2)]
    launch = made[0][1]
    chosen, ready, rows = config_digest(choice_of(launch)), {}, []

    def call(outputs: Any, launch: Launch, config: Any) -> None:
        launch.kernel.fn[launch.grid](*launch.args, **launch.kwargs, **config.all_kwargs())
        x, weight, bias = launch.args[1:4]
        plan = launches.backward_plan(x, weight, bias, problem.groups)
        partials = (outputs.weight_partials, outputs.bias_partials)
        _, finalize = launches.finalize_launch(plan, *partials, weight, bias)
        launches.run_launch(finalize, pinned=False)

    for config in configs_of(launch, options.all):
        calls = [functools.partial(call, *each, config) for each in made]
        row = {"part": problem.name, "config": config_text(config)}
        row["chosen"] = config_digest(config) == chosen
        try:
            replay = norm_timing.Replay(lambda calls=calls: calls, replay_s=2e-3)
        except Exception as error:
            rows.append({**row, "error": f"{type(error).__name__}: {str(error)[:200]}"})
            continue
        ready[row["config"]] = (row, replay, [])
    for _, replay, _ in ready.values():
        replay.warm_up(0.03)
    for _ in range(options.replays):
        for _, replay, times in random.sample(list(ready.values()), len(ready)):
            times.append(replay.microseconds())
    rows += [{**row, "microseconds": statistics.median(t)} for row, _, t in ready.values()]
    if not recording.interpreted():
        torch.cuda.empty_cache()
    return rows


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = recording.part_arguments(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--all", action="store_true", help="what pruning leaves on any card")
    parser.add_argument("--workers", type=int, default=14, help="compiling processes")
    parser.add_argument("--replays", type=int, default=14)
    return parser.parse_args(argv)


def main() -> None:
    """Run the parts that are still missing, print and record."""
    options = parse()
    recording.require_device()
    folder = recording.output_folder(options)
    os.environ["SAFETUNE_MODE"] = "frozen"
    result = recording.begin("norm_choices")
    if not options.fresh:
        recording.resume(result, [folder, recording.RESULTS])
    every, done = problems(), {row["part"] for row in result.rows}
    if not recording.interpreted():
        compile_all([problem for name, problem in every.items() if name not in done], options)
    path = result.save(folder, figures)
    for name in recording.parts_to_run(every, result.rows, options, PART_S):
        rows = measure(every[name], options)
        by_time = sorted(rows, key=lambda row: row.get("microseconds", 1e9))
        print(recording.table(by_time, ["part", "microseconds", "chosen", "config", "error"]))
        result.rows += rows
        result.save(folder, figures)
    print(recording.figures_table(result, path))


if __name__ == "__main__":
    main()
