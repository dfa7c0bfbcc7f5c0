"""What gc takes away, what it leaves, and what stats counts."""

from __future__ import annotations

import os
import sqlite3
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from safetune.cli import main
from safetune.store.local import gc
from safetune.store.local.gc import Rule
from safetune.store.local.locks import try_lock
from safetune.store.local.store import Store
from safetune.store.records import RecordedCall

DAY = 86_400.0


@pytest.fixture
def filled(store, records) -> Store:
    """Ten keys, a day apart; the even ones of Triton 2."""
    for number in range(10):
        name = f"k{number}"
        toolchain = {"triton": "2.0" if number % 2 == 0 else metadata.version("triton")}
        store.put_key(records.key(name, kernel_digest=f"kernel-{number}", toolchain=toolchain))
        for config in ("c1", "c2"):
            store.put_trial(records.trial(config, key=name, created=number * DAY))
        store.put_choice(records.choice(key=name, created=number * DAY))
    return store


def left(store: Store) -> list[int]:
    return [int(stored.key.digest[1:]) for stored in store.choices()]


def test_gc_removes_what_is_old(filled) -> None:
    swept = gc.sweep(filled, Rule(before=3 * DAY), dry_run=False)
    assert (swept.keys, swept.trials, swept.choices) == (3, 6, 3)
    assert left(filled) == list(range(3, 10))
    assert filled.trials("k2") == []
    connection = sqlite3.connect(filled.path)
    for table, count in (("kernel", 7), ("key", 7), ("trial", 14), ("choice", 7), ("device", 1)):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (count,)
    connection.close()


def test_a_key_is_as_old_as_its_newest_row(filled, records) -> None:
    filled.put_choice(records.choice(key="k0", generation=2, created=9 * DAY))
    gc.sweep(filled, Rule(before=3 * DAY), dry_run=False)
    assert left(filled) == [0, *range(3, 10)]


def test_recorded_calls_go_with_their_key_and_keep_it(filled, records) -> None:
    for number, created in ((0, 9 * DAY), (1, DAY)):
        call = RecordedCall(f"k{number}", "add", "module:add", {"n": number}, created)
        assert filled.put_call(call)
    filled.put_key(records.key("recorded", kernel_digest="recorded"))
    filled.put_call(RecordedCall("recorded", "add", "module:add", {}, 9 * DAY))
    assert gc.stats(filled)["recorded"] == 3
    swept = gc.sweep(filled, Rule(before=3 * DAY), dry_run=False)
    assert (swept.keys, swept.calls) == (2, 1)
    assert left(filled) == [0, *range(3, 10)]
    assert [call.key for call in filled.calls()] == ["k0", "recorded"]


def test_gc_removes_what_another_toolchain_measured(filled) -> None:
    gc.sweep(filled, Rule(triton=metadata.version("triton")), dry_run=False)
    assert left(filled) == [1, 3, 5, 7, 9]


def test_gc_by_size_removes_the_oldest_and_gives_the_space_back(store, records) -> None:
    for number in range(200):
        store.put_key(records.key(f"k{number}"))
        store.put_choice(records.choice(key=f"k{number}", declared="x" * 2000, created=number))
    swept = gc.sweep(store, Rule(most_bytes=300_000), dry_run=False)
    assert swept.bytes_before > 400_000
    assert swept.bytes_after == pytest.approx(300_000, rel=0.3)
    assert left(store) == list(range(200 - len(left(store)), 200))
    assert gc.sweep(store, Rule(most_bytes=10**9), dry_run=False).keys == 0


def test_free_pages_are_given_back_before_a_key_is_deleted(store, records) -> None:
    """Regression: after `clear` of a large kernel, half of the other keys were deleted."""
    source = "#" * 1_000_000
    store.put_key(records.key("big", kernel_name="big", kernel_digest="big", kernel_source=source))
    for number in range(20):
        store.put_key(records.key(f"k{number}"))
        store.put_choice(records.choice(key=f"k{number}", created=number))
    store.clear("big")
    swept = gc.sweep(store, Rule(most_bytes=500_000), dry_run=False)
    assert swept.keys == 0
    assert swept.bytes_before > 1_000_000 > 500_000 > swept.bytes_after
    assert len(left(store)) == 20


