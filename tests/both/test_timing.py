"""Timing: what is inside the span, how often, and what counts as a time."""

from __future__ import annotations

import math

import pytest

from safetune.both.protocol import Budget
from safetune.both.timing import (
    InvalidTime,
    Sample,
    Timer,
    from_do_bench,
    measure,
    summarize,
)


class FakeClock(Timer):
    """Gives recorded times, and records the order of the calls."""

    def __init__(self, milliseconds):
        super().__init__(long_ms=math.inf)
        self.milliseconds = milliseconds
        self.asked = []

    def samples(self, launch, before, after, count):
        self.asked.append(count)
        return [Sample(self.milliseconds)] * count


class Recorded(Timer):
    """Gives samples in turn, the last one again and again."""

    def __init__(self, *samples):
        super().__init__(long_ms=math.inf)
        self.coming = list(samples)
        self.given = 0

    def samples(self, launch, before, after, count):
        self.given += count
        last = self.coming[-1:] * count
        found, self.coming = [*self.coming, *last][:count], [*self.coming[count:], *last][:99]
        return found


def nothing():
    pass


def test_hooks_run_around_every_launch_and_outside_the_span():
    order = []
    times = Timer().samples(
        lambda: order.append("launch"),
        lambda: order.append("before"),
        lambda: order.append("after"),
        3,
    )
    assert order == ["before", "launch", "after"] * 3
    assert len(times) == 3
    assert all(time.ms > 0 for time in times)


@pytest.mark.parametrize(("long_ms", "count"), [(1e9, 5), (0.0, 2)])
def test_slow_launches_in_the_interpreter_are_fewer(long_ms, count):
    assert len(Timer(long_ms).samples(nothing, nothing, nothing, 5)) == count


def test_a_config_gets_its_time_budget():
    clock = FakeClock(1.0)
    timing = measure(nothing, nothing, nothing, clock, Budget(least=5, time_ms=20))
    assert clock.asked == [5, 15]
    assert timing.median_ms == 1.0
    assert timing.count == 15 + 3  # the later half of the least counts too


def test_a_slow_kernel_is_launched_no_more_often_than_the_least():
    clock = FakeClock(100.0)
    assert measure(nothing, nothing, nothing, clock, Budget(time_ms=20)).count == 5
    assert clock.asked == [5]


@pytest.mark.parametrize(
    ("milliseconds", "asked", "stage"),
    [
        (2.1, [2], "coarse"),
        (1.9, [2, 3], "screen"),
        (1.2, [2, 3, 10], "screen"),
        (1.1, [2, 3, 10, 25], "screen"),  # the final decides
        (0.9, [2, 3, 10, 35], "screen"),
    ],
)
def test_the_slower_a_config_the_fewer_launches_it_gets(milliseconds, asked, stage):
    clock = FakeClock(milliseconds)
    found = measure(nothing, nothing, nothing, clock, Budget(best_ms=1.0, time_ms=45))
    assert clock.asked == asked
    assert (found.stage, found.median_ms) == (stage, milliseconds)


def test_a_race_has_the_launches_that_it_asks_for():
    clock = FakeClock(1.0)
    found = measure(nothing, nothing, nothing, clock, Budget(least=20, time_ms=0.0))
    assert clock.asked == [20]
    assert found.count == 20


def test_one_launch_that_was_interrupted_gives_no_config_up():
    clock = FakeClock(1.0)
    first = clock.samples
    clock.samples = lambda *given: [*first(*given)[1:], Sample(50.0)]
    measure(nothing, nothing, nothing, clock, Budget(best_ms=1.0))
    assert clock.asked == [2, 3, 10, 5]


def test_launches_that_the_host_held_up_give_no_config_up():
    """A stall of the host made two launches 36 times as long; the best config was left out."""
    stalled, right = Sample(36.0, waited_ms=35.5), Sample(1.0)
    timer = Recorded(stalled, stalled, right)
    found = measure(nothing, nothing, nothing, timer, Budget(best_ms=1.0, time_ms=45))
    assert (found.stage, found.median_ms, found.p80_ms) == ("screen", 1.0, 1.0)
    assert timer.given > 5

    timer = Recorded(stalled, Sample(3.0))  # of one launch alone it is not believed
    found = measure(nothing, nothing, nothing, timer, Budget(best_ms=1.0))
    assert (found.median_ms, timer.given) == (3.0, 5)


def test_a_config_is_given_up_that_is_slow_whatever_the_host_did():
    """It takes four times as long as the best even without the stall."""
    timer = Recorded(Sample(36.0, waited_ms=32.0))
    found = measure(nothing, nothing, nothing, timer, Budget(best_ms=1.0))
    assert (found.stage, timer.given) == ("coarse", 2)


def test_a_time_is_of_the_launches_that_nothing_held_up():
    stalled, right = Sample(36.0, waited_ms=35.5), Sample(1.0, waited_ms=0.005)
    timer = Recorded(stalled, stalled, stalled, stalled, right, stalled)
    assert measure(nothing, nothing, nothing, timer, Budget(best_ms=0.9)).median_ms == 1.0
    timer = Recorded(right, right, stalled)  # a cold launch is nearer to the truth
    long = Budget(best_ms=0.9, time_ms=400)
    assert measure(nothing, nothing, nothing, timer, long).median_ms == 1.0
    assert timer.given > long.least
    timer = Recorded(stalled)
    assert measure(nothing, nothing, nothing, timer, Budget(best_ms=0.9)).median_ms == 36.0


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_a_value_that_is_not_a_time_is_refused(wrong):
    with pytest.raises(InvalidTime, match=str(wrong)):
        measure(nothing, nothing, nothing, FakeClock(wrong), Budget())
    with pytest.raises(InvalidTime):
        summarize([1.0, wrong], "screen")
    with pytest.raises(InvalidTime):
        from_do_bench([wrong, 1.0, 2.0])


def test_quantiles_are_of_the_sorted_times():
    timing = summarize([5.0, 1.0, 3.0, 2.0, 4.0], "final")
    assert (timing.median_ms, timing.p20_ms, timing.p80_ms) == (3.0, 1.0, 5.0)


def test_a_users_benchmark_may_give_quantiles_or_one_number():
    assert from_do_bench([2.0, 1.0, 3.0]).p80_ms == 3.0
    assert from_do_bench(2.0).median_ms == 2.0
