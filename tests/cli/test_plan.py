"""`safetune tune --dry-run`: what a sweep would measure, and how long that takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import Workload
from safetune import safetune as decorated
from safetune.offline import plan, tasks
from safetune.outcome import Outcome, Verdict
from safetune.store.local.store import Store
from safetune.store.records import TrialRecord
from safetune.tuning.requests import Progress


@triton.jit
def add_kernel(x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offsets, tl.load(x + offsets, mask=offsets < n) + 1, mask=offsets < n)


def task(n: int, blocks: tuple[int, ...] = (64, 128)) -> tasks.Task:
    configs = [triton.Config({"BLOCK": block}) for block in blocks]
    tuner = decorated(configs=configs, key=["n"])(add_kernel)

    def grid(meta: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(n, meta["BLOCK"]),)

    workload = Workload(str(n), grid, (torch.zeros(n), n))
    return tasks.Task(tasks.OfflineKernel("add_kernel", tuner, tuner), workload, "float32")


def left(data: dict[str, Any]) -> dict[str, int]:
    return {f"{each['kernel']} {each['shape']}": each["to_measure"] for each in data["tunings"]}


def test_a_plan_names_every_key_and_stores_nothing(
    safetune: Any, targets: Path, cache_dir: Path
) -> None:
    result = safetune("tune", targets / "add.py", "--dry-run")

    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert lines[1][:3] == ["kernel", "shape", "dtype"]
    assert ["add_one", "large", "float32", "2", "0", "2"] in lines
    last = result.stdout.splitlines()[-1]
    assert last == "3 tunings of 2 kernels; 6 configs, 0 stored, 6 to measure"
    assert not cache_dir.exists()


def test_what_is_stored_is_not_planned_again_and_says_how_long_the_rest_takes(
    safetune: Any, targets: Path
) -> None:
    add, small = str(targets / "add.py"), ("--shape", "small")
    safetune.json("tune", f"{add}:add_one", *small)

    data = safetune.json("tune", add, "--dry-run")

    assert left(data) == {"kernel small": 2, "add_one small": 0, "add_one large": 2}
    estimates = [each["estimate_s"] for each in data["tunings"]]
    assert estimates[:2] == [None, 0], "no trial of the first kernel is stored"
    assert estimates[2] == data["estimate_s"] > 0
    shown = safetune("tune", add, "--dry-run").stdout.splitlines()[-1]
    assert "6 configs, 2 stored, 4 to measure; at least about " in shown
    forced = safetune.json("tune", f"{add}:add_one", *small, "--force", "--dry-run")
    assert left(forced) == {"add_one small": 2}


def test_two_shapes_of_one_key_are_measured_once(safetune: Any, targets: Path) -> None:
    data = safetune.json("tune", targets / "heuristics.py", "--dry-run")

    assert [each["to_measure"] for each in data["tunings"]] == [2, 0, 2]
    assert data["stored"] == 0, "what another key of the plan measures is not stored yet"
    measured = safetune.json("tune", targets / "heuristics.py")["tunings"]
    assert [tuning["measured"] for tuning in measured] == [2, 0, 2], "as planned"


def test_recorded_calls_are_planned(safetune: Any, recorded: None) -> None:
    data = safetune.json("tune", "--recorded", "--dry-run")

    assert [each["to_measure"] for each in data["tunings"]] == [2, 2, 2, 2]
    assert len(data["left_out"]) == 1
    assert safetune.json("list") == []


class TestSecondsPerConfig:
    def test_a_judged_trial_keeps_the_time_of_its_measurement(self) -> None:
        """Else all trials of a key had the time of the vote, which says nothing of their cost."""
        seen: dict[int, float] = {}

        def note(step: Progress) -> None:
            if step.outcome is not None and step.stage == "screen":
                seen[step.config.kwargs["BLOCK"]] = time.time()

        tasks.tune_task(task(256, blocks=(2, 256)), lambda tally: tally.observers.append(note))

        (_, trials), *_ = tasks.open_tuning_store().trials_of("add_kernel")
        slow = next(trial for trial in trials if trial.config["BLOCK"] == 2)
        assert slow.outcome.judged > 0
        assert slow.created <= seen[2]

    def test_a_pause_between_two_sweeps_does_not_count(self, tmp_path: Path) -> None:
        tasks.tune_task(task(100), lambda tally: None)
        ((key, _),) = tasks.open_tuning_store().trials_of("add_kernel")
        store = Store.open(tmp_path / "other")
        store.put_key(key)
        for number, created in enumerate((1000.0, 1002.0, 1006.0, 90000.0, 90003.0)):
            outcome = Outcome(Verdict.TIMEOUT)
            store.put_trial(TrialRecord(key.digest, str(number), {}, 1, outcome, created))

        assert plan.seconds_per_config(store, "add_kernel") == 3.0
        assert plan.seconds_per_config(store, "other_kernel") is None
        store.close()


def test_a_choice_that_was_imported_has_no_outcomes_here(
    safetune: Any, targets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that all configs have a stored outcome, of which none was measured here."""
    command = ("tune", targets / "add.py:add_one", "--shape", "small")
    safetune.json(*command)
    safetune.json("export", tmp_path / "packs")
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "elsewhere"))
    safetune.json("import", tmp_path / "packs")

    data = safetune.json(*command, "--dry-run")

    assert (data["configs"], data["stored"], data["to_measure"]) == (2, 0, 0)
