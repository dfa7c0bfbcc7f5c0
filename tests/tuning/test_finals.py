"""Finals: how their times are taken, that they take turns, and what other work on a device does.

Children are real; the times are made up.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.both.protocol import Budget
from safetune.miss.resolve import Miss
from safetune.outcome import BUSY, Outcome, OutputReport, Timing
from safetune.settings import Settings
from safetune.store.local.store import Store
from safetune.store.lookup import open_lookup
from safetune.store.records import ChoiceRecord, TrialRecord
from safetune.tuning.bench import LaunchBench
from safetune.tuning.requests import Plan, TuningRequest, TuningResult
from safetune.tuning.tuner import BUSY_AGAIN, tune
from tests.conftest import FreshProcess

N = 100


@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def open_store() -> Store:
    return open_lookup(Settings.current()).store


class Planted(LaunchBench):
    """A bench whose configs take the times that a test says, by BLOCK, and of each kind."""

    screened: Mapping[int, float]
    replayed: Mapping[int, float]
    busy = False
    asked: list[str]

    def _block(self, index: int) -> int:
        return int(self._request.configs[index].kwargs["BLOCK"])

    def measure(
        self, index: int, budget: Budget | None, *args: Any, **kwargs: Any
    ) -> tuple[Outcome, OutputReport | None]:
        outcome, report = super().measure(index, budget, *args, **kwargs)
        return (outcome if budget is None else self._timed(outcome, index, "screen")), report

    def in_turn(self, budgets: Mapping[int, Budget]) -> dict[int, Outcome]:
        outcomes = {}
        for index, budget in budgets.items():
            self.asked.append(budget.way)
            replays = budget.way != "events" and self._block(index) in self.replayed
            outcomes[index] = self._timed(
                Outcome(self.measure(index, None)[0].verdict, marks=(BUSY,) * self.busy),
                *(index, budget.way if replays else "screen"),
            )
        return outcomes

    def _timed(self, outcome: Outcome, index: int, stage: str) -> Outcome:
        times = self.screened if stage == "screen" else self.replayed
        ms = times[self._block(index)]
        return replace(outcome, timing=Timing(ms, ms, ms, 10, stage))


class Key:
    """One key, which a tuning of a new process finds as the last one left it."""

    def __init__(self, measure: str | None = None) -> None:
        configs = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]
        decorate = safetune(configs=configs, key=["n"], measure=measure)
        self._kernel = decorate(copy_kernel)
        self.asked: list[str] = []

    @property
    def request(self) -> TuningRequest:
        return Miss(self._kernel, (torch.zeros(N), torch.ones(N), N), {"grid": grid}).request()

    def tune(
        self,
        screened: Mapping[int, float],
        replayed: Mapping[int, float] | None = None,
        busy: bool = False,
    ) -> TuningResult:
        request, self.asked = self.request, []
        bench = Planted(request)
        bench.screened, bench.replayed = screened, replayed or {}
        bench.busy, bench.asked = busy, self.asked
        return tune(request, open_store(), bench=bench)

    def trials(self) -> dict[int, TrialRecord]:
        return {t.config["BLOCK"]: t for t in open_store().trials(self.request.key.digest)}

    @property
    def choice(self) -> ChoiceRecord:
        found = Plan.read(self.request, open_store()).choice
        assert found is not None
        return found

    @property
    def is_due(self) -> bool:
        return Plan.read(self.request, open_store()).due


def chosen(result: TuningResult) -> int:
    return int(result.choice.kwargs["BLOCK"])


pytestmark = pytest.mark.usefixtures("cache_dir")

SHORT = {16: 0.010, 32: 0.011, 64: 0.012}
REPLAYED = {16: 0.009, 32: 0.006, 64: 0.007}

TIMES = {16: 1.0, 32: 1.02, 64: 2.0}
LATER = {16: 1.03, 32: 1.0, 64: 2.0}


class TestKinds:
    @pytest.mark.parametrize("measure", [None, "graph"])
    def test_a_short_kernel_is_chosen_by_its_replays(self, measure: str | None) -> None:
        key = Key(measure)
        assert chosen(key.tune(SHORT, REPLAYED)) == 32
        assert {*key.asked} == {"graph"}
        for block, trial in key.trials().items():
            timing, final = trial.outcome.timing, trial.outcome.final
            assert timing is not None
            assert final is not None
            assert (timing.stage, timing.median_ms) == ("screen", SHORT[block])
            assert (final.stage, final.median_ms) == ("graph", REPLAYED[block])
            assert [*trial.outcome.times().values()] == [SHORT[block]]
        assert key.choice.median_ms == SHORT[32], "as the times that it is compared with"

    @pytest.mark.parametrize(
        ("measure", "longer"), [(None, 10), ("events", 1), ("graph", 10), ("hot", 10)]
    )
    def test_others_are_chosen_by_events(self, measure: str | None, longer: int) -> None:
        key = Key(measure)
        times = {16: 0.0102 * longer, 32: 0.0100 * longer, 64: 0.0104 * longer}
        assert chosen(key.tune(times, REPLAYED)) == 32
        assert {*key.asked} == {"events"}
        assert all(trial.outcome.final is None for trial in key.trials().values())

    def test_one_that_cannot_be_replayed_has_all_timed_between_events(self) -> None:
        key = Key("graph")
        alone = {block: ms for block, ms in REPLAYED.items() if block != 64}
        assert chosen(key.tune(SHORT, alone)) == 16
        assert list(dict.fromkeys(key.asked)) == ["graph", "events"]
        assert all(trial.outcome.final is None for trial in key.trials().values())


class TestOtherWork:
    """On the device, in the rounds of a final."""

    def test_a_choice_is_marked_and_races_once_more(self) -> None:
        key = Key()
        assert chosen(key.tune(TIMES, busy=True)) == 16
        assert key.choice.marks == (BUSY,)
        assert not key.trials()[16].outcome.shareable
        assert key.is_due
        assert chosen(key.tune(LATER)) == 32
        assert key.asked
        assert (key.choice.marks, key.choice.generation) == ((), 2)
        assert key.trials()[32].outcome.shareable
        assert not key.is_due

    def test_the_same_config_wins_again(self) -> None:
        key = Key()
        key.tune(TIMES, busy=True)
        assert chosen(key.tune(TIMES)) == 16
        assert key.choice.marks == ()
        assert not key.is_due

    def test_it_races_no_third_time(self) -> None:
        key = Key()
        for _ in range(2):
            key.tune(TIMES, busy=True)
        assert key.choice.marks == (BUSY_AGAIN,)
        assert not key.trials()[16].outcome.shareable
        assert not key.is_due
        key.tune(LATER)
        assert key.asked == []

    def test_those_who_waited_for_the_choice_take_it(self) -> None:
        key = Key()
        key.tune(TIMES, busy=True)
        created = key.choice.created
        assert not Plan.read(key.request, open_store(), created - 1).due
        assert Plan.read(key.request, open_store(), created + 1).due

    def test_a_calm_final_leaves_no_mark(self) -> None:
        key = Key()
        key.tune(TIMES)
        assert key.choice.marks == ()
        assert not key.is_due


HOLDER = """
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from safetune.tuning.single_flight import WaitBudget, racing

