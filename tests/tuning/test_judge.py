"""Which configs are right: those of the largest group, unless the launch explains a difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from safetune.outcome import Group, GroupDifference, Mark, OutputReport, Verdict
from safetune.tuning.judge import Judgement, Votes, judge


def reports(
    groups: list[int | None],
    stale: tuple[int, ...] = (),
    written: list[int] | None = None,
    common: int = 0,
    excess: float = 1.0,
    spread: dict[int, float] | None = None,
) -> dict[int, OutputReport]:
    """Return what configs with these results report; equal numbers agree."""
    first: dict[int, int] = {}
    made = {}
    for config, kind in enumerate(groups):
        others = [number for other, number in first.items() if other != kind]
        is_new = kind is not None and kind not in first
        if is_new:
            first[kind] = config
        number = None if kind is None else first[kind]
        made[config] = OutputReport(
            number,
            Group(config, len(first), (0,)) if is_new else None,
            tuple(GroupDifference(other, (excess,), (5,), (common,)) for other in others),
            () if spread is None else (spread.get(config, 0.0),),
            (int(config in stale),),
            () if written is None else (written[config],),
            difference=f"out differs by {config}" if others else "",
        )
    return made


def judged(
    groups: list[int | None], grids: list[int] | None = None, stale: tuple[int, ...] = ()
) -> Judgement:
    sizes = grids or list(range(1, len(groups) + 1))
    return judge(reports(groups, stale), {config: (size,) for config, size in enumerate(sizes)})


def verdicts(result: Judgement) -> dict[int, Verdict]:
    return {config: verdict for config, (verdict, _) in result.rejected.items()}


@pytest.mark.parametrize("grids", [None, [4] * 8], ids=["another grid each", "one grid"])
def test_one_of_eight_is_wrong(grids: list[int] | None) -> None:
    result = judged([0, 1, 1, 1, 1, 1, 1, 1], grids)
    assert verdicts(result) == {0: Verdict.WRONG_RESULT}
    assert result.candidates == {*range(1, 8)}
    assert result.disputed == {}
    assert set(result.sizes.values()) == {1, 7}
    assert "7 of 8 configs agree on another result" in result.rejected[0][1]


def test_the_reason_names_what_differs() -> None:
    (reason,) = (text for _, text in judged([0, 0, 0, 1]).rejected.values())
    assert reason.endswith("; out differs by 3")


def test_all_that_disagree_with_the_majority() -> None:
    found = judged([0, 0, 0, 0, 1, 2, None])
    assert verdicts(found) == dict.fromkeys((4, 5, 6), Verdict.WRONG_RESULT)


@pytest.mark.parametrize(
    ("groups", "right"),
    [
        ([0, 1], {0}),
        ([0, 0, 1], {0, 1}),
        ([1, 0, 0], {1, 2}),
        ([0, 0, 1, 1], {0, 1}),
        ([0, 1, 2, 1, 2], {1, 3}),
        ([0, 0, 0, 1, 1, 1], {0, 1, 2}),
        ([0, 1, 2, 3], {0}),
        ([None] * 5, {0}),
        ([0, None, None, None], {0}),
        ([0, 0, 0, 1, 1, 2, 3], {0, 1, 2}),
    ],
)
def test_a_dispute_is_settled_by_the_largest_group_then_by_the_first_declared(
    groups: list[int | None], right: set[int]
) -> None:
    result = judged(groups)
    assert result.rejected == {}
    assert result.candidates == right
    assert result.disputed.keys() == set(range(len(groups)))
    assert not result.clear
    for config in range(len(groups)):
        outvoted = Mark.OUTVOTED.value in result.marks(config)
        assert outvoted == (config not in right)


def test_a_stored_group_counts_with_its_size_where_the_launched_ones_tie() -> None:
    grids = dict.fromkeys(range(5), (1,))
    known = judge(reports([0, 1]), grids, stored={1: 4})
    assert known.candidates == {1}
    assert known.sizes == {0: 1, 1: 4}
    assert verdicts(known) == {0: Verdict.WRONG_RESULT}
    small = judge(reports([0, 1]), grids, stored={1: 2})
    assert (small.candidates, small.rejected) == ({1}, {})
    outvoted = judge(reports([0, 1, 1, 1]), grids, stored={0: 9})
    assert outvoted.candidates == {1, 2, 3}
    assert judge(reports([0, 0]), grids, stored={1: 5}).sizes == {0: 6, 1: 6}


def test_a_majority_counts_those_that_have_not_been_launched_again() -> None:
    grids = dict.fromkeys(range(5), (1,))
    assert not judge(reports([0, 0, 0, 1]), grids, waiting=2).clear
    assert judge(reports([0, 0, 0, 0, 1]), grids, waiting=2).clear


class TestGrids:
    def test_a_result_of_each_program_follows_the_number_of_programs(self) -> None:
        """Whichever is the fastest may be chosen, and nothing is marked."""
        found = judge(reports([0, 1, 2], written=[8, 4, 2], common=2), {0: (8,), 1: (4,), 2: (2,)})
        assert found.candidates == {0, 1, 2}
        assert not found.disputed

    def test_it_may_follow_one_axis(self) -> None:
        grids = {0: (8, 4), 1: (4, 8), 2: (8, 1), 3: (2, 2)}
        written = [80, 40, 80, 20]
        made = reports([0, 1, 0, 2], written=written, common=9)
        assert judge(made, grids).candidates == {0, 1, 2, 3}

    @pytest.mark.parametrize(
        ("mine", "common"),
        [(995, 0), (1000, 1000), (500, 0), (300, 700)],
        ids=["a tail", "other values", "half of each tile", "random elements"],
    )
    def test_another_number_of_programs_excuses_nothing_else(self, mine: int, common: int) -> None:
        made = reports([0, 0, 0, 1], written=[1000, 1000, 1000, mine], common=common)
        found = judge(made, {0: (16,), 1: (16,), 2: (16,), 3: (8,)})
        assert verdicts(found) == {3: Verdict.WRONG_RESULT}

    @pytest.mark.parametrize(
        ("written", "grid"),
        [([8, 8, 8, 8], (2, 4)), ([0, 0, 0, 0], (4,))],
        ids=["as many programs", "not known"],
    )
    def test_what_may_be_partial_results_is_disputed(
        self, written: list[int], grid: tuple[int, ...]
    ) -> None:
        grids = {0: (8,), 1: (8,), 2: (8,), 3: grid}
        found = judge(reports([0, 0, 0, 1], written=written), grids)
        assert found.rejected == {}
        assert found.candidates == {0, 1, 2}
        assert found.disputed[3] == "1 of 4 configs have this result"

    def test_a_rival_with_the_grid_of_the_majority_has_no_excuse(self) -> None:
        assert verdicts(judged([0, 0, 0, 1], grids=[8, 8, 8, 8])) == {3: Verdict.WRONG_RESULT}


class TestRuns:
    def test_a_config_whose_runs_differ_is_judged_by_the_others(self) -> None:
        made = reports([0] * 6, spread={0: 9.0})
        found = judge(made, {config: (config,) for config in range(6)})
        assert verdicts(found) == {0: Verdict.WRONG_RESULT}
        assert "its runs differ" in found.rejected[0][1]

    def test_where_most_runs_differ_by_little_so_may_configs(self) -> None:
        spread = dict.fromkeys(range(1, 5), 0.04)
        made = reports([0, 1, 2, 3, 4], excess=0.1, spread=spread)
        assert judge(made, dict.fromkeys(made, (1,))).candidates == {*range(5)}

    def test_noise_as_large_as_the_values_is_a_fault_of_all_that_have_it(self) -> None:
        spread = dict.fromkeys(range(2, 8), 3.0)
        made = reports([0, 0, 1, 2, 3, 4, 5, 6], excess=3.0, spread=spread)
        assert judge(made, dict.fromkeys(made, (1,))).candidates == {0, 1}


class TestStale:
    def test_right_only_by_what_the_output_held(self) -> None:
        assert verdicts(judged([0] * 5, stale=(4,))) == {4: Verdict.ORDER_DEPENDENT}
        assert judged([0] * 5, stale=(2, 3, 4)).candidates == {*range(5)}
        assert judged([0] * 5, stale=(0, 1, 2, 3, 4)).candidates == {*range(5)}

    def test_of_three_the_two_that_write_all_are_preferred(self) -> None:
        found = judged([0] * 3, stale=(0,))
        assert (found.candidates, found.rejected) == ({1, 2}, {})
        assert found.disputed

    @pytest.mark.parametrize(("count", "slow"), [(2, (1,)), (4, (0, 1)), (4, (1, 2, 3))])
    def test_a_config_that_was_launched_once_shows_nothing(
        self, count: int, slow: tuple[int, ...]
    ) -> None:
        """Regression: of an in-place kernel's configs, which are all stale, one that something had
        held up for two seconds counted as one that is not: the others were disputed, or, where
        three were held up, rejected.
        """
        made = reports([0] * count, stale=(0, 1, 2, 3))
        made |= {config: replace(made[config], stale=()) for config in slow}
        assert judge(made, dict.fromkeys(made, (1,))).candidates == {*range(count)}

    def test_beside_one_that_was_launched_once_the_others_are_judged(self) -> None:
        made = reports([0] * 5, stale=(4,))
        made[0] = replace(made[0], stale=())
        found = judge(made, dict.fromkeys(made, (1,)))
        assert verdicts(found) == {4: Verdict.ORDER_DEPENDENT}
        assert found.candidates == {*range(4)}

    def test_a_config_that_is_rejected_has_no_vote(self) -> None:
        """Five of nine agreed, one of them was rejected, and the four left rejected four others."""
        disputed = judged([None, None, None, 0, 0, 0, 0, None, 0], stale=(3,))
        assert disputed.rejected == {}
        assert disputed.candidates == {4, 5, 6, 8}
        clear = judged([0, 0, 0, 0, 0, 1, 1], stale=(4,))
        assert verdicts(clear) == {
            4: Verdict.ORDER_DEPENDENT,
            5: Verdict.WRONG_RESULT,
            6: Verdict.WRONG_RESULT,
        }
        assert "4 of 7 configs agree on another result" in clear.rejected[5][1]


class TestVotes:
    def test_a_note_says_how_many_configs_wrote_beside_an_argument(self) -> None:
        votes = Votes()
        for config in range(2):
            votes.add(config, OutputReport(0, unowned=("qkv",)))
        (note,) = votes.notes()
        assert "2 of its configs wrote into the storage behind qkv" in note

    def test_a_majority_that_found_no_room_is_examined_again(self) -> None:
        """Groups of one config make room for it."""
        votes = Votes()
        for config, report in reports([0, 1, 1, 2, None, None, None]).items():
            votes.add(config, report)
        assert votes.unplaced() == [4, 5, 6]
        assert [group.number for group in votes.groups()] == [1]

    def test_a_minority_without_room_is_not(self) -> None:
        votes = Votes()
        for config, report in reports([0, 0, 1, 2, 3, 4, None]).items():
            votes.add(config, report)
        assert votes.unplaced() == []
        assert len(votes.groups()) == 5


CONFIGS = st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.integers(1, 3), st.booleans())


@given(st.lists(CONFIGS, min_size=1, max_size=12))
@example(
    [
        (group, 1 + config % 2, config == 3)
        for config, group in enumerate([None, None, None, 3, 3, 3, 3, None, 3])
    ]
)
def test_a_majority_is_never_rejected(configs: list[tuple[int | None, int, bool]]) -> None:
    groups = [group for group, _, _ in configs]
    stale = tuple(config for config, (_, _, is_stale) in enumerate(configs) if is_stale)
    result = judged(groups, [grid for _, grid, _ in configs], stale)
    wrong = [c for c, verdict in verdicts(result).items() if verdict is Verdict.WRONG_RESULT]
    assert result.candidates
    assert not result.candidates & result.rejected.keys()
    assert 2 * len(wrong) < max(1, len(groups))
    assert 2 * len(result.rejected) <= len(groups)
