"""Which share of the recorded time each key has."""

from __future__ import annotations

import pytest

from safetune.offline import shares
from safetune.store.records import CallCount, RecordedCall


def call(key: str, calls: int, each_ms: float | None = None, name: str = "k") -> RecordedCall:
    made = RecordedCall(key, name, "m:k", {}, 0.0)
    timed = 0 if each_ms is None else 4
    return made.counted(CallCount(key, calls, timed, 4 * (each_ms or 0.0)))


def test_calls_times_the_time_of_one() -> None:
    calls = [call("often", 90, 1.0), call("long", 1, 10.0)]
    assert shares.shares_of_time(calls) == {"often": 0.9, "long": 0.1}


def test_a_key_that_was_never_timed_is_as_the_others_of_its_kernel() -> None:
    calls = [call("a", 1, 2.0), call("b", 1, 4.0), call("other", 1, 9.0, "l"), call("c", 2)]
    assert shares.times_ms(calls)["c"] == 6.0
    assert shares.times_ms([*calls, call("d", 1, None, "m")])["d"] == 5.0, "as all"


@pytest.mark.parametrize("each_ms", [0.0, -1.0, None])
def test_where_no_clock_shows_a_time_calls_count(each_ms: float | None) -> None:
    """A median that falls after `safetune clear` leaves a time below zero."""
    calls = [call("a", 3, each_ms), call("b", 1, each_ms)]
    assert shares.shares_of_time(calls) == pytest.approx({"a": 0.75, "b": 0.25})
    assert [each.key for each in shares.top(calls, 0.7)] == ["a"]


@pytest.mark.parametrize(
    ("share", "kept"), [(0.5, "c"), (0.51, "ca"), (0.8, "ca"), (0.81, "cab"), (1.0, "cab")]
)
def test_the_fewest_keys_that_make_a_share(share: float, kept: str) -> None:
    calls = [call("a", 3, 1.0), call("b", 2, 1.0), call("c", 5, 1.0)]
    assert "".join(each.key for each in shares.top(calls, share)) == kept