with racing(open_lookup(Settings.current()).store, "", WaitBudget()) as is_alone:
    print(is_alone, flush=True)
    input()
"""

TUNED = """
import torch, triton, triton.language as tl
from safetune import safetune
from safetune.miss.resolve import Miss
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from safetune.tuning.single_flight import WaitBudget
from safetune.tuning.tuner import tune

def bench(launch, quantiles):
    launch()
    return [1.0] * 3

@safetune(configs=[triton.Config({"BLOCK": b}) for b in (16, 32)], key=["n"], do_bench=bench)
@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

def tell(text):
    if text:
        print(text.partition(", ")[2] or text, flush=True)

if __name__ == "__main__":
    call = (torch.zeros(100), torch.ones(100), 100)
    request = Miss(copy_kernel, call, {"grid": lambda meta: (8,)}).request()
    store = open_lookup(Settings.current()).store
    tune(request, store, lambda step: tell(step.stage), wait_budget=WaitBudget(%s, tell=tell))
    print("done", store.choice(request.key.digest).marks, flush=True)
"""


class TestTurns:
    """Of real processes on one device: here, the machine."""

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
        started: list[subprocess.Popen[str]] = []

        def run(script: str) -> subprocess.Popen[str]:
            path = tmp_path / f"{len(started)}.py"
            path.write_text(script)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = subprocess.Popen([sys.executable, str(path)], text=True, **pipes)
            started.append(process)
            return process

        yield run
        for process in started:
            process.kill()
            process.communicate()

    @pytest.mark.parametrize("ends", ["killed", "itself"])
    def test_a_final_waits_for_another_one_and_screening_does_not(
        self, start: Callable[[str], subprocess.Popen[str]], ends: str
    ) -> None:
        holder = start(HOLDER)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        tuned = start(TUNED % "120.0")
        assert tuned.stdout is not None
        seen = []
        while not seen or "times configs" not in seen[-1]:
            seen.append(tuned.stdout.readline().strip())
            assert seen[-1], seen
        assert seen[:-1] == ["screen"] * 4, "both configs, when they begin and end"
        if ends == "killed":
            holder.send_signal(signal.SIGKILL)
        else:
            holder.communicate("\n")
        *later, last = tuned.communicate()[0].splitlines()
        assert "final" in later
        assert last == "done ()"

    def test_it_does_not_wait_for_ever(
        self,
        start: Callable[[str], subprocess.Popen[str]],
        fresh_process: FreshProcess,
        tmp_path: Path,
    ) -> None:
        holder = start(HOLDER)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        told = start(TUNED % "0.2").communicate()[0].splitlines()
        assert "final" in told
        assert told[-1] == f"done ({BUSY!r},)"
