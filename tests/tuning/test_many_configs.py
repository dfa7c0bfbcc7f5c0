"""What a config costs the caller: as much among hundreds as among a few, and nothing twice."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.both.protocol import Budget
from safetune.config import config_text
from safetune.miss.resolve import Miss
from safetune.outcome import Effects, Group, Mark, Outcome, OutputReport, Timing, Verdict
from safetune.store.local.store import Store
from safetune.tuning import race
from safetune.tuning.bench import Ready
from safetune.tuning.requests import Phases, TuningRequest, TuningResult
from safetune.tuning.tuner import tune


@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr, TAG: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


class Bench:
    """In the place of children: every config works, and has the result of the first.

    `same` is as in `Ready`; the others are yielded from the last to the first.
    """

    interpreted = False
    chooses = True
    notes: tuple[str, ...] = ()
    effects = Effects(repeats=True)
    varied: frozenset[int] = frozenset()  # configs whose launches leave other bits

    def __init__(self, request: TuningRequest, same: dict[int, int] | None = None) -> None:
        self._same = same or {}
        self.phases = Phases("wait")
        self.grids = request.grids.sizes
        self.measured = Counter[int]()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def compiled(self, configs: Sequence[int], timeout_s: float, *_: object) -> Iterator[Ready]:
        for config in sorted(configs, key=lambda config: (config in self._same, -config)):
            yield Ready(config, same=self._same.get(config))

    def measure(
        self, config: int, budget: Budget | None, groups: Sequence[Group] | None = None
    ) -> tuple[Outcome, OutputReport | None]:
        self.measured[config] += 1
        stage = "final" if groups is None else "screen"
        timing = Timing(1.0 + config, 1.0 + config, 1.0 + config, 5, stage)
        report = None
        if groups is not None:
            number = groups[0].number if groups else config
            new = None if groups else Group(config, (0,))
            report = OutputReport(number, new, written=(7,), sums=(0,))
        return Outcome(Verdict.OK, timing=timing), report

    def repeat(self, config: int) -> tuple[Outcome, Sequence[tuple[int, int, str]]]:
        self.measured[config] += 1
        return Outcome(Verdict.OK), [(config, 0, "dst")] if config in self.varied else []

    def in_turn(self, budgets: Mapping[int, Budget]) -> dict[int, Outcome]:
        return {config: self.measure(config, budget)[0] for config, budget in budgets.items()}


def tuned(
    count: int, store: Store, same: dict[int, int] | None = None, kind: type[Bench] = Bench
) -> tuple[TuningResult, Bench]:
    """Tune a kernel of `count` configs."""
    configs = [triton.Config({"BLOCK": 16, "TAG": tag}) for tag in range(count)]
    kernel: Any = safetune(configs=configs, key=["n"])(copy_kernel)
    tensors = torch.zeros(16), torch.zeros(16)
    request = Miss(kernel, (*tensors, 16), {"grid": (1,)}).request()
    bench: Any = kind(request, same)
    return tune(request, store, bench=bench), bench


def test_a_config_costs_no_more_calls_among_hundreds_than_among_a_few() -> None:
    """SGLang's grid has 1,920: what is done for each config must not look at all the others."""

    def calls(count: int) -> float:
        store, seen = Store.in_memory(), 0
        store.kernels()

        def see(frame: object, event: str, argument: object) -> None:
            nonlocal seen
            seen += event == "call"

        sys.setprofile(see)
        try:
            tuned(count, store)
        finally:
            sys.setprofile(None)
        return seen / count

    calls(8)  # what a process does once
    few, many = calls(40), calls(320)
    assert many < 1.1 * few


def test_a_config_with_the_code_of_another_is_not_run_and_shares_its_outcome() -> None:
    store = Store.in_memory()
    result, bench = tuned(6, store, same={0: 5, 2: 3})
    assert sorted(bench.measured) == [1, 3, 4, 5]
    outcomes = [outcome for _, outcome in result.outcomes]
    assert [outcome.verdict for outcome in outcomes] == [Verdict.OK] * 6
    assert [outcome.judged for outcome in outcomes] == [6] * 6
    configs = [config for config, _ in result.outcomes]
    for config, same in {0: 5, 2: 3}.items():
        mark = Mark.SAME_AS.of(config_text(configs[same]))
        assert outcomes[config] == outcomes[same].with_marks([mark])
        assert outcomes[config].shareable
    stored = store.trials(result.stored.key)
    assert sum(trial.outcome.marked(Mark.SAME_AS) for trial in stored) == 2


@pytest.mark.parametrize("same", [{0: 1}, {1: 0}])
def test_of_two_with_the_same_code_the_one_declared_first_is_chosen(same: dict[int, int]) -> None:
    """Whichever was compiled first: the choice must not depend on that."""
    result, bench = tuned(2, Store.in_memory(), same)
    assert result.choice.kwargs["TAG"] == 0
    assert len(bench.measured) == 1


@pytest.mark.parametrize(
    ("racy", "chosen"), [({0, 1}, 2), ({2}, 0), ({0, 1, 2, 3}, 0)], ids=["two", "a slow one", "all"]
)
def test_the_fastest_that_leaves_the_same_bits_each_time_is_chosen(
    racy: set[int], chosen: int
) -> None:
    class Racy(Bench):
        varied = frozenset(racy)

    result, _ = tuned(4, Store.in_memory(), kind=Racy)
    assert result.choice.kwargs["TAG"] == chosen
    marks = [Mark.NOT_REPEATABLE.reason_in(outcome.marks) for _, outcome in result.outcomes]
    tried = racy if chosen != 0 or 0 in racy else set[int]()  # from the fastest on
    assert marks == ["dst" if config in tried else "" for config in range(4)]
    assert any("not_repeatable" in mark for mark in result.stored.marks) == (chosen in racy)


class FailingFinal(Bench):
    """The two best configs of the final end their processes in its last rounds, which are slow."""

    screen = (1.0, 1.01, 1.05, 1.06, 1.5)

    def measure(
        self, config: int, budget: Budget | None, groups: Sequence[Group] | None = None
    ) -> tuple[Outcome, OutputReport | None]:
        outcome, report = super().measure(config, budget, groups)
        assert outcome.timing is not None
        ms, turn = self.screen[config], self.measured[config]
        if outcome.timing.stage == "final":
            ms = 2.0 * ms + 0.04 * (turn % 2 == config)  # who of the first two leads stays open
            if config < 2 and turn > race.MIN_ROUNDS + 1:
                return Outcome(Verdict.DIED), None
        return replace(outcome, timing=replace(outcome.timing, median_ms=ms, p20_ms=ms)), report


def test_where_all_that_a_final_leaves_fail_those_that_it_has_beaten_come_first() -> None:
    """One that was not in the final won, by the time of a moment at which the device was faster."""
    result, _ = tuned(5, Store.in_memory(), kind=FailingFinal)
    stages = {
        config.kwargs["TAG"]: outcome.timing and outcome.timing.stage
        for config, outcome in result.outcomes
    }
    assert stages == {0: None, 1: None, 2: "final", 3: "final", 4: "screen"}
    assert result.choice.kwargs["TAG"] == 2
