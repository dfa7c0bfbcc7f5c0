"""Which configs are right: those of the largest group, unless the launch explains a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from safetune.outcome import Difference, Group, GroupDifference, Mark, OutputReport, Verdict
from safetune.tuning.judge import Judgement, Votes, judge


def reports(
    groups: list[int | None],
    written: list[int] | None = None,
    common: int = 5,
    excess: float = 1.0,
    spread: dict[int, float] | None = None,
) -> dict[int, OutputReport]:
    """Return what configs with these results report; equal numbers agree, None with no other."""
    first: dict[int, int] = {}
    made = {}
    for config, group in enumerate(groups):
        kind = -1 - config if group is None else group
        others = [number for other, number in first.items() if other != kind]
        is_new = kind not in first
        number = first.setdefault(kind, config)
        found = Difference(5, common, 5, excess)
        made[config] = OutputReport(
            number,
            Group(config, (0,)) if is_new else None,
            tuple(GroupDifference(other, (found,)) for other in others),
            () if spread is None else (spread.get(config, 0.0),),
            (8,) if written is None else (written[config],),
            (kind,),
            difference=f"out differs by {config}" if others else "",
        )
    return made


def judged(groups: list[int | None], grids: list[int] | None = None, **options: Any) -> Judgement:
    sizes = grids or [1] * len(groups)
    return judge(reports(groups), [(size,) for size in sizes], **options)


def verdicts(result: Judgement) -> dict[int, Verdict]:
    return {config: verdict for config, (verdict, _) in result.rejected.items()}


@pytest.mark.parametrize("grids", [[*range(8)], [4] * 8], ids=["another grid each", "one grid"])
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


@pytest.mark.parametrize(
    ("apart", "chosen"),
    [
        pytest.param(Difference(40, 40, 40, 1.0), {0, 1, 2}, id="few"),
        pytest.param(Difference(50, 50, 50, 1.0), {0, 1}, id="more"),
        pytest.param(Difference(40, 39, 39, 1.0), {0, 1}, id="one is not written"),
        pytest.param(Difference(1, 1, 1, 1e30), {0, 1}, id="far apart"),
    ],
)
def test_in_a_dispute_few_elements_of_many_leave_no_config_out(
    apart: Difference, chosen: set[int]
) -> None:
    """As in a gradient of FLA, whose terms cancel: any order of addition may be the right one."""
    made = reports([0, 0, 1], written=[1 << 22] * 3)
    made[2] = replace(made[2], differences=(GroupDifference(0, (apart,)),))
    found = judge(made, [(8,)] * 3)
    assert found.candidates == chosen
    assert found.disputed.keys() == {0, 1, 2}
    assert not found.rejected


def test_a_majority_rejects_a_config_for_one_element() -> None:
    made = reports([0, 0, 0, 1], written=[1 << 22] * 4)
    apart = (GroupDifference(0, (Difference(1, 1, 1, 1.0),)),)
    made[3] = replace(made[3], differences=apart)
    assert verdicts(judge(made, [(8,)] * 4)) == {3: Verdict.WRONG_RESULT}


def test_a_stored_group_counts_with_its_size_where_the_launched_ones_tie() -> None:
    known = judged([0, 1], stored={1: 4})
    assert known.candidates == {1}
    assert known.sizes == {0: 1, 1: 4}
    assert verdicts(known) == {0: Verdict.WRONG_RESULT}
    small = judged([0, 1], stored={1: 2})
    assert (small.candidates, small.rejected) == ({1}, {})
    assert judged([0, 1, 1, 1], stored={0: 9}).candidates == {1, 2, 3}
    assert judged([0, 0], stored={1: 5}).sizes == {0: 6, 1: 6}


def test_a_majority_counts_those_that_have_not_been_launched_again() -> None:
    assert not judged([0, 0, 0, 1], waiting=2).clear
    assert judged([0, 0, 0, 0, 1], waiting=2).clear


class TestGrids:
    def test_a_result_of_each_program_follows_the_number_of_programs(self) -> None:
        """Whichever is the fastest may be chosen, and nothing is marked."""
        found = judge(reports([0, 1, 2], written=[8, 4, 2]), [(8,), (4,), (2,)])
        assert found.candidates == {0, 1, 2}
        assert not any(map(found.marks, range(3)))

    def test_it_may_follow_one_axis(self) -> None:
        made = reports([0, 1, 0, 2], written=[80, 40, 80, 20])
        assert judge(made, [(8, 4), (4, 8), (8, 1), (2, 2)]).candidates == {0, 1, 2, 3}

    def test_whole_tiles_may_be_written_beyond_the_end(self) -> None:
        """Of 260 elements; the last one leaves out some of the first tiles."""
        written, grids = [272, 288, 512, 272, 192], [(17,), (9,), (2,), (17,), (3,)]
        found = judge(reports([0, 1, 2, 0, 3], written, common=0), grids)
        assert (found.candidates, found.disputed) == ({0, 1, 2, 3}, {})
        assert verdicts(found) == {4: Verdict.ORDER_DEPENDENT}
        odd = judge(reports([0, 0, 0, 1], [260, 260, 260, 256], common=0), [(2,), (2,), (3,), (4,)])
        assert verdicts(odd) == {3: Verdict.ORDER_DEPENDENT}, "a mask cuts the last tile off"
        other = judge(reports([0, 0, 0, 1], [272, 272, 272, 288]), [(17,), (17,), (5,), (9,)])
        assert verdicts(other) == {3: Verdict.WRONG_RESULT}, "it differs where both have written"

    @pytest.mark.parametrize(
        ("mine", "common", "verdict"),
        [
            (995, 0, Verdict.ORDER_DEPENDENT),
            (1000, 1000, Verdict.WRONG_RESULT),
            (500, 0, Verdict.ORDER_DEPENDENT),
            (300, 700, Verdict.WRONG_RESULT),
        ],
        ids=["a tail", "other values", "half of each tile", "random elements"],
    )
    def test_another_number_of_programs_excuses_nothing_else(
        self, mine: int, common: int, verdict: Verdict
    ) -> None:
        made = reports([0, 0, 0, 1], written=[1000, 1000, 1000, mine], common=common)
        assert verdicts(judge(made, [(16,), (16,), (4,), (8,)])) == {3: verdict}

    @pytest.mark.parametrize("options", [True, False], ids=["another tile", "another grid"])
    def test_what_agrees_with_one_tile_alone_rejects_no_other(self, options: bool) -> None:
        """Nothing shows that a tile does not matter to the result."""
        grids = [(1,)] * 4 if options else [(8,)] * 3 + [(4,)]
        blocks = [
            {"BLOCK": str(64 >> config // 3), "num_warps": str(config)} for config in range(4)
        ]
        found = judge(reports([0, 0, 0, 1]), grids, blocks if options else ())
        assert (found.candidates, found.rejected) == ({0, 1, 2}, {})
        assert found.disputed[3] == "1 of 4 configs have this result"

    def test_a_rival_with_the_tile_of_the_majority_has_no_excuse(self) -> None:
        assert verdicts(judged([0, 0, 0, 1], grids=[8, 8, 8, 8])) == {3: Verdict.WRONG_RESULT}
        blocks = [{"BLOCK": "64", "num_warps": str(config)} for config in range(4)]
        assert verdicts(judged([0, 0, 0, 1], options=blocks)) == {3: Verdict.WRONG_RESULT}

    @pytest.mark.parametrize(
        ("groups", "grids"),
        [([0, 1, 2], [1, 2, 3]), ([0, 0, 1, 1, 1, 2], [1, 1, 2, 2, 2, 3])],
        ids=["one of each", "several of two"],
    )
    def test_where_no_two_grids_agree_the_result_is_a_matter_of_the_grid(
        self, groups: list[int | None], grids: list[int]
    ) -> None:
        """As ties of an argmax, program ids, and scales of each block are."""
        found = judged(groups, grids)
        assert (found.candidates, found.disputed) == ({*range(len(groups))}, {})
        assert found.marks(0) == ("varies",)

    @pytest.mark.parametrize(
        ("groups", "grids"),
        [
            ([0, 1], [1, 2]),
            ([0, 0, 0, 1, 1], [1, 1, 1, 2, 2]),
            ([0, 0, 0, 1, 2], [1, 1, 1, 2, 3]),
            ([0, 0, 1, 2, 0], [1, 1, 2, 3, 4]),
            ([0, 0, 0, 1, 2, 3], [1, 1, 1, 2, 2, 3]),
        ],
        ids=["two grids", "a fault alike", "a group and others", "grids agree", "one grid differs"],
    )
    def test_few_other_results_may_be_faults(
        self, groups: list[int | None], grids: list[int]
    ) -> None:
        found = judged(groups, grids)
        assert found.candidates == {c for c, group in enumerate(groups) if group == 0}
        assert not found.varies


class TestDraws:
    def test_numbers_that_follow_the_tile_are_right_in_every_config(self) -> None:
        """Two of the six used to be rejected."""
        found = judged([0, 0, 0, 0, 1, 2], [94, 94, 94, 94, 24, 6], draws=True)
        assert found.candidates == {*range(6)}
        assert {found.marks(config) for config in range(6)} == {("varies",)}

    def test_where_two_grids_agree_the_vote_counts(self) -> None:
        found = judged([0, 0, 0, 1], [1, 2, 3, 4], draws=True)
        assert verdicts(found) == {3: Verdict.WRONG_RESULT}
        one = judged([0, 0, 0, 1], [1, 1, 1, 1], draws=True)
        assert verdicts(one) == {3: Verdict.WRONG_RESULT}, "the grid explains nothing"


class TestLastBits:
    """Within the tolerance, config 3 differs from the others by more than the last bits."""

    @staticmethod
    def judged(options: Sequence[dict[str, Any]], fine: int = 5, bits: int = 0) -> Judgement:
        made = reports([0] * len(options))
        for config in made:
            off = config >= len(options) - 1 - bits
            made[config] = OutputReport(
                config if off else 0,
                Group(config, (0,)) if off or not config else None,
                (GroupDifference(0, (Difference(0, 0, fine, 0.0),)),) if off else (),
                sums=(int(off),),
            )
        texts = [{name: str(value) for name, value in each.items()} for each in options]
        return judge(made, [(1,)] * len(options), texts)

    OPTIONS = ({"BLOCK": 16, "warps": 4}, {"BLOCK": 32, "warps": 4}, {"BLOCK": 32, "warps": 8})

    def test_one_that_differs_in_what_does_not_matter_is_not_chosen(self) -> None:
        found = self.judged([*self.OPTIONS, {"BLOCK": 64, "warps": 4}])
        assert (found.candidates, found.rejected, found.disputed) == ({0, 1, 2}, {}, {})
        assert (found.marks(3), set(found.sizes.values())) == (("outvoted",), {4})

    @pytest.mark.parametrize(
        "options",
        [
            [{"BLOCK": 16}, {"BLOCK": 32}, {"BLOCK": 32}, {"BLOCK": 16, "PRECISE": True}],
            [{"BLOCK": 16}, {"BLOCK": 16}, {"BLOCK": 16}, {"BLOCK": 32}],
            [{"BLOCK": 16}, {"BLOCK": 32}, {"BLOCK": 64}],
        ],
        ids=["a flag that none varies", "one tile", "two that agree"],
    )
    def test_the_tolerance_stands_elsewhere(self, options: list[dict[str, Any]]) -> None:
        assert self.judged(options).candidates == {*range(len(options))}

    def test_a_few_units_in_the_last_place_do_not_count(self) -> None:
        found = self.judged([*self.OPTIONS, {"BLOCK": 64, "warps": 4}], fine=0)
        assert found.candidates == {0, 1, 2, 3}

    def test_bits_on_which_as_many_agree_do_not_count_either(self) -> None:
        found = self.judged([*self.OPTIONS, *self.OPTIONS], bits=2)
        assert found.candidates == {*range(6)}


class TestRuns:
    def test_a_config_whose_runs_differ_is_judged_by_the_others(self) -> None:
        found = judge(reports([0] * 6, spread={0: 9.0}), [(config,) for config in range(6)])
        assert verdicts(found) == {0: Verdict.WRONG_RESULT}
        assert "its result varies between runs" in found.rejected[0][1]

    def test_where_most_runs_differ_by_little_so_may_configs(self) -> None:
        spread = dict.fromkeys(range(1, 5), 0.04)
        made = reports([0, 1, 2, 3, 4], excess=0.1, spread=spread)
        assert judge(made, [(1,)] * 5).candidates == {*range(5)}

    def test_noise_as_large_as_the_values_is_a_fault_of_all_that_have_it(self) -> None:
        spread = dict.fromkeys(range(2, 8), 3.0)
        made = reports([0, 0, 1, 2, 3, 4, 5, 6], excess=3.0, spread=spread)
        assert judge(made, [(1,)] * 8).candidates == {0, 1}


class TestVotes:
    def test_a_note_says_how_many_configs_wrote_beside_an_argument(self) -> None:
        votes = Votes()
        for config in range(2):
            votes.add(config, OutputReport(0, unowned=("qkv",)))
        (note,) = votes.notes()
        assert "2 of its configs wrote into the storage behind qkv" in note

    def test_a_config_is_compared_with_large_groups_and_the_latest(self) -> None:
        votes = Votes()
        for config in range(200):
            votes.add(config, OutputReport(config, Group(config, (0,))))
        votes.add(200, OutputReport(3))
        assert [group.number for group in votes.groups()] == [
            3,
            0,
            1,
            2,
            *range(4, 8),
            *range(136, 200),
        ]


CONFIGS = st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.integers(1, 3))


@given(st.lists(CONFIGS, min_size=1, max_size=12))
@example(
    [
        (group, 1 + config % 2)
        for config, group in enumerate([None, None, None, 3, 3, 3, 3, None, 3])
    ]
)
def test_a_majority_is_never_rejected(configs: list[tuple[int | None, int]]) -> None:
    result = judged([group for group, _ in configs], [grid for _, grid in configs])
    assert result.candidates
    assert not result.candidates & result.rejected.keys()
    assert 2 * len(result.rejected) < max(1, len(configs))
