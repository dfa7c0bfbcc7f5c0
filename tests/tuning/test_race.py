"""Which config wins, given noisy times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safetune.outcome import Outcome, Timing, Verdict
from safetune.tuning import race


def timing(median: float) -> Timing:
    return Timing(median, median * 0.99, median * 1.01, 10, "screen")


def test_the_fastest_wins():
    assert race.best({0: timing(2.0), 1: timing(1.0), 2: timing(3.0)}) == 1


def test_a_tie_goes_to_the_config_declared_first():
    assert race.best({0: timing(1.001), 1: timing(1.0)}) == 0
    assert race.best({0: timing(1.02), 1: timing(1.0)}) == 1


def outcome(timing: Timing, *tunings: str) -> Outcome:
    return Outcome(Verdict.OK, timing, tunings=tunings)


def near(*timings: Timing) -> list[int]:
    (found,) = race.finalists({i: outcome(each) for i, each in enumerate(timings)})
    return sorted(found)


def test_only_those_near_the_best_race():
    assert near(timing(1.0), timing(1.04), timing(1.2)) == [0, 1]


def test_a_config_whose_launches_were_held_up_races():
    """Its median says nothing; some of its launches are as fast as those of the best."""
    held_up = Timing(median_ms=6.6, p20_ms=1.02, p80_ms=17.0, count=48, stage="screen")
    slow = replace(held_up, p20_ms=1.2)
    assert near(timing(1.0), held_up, slow) == [0, 1]
    assert 1 in near(timing(1.0), held_up, slow, *[timing(1.03)] * 17)


def test_a_coarse_time_near_the_best_is_measured_again():
    """Where the configs that were faster have proved wrong, it may be the best of the others."""
    coarse = Timing(1.4, 1.4, 1.4, 2, "coarse")
    assert near(timing(1.0), coarse, timing(1.4), replace(coarse, median_ms=3.5)) == [0, 1]


@pytest.mark.parametrize(
    ("times", "finalists"),
    [
        (["a=5", "a=6"], [[0]]),
        (["a=5", "b=2"], [[0], [1]]),
        # The fastest of the first tuning was timed again in the second, and has beaten the others.
        (["a=9", "a=5 b=5", "b=4"], [[2]]),
        (["a=9", "c=8", "a=5 b=5", "b=4"], [[1], [3]]),
        # It has been taken away: what it had beaten is not beaten by what it never met.
        (["a=9", "b=4"], [[0], [1]]),
        # The one that was timed again was itself slower than another one of the first tuning.
        (["a=5", "a=7 b=7", "b=10"], [[0], [1]]),
        (["a=5", "a=5.2 b=5.2", "b=5.1"], [[0], [2, 1]]),
    ],
)
def test_only_times_of_one_tuning_are_compared(times, finalists):
    tunings = [text.split() for text in times]
    last = [float(entries[-1].partition("=")[2]) for entries in tunings]
    outcomes = {
        i: outcome(timing(ms), *entries)
        for i, (ms, entries) in enumerate(zip(last, tunings, strict=True))
    }
    assert race.finalists(outcomes) == finalists


def test_the_last_tunings_of_an_outcome_are_kept():
    timed = outcome(timing(3.0))
    for number in range(20):
        timed = timed.timed_in(f"t{number}").timed_in(f"t{number}")
    assert list(timed.times()) == [f"t{number}" for number in range(12, 20)]
    assert timed.times()["t19"] == 3.0


def rounds(*medians: float) -> list[Timing]:
    return [timing(median) for median in medians]


def test_a_race_is_over_when_every_rival_is_beaten():
    fast = rounds(1.00, 1.10, 1.05, 1.02)
    slow = rounds(1.05, 1.16, 1.10, 1.07)
    assert race.beaten({0: slow, 1: fast}) == {0}
    assert race.clear({0: slow, 1: fast}), "the clock drifted by 10%, for both"
    assert not race.clear({0: slow[:3], 1: fast[:3]}), "too few rounds"


def test_a_race_goes_on_while_the_noise_is_larger_than_the_difference():
    noisy = rounds(1.0, 1.1, 1.0, 1.1)
    other = rounds(1.06, 1.02, 1.08, 1.03)
    assert race.beaten({0: noisy, 1: other}) == set()
    assert not race.clear({0: noisy, 1: other})


def test_a_race_is_over_between_equals():
    one = rounds(1.000, 1.001, 1.000, 1.001)
    other = rounds(1.001, 1.001, 1.001, 1.001)
    assert race.beaten({0: one, 1: other}) == set()
    assert race.clear({0: one, 1: other})


def test_a_race_goes_on_while_an_earlier_config_may_tie_and_be_slower_by_a_percent():
    """It would be chosen for its place; a later one would not."""
    faster = rounds(1.000, 1.001, 1.000, 1.001)
    slower = rounds(1.001, 1.013, 1.001, 1.013)
    assert race.beaten({0: slower, 1: faster}) == set()
    assert not race.clear({0: slower, 1: faster})
    assert race.clear({0: faster, 1: slower})
    assert race.beaten({0: rounds(1.012, 1.013, 1.012, 1.013), 1: faster}) == {0}
    ties = rounds(1.002, 1.003, 1.002, 1.003)
    assert race.beaten({0: ties, 1: faster}) == set()
    assert race.beaten({0: faster, 1: ties}) == {1}


def test_a_config_that_was_beaten_does_not_win_when_the_others_slow_down():
    """Its median is of the first rounds alone, before the clock fell."""
    turns = []

    def measure(budgets):
        turns.append(set(budgets))
        clock = 1.0 if len(turns) <= race.MIN_ROUNDS else 2.0
        noise = 0.01 * (len(turns) % 2)  # which of the first two is faster stays open
        times = {0: 1.0 + noise, 1: 1.01 - noise, 2: 1.07}
        return {i: Outcome(Verdict.OK, timing(clock * times[i])) for i in budgets}

    timings, failed, unbeaten = race.race({i: timing(1.0) for i in range(3)}, measure)
    assert {2} == turns[0] - turns[-1]
    assert timings[2].median_ms < min(timings[0].median_ms, timings[1].median_ms)
    assert (failed, unbeaten) == ({}, [0, 1])
    assert len(turns) == race.MAX_ROUNDS, "it is open until the end which of the two is faster"


def test_a_race_ends_when_only_beaten_configs_are_left():
    turns = []

    def measure(budgets):
        turns.append(set(budgets))
        if len(turns) > race.MIN_ROUNDS:
            return {i: Outcome(Verdict.DIED) for i in budgets}
        noise = 0.01 * (len(turns) % 2)
        times = {0: 1.0 + noise, 1: 1.01 - noise, 2: 1.07, 3: 1.07 + noise / 10}
        return {i: Outcome(Verdict.OK, timing(times[i])) for i in budgets}

    timings, failed, left = race.race({i: timing(1.0) for i in range(4)}, measure)
    assert [*timings, *failed, left] == [2, 3, 0, 1, [2, 3]]
    assert turns[-1] == {0, 1}


def test_configs_that_were_beaten_are_compared_by_their_common_rounds():
    """One that was beaten later has rounds of another clock."""
    turns = []

    def measure(budgets):
        turns.append(set(budgets))
        if turns.count({0, 1}):
            return {i: Outcome(Verdict.DIED) for i in budgets}
        clock, odd = 1.0 if len(turns) <= race.MIN_ROUNDS else 3.0, len(turns) % 2
        times = {0: 1.0 + 0.01 * odd, 1: 1.01 - 0.01 * odd, 2: 1.01 + 0.1 * odd, 3: 1.08}
        return {i: Outcome(Verdict.OK, timing(clock * times[i])) for i in budgets}

    timings, failed, left = race.race({i: timing(1.0) for i in range(4)}, measure)
    assert ([*failed], left) == ([0, 1], [2, 3])
    rounds_of = {i: sum(i in turn for turn in turns) for i in left}
    assert rounds_of[2] > rounds_of[3], "the one without noise was beaten first"
    assert race.best(timings) == 2
    assert timings[2].count == timings[3].count


@given(st.dictionaries(st.integers(0, 30), st.floats(1e-3, 1e3), min_size=1))
def test_the_winner_is_never_slower_than_a_tie(medians):
    timings = {index: timing(median) for index, median in medians.items()}
    best = race.best(timings)
    assert medians[best] <= race.TIE_RATIO * min(medians.values())
    assert all(
        medians[index] > race.TIE_RATIO * min(medians.values()) for index in medians if index < best
    )


@given(st.lists(st.integers(), min_size=1, max_size=8, unique=True), st.integers(0, 20))
def test_every_racer_runs_once_a_turn(racers, turn):
    assert sorted(race.in_turn(racers, turn)) == sorted(racers)


@pytest.mark.parametrize("count", range(2, 8))
def test_no_config_is_always_first_or_always_follows_the_same_other(count):
    turns = [race.in_turn(range(count), turn) for turn in range(2 * count)]
    assert {turn[0] for turn in turns} == set(range(count))
    for racer in range(count):
        before = {turn[turn.index(racer) - 1] for turn in turns if turn[0] != racer}
        assert len(before) == min(2, count - 1)


def held_up(fastest_us: float, slice_us: float = 105.0) -> Timing:
    """Return the time of a round in which another process had the device for half of the replays,
    as measured on an H200: the median lies between the two.
    """
    slow_us = fastest_us + slice_us
    middle_us = (fastest_us + slow_us) / 2
    return Timing(middle_us / 1e3, fastest_us / 1e3, slow_us / 1e3, 4, "graph")


def calm(median_us: float) -> Timing:
    return Timing(median_us / 1e3, median_us / 1.005e3, median_us * 1.005e-3, 4, "graph")


def test_the_fastest_wins_beside_another_process():
    """Of the best only few launches were not held up; of the slower one, most."""
    rounds = {0: [held_up(22.0)] * 3 + [calm(22.1)], 1: [calm(24.5)] * 4}
    assert race.beaten(rounds) == {1}
    final = {index: race.combine(each, "graph") for index, each in rounds.items()}
    assert race.best(final) == 0
    assert final[0].median_ms == pytest.approx(0.022)


def test_no_median_is_compared_with_a_percentile():
    """The median of a calm round is above its 20th percentile, by which it is compared here."""
    quiet = Timing(0.0222, 0.0220, 0.0224, 4, "graph")
    later, earlier = race.combine([held_up(22.0)] * 4), race.combine([quiet] * 4)
    assert race.best({0: later, 1: earlier}) == 0, "they tie"
    assert race.best({0: earlier, 1: later}) == 0, "they tie"
    assert race.best({0: replace(later, p20_ms=0.0221), 1: earlier}) == 0, "still a tie"
    assert race.best({0: replace(later, p20_ms=0.0222), 1: earlier}) == 1
