"""Tuning within a budget: real children and a real store, and times made up by `do_bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import History, InvalidSetting, safetune, space
from safetune.config import config_digest
from safetune.miss.resolve import Miss
from safetune.outcome import Mark, Outcome, Verdict
from safetune.settings import SearchBudget, Settings
from safetune.store.lookup import open_lookup
from safetune.store.records import TrialRecord
from safetune.tuning.requests import Progress, TuningResult
from safetune.tuning.tuner import tune

N = 100
CONFIGS = space(BLOCK=[16, 32, 64, 128, 256], TAG=[*range(8)])
CURRENT: dict[str, Any] = {}


@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr, TAG: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


def note(arguments: dict[str, Any], reset_only: bool = False) -> None:
    CURRENT.update(BLOCK=arguments["BLOCK"], TAG=arguments["TAG"])


def milliseconds(BLOCK: int, TAG: int) -> float:
    """One valley, at BLOCK = 64 and TAG = 5."""
    return 1.0 + abs(BLOCK.bit_length() - 7) + 0.5 * abs(TAG - 5)


def bench(launch: Callable[[], None], quantiles: Any) -> list[float]:
    launch()
    return [milliseconds(**CURRENT)] * 3


def decorated(configs: Sequence[Any] = CONFIGS, **options: Any) -> Any:
    """Return the kernel as a fresh process would have it: nothing in memory."""
    settings = {"key": ["n"], "pre_hook": note, "do_bench": bench, **options}
    return safetune(configs=list(configs), **settings)(copy_kernel)


def launched(kernel: Any, n: int = N) -> tuple[int, int]:
    """Launch a kernel; return its choice."""
    src, dst = torch.arange(n).float(), torch.zeros(n)
    kernel[grid](dst, src, n)
    assert torch.equal(dst, src)
    chosen = kernel.best_config.kwargs
    return chosen["BLOCK"], chosen["TAG"]


def tuned(
    kernel: Any,
    force: bool = False,
    goes_on: bool = False,
    observe: Callable[[Progress], None] = lambda progress: None,
) -> TuningResult:
    """Tune a kernel as `safetune tune` does."""
    request = Miss(kernel, (torch.zeros(N), torch.zeros(N), N), {"grid": grid}).request(force)
    return tune(replace(request, goes_on=goes_on), open_lookup(Settings.current()).store, observe)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


class InOrder:
    """Proposes the configs as they are declared."""

    def __init__(self) -> None:
        self.told: list[History] = []

    def propose(self, history: History, remaining: int) -> Sequence[Any]:
        self.told.append(history)
        tried = {id(trial.config) for trial in history.trials}
        return [config for config in history.configs if id(config) not in tried][:remaining]


def stored_marks() -> list[tuple[str, ...]]:
    """Return the marks of every choice in the store."""
    return [found.choice.marks for found in open_lookup(Settings.current()).store.choices()]


def test_a_budget_ends_the_tuning_and_the_stored_choice_says_so() -> None:
    pytest.importorskip("sklearn")
    kernel = decorated(budget=20)
    assert launched(kernel) == (64, 5)
    assert len(kernel.configs_timings) == 20
    assert kernel.tuning_phases["search"] > 0
    assert stored_marks() == [("searched: 20 of 40 configs",)]


def test_a_choice_of_a_search_is_launched_and_not_searched_again() -> None:
    """Not by a process that has another budget, or none."""
    launched(decorated(budget=4, proposer=InOrder()))
    for budget in (4, 30, None):
        again = decorated(budget=budget)
        launched(again)
        assert not again.tuning_phases, budget


def test_every_config_is_the_default_and_such_a_choice_has_no_mark() -> None:
    kernel = decorated(CONFIGS[:6])
    launched(kernel)
    assert len(kernel.configs_timings) == 6
    assert stored_marks() == [()]
    launched(decorated(CONFIGS[:7], budget=9), n=2 * N)
    assert () in stored_marks(), "a budget for all of them leaves nothing out"


def test_a_search_that_was_interrupted_goes_on_where_it_was() -> None:
    class Killed(BaseException):
        pass

    def kill(progress: Progress) -> None:
        if progress.outcome is not None and progress.done == 7:
            raise Killed

    with pytest.raises(Killed):
        tuned(decorated(budget=16, proposer=InOrder()), observe=kill)
    proposer = InOrder()
    result = tuned(decorated(budget=16, proposer=proposer))
    assert len(proposer.told[0].trials) == 7
    assert len(result.outcomes) == 16
    assert result.measured <= 16 - 7 + 10, "those of the final are run again"


def test_a_larger_budget_and_none_measure_only_what_is_left() -> None:
    """Each opens a generation: its mark says how far it went."""
    tuned(decorated(budget=8, proposer=InOrder()))
    assert tuned(decorated(budget=8), goes_on=True).measured == 0
    more = tuned(decorated(budget=16, proposer=InOrder()), goes_on=True)
    assert len(more.outcomes) == 16
    assert stored_marks() == [("searched: 16 of 40 configs",)]
    every = tuned(decorated(), goes_on=True)
    assert len(every.outcomes) == 40
    assert stored_marks() == [()]
    assert every.choice.kwargs == {"BLOCK": 64, "TAG": 5}
    assert tuned(decorated(), goes_on=True).measured == 0


def test_the_incumbent_is_measured_again_first_and_kept() -> None:
    """Though the proposer would never name it."""
    every = tuned(decorated())
    assert every.choice.kwargs == {"BLOCK": 64, "TAG": 5}
    proposer = InOrder()
    forced = tuned(decorated(budget=3, proposer=proposer), force=True)
    assert proposer.told[0].incumbent is not None
    assert proposer.told[0].incumbent.kwargs == {"BLOCK": 64, "TAG": 5}
    assert forced.choice.kwargs == {"BLOCK": 64, "TAG": 5}
    assert len(forced.outcomes) == 3


def test_a_search_is_told_of_the_nearest_keys_and_tries_their_choices_first() -> None:
    for n in (10 * N, 2 * N):
        launched(decorated(CONFIGS), n=n)
    proposer = InOrder()
    assert launched(decorated(budget=2, proposer=proposer)) == (64, 5)
    (history,) = proposer.told[:1]
    assert history.values == {"n": N}
    assert [each.values for each in history.neighbours] == [{"n": 2 * N}, {"n": 10 * N}]
    assert [round(each.distance, 1) for each in history.neighbours] == [1.0, 3.3]
    for each in history.neighbours:
        assert each.choice.kwargs == {"BLOCK": 64, "TAG": 5}
        assert len(each.trials) == len(CONFIGS)
        for trial in each.trials:
            assert trial.time_ms == milliseconds(**trial.config.kwargs)


def test_a_lack_of_memory_at_another_key_says_nothing_of_its_config() -> None:
    store = open_lookup(Settings.current()).store
    launched(decorated(budget=3, proposer=InOrder()), n=2 * N)
    (chosen,) = store.choices()
    lacked = CONFIGS[-1]
    outcome = Outcome(Verdict.NO_MEMORY)
    digest = config_digest(lacked)
    store.put_trial(TrialRecord(chosen.choice.key, digest, lacked.all_kwargs(), 1, outcome, 1.0))
    proposer = InOrder()
    launched(decorated(budget=2, proposer=proposer))
    (neighbour,) = proposer.told[0].neighbours
    assert len(neighbour.trials) == 3
    assert all(trial.time_ms for trial in neighbour.trials)


def test_a_budget_does_not_end_before_a_config_works() -> None:
    def fails(arguments: dict[str, Any], reset_only: bool = False) -> None:
        note(arguments)
        if arguments["BLOCK"] < 64:
            raise ValueError("too small")

    kernel = decorated(budget=3, proposer=InOrder(), pre_hook=fails)
    block, _ = launched(kernel)
    assert block >= 64
    assert len(kernel.configs_timings) < 40


def test_a_time_ends_the_search_too() -> None:
    """So short a time ends it after the first batch."""
    budget = SearchBudget.parse("copy_kernel", "0.001s")
    kernel = decorated(budget="0.001s", proposer=InOrder())
    assert kernel.budget == budget
    launched(kernel)
    assert 0 < len(kernel.configs_timings) < 40
    assert tuned(decorated(budget="0.001s"), goes_on=True).measured == 0


def test_without_scikit_learn_the_search_is_random_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "safetune.tuning.gaussian", None)
    with pytest.warns(UserWarning, match=r"drawn at random; install safetune\[search\]"):
        launched(kernel := decorated(budget=6))
    assert len(kernel.configs_timings) == 6


@pytest.mark.parametrize(
    ("variable", "own", "tried"),
    [("7", None, 7), ("7", 5, 5), ("1000", None, len(CONFIGS)), ("100h", 4, 4), ("", 6, 6)],
)
def test_a_variable_is_the_budget_of_kernels_without_their_own(
    monkeypatch: pytest.MonkeyPatch, variable: str, own: int | None, tried: int
) -> None:
    monkeypatch.setenv("SAFETUNE_BUDGET", variable)
    kernel = decorated(budget=own)
    launched(kernel)

    assert len(kernel.configs_timings) == tried


def test_a_time_in_the_variable_ends_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFETUNE_BUDGET", "0.01s")
    kernel = decorated()
    launched(kernel)

    assert 0 < len(kernel.configs_timings) < len(CONFIGS)


@pytest.mark.parametrize("value", ["0", "-3", "5 minutes", "2.5", "nan"])
def test_a_variable_that_is_no_budget_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("SAFETUNE_BUDGET", value)
    with pytest.raises(InvalidSetting, match=f"budget={value!r} of SAFETUNE_BUDGET is neither"):
        Settings.current()


def test_a_budget_or_proposer_that_is_none_of_them_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="budget='soon' of copy_kernel"):
        decorated(budget="soon")
    for proposer in (3, len):
        with pytest.raises(InvalidSetting, match="of copy_kernel is not an object with a method"):
            decorated(proposer=proposer)


def test_budget_and_proposer_are_not_part_of_the_key(tmp_path: Path) -> None:
    one, other = decorated(), decorated(budget=5, proposer=InOrder())
    assert one.identity.digest == other.identity.digest
    assert config_digest(one.configs[0]) == config_digest(other.configs[0])
    assert not Mark.SEARCHED.reason_in(())