def test_a_dry_run_says_the_same_and_changes_nothing(filled) -> None:
    before = filled.path.read_bytes(), left(filled)
    dry = gc.sweep(filled, Rule(before=3 * DAY), dry_run=True)
    assert (filled.path.read_bytes(), left(filled)) == before
    wet = gc.sweep(filled, Rule(before=3 * DAY), dry_run=False)
    assert (dry.keys, dry.trials, dry.choices) == (wet.keys, wet.trials, wet.choices)


def test_a_key_that_is_being_tuned_stays(filled) -> None:
    lock = try_lock(filled.path, "k1")
    gc.sweep(filled, Rule(before=3 * DAY), dry_run=False)
    assert left(filled) == [1, *range(3, 10)]
    lock.release()
    gc.sweep(filled, Rule(before=3 * DAY), dry_run=False)
    assert left(filled) == list(range(3, 10))


def test_rows_without_a_key_and_keys_whose_owner_died_go_too(filled, children) -> None:
    connection = sqlite3.connect(filled.path)
    with connection:
        connection.execute("DELETE FROM key WHERE digest = 'k0'")
    children.run(
        "from safetune.store.local.locks import try_lock\n"
        "assert try_lock(directory / 'safetune.db', 'k1')",
        filled.path.parent,
    )
    gc.sweep(filled, Rule(before=3 * DAY), dry_run=False)
    assert connection.execute("SELECT count(*) FROM trial WHERE key = 'k0'").fetchone() == (0,)
    connection.close()
    assert left(filled) == list(range(3, 10))


def test_old_databases_that_were_kept_aside_go(filled) -> None:
    """By the time when they were moved: the last write may have been long before that."""
    old, new = (Path(f"{filled.path}.corrupt-{n * DAY * 10**9:.0f}-1") for n in (2, 4))
    for path in (old, new):
        path.touch()
        os.utime(path, (0, 0))
    assert gc.sweep(filled, Rule(before=3 * DAY), dry_run=True).files == 1
    gc.sweep(filled, Rule(before=3 * DAY), dry_run=False)
    assert (old.exists(), new.exists()) == (False, True)


def test_stats(filled, records) -> None:
    lock = try_lock(filled.path, "k1")
    found = gc.stats(filled)
    lock.release()
    assert found["path"] == str(filled.path)
    assert found["bytes"] > 20_000
    counts = {name: found[name] for name in ("kernels", "keys", "choices", "trials", "tuning_now")}
    assert counts == {"kernels": 1, "keys": 10, "choices": 10, "trials": 20, "tuning_now": 1}
    assert found["verdicts"] == {"ok": 20}
    assert found["devices"] == {"H100": 10}
    assert (found["oldest"], found["newest"]) == (DAY, 9 * DAY)


def test_stats_of_what_makes_no_sense(store) -> None:
    connection = sqlite3.connect(store.path)
    with connection:
        connection.execute("INSERT INTO key VALUES ('k', 'n', 'k', 'd', '{', '{', 'x')")
        connection.execute("INSERT INTO device VALUES ('d', '[1', 'x')")
    connection.close()
    found = gc.stats(store)
    assert (found["keys"], found["devices"], found["tritons"]) == (1, {"": 1}, {"": 1})


class TestCommands:
    @pytest.fixture
    def run(self, filled, monkeypatch):
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(filled.path.parent))

        def run(*words: str, code: int = 0) -> str:
            result = CliRunner().invoke(main, words)
            assert result.exit_code == code, result.output
            return result.output

        return run

    def test_gc(self, run, filled) -> None:
        assert run("gc", "--older-than", "1", "--dry-run").startswith(
            "would delete 10 keys, 20 trials"
        )
        assert len(left(filled)) == 10
        assert '"keys": 5' in run("gc", "--dead-toolchains", "--json")
        assert left(filled) == [1, 3, 5, 7, 9]
        assert run("gc", "--max-size", "1").startswith("deleted 5 keys, 10 trials, 5 choices;")
        assert left(filled) == []

    def test_gc_of_nothing_in_particular_is_refused(self, run, filled) -> None:
        assert "--older-than" in run("gc", code=2)
        assert "is not a size" in run("gc", "--max-size", "many", code=2)
        assert len(left(filled)) == 10

    def test_stats(self, run) -> None:
        assert "\ntrials       20\n" in run("stats")
        assert '"trials": 20' in run("stats", "--json")
