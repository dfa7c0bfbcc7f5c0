"""The time in the row of a trial."""

from __future__ import annotations

import time

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune
from safetune.offline import tasks
from safetune.tuning.requests import Progress


@triton.jit
def add_kernel(x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < n) + 1, mask=offsets < n)


def task() -> tasks.Task:
    configs = [triton.Config({"BLOCK": block}) for block in (2, 256)]
    tuner = safetune(configs=configs, key=["n"])(add_kernel)
    workload = Workload(
        "256", lambda meta: (triton.cdiv(256, meta["BLOCK"]),), (torch.zeros(256), 256)
    )
    return tasks.Task(tasks.OfflineKernel("add_kernel", tuner, tuner), workload, "float32")


def test_a_judged_trial_keeps_the_time_of_its_measurement() -> None:
    """Else all trials of a key had the time of the vote."""
    seen: dict[int, float] = {}

    def note(step: Progress) -> None:
        if step.outcome is not None and step.stage == "screen":
            seen[step.config.kwargs["BLOCK"]] = time.time()

    tasks.tune_task(task(), lambda tally: tally.observers.append(note))

    (_, trials), *_ = tasks.open_tuning_store().trials_of("add_kernel")
    slow = next(trial for trial in trials if trial.config["BLOCK"] == 2)
    assert slow.outcome.judged > 0
    assert slow.created <= seen[2]
