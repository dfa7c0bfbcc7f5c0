"""A short list of configs, against every list that there is, and what it costs elsewhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safetune.errors import InvalidSetting, TargetError
from safetune.offline import shortlist
from safetune.offline.shortlist import Measured
from safetune.outcome import Mark, Outcome, Timing, Verdict
from safetune.store.records import KeyRecord, TrialRecord

CALL: dict[str, Any] = {"values": [], "dtypes": [], "options": []}


def record(digest: str, kernel: str = "k" * 32) -> KeyRecord:
    return KeyRecord(digest, "kernel", kernel, "", 0, "", {"name": "card"}, {}, CALL)


def measured(*tables: dict[str, float]) -> list[Measured]:
    return [Measured(record(str(i)), times) for i, times in enumerate(tables)]


def trial(
    config: str, ms: float, generation: int = 1, marks: tuple[str, ...] = (), ok: bool = True
) -> TrialRecord:
    timing = Timing(ms, ms, ms, 3, "screen")
    outcome = Outcome(Verdict.OK if ok else Verdict.DIED, timing if ok else None, marks=marks)
    return TrialRecord("key", config, {"BLOCK": config}, generation, outcome, float(generation))


tables = st.lists(
    st.dictionaries(
        st.sampled_from("abcdef"), st.sampled_from([1.0, 1.005, 1.01, 1.02, 1.5]), min_size=1
    ),
    min_size=1,
    max_size=7,
)


@given(tables, st.sampled_from([0.0, 0.006, 0.03]))
@settings(max_examples=30, deadline=None)
def test_every_key_keeps_a_fast_config_and_none_of_the_list_is_needless(
    times: list[dict[str, float]], within: float
) -> None:
    keys = measured(*times)
    configs = sorted({config for key in keys for config in key.times})

    def keeps(few: Iterable[str]) -> bool:
        return all(key.slowdown(few) <= 1 + within for key in keys)

    kept = shortlist.shortest(keys, within)
    assert keeps(kept)
    assert not any(keeps(kept - {config}) for config in kept if len(kept) > 1)
    lengths = range(1, len(configs) + 1)
    least = min(n for n in lengths if any(map(keeps, itertools.combinations(configs, n))))
    assert len(kept) <= least * (1 + math.log(len(keys))), "what a greedy cover promises"


def test_the_config_that_is_good_for_the_most_keys_goes_where_others_make_it_needless() -> None:
    good = {"wide": (0, 1, 2, 3), "left": (0, 1, 4), "right": (2, 3, 5)}
    keys = measured(*({c: 1.0 for c, of in good.items() if i in of} for i in range(6)))
    assert shortlist.shortest(keys, 0.01) == {"left", "right"}


def test_of_two_lists_the_one_that_is_faster_over_all_keys_stays() -> None:
    for a, b in ((1.008, 1.009), (1.009, 1.008)):
        keys = measured({"a": 1.0, "b": b}, {"a": a, "b": 1.0})
        assert shortlist.shortest(keys, 0.01) == {"a" if a < b else "b"}


def test_further_configs_are_those_that_keys_like_the_measured_ones_may_need() -> None:
    keys = measured(
        {"best": 1.0, "twin": 1.0, "near": 1.02, "far": 2.0, "fails": 9e9},
        {"best": 1.0, "twin": 1.0, "near": 3.0, "far": 1.1},
    )
    kept = [shortlist.shortest(keys, 0.01, keep) for keep in (0, 1, 2, 3, 5)]
    assert kept[0] == kept[1]
    (one,) = kept[0]
    assert one in ("best", "twin")
    assert kept[2] == {one, "near"}, "its twin is the same machine code"
    assert kept[3] == kept[4] == {one, "near", "far"}, "the others would never be the fastest"


@pytest.mark.parametrize(
    ("tables", "added"),
    [
        pytest.param(
            ({"a": 1.0, "trend": 1.3, "near": 1.03}, {"a": 1.0, "trend": 1.05, "near": 1.03}),
            "trend",
            id="beyond the edge",
        ),
        pytest.param(
            (
                {"a": 1.0, "b": 1.5, "middle": 1.1, "near": 1.04},
                {"a": 1.5, "b": 1.0, "middle": 1.1, "near": 1.7},
            ),
            "middle",
            id="half way",
        ),
    ],
)
def test_a_config_is_added_for_keys_between_and_beyond_the_measured_ones(
    tables: tuple[dict[str, float], ...], added: str
) -> None:
    """`near` is closer to the best of a measured key, and the fastest on no key like them."""
    keys = measured(*tables)
    least = shortlist.shortest(keys, 0.01)
    assert shortlist.shortest(keys, 0.01, len(least) + 1) == least | {added}


def test_a_list_is_not_made_so_short_that_a_measured_key_is_slower() -> None:
    keys = measured({"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 1.0})
    with pytest.raises(InvalidSetting, match="--keep 1 is too few: 2 configs"):
        shortlist.shortest(keys, 0.01, keep=1)


def test_a_longer_list_is_also_judged_on_keys_that_it_was_not_made_from() -> None:
    keys = measured(*[{"a": 1.0, "b": 1.015}] * 2, {"a": 1.5, "b": 1.0})
    short, longer = (shortlist.held_out(keys, 0.02, keep) for keep in (0, 2))
    assert short is not None
    assert longer is not None
    assert short.worst == 1.5
    assert longer.worst == 1.0, "b was second-best elsewhere"


def test_a_key_is_judged_by_a_list_that_was_not_made_from_it() -> None:
    common = [{"a": 1.0, "b": 3.0} for _ in range(8)]
    keys = measured(*common, {"a": 1.5, "b": 1.0}, {"c": 1.0})

    all_of_them = shortlist.cost(keys, shortlist.shortest(keys, 0.01))
    assert (all_of_them.worst, all_of_them.failed) == (1.0, 0)

    found = shortlist.held_out(keys, 0.01)
    assert found is not None
    assert found.keys == 10
    assert found.failed == 1, "no list that was made without the last key has c"
    assert found.worst == 1.5
    assert found.mean == pytest.approx(math.exp(math.log(1.5) / 9))
    assert shortlist.held_out(keys[:1], 0.01) is None


def test_the_last_trial_of_each_config_counts_and_only_a_time_that_says_something() -> None:
    trials = [
        trial("again", 9.0, generation=2),
        trial("again", 1.0),
        trial("failed now", 1.0),
        trial("failed now", 0.0, generation=2, ok=False),
        trial("beside the program", 1.0, marks=(Mark.CONTENDED.value,)),
        trial("not declared", 1.0),
    ]
    stored = [(record("one"), trials), (record("two"), trials[3:4])]
    among = {t.config_digest for t in trials} - {"not declared"}
    (key,) = shortlist.measured_keys(stored, among)
    assert dict(key.times) == {"again": 9.0}


def test_a_time_that_an_interrupted_tuning_has_not_judged_does_not_count() -> None:
    """Its result was compared with no other one: it may be the fastest because it is wrong."""
    timed = trial("timed", 0.1)
    timed = replace(timed, outcome=replace(timed.outcome, verdict=Verdict.NOT_JUDGED))
    stored = [(record("one"), [timed, trial("judged", 1.0)])]
    (key,) = shortlist.measured_keys(stored, ["timed", "judged"])
    assert dict(key.times) == {"judged": 1.0}


def test_launches_that_the_host_held_up_do_not_make_a_config_slow() -> None:
    timing = Timing(median_ms=9.0, p20_ms=1.0, p80_ms=20.0, count=48, stage="screen")
    held_up = replace(trial("a", 1.0), outcome=Outcome(Verdict.OK, timing))
    (key,) = shortlist.measured_keys([(record("one"), [held_up])], ["a"])
    assert dict(key.times) == {"a": 1.0}


def test_only_keys_of_one_version_of_the_kernel_count() -> None:
    old, new = "a" * 32, "b" * 32
    stored = [
        (record("1", old), [trial("a", 1.0)]),
        (record("2", new), [trial("a", 1.0, generation=2)]),
    ]
    assert [key.digest for key, _ in shortlist.of_newest(stored, "kernel", old)] == ["1"]
    with pytest.raises(TargetError, match="2 keys are of other versions"):
        shortlist.of_newest(stored, "kernel", "c" * 32)
