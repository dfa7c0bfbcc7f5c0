"""The read order, and the rule that a broken store costs a warning, never the run."""

from __future__ import annotations

import logging
import math
import sqlite3
import warnings

import pytest

from safetune.errors import SafetuneWarning, StoreError
from safetune.keys.tuning_key import Device, KernelIdentity, Toolchain, TuningKey
from safetune.settings import Settings
from safetune.store.lookup import GuardedStore, Lookup, open_lookup


@pytest.fixture
def settings_for(monkeypatch):
    def settings(directory) -> Settings:
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(directory))
        return Settings.current()

    return settings


@pytest.fixture
def guarded(tmp_path):
    store = GuardedStore.open(tmp_path / "cache")
    yield store
    store.close()


def refuse_writes(store) -> None:
    """Make SQLite fail every insert, as a full disk does."""
    connection = sqlite3.connect(store.path)
    for table in ("trial", "choice", "key"):
        connection.execute(
            f"CREATE TRIGGER full_{table} BEFORE INSERT ON {table} "
            "BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
        )
    connection.close()


KEY = TuningKey(
    kernel=KernelIdentity("add", "kernel"),
    values=(("N", 1024),),
    dtypes=(),
    options=(),
    device=Device("H100", "90", 132, 232448),
    toolchain=Toolchain("3.9.0", "ptxas", "cuda:90:32"),
)


def test_memory_is_asked_before_the_store(store, records):
    lookup = Lookup(store)
    assert lookup.find(KEY, "declared") is None
    store.put_choice(records.choice("stored", KEY.digest))
    assert lookup.find(KEY, "declared").config_digest == "stored"
    lookup.remember(records.choice("adopted", KEY.digest))
    assert lookup.find(KEY, "declared").config_digest == "adopted"
    lookup.forget(KEY.digest, "declared")
    lookup.forget(KEY.digest, "declared")
    assert lookup.find(KEY, "declared").config_digest == "stored"


def test_a_choice_from_another_list_of_configs_is_not_found(store, records):
    lookup = Lookup(store)
    store.put_choice(records.choice("stored", KEY.digest))
    lookup.remember(records.choice("adopted", KEY.digest))
    assert lookup.find(KEY, "another list") is None


def test_a_newer_generation_is_not_picked_up_in_the_middle_of_a_run(store, records):
    lookup = Lookup(store)
    store.put_choice(records.choice("c1", KEY.digest))
    lookup.remember(lookup.find(KEY, "declared"))
    store.put_choice(records.choice("c2", KEY.digest, generation=2))
    assert lookup.find(KEY, "declared").config_digest == "c1"
    assert Lookup(store).find(KEY, "declared").config_digest == "c2"


def test_a_process_has_one_store_per_directory(tmp_path, settings_for):
    first = open_lookup(settings_for(tmp_path / "a")).store
    assert first.path == tmp_path / "a" / "safetune.db"
    assert open_lookup(settings_for(tmp_path / "b" / ".." / "a")).store is first
    assert open_lookup(settings_for(tmp_path / "a")).store is first
    assert open_lookup(settings_for(tmp_path / "b")).store is not first


def test_a_store_that_cannot_be_opened_costs_one_warning(tmp_path, settings_for, records):
    (tmp_path / "cache").write_text("")
    with pytest.warns(UserWarning, match="safetune") as caught:
        store = open_lookup(settings_for(tmp_path / "cache")).store
    message = str(caught[0].message)
    assert len(caught) == 1
    assert str(tmp_path / "cache" / "safetune.db") in message
    assert "File exists" in message
    assert "in memory" in message

    with warnings.catch_warnings():
        warnings.simplefilter("error", SafetuneWarning)
        assert open_lookup(settings_for(tmp_path / "cache")).store is store
        assert store.path is None
        store.put_key(records.key())
        store.put_trial(records.trial())
        assert store.put_choice(records.choice()) == store.choice("key") == records.choice()
        assert store.trials("key") == [records.trial()]


def test_a_full_disk_costs_one_line_and_what_is_stored_is_still_read(guarded, records, caplog):
    guarded.put_trial(records.trial("before"))
    guarded.put_choice(records.choice("before"))
    refuse_writes(guarded)
    with caplog.at_level(logging.WARNING, "safetune"):
        guarded.put_key(records.key())
        guarded.put_trial(records.trial("after"))
        assert guarded.put_choice(records.choice("c2", generation=2)).generation == 2
        assert guarded.put_choice(records.choice("new", key="other")).config_digest == "new"
    assert [trial.config_digest for trial in guarded.trials("key")] == ["before"]
    assert guarded.choice("key").config_digest == "c2"
    assert guarded.choice("other").config_digest == "new"
    assert guarded.generation("key") == 2
    assert [record.message for record in caplog.records] == [
        f"cannot write to the store {guarded.path}: disk is full; this process keeps its choices "
        "in memory"
    ]


def test_a_store_that_cannot_be_read_any_more_costs_one_line(guarded, records, caplog):
    guarded.put_choice(records.choice())
    connection = sqlite3.connect(guarded.path)
    connection.executescript("DROP TABLE choice; DROP TABLE trial; CREATE VIEW choice AS SELECT 1")
    connection.close()
    with caplog.at_level(logging.WARNING, "safetune"):
        assert guarded.choice("key") is None
        assert guarded.trials("key") == []
        assert guarded.generation("key") == 0
    assert len(caplog.records) == 1
    assert "continuing without its choices" in caplog.text
    guarded.put_choice(records.choice("c2"))
    assert guarded.choice("key") == records.choice("c2")
    with pytest.raises(StoreError):
        guarded.choices()


def test_a_read_that_fails_with_its_connection_costs_nothing(guarded, records, caplog):
    """Such as a lock that cannot be let go: what is stored is found through another connection."""
    stored = guarded.put_choice(records.choice())
    guarded.connection._sqlite.set_progress_handler(lambda: 1, 1)
    assert guarded.choice(stored.key) == stored
    assert caplog.messages == []


def test_a_bad_record_is_dropped_without_giving_up_the_store(guarded, records, caplog):
    bad = records.choice(median_ms=math.nan)
    with caplog.at_level(logging.WARNING, "safetune"):
        assert guarded.put_choice(bad) is bad
        guarded.put_trial(records.trial(created=math.inf))
    assert len(caplog.records) == 2
    assert "choice: median_ms" in caplog.text
    guarded.put_choice(records.choice())
    again = GuardedStore.open(guarded.path.parent)
    assert again.choice("key") == records.choice()
    again.close()


def test_a_relative_directory_stays_where_it_was_at_the_import(tmp_path, children, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("SAFETUNE_CACHE_DIR", "SAFETUNE_PACKS"):
        monkeypatch.setenv(name, "./here")
    output = children.run(
        "import safetune\n"
        "os.chdir('elsewhere')\n"
        "from safetune.settings import Settings\n"
        "from safetune.store.lookup import open_lookup\n"
        "opened = open_lookup(Settings.current())\n"
        "os.chdir('/')\n"
        "assert open_lookup(Settings.current()) is opened\n"
        "print(opened.store.path, *Settings.current().packs)",
        "unused",
    )
    assert output.split() == [str(tmp_path / "here" / "safetune.db"), str(tmp_path / "here")]
