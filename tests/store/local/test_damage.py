"""Rows that were damaged in the file: absent, reported once, and never in the way of the others."""

from __future__ import annotations

import logging
import re
import sqlite3
from pathlib import Path

import pytest

from safetune.errors import StoreWarning
from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.lookup import GuardedStore


def execute(path: Path, statement: str, *parameters: object) -> None:
    """Change the database behind the store's back."""
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(statement, parameters)
    connection.close()


DAMAGE = {
    "key": "UPDATE key SET record = replace(record, 'triton', 'notirt') WHERE digest = 'key'",
    "choice": "UPDATE choice SET record = replace(record, '64', '65') WHERE key = 'key'",
    "choice moved": "UPDATE choice SET key = 'moved' WHERE key = 'key'",
    "choice of another": "UPDATE choice SET record = "
    "(SELECT record FROM choice WHERE key = 'sound') WHERE key = 'key'",
    "choice type": "UPDATE choice SET record = 7 WHERE key = 'key'",
    "choice list": "UPDATE choice SET record = '[1]' WHERE key = 'key'",
    "choice null": "UPDATE choice SET record = NULL WHERE key = 'key'",
    "choice blob": "UPDATE choice SET declared = x'00ff' WHERE key = 'key'",
    "trial": "UPDATE trial SET record = replace(record, '9.0', '0.9') WHERE key = 'key'",
    "trial verdict": "UPDATE trial SET record = replace(record, 'died', 'ok') WHERE key = 'key'",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_row_is_absent_and_reported_once(store, records, caplog, damage):
    failed = records.trial(outcome=Outcome(Verdict.DIED, Timing(9.0, 9.0, 9.0, 1, "screen")))
    store.put_key(records.key())
    store.put_trial(failed)
    store.put_choice(records.choice())
    sound = records.key("sound", kernel_digest="k2", device_digest="device")
    store.put_key(sound)
    store.put_trial(records.trial(key="sound"))
    store.put_choice(records.choice(key="sound"))

    execute(store.path, DAMAGE[damage])
    with caplog.at_level(logging.WARNING, "safetune"):
        for _ in range(2):
            assert (store.choice("key") is None) == damage.startswith("choice")
            assert (store.trials("key") == []) == damage.startswith("trial")
            listed = [stored.key.digest for stored in store.choices()]
            store.choice("moved")
            shown = [key.digest for key, trials in store.trials_of("add") if trials]
    assert store.choice("sound") == records.choice(key="sound")
    assert store.trials("sound") == [records.trial(key="sound")]
    assert listed == (["key", "sound"] if damage.startswith("trial") else ["sound"])
    assert shown == (["key", "sound"] if damage.startswith("choice") else ["sound"])
    assert len(caplog.records) == 1
    assert damage.split()[0] in caplog.text


def test_a_damaged_generation_falls_back_to_the_one_before(store, records):
    store.put_choice(records.choice("c1"))
    store.put_choice(records.choice("c2", generation=2))
    execute(
        store.path, "UPDATE choice SET record = replace(record, '1.5', '7.5') WHERE generation = 2"
    )
    assert store.choice("key").config_digest == "c1"
    assert store.generation("key") == 1


def test_a_damaged_row_is_replaced_by_the_next_write(store, records):
    store.put_choice(records.choice("c1"))
    store.put_trial(records.trial())
    execute(store.path, "UPDATE choice SET record = replace(record, 'c1', 'c9')")
    execute(store.path, "UPDATE trial SET record = replace(record, 'spilled', 'x')")
    assert store.put_choice(records.choice("c2")) == records.choice("c2") == store.choice("key")
    store.put_trial(records.trial())
    assert store.trials("key") == [records.trial()]


def test_a_database_whose_index_leads_to_another_row_is_set_aside(tmp_path, records):
    """One byte is enough: out of order, a search ends at a neighbour, which is sound itself."""
    guarded = GuardedStore.open(tmp_path)
    for number in range(40):
        guarded.put_choice(records.choice(key=f"key-{number}"))
    guarded.close()
    content = guarded.path.read_bytes()
    changed, count = re.subn(rb"key-14declared(?!c1)", b"kdy-14declared", content)
    assert count == 1, "in the index; in the row a config comes next"
    guarded.path.write_bytes(changed)

    again = GuardedStore.open(tmp_path)
    with pytest.warns(StoreWarning, match="renamed it to"):
        assert again.choice("key-12", "declared") is None
    assert again.put_choice(records.choice()) == again.choice("key")
    again.close()
