"""Stores that earlier versions made: brought up to date when they are opened, nothing lost."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from safetune.keys.tuning_key import key_digest
from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.local import opening
from safetune.store.local.store import Store
from safetune.store.packs import exchange
from safetune.store.records import ChoiceRecord, RecordedCall, TrialRecord

STORES = Path(__file__).parent / "stores"
KEY = "487a4014bd92112998b0545faab0b7b8"
LIST, OTHER_LIST = "cd" * 16, "ef" * 16


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    connection = sqlite3.connect(tmp_path / "safetune.db")
    connection.executescript((STORES / "0.1.0.sql").read_text(encoding="utf-8"))
    connection.close()
    return tmp_path


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    opened = Store.open(directory)
    yield opened
    opened.close()


def config(block: int) -> dict[str, int]:
    return {"BLOCK": block, "num_ctas": 1, "num_stages": 3, "num_warps": 4}


def test_a_store_of_0_1_0_is_brought_up_to_date(store: Store) -> None:
    connection = sqlite3.connect(store.path)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    steps = connection.execute("SELECT name FROM _sqlite_migrations ORDER BY id").fetchall()
    connection.close()
    assert version == opening.VERSION
    first, *later = [(step.__name__,) for step in opening.HISTORY]
    made_by_0_1_0 = [first, ("m002_lease_and_choice_per_list",), ("m003_create_call",)]
    assert steps == [*made_by_0_1_0, *later]


def test_a_store_of_0_1_0_has_the_tables_of_a_new_one(store: Store, tmp_path: Path) -> None:
    """Its tables were made by three steps that are one now."""
    Store.open(tmp_path / "new").close()
    found = []
    for path in (store.path, tmp_path / "new" / "safetune.db"):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            columns = connection.execute(
                "SELECT made.name, has.* FROM sqlite_master AS made, pragma_table_xinfo(made.name) "
                "AS has WHERE made.type = 'table' AND made.name NOT LIKE 'sqlite_%' ORDER BY 1, 2"
            ).fetchall()
            indexes = connection.execute(
                "SELECT name, sql FROM sqlite_master WHERE type = 'index' ORDER BY 1"
            ).fetchall()
        found.append((columns, indexes))
    assert found[0] == found[1]


def test_every_row_of_0_1_0_is_found(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "safetune"):
        entries = store.choices_of_lists("add")
        ((key, trials),) = store.trials_of("add")
        recorded = store.calls()
    assert caplog.text == ""

    wide, narrow = "a0a0d8e9d59ba4142bdceb0d18e998aa", "a507d44283006b9455f2c094f04d7edb"
    assert [entry.choice for entry in entries] == [
        ChoiceRecord(KEY, 2, wide, config(256), LIST, 0.011, 3, 1795262461.0),
        ChoiceRecord(KEY, 1, narrow, config(64), OTHER_LIST, 0.0125, 1, 1795262470.0),
    ]
    assert key == entries[0].key
    assert (key.kernel_source, key.kernel_file, key.kernel_line) == (
        "def add(x): ...",
        "/src/add.py",
        12,
    )
    timing, later = (
        Timing(0.0125, 0.012, 0.013, 100, "final"),
        Timing(0.011, 0.0105, 0.012, 100, "final"),
    )
    measured = Outcome(Verdict.OK, timing, gpu_uuid="GPU-1", marks=("disputed: 2 of 3",))
    died = Outcome(Verdict.DIED, None, "SIGSEGV", "it died", "core dumped\n")
    crashed = "e3743b192eb1a65b4a2783725e351304"
    assert (
        trials
        == store.trials(KEY)
        == [
            TrialRecord(KEY, narrow, config(64), 1, measured, 1795262400.25),
            TrialRecord(KEY, crashed, config(128), 1, died, 1795262401.5),
            TrialRecord(KEY, wide, config(256), 2, Outcome(Verdict.OK, later), 1795262460.0),
        ]
    )
    assert recorded == [RecordedCall("12" * 16, "add", "module:add", {"n": 2**64}, 1795262480.0)]


def test_a_store_of_0_1_0_is_read_where_it_cannot_be_written(directory: Path) -> None:
    """In an image, by a frozen run, or as the source of `safetune import`."""
    before = {path: path.read_bytes() for path in directory.iterdir()}
    found = exchange.collect(directory / "safetune.db")
    assert [entry.choice.generation for entry in found.entries] == [2, 1]
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_keys_of_0_1_0_have_the_same_digest_and_can_be_exported(store: Store) -> None:
    found = exchange.of_store(store)
    assert found.left_out == []
    key = found.entries[0].key
    assert key.digest == KEY
    assert (
        repr(key.call["values"]) == "[['N', 18446744073709551616], ['scale', -0.0], ['label', 'é']]"
    )
    parts = key.kernel_name, key.kernel_digest, key.call, key.device, key.toolchain
    assert key_digest(*parts) == KEY


def test_a_choice_of_0_1_0_is_kept_beside_new_ones(store: Store) -> None:
    new = ChoiceRecord(KEY, 3, "12" * 16, config(512), LIST, 0.01, 4, 1795263000.0)
    assert store.put_choice(new) == new == store.choice(KEY, LIST)
    assert store.choice(KEY, OTHER_LIST).generation == 1  # type: ignore[union-attr]
    assert store.generation(KEY) == 3
