"""How long configs of a kernel take, by the times at which their trials were stored."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import triton
import triton.language as tl

from safetune import Workload, safetune
from safetune.offline import plan, tasks
from safetune.outcome import Outcome, Verdict
from safetune.store.local.store import Store
from safetune.store.records import TrialRecord
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
    """Else all trials of a key had the time of the vote, which says nothing of their cost."""
    seen: dict[int, float] = {}

    def note(step: Progress) -> None:
        if step.outcome is not None and step.stage == "screen":
            seen[step.config.kwargs["BLOCK"]] = time.time()

    tasks.tune_task(task(), lambda tally: tally.observers.append(note))

    (_, trials), *_ = tasks.open_tuning_store().trials_of("add_kernel")
    slow = next(trial for trial in trials if trial.config["BLOCK"] == 2)
    assert slow.outcome.judged > 0
    assert slow.created <= seen[2]


def test_a_pause_between_two_sweeps_does_not_count(tmp_path: Path) -> None:
    tasks.tune_task(task(), lambda tally: None)
    ((key, _),) = tasks.open_tuning_store().trials_of("add_kernel")
    store = Store.open(tmp_path / "other")
    store.put_key(key)
    for number, created in enumerate((1000.0, 1002.0, 1006.0, 90000.0, 90003.0)):
        outcome = Outcome(Verdict.TIMEOUT)
        store.put_trial(TrialRecord(key.digest, str(number), {}, 1, outcome, created))

    assert plan.seconds_per_config(store, "add_kernel") == 3.0
    assert plan.seconds_per_config(store, "other_kernel") is None
    store.close()
