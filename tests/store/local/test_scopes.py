"""What the store keeps of a config that fails with one call and works with another."""

from __future__ import annotations

from pathlib import Path

import pytest

from safetune.outcome import Mark, Outcome, Scope, Timing, Verdict
from safetune.store.local.store import Store
from safetune.store.records import KeyRecord, TrialRecord

FAST = Timing(1.0, 1.0, 1.0, 5, "final")
OK, CLEAN = Verdict.OK, Verdict.COMPILE_ERROR


def scope(special: int, call: int = 0) -> Scope:
    return Scope(f"special{special}", f"call{special}.{call}")


class Row:
    """The row of one config in a real database file, which every read opens again."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._time = directory, 0.0
        key = KeyRecord("key", "kernel", "k", "", 1, "d", {"name": "a card"}, {}, {})
        store = Store.open(directory)
        store.put_key(key)
        store.close()

    def put(self, verdict: Verdict, seen: Scope | None, generation: int = 1) -> None:
        self._time += 1.0
        timing = FAST if verdict is OK else None
        outcome = Outcome(verdict, timing, message=verdict.value, marks=("first",), scope=seen)
        store = Store.open(self._directory)
        store.put_trial(TrialRecord("key", "config", {}, generation, outcome, self._time))
        store.close()

    @property
    def latest(self) -> TrialRecord:
        store = Store.open(self._directory)
        trial = store.trials("key")[-1]
        store.close()
        return trial

    def verdict(self, seen: Scope, some_work: bool = True) -> str | None:
        known = self.latest.seen_with(seen, some_work)
        return None if known is None else known.outcome.verdict.value


@pytest.fixture
def row(tmp_path: Path) -> Row:
    return Row(tmp_path)


@pytest.mark.parametrize("verdict", [CLEAN, Verdict.OUT_OF_RESOURCES, Verdict.LAUNCH_ERROR])
def test_a_clean_failure_of_another_call_leaves_a_config_that_works(
    row: Row, verdict: Verdict
) -> None:
    row.put(OK, scope(1))
    row.put(verdict, scope(2))
    assert row.latest.outcome == Outcome(
        OK, FAST, message="ok", marks=(Mark.FIRST.value,), scope=scope(1)
    )
    assert row.verdict(scope(1)) == "ok"
    assert row.verdict(scope(2)) == verdict.value
    assert row.verdict(scope(3)) == "ok"


@pytest.mark.parametrize("verdict", [CLEAN, Verdict.LAUNCH_ERROR, Verdict.TIMEOUT, Verdict.DIED])
def test_a_failure_of_the_same_call_replaces_it(row: Row, verdict: Verdict) -> None:
    row.put(OK, scope(1))
    row.put(verdict, scope(1))
    assert row.latest.outcome.verdict is verdict
    assert row.verdict(scope(1)) == verdict.value


@pytest.mark.parametrize("verdict", [Verdict.TIMEOUT, Verdict.DIED, Verdict.WRONG_RESULT])
def test_what_crashed_hung_or_was_wrong_holds_for_the_key_while_some_config_works(
    row: Row, verdict: Verdict
) -> None:
    row.put(OK, scope(1))
    row.put(verdict, scope(2))
    assert row.verdict(scope(1)) == row.verdict(scope(3)) == verdict.value
    assert row.verdict(scope(2), some_work=False) == verdict.value
    assert row.verdict(scope(3), some_work=False) is None


def test_a_compiler_s_failure_holds_for_other_shapes_and_a_launch_s_does_not(row: Row) -> None:
    row.put(CLEAN, scope(1, 1))
    row.put(Verdict.OUT_OF_BOUNDS, scope(2, 1))
    assert row.verdict(scope(1, 9)) == "compile_error"
    assert row.verdict(scope(2, 1)) == "out_of_bounds"
    assert row.verdict(scope(2, 9)) is None


def test_a_config_that_works_again_forgets_what_held_for_that_call(row: Row) -> None:
    row.put(CLEAN, scope(1))
    row.put(CLEAN, scope(2))
    row.put(Verdict.TIMEOUT, scope(3))
    row.put(OK, scope(2, 5))
    assert row.verdict(scope(1)) == "compile_error", "with other arguments"
    assert row.verdict(scope(2)) == row.verdict(scope(3)) == "ok"


def test_eight_failures_are_kept_and_the_oldest_goes(row: Row) -> None:
    row.put(OK, scope(0))
    for number in range(1, 10):
        row.put(CLEAN, scope(number))
        row.put(CLEAN, scope(number, 7))  # of the same specialisation: no further one
    kept = [failure.outcome.scope for failure in row.latest.failures]
    assert kept == [scope(number, 7) for number in range(2, 10)]
    for number in range(11, 20):
        row.put(Verdict.LAUNCH_ERROR, scope(1, number))
    assert [failure.created for failure in row.latest.failures] == [*range(21, 29)]
    row.put(Verdict.DIED, scope(50))
    assert len(row.latest.failures) == 8
    assert row.verdict(scope(1, 19)) == "died"


def test_a_failure_joins_the_row_of_an_earlier_generation(row: Row) -> None:
    """A choice that was replaced opens a generation; older rows still count."""
    row.put(OK, scope(1), generation=1)
    row.put(CLEAN, scope(2), generation=3)
    assert (row.latest.generation, row.latest.outcome.verdict) == (1, OK)
    assert row.verdict(scope(2)) == "compile_error"


def test_an_outcome_without_a_call_replaces_and_is_replaced(row: Row) -> None:
    row.put(OK, None)
    row.put(CLEAN, scope(1))
    assert row.latest.outcome.verdict is CLEAN
    row.put(OK, None)
    assert (row.latest.outcome.verdict, row.latest.elsewhere) == (OK, ())
