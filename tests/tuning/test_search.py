"""Which configs a search asks for, on times that are known: without launches."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from safetune import History, InvalidSetting, Neighbour, Trial, space
from safetune.settings import SearchBudget
from safetune.tuning.search import BATCH, RandomProposer, Search, one_step

CONFIGS = tuple(
    space(BM=[16, 32, 64, 128], BN=[16, 32, 64, 128], KIND=["a", "b"], num_warps=[1, 2, 4, 8])
)
HISTORY = History("kernel", {"n": 1000}, {}, {}, CONFIGS)


def time_of(config: Any, best: int = 64) -> float:
    """Return milliseconds with one valley, at BM = best, BN = 32, two warps and kind b."""
    distance = abs(config.kwargs["BM"].bit_length() - best.bit_length())
    distance += abs(config.kwargs["BN"].bit_length() - 6) + abs(config.num_warps - 2)
    return 1.0 + distance + 0.5 * (config.kwargs["KIND"] == "a")


BEST = min(CONFIGS, key=time_of)


class Named:
    """Proposes what it was given, once each time, and keeps what it was told."""

    def __init__(self, *answers: Sequence[Any]) -> None:
        self.answers = list(answers)
        self.told: list[tuple[History, int]] = []

    def propose(self, history: History, remaining: int) -> Sequence[Any]:
        self.told.append((history, remaining))
        return self.answers.pop(0) if self.answers else []


def run(search: Search, budget: int) -> list[int]:
    """Return the indexes that a search asks for, in order."""
    times: dict[int, float | None] = {}
    while len(times) < budget and (batch := search.ask(times, budget - len(times))):
        assert not times.keys() & set(batch)
        assert 0 < len(batch) <= budget - len(times)
        times |= {index: time_of(CONFIGS[index]) for index in batch}
    return list(times)


def test_a_step_is_to_the_next_value_of_one_parameter() -> None:
    steps = one_step(CONFIGS)
    here = next(i for i, c in enumerate(CONFIGS) if str(c).startswith("BM: 32, BN: 16, KIND: a"))
    near = {str(CONFIGS[index]).partition(", num_ctas")[0] for index in steps[here]}
    assert near == {
        "BM: 16, BN: 16, KIND: a, num_warps: 1",
        "BM: 64, BN: 16, KIND: a, num_warps: 1",
        "BM: 32, BN: 32, KIND: a, num_warps: 1",
        "BM: 32, BN: 16, KIND: b, num_warps: 1",
        "BM: 32, BN: 16, KIND: a, num_warps: 2",
    }


def test_a_step_goes_over_what_a_list_leaves_out() -> None:
    configs = [config for config in CONFIGS if config.kwargs["BM"] != 32]
    steps = one_step(configs)
    assert {configs[index].kwargs["BM"] for index in steps[0]} == {16, 64}


def test_the_incumbent_and_the_choices_of_neighbours_come_first() -> None:
    neighbours = tuple(Neighbour({"n": n}, 1.0, CONFIGS[n]) for n in (7, 9))
    start = replace(HISTORY, incumbent=CONFIGS[50], neighbours=neighbours)
    assert run(Search(start, RandomProposer()), 20)[:3] == [50, 7, 9]
    assert run(Search(start, RandomProposer()), 2) == [50, 7]


def test_the_last_part_of_a_budget_descends_to_a_config_that_no_step_improves() -> None:
    """Also where the proposer has no more to say."""
    start = CONFIGS[[c.kwargs["BM"] * c.kwargs["BN"] * c.num_warps for c in CONFIGS].index(2048)]
    tried = run(Search(HISTORY, Named([start])), 60)
    assert CONFIGS[min(tried, key=lambda index: time_of(CONFIGS[index]))] is BEST
    assert set(one_step(CONFIGS)[CONFIGS.index(BEST)]) <= set(tried)
    assert len(tried) < 60  # every config one step from the best was tried: nothing is left to do


def test_what_a_proposer_is_told_and_what_is_taken_of_its_answers() -> None:
    import triton

    other = triton.Config({"BM": 17, "BN": 16, "KIND": "a"})
    equal = space(BM=[16], BN=[16], KIND=["a"], num_warps=[2])[0]
    named = Named([CONFIGS[5], other, CONFIGS[5], equal], [CONFIGS[5], CONFIGS[6]])
    search = Search(HISTORY, named)
    assert search.ask({}, 40) == [5, 1]
    search.ask({5: 2.0, 1: None}, 38)
    (first, most), (second, _) = named.told
    assert (first.trials, first.values, first.configs) == ((), {"n": 1000}, CONFIGS)
    assert 0 < most < 40, "the rest is for the polish"
    assert second.trials == (Trial(CONFIGS[5], 2.0), Trial(CONFIGS[1], None))


@pytest.mark.parametrize("answer", [None, 0, "all", [0, 1], [{"BM": 16}]])
def test_an_answer_that_is_not_a_list_of_configs_names_the_proposer(answer: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"of kernel returned .*, not a list of configs"):
        Search(HISTORY, Named(answer)).ask({}, 40)


@pytest.mark.parametrize("kind", [tuple, iter, lambda configs: configs[0]])
def test_any_iterable_of_configs_is_an_answer_and_so_is_one_config(kind: Any) -> None:
    assert Search(HISTORY, Named(kind([CONFIGS[5]]))).ask({}, 40) == [5]


def test_a_random_proposer_says_the_same_in_each_process_and_never_a_config_twice() -> None:
    one, other = (run(Search(HISTORY, RandomProposer(seed=3)), 128) for _ in range(2))
    assert one == other
    assert sorted(one) == list(range(len(CONFIGS)))
    assert one != run(Search(HISTORY, RandomProposer(seed=4)), 128)


def gaussian(seed: int = 0) -> Any:
    """Return the default proposer, where scikit-learn is installed."""
    return pytest.importorskip("safetune.tuning.gaussian").GaussianProcess(seed)


def test_a_search_finds_the_valley_where_chance_does_not() -> None:
    found = [run(Search(HISTORY, gaussian(seed)), 36) for seed in range(4)]
    assert all(CONFIGS.index(BEST) in tried for tried in found)
    assert all(len(tried) == 36 for tried in found)


def on_edge(config: Any) -> float | None:
    """Return milliseconds that fall with the bytes of the tiles until they do not fit."""
    rows, columns, inner = (config.kwargs[name] for name in ("BM", "BN", "BK"))
    size = 2 * (rows + columns) * inner * config.num_stages
    shape = abs(rows.bit_length() - 7) + abs(columns.bit_length() - 8)
    return None if size > 232_448 else 3.0 - math.log2(size / 232_448) / 4 + shape / 3


def test_a_search_knows_the_best_configs_beside_those_that_need_too_much_memory() -> None:
    """A forest of trees held them for failing ones: it proposed them in one case of these eight."""
    values: dict[str, Any] = {"BM": [16, 32, 64, 128, 256], "BN": [32, 64, 128, 256]}
    values |= {"BK": [64, 128, 256], "GM": [1, 16, 32, 64], "num_stages": [2, 3, 4, 5]}
    configs = tuple(space(**values))
    best = min(time_ms for config in configs if (time_ms := on_edge(config)) is not None)
    cases = 0
    for seed in range(8):
        drawn = random.Random(seed).sample(configs, 48)
        trials = (Trial(config, on_edge(config)) for config in drawn)
        others = tuple(trial for trial in trials if trial.time_ms != best)
        proposed = gaussian().propose(replace(HISTORY, configs=configs, trials=others), BATCH)
        times = [on_edge(config) for config in proposed]
        assert times.count(None) <= 3, seed
        cases += best in times
    assert cases >= 5


def test_a_search_follows_near_neighbours_and_not_far_ones() -> None:
    def neighbour(distance: float, best: int) -> Neighbour:
        trials = tuple(Trial(config, time_of(config, best)) for config in CONFIGS)
        choice = min(CONFIGS, key=lambda config: time_of(config, best))
        return Neighbour({"n": 0}, distance, choice, trials)

    near = replace(HISTORY, neighbours=(neighbour(0.1, 64), neighbour(2.0, 16)))
    first = gaussian().propose(near, BATCH)
    assert first[0] is BEST
    assert all(time_of(config) <= 2.5 for config in first[:4])
    far = replace(HISTORY, neighbours=(neighbour(9.0, 16),))
    assert gaussian().prior(far) is None


def test_a_search_takes_values_that_are_not_numbers_and_configs_that_all_fail() -> None:
    failed = tuple(Trial(config, None) for config in CONFIGS[:30])
    proposed = gaussian().propose(replace(HISTORY, trials=failed), 8)
    assert len({id(config) for config in proposed} - {id(t.config) for t in failed}) == 8
    alone = replace(HISTORY, configs=CONFIGS[:1])
    assert list(gaussian().propose(alone, 10)) == [CONFIGS[0]]
    assert list(gaussian().propose(replace(alone, trials=failed[:1]), 10)) == []


@pytest.mark.parametrize(
    ("written", "budget"),
    [
        (None, None),
        (200, SearchBudget(configs=200)),
        ("200", SearchBudget(configs=200)),
        ("90s", SearchBudget(seconds=90.0)),
        ("1.5m", SearchBudget(seconds=90.0)),
        ("1h", SearchBudget(seconds=3600.0)),
    ],
)
def test_a_budget_is_a_number_of_configs_or_a_time(
    written: object, budget: SearchBudget | None
) -> None:
    assert SearchBudget.parse("kernel", written) == budget


@pytest.mark.parametrize(
    "written",
    [
        *(0, -1, True, 1.5, "0s", "5 minutes", "m", "", "1d", [200]),
        *(float("nan"), 10**400, f"{10**400}h"),
    ],
)
def test_another_budget_is_refused_by_name(written: object) -> None:
    with pytest.raises(InvalidSetting, match=r"budget=.* of add_kernel is neither a number"):
        SearchBudget.parse("add_kernel", written)


def test_a_time_leaves_as_many_configs_as_fit_at_the_rate_so_far() -> None:
    budget = SearchBudget(seconds=10.0)
    assert budget.remaining(tried=100, new=0, elapsed_s=0.0) > 10**9
    assert budget.remaining(tried=120, new=20, elapsed_s=4.0) == 30
    assert budget.remaining(tried=120, new=20, elapsed_s=11.0) < 1
    assert SearchBudget(configs=50).remaining(tried=30, new=1, elapsed_s=99.0) == 20


def test_a_space_is_every_combination_that_where_keeps() -> None:
    configs = space(BM=[16, 32], num_warps=(4, 8), where=lambda c: c.BM == 32 or c.num_warps < 8)
    assert [(c.kwargs, c.num_warps) for c in configs] == [
        ({"BM": 16}, 4),
        ({"BM": 32}, 4),
        ({"BM": 32}, 8),
    ]
    (config,) = space(BM=[16], num_stages=[2], num_ctas=[1], maxnreg=[128])
    assert (config.kwargs, config.num_stages, config.maxnreg) == ({"BM": 16}, 2, 128)
    with pytest.raises(InvalidSetting, match=r"BM=64 is not a list of values; write BM=\[\.\.\.\]"):
        space(BM=64)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="none of 2 configs is left"):
        space(BM=[16, 32], where=lambda c: c.BM > 32)
