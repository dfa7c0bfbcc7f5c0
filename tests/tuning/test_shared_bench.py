"""A key whose configs several processes of a node measure: each config once, and one chooses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.config import config_digest
from safetune.miss.resolve import Miss
from safetune.outcome import Outcome, Verdict
from safetune.settings import Settings
from safetune.store.lookup import GuardedStore, open_lookup
from safetune.store.records import KeyRecord
from safetune.tuning.requests import Phases, Progress, TuningRequest
from safetune.tuning.shared_bench import HelpersBench, SharedBench
from safetune.tuning.single_flight import WaitBudget
from safetune.tuning.tuner import measure, recall, tune

ROOT = Path(__file__).parents[2]
TIMES = {16: 5.0, 32: 1.0, 64: 1.01, 128: 3.0}

#: A process that measures a config until it is killed.
HELPER = """
import sys
from pathlib import Path
from safetune.store.local.locks import try_lock
held = try_lock(Path(sys.argv[1]), sys.argv[2])
print(held is not None, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def request_() -> TuningRequest:
    block = [0]

    def hook(arguments: dict[str, Any]) -> None:
        block[0] = arguments["BLOCK"]

    def bench(launch: Callable[[], None], quantiles: Any) -> list[float]:
        launch()
        return [{16: 5.0, 32: 1.0, 64: 1.01, 128: 3.0}[block[0]]] * 3

    @safetune(
        configs=[triton.Config({"BLOCK": size}, pre_hook=hook) for size in TIMES],
        key=["n"],
        do_bench=bench,
    )
    @triton.jit
    def copy(dst, src, n, BLOCK: tl.constexpr):
        offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

    grid = lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)  # noqa: E731
    call = {"grid": grid}
    return Miss(copy, (torch.zeros(100), torch.ones(100), 100), call).request(force=False)


@pytest.fixture
def store() -> GuardedStore:
    return open_lookup(Settings.current()).store


@pytest.fixture
def killed(store: GuardedStore, request_: TuningRequest) -> Iterator[subprocess.Popen[str]]:
    """A process of this node that has begun to measure the last config."""
    name = f"{request_.key.digest} {config_digest(request_.configs[-1])}"
    process = subprocess.Popen(
        [sys.executable, "-c", HELPER, str(store.path), name],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    yield process
    process.kill()
    process.communicate()


def shared(request: TuningRequest, store: GuardedStore) -> TuningRequest:
    return replace(request, bench=partial(SharedBench, store))


def test_a_helper_measures_what_the_owner_has_not_and_the_owner_chooses(
    request_: TuningRequest, store: GuardedStore
) -> None:
    timed: dict[str, list[str]] = {"owner": [], "helper": [], "final": []}

    def note(step: Progress, who: str) -> None:
        if step.outcome is None:
            timed["final" if step.stage == "final" else who].append(step.text.split()[0])

    def observe(step: Progress) -> None:
        note(step, "owner")
        if step.outcome is not None and not timed["helper"]:  # the first config is claimed still
            asked = replace(request_, bench=partial(HelpersBench, store))
            helping = recall(asked, store, lambda step: note(step, "helper"), Phases("wait"))
            measure(helping, None, WaitBudget(0.0))
            assert store.choice(request_.key.digest) is None

    result = tune(shared(request_, store), store, observe)

    assert timed["owner"][0] == "BLOCK=16"
    assert timed["helper"] == ["BLOCK=32", "BLOCK=64", "BLOCK=128"]
    assert set(timed["final"]) == {"BLOCK=32", "BLOCK=64"}, "both ran again on the owner's card"
    assert result.choice.kwargs == {"BLOCK": 32}
    assert result.measured == 4
    assert [outcome.judged for _, outcome in result.outcomes] == [4] * 4
    stages = [outcome.timing.stage for _, outcome in result.outcomes if outcome.timing]
    assert [stage == "final" for stage in stages] == [False, True, True, False]


def test_the_owner_measures_the_config_of_a_helper_that_died(
    request_: TuningRequest, store: GuardedStore, killed: subprocess.Popen[str]
) -> None:
    screened: list[str] = []

    def observe(step: Progress) -> None:
        if step.outcome is not None and step.stage == "screen":
            screened.append(step.text.split()[0])
            if len(screened) == len(TIMES) - 1:
                killed.kill()

    assert tune(shared(request_, store), store, observe).measured == 4
    assert screened == ["BLOCK=16", "BLOCK=32", "BLOCK=64", "BLOCK=128"]


def test_a_config_that_found_no_memory_elsewhere_counts_as_not_tried(
    request_: TuningRequest, store: GuardedStore
) -> None:
    """Else its owner would wait for an outcome that no process is about to store."""
    helping = recall(request_, store, lambda step: None, Phases("wait"))
    store.put_key(KeyRecord.of(request_.key))
    helping.settle(2, Outcome(Verdict.DIED))
    helping.settle(3, Outcome(Verdict.NO_MEMORY))
    tried = store.tried(request_.key.digest, 0.0)
    assert tried == {config_digest(request_.configs[2])}
