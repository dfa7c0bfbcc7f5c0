"""Who is wrong: the one that a majority contradicts, unless the launch itself explains it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from safetune.isolation.protocol import Group, OutputReport
from safetune.outcome import Verdict
from safetune.tuning.majority import VoteResult, Votes, notes_of


def votes(
    groups: list[int | None],
    stale: tuple[int, ...] = (),
    reach: list[tuple[int, ...]] | None = None,
) -> Votes:
    made = Votes()
    founded: set[int | None] = {None}
    for config, group in enumerate(groups):
        new = None
        if group is not None and group not in founded:
            new = Group(group, (0,), (1.0,), (0.0,))
        founded.add(group)
        difference = f"out differs by {config}" if group else ""
        writes = () if reach is None else reach[config]
        report = OutputReport(group, new, config in stale, writes, difference=difference)
        made.add(config, report)
    return made


def vote(
    groups: list[int | None], grids: list[int] | None = None, stale: tuple[int, ...] = ()
) -> VoteResult:
    sizes = grids or list(range(1, len(groups) + 1))
    return votes(groups, stale).count({config: (size,) for config, size in enumerate(sizes)})


def verdicts(result: VoteResult) -> dict[int, Verdict]:
    return {config: verdict for config, (verdict, _) in result.rejected.items()}


@pytest.mark.parametrize("grids", [None, [4] * 8], ids=["another grid each", "one grid"])
def test_one_of_eight_is_wrong(grids: list[int] | None) -> None:
    result = vote([0, 1, 1, 1, 1, 1, 1, 1], grids)
    assert verdicts(result) == {0: Verdict.WRONG_RESULT}
    assert result.disputed == {}
    assert "7 of 8 configs agree on another result" in result.rejected[0][1]


def test_the_reason_names_what_differs() -> None:
    (reason,) = (text for _, text in vote([0, 0, 0, 1]).rejected.values())
    assert reason.endswith("; out differs by 3")


def test_all_that_disagree_with_the_majority() -> None:
    assert verdicts(vote([0, 0, 0, 0, 1, 2, None])) == dict.fromkeys(
        (4, 5, 6), Verdict.WRONG_RESULT
    )


@pytest.mark.parametrize(
    "groups",
    [
        [0, 1],
        [0, 0, 1],
        [0, 0, 1, 1],
        [0, 0, 0, 1, 1, 1],
        [0, 1, 2, 3],
        [None] * 5,
        [0, None, None, None],
    ],
)
def test_without_a_majority_no_config_is_wrong(groups: list[int | None]) -> None:
    result = vote(groups)
    assert result.rejected == {}
    assert len(result.disputed) == (len(groups) if len(set(groups)) > 1 else 0)


def test_partial_results_depend_on_the_grid() -> None:
    """Three configs with one grid agree; the fourth, with another, may be as right."""
    result = vote([0, 0, 0, 1], grids=[8, 8, 8, 4])
    assert result.rejected == {}
    assert result.disputed[3] == "1 of 4 configs have this result"


@pytest.mark.parametrize(
    ("reach", "grid", "wrong"),
    [
        ((1,), (4,), True),
        ((2,), (4,), False),
        ((1,), (2, 4), False),
        ((), (4,), False),
    ],
    ids=["same elements", "other elements", "as many programs", "not known"],
)
def test_partial_results_are_other_elements(
    reach: tuple[int, ...], grid: tuple[int, ...], wrong: bool
) -> None:
    """A program's own partial result has a place of its own, so fewer programs write fewer."""
    found = votes([0, 0, 0, 1], reach=[(1,), (1,), (1,), reach])
    result = found.count({0: (8,), 1: (8,), 2: (8,), 3: grid})
    assert verdicts(result) == ({3: Verdict.WRONG_RESULT} if wrong else {})


def test_a_rival_with_the_grid_of_the_majority_has_no_excuse() -> None:
    assert verdicts(vote([0, 0, 0, 1], grids=[8, 8, 8, 8])) == {3: Verdict.WRONG_RESULT}


def test_right_only_by_what_the_output_held() -> None:
    assert verdicts(vote([0] * 5, stale=(4,))) == {4: Verdict.ORDER_DEPENDENT}
    assert verdicts(vote([0] * 5, stale=(1, 2, 3, 4))) == {}
    assert verdicts(vote([0] * 5, stale=(2, 3, 4))) == {}
    assert verdicts(vote([0] * 3, stale=(2,))) == {}


def test_a_note_says_how_many_configs_wrote_beside_an_argument() -> None:
    assert notes_of({}) == []
    (note,) = notes_of({"qkv": 2})
    assert "2 of its configs wrote into the storage behind qkv" in note


def test_a_config_that_is_rejected_has_no_vote() -> None:
    """Five of nine agreed, one of them was rejected, and the four left rejected four others."""
    disputed = vote([None, None, None, 0, 0, 0, 0, None, 0], stale=(3,))
    assert disputed.rejected == {}
    assert disputed.disputed[3] == "5 of 9 configs have this result"
    clear = vote([0, 0, 0, 0, 0, 1, 1], stale=(4,))
    assert verdicts(clear) == {
        4: Verdict.ORDER_DEPENDENT,
        5: Verdict.WRONG_RESULT,
        6: Verdict.WRONG_RESULT,
    }
    assert "4 of 7 configs agree on another result" in clear.rejected[5][1]


CONFIGS = st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.integers(1, 3), st.booleans())


@given(st.lists(CONFIGS, max_size=12))
@example(
    [
        (group, 1 + config % 2, config == 3)
        for config, group in enumerate([None, None, None, 3, 3, 3, 3, None, 3])
    ]
)
def test_a_majority_is_never_rejected(configs: list[tuple[int | None, int, bool]]) -> None:
    ordered = sorted({group for group, _, _ in configs if group is not None})
    groups = [None if group is None else ordered.index(group) for group, _, _ in configs]
    stale = tuple(config for config, (_, _, is_stale) in enumerate(configs) if is_stale)
    result = vote(groups, [grid for _, grid, _ in configs], stale)
    wrong = [c for c, verdict in verdicts(result).items() if verdict is Verdict.WRONG_RESULT]
    assert 2 * len(wrong) < max(1, len(groups))
    assert 2 * len(result.rejected) <= len(groups)
