"""What the store keeps, what it refuses, and what it does with rows that were damaged."""

from __future__ import annotations

import math
import sqlite3
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safetune.errors import StoreError
from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.local.rows import RecordError, text
from safetune.store.local.store import CHOICES_OF_LIST, Store
from safetune.store.records import StoredChoice, precedence

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
json_records = st.dictionaries(st.text(), json_values, max_size=5)
named_values = st.lists(st.tuples(st.text(), json_values).map(list), max_size=3)
calls = st.builds(
    lambda others, **parts: {**others, **parts},
    json_records,
    values=named_values,
    dtypes=st.lists(st.tuples(st.text(), st.text()).map(list), max_size=3),
    options=named_values,
)
any_text = st.text(st.characters(exclude_categories=()))
milliseconds = st.floats(0, 1e12)


def test_every_record_comes_back_from_a_new_open(store, records):
    key, trial, choice = records.key(), records.trial(), records.choice()
    failed = records.trial(
        "c2", outcome=Outcome(Verdict.DIED, detail="SIGSEGV", stderr="core dumped")
    )
    store.put_key(key)
    store.put_trial(trial)
    store.put_trial(failed)
    assert store.put_choice(choice) == choice

    store.close()
    again = Store.open(store.path.parent)
    assert again.trials("key") == [trial, failed]
    assert again.choice("key") == choice
    assert again.choices() == again.choices("add") == [StoredChoice(key, choice)]
    assert again.trials_of("add") == [(key, [trial, failed])]
    assert again.kernels() == ["add"]
    again.close()


def test_nothing_is_stored_for_an_unknown_key(store):
    assert store.choice("absent") is None
    assert store.trials("absent") == []
    assert store.generation("absent") == 0
    assert store.choices() == store.choices("absent") == store.trials_of("absent") == []
    assert store.kernels() == []
    assert store.clear("absent") == 0


def test_the_choice_of_the_highest_generation_is_used(store, records):
    """Also if the clock was set back in between."""
    second, first = records.choice("c2", generation=2, created=1.0), records.choice("c1")
    store.put_key(records.key())
    assert [store.put_choice(second), store.put_choice(first)] == [second, first]
    assert store.choice("key") == second
    assert [stored.choice for stored in store.choices()] == [second]
    assert store.generation("key") == 2
    store.put_trial(records.trial(generation=3))
    assert store.generation("key") == 3
    assert store.choice("key") == second


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.floats(0, 9), milliseconds),
        min_size=1,
        max_size=12,
    )
)
def test_sqlite_orders_choices_as_the_rule_does(records, made):
    """`records.precedence` is the rule; ORDER BY is its copy."""
    store = _shared_memory_store()
    store.clear("add")
    store.put_key(records.key())
    stored = {}
    for number, (declared, generation, created, median_ms) in enumerate(made):
        facts = {"declared": declared, "generation": generation, "median_ms": median_ms}
        choice = store.put_choice(records.choice(f"c{number}", created=created, **facts))
        stored.setdefault(declared, {})[generation] = choice
    best = {name: min(found.values(), key=precedence) for name, found in stored.items()}
    assert {name: store.choice("key", name) for name in stored} == best
    assert {each.choice.declared: each.choice for each in store.choices_of_lists()} == best
    assert {each.choice.declared: each.choice for each in store.related("kernel", "device")} == best


def test_a_transient_outcome_never_replaces_a_row(store, records):
    """Regression: out of memory for a moment would have erased a measured time."""
    transient = records.trial(outcome=Outcome(Verdict.NO_MEMORY))
    store.put_trial(transient)
    assert store.trials("key") == [transient]
    store.put_trial(records.trial())
    store.put_trial(transient)
    assert store.trials("key") == [records.trial()]


def test_a_key_that_is_put_again_is_refreshed(store, records):
    store.put_key(records.key())
    store.put_key(records.key(kernel_line=99))
    assert [key.kernel_line for key, _ in store.trials_of("add")] == [99]


def test_equal_sources_under_two_names_stay_two_kernels(store, records):
    for name in ("add", "sub"):
        store.put_key(records.key(name, kernel_name=name))
        store.put_choice(records.choice(key=name))
    assert store.kernels() == ["add", "sub"]
    assert [stored.key.kernel_name for stored in store.choices()] == ["add", "sub"]
    assert store.clear("add") == 1
    assert [stored.key for stored in store.choices()] == [records.key("sub", kernel_name="sub")]


def test_a_kernel_that_is_cleared_while_it_is_tuned_is_found_afterwards(store, records):
    """Regression: its choice was launched, but `list`, `show` and `clear` did not know it."""
    store.put_key(records.key())
    store.put_trial(records.trial("c1"))
    assert Store.open(store.path.parent).clear("add") == 1
    store.put_trial(records.trial("c2"))
    assert [len(trials) for _, trials in store.trials_of("add")] == [1]
    assert store.clear("add") == 1
    store.put_choice(records.choice("c2"))
    assert store.choices("add") == [StoredChoice(records.key(), records.choice("c2"))]


def test_a_value_that_would_not_come_back_is_refused(store, records):
    """JSON has no NaN and no infinity."""
    not_finite = replace(records.outcome, timing=Timing(1.0, math.nan, 1.0, 1, "final"))
    for put, record in (
        (store.put_trial, records.trial(outcome=not_finite)),
        (store.put_trial, records.trial(config={"x": [{"y": math.inf}]})),
        (store.put_trial, records.trial(created=-math.inf)),
        (store.put_key, records.key(call={"values": [["N", math.nan]]})),
        (store.put_choice, records.choice(median_ms=math.nan)),
        (store.put_choice, records.choice(measured=2**63)),
        (store.put_choice, records.choice(measured=True)),
        (store.put_choice, records.choice(median_ms="1.5")),
        (store.put_choice, records.choice(declared=None)),
        (store.put_choice, records.choice(config={"x": object()})),
        (store.put_choice, records.choice(config=[1])),
        (store.put_choice, records.choice(generation=0)),
        (store.put_choice, records.choice(median_ms=-1.0)),
    ):
        with pytest.raises(RecordError, match="cannot hold this"):
            put(record)
    assert (store.kernels(), store.trials("key"), store.choice("key")) == ([], [], None)


def test_lone_surrogates_and_big_integers_do_no_harm(store, records):
    """A path or a compiler's output need not be valid UTF-8, a key value may have any size."""
    call = {"values": [["\ud800", 2**200]], "dtypes": [["\ud800", "\udc80"]], "options": []}
    key = records.key("\udc80", kernel_name="a\udcffdd", call=call)
    store.put_key(key)
    store.put_trial(
        records.trial("c\ud8ff", key="\udc80", outcome=Outcome(Verdict.OK, stderr="\udc80\0"))
    )
    store.put_choice(records.choice("c\ud8ff", key="\udc80"))
    assert store.choice("\udc80").config_digest == "c\\ud8ff"
    assert store.trials("\udc80")[0].outcome.stderr == "\\udc80\0"
    assert store.choices("a\udcffdd")[0].key.call == key.call
    assert store.generation("\udc80") == 1
    assert store.clear("a\udcffdd") == 1


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=json_records, call=calls, times=st.tuples(*[milliseconds] * 4), message=any_text)
def test_any_json_comes_back(records, config, call, times, message):
    store = _shared_memory_store()
    store.clear("add")
    key = records.key(call=call)
    choice = records.choice(config=config, median_ms=times[0])
    outcome = Outcome(Verdict.WRONG_RESULT, Timing(*times[1:], 3, "screen"), message=message)
    trial = records.trial(config=config, outcome=outcome)
    store.put_key(key)
    store.put_trial(trial)
    assert store.put_choice(choice) == choice
    assert store.choices() == [StoredChoice(key, choice)]
    kept = replace(trial, outcome=replace(outcome, message=text(message)))
    assert store.trials("key") == [kept]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=json_records)
def test_a_key_whose_call_no_reader_can_use_is_not_listed(records, call):
    """What was stored for it is still found by its digest."""
    store = _shared_memory_store()
    store.clear("add")
    store.put_key(records.key(call=call))
    store.put_trial(records.trial())
    store.put_choice(records.choice())
    assert store.choices() == store.trials_of("add") == []
    assert store.choice("key") == records.choice()
    assert store.trials("key") == [records.trial()]
    assert store.clear("add") == 1


_memory: list[Store] = []


def _shared_memory_store() -> Store:
    if not _memory:
        _memory.append(Store.in_memory())
    return _memory[0]


def test_a_closed_store_says_so(store):
    store.close()
    with pytest.raises(StoreError, match=r"safetune\.db is closed"):
        store.choice("key")


def test_the_lookup_is_one_search_of_an_index(store, records):
    connection = sqlite3.connect(store.path)
    statement = "EXPLAIN QUERY PLAN " + CHOICES_OF_LIST
    plan = connection.execute(statement, ("key", "declared")).fetchall()
    connection.close()
    assert len(plan) == 1
    assert plan[0][3].startswith("SEARCH choice USING INDEX")


def test_a_cold_lookup_does_little(store, records):
    """No import, no migration: neither could be done in so few calls."""
    store.put_choice(records.choice())
    Store.open(store.path.parent).choice("key")
    calls: Counter[str] = Counter()

    def count(frame, event, argument) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        opened = Store.open(store.path.parent)
        found = opened.choice("key")
    finally:
        sys.setprofile(None)
    opened.close()
    assert found is not None
    # From Python 3.12 on pathlib calls more of its own.
    assert calls.total() <= (400 if sys.version_info < (3, 12) else 450), calls.most_common(20)


def test_related_choices_are_the_current_ones_of_one_kernel_on_one_device(store, records):
    for digest, changes in (
        ("a", {}),
        ("b", {"call": {"values": [["N", 2048]], "dtypes": [], "options": []}}),
        ("untuned", {}),
        ("kernel", {"kernel_digest": "another"}),
        ("device", {"device_digest": "another"}),
    ):
        store.put_key(records.key(digest, **changes))
        if digest != "untuned":
            store.put_choice(records.choice("c1", key=digest))
    store.put_choice(records.choice("c2", key="b", generation=2))

    first, second = store.related("kernel", "device")

    assert (first.choice, second.choice.config_digest) == (records.choice("c1", key="a"), "c2")
    assert first.call == records.key().call
    assert second.call["values"] == [["N", 2048]]
    assert first.toolchain == records.key().toolchain
    assert store.related("kernel", "nowhere") == []
