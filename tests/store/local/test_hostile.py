"""A database made to do harm: whatever its rows hold, a run gets a declared config."""

from __future__ import annotations

import itertools
import json
import logging
import sqlite3
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import to_builtins

from safetune import safetune
from safetune.cli.stored import newest_rows
from safetune.config import config_digest, config_record
from safetune.errors import StoreError
from safetune.keys import encoding
from safetune.keys.identity import is_interpreted
from safetune.miss import candidates
from safetune.miss.resolve import Miss, stored
from safetune.outcome import Outcome, Timing, Verdict
from safetune.settings import Settings
from safetune.store import lookup
from safetune.store.local.rows import CHOICE, KEY, TRIAL, Table
from safetune.store.packs import exchange, packs
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord

BLOCKS = (16, 32, 64)


@safetune(configs=[triton.Config({"BLOCK": block}) for block in BLOCKS], key=["n"])
@triton.jit
def copy(src, dst, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offsets, tl.load(src + offsets, mask=offsets < n), mask=offsets < n)


if not is_interpreted(copy):  # a run for the GPU alone, which imports this only to deselect it
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

MISS = Miss(copy, (torch.zeros(64), torch.zeros(64), 64), {"grid": (4,)})
REQUEST = MISS.request()
DIGESTS = [config_digest(config) for config in REQUEST.configs]

#: What may be in any field: JSON of all kinds and depths, and what is not quite JSON.
anything = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    | st.sampled_from([{}, [], {"values": 1}, {"values": [[1]]}, json.loads("[" * 900 + "]" * 900)])
)
names = st.sampled_from(
    [REQUEST.key.digest, REQUEST.declared, *DIGESTS, *(verdict.value for verdict in Verdict)]
)
configs = st.sampled_from(
    [config_record(config) for config in REQUEST.configs]
    + [{"BLOCK": 16, "ir_override": "/tmp/evil.ptx"}, {"pre_hook": "os.system"}, {}]
    + [{"BLOCK": float("nan")}, {"BLOCK": float("inf")}, {"BLOCK": 10**400}]
)
CALL = encoding.dumps(REQUEST.key.record())
#: Calls that a key may be of: those whose values have the request's names and types can be near it.
calls = st.sampled_from(["9" * 400, "-" + "9" * 400, "Infinity", "0", "true"]).map(
    lambda number: json.loads(CALL.replace("64", number))
)

TRIAL_RECORD = TrialRecord(
    REQUEST.key.digest,
    DIGESTS[0],
    config_record(REQUEST.configs[0]),
    1,
    Outcome(Verdict.OK, Timing(1.0, 1.0, 1.0, 10, "final")),
    1.0,
)
CHOICE_RECORD = ChoiceRecord(
    REQUEST.key.digest,
    1,
    DIGESTS[1],
    config_record(REQUEST.configs[1]),
    REQUEST.declared,
    1.0,
    3,
    1.0,
)
RIGHT = {"key": KeyRecord.of(REQUEST.key), "trial": TRIAL_RECORD, "choice": CHOICE_RECORD}


def row_of(table: Table) -> st.SearchStrategy[dict[str, Any]]:
    """Documents that are nearly right: each field is what it should be, or anything at all."""
    right = {"config": configs, "generation": st.integers(1, 3), "call": calls}
    right["config_digest"] = st.sampled_from(DIGESTS)
    data = to_builtins(RIGHT[table.name])
    return st.fixed_dictionaries(
        {name: st.just(data[name]) | right.get(name, names) | anything for name in data}
    )


def row_and_table(table: Table) -> st.SearchStrategy[tuple[Table, dict[str, Any]]]:
    return st.tuples(st.just(table), row_of(table))


TABLES = (CHOICE, TRIAL, KEY)


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> lookup.Lookup:
    return lookup.Lookup(lookup.GuardedStore.open(tmp_path_factory.mktemp("hostile")))


def insert(connection: sqlite3.Connection, table: Table, data: dict[str, Any]) -> None:
    """With a right checksum, where there is one: it is not a secret."""
    try:
        data = {**data, "checksum": table.checksum(data)}
    except (TypeError, ValueError, RecursionError):
        data = {**data, "checksum": "none"}
    made = table.seal(RIGHT[table.name])
    for name in made:
        value = data.get(name, made[name])
        is_plain = type(value) in (str, float) or (type(value) is int and abs(value) < 2**63)
        made[name] = value if is_plain else made[name]
    table.insert(connection, {**made, "record": json.dumps(data)}, "REPLACE")


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows_of=st.lists(st.one_of(*map(row_and_table, TABLES)), min_size=1, max_size=8))
def test_a_run_gets_a_declared_config(opened, rows_of) -> None:
    connection = sqlite3.connect(opened.store.path)
    with connection:
        for table in ("choice", "trial", "key"):
            connection.execute(f"DELETE FROM {table}")
        for table, row in rows_of:
            insert(connection, table, row)
    connection.close()
    opened._memory.clear()

    found = stored(MISS.tuner, REQUEST, opened).config

    assert found is None or found in REQUEST.configs
    assert candidates.fallback(REQUEST, opened.store) in REQUEST.configs
    assert all(config in REQUEST.configs for config in itertools.islice(
        candidates.best_first(REQUEST, opened.store, measured_first=True), 20))  # fmt: skip
    assert 0 <= opened.store.generation(REQUEST.key.digest) <= 10**12
    for stored_choice in opened.store.choices():
        assert isinstance(stored_choice.choice, ChoiceRecord)
    assert opened.store.lost is None
    assert ("read",) not in opened.store._reported
    # What people do with it: `safetune clear`, `export` and `import`.
    newest_rows(opened.store)
    for entry in exchange.of_store(opened.store).entries:
        assert packs.load(packs.dump([entry]).encode()) == [entry]


def put(opened: lookup.Lookup, **changes: Any) -> None:
    connection = sqlite3.connect(opened.store.path)
    with connection:
        connection.execute("DELETE FROM choice")
        insert(connection, CHOICE, {**to_builtins(CHOICE_RECORD), **changes})
    connection.close()


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"config_digest": "unknown"}, ""),
        ({"config": {"BLOCK": 32, "ir_override": "/tmp/evil.ptx"}}, "values differ from"),
        ({"config": {"BLOCK": 4096}}, "values differ from"),
        ({"config": [32]}, "config: Expected `object`, got `array`"),
        ({"config": {"BLOCK": float("nan")}}, "not a finite number"),
        ({"config": {"BLOCK": float("inf")}}, "not a finite number"),
        ({"generation": 2**62}, "generation is 4611686018427387904"),
        ({"generation": 0}, "generation is 0"),
        ({"measured": -1}, "measured is -1"),
        ({"median_ms": -1.0}, "median_ms is -1.0"),
        ({"median_ms": 1e300}, "median_ms is 1e+300"),
        ({"median_ms": "fast"}, "median_ms: Expected `float`, got `str`"),
        ({"config_digest": None}, "config_digest: Expected `str`, got `null`"),
    ],
)
def test_a_value_that_tuning_never_writes_is_ignored_and_reported(
    tmp_path, caplog, changes: dict[str, Any], reported: str
) -> None:
    opened = lookup.Lookup(lookup.GuardedStore.open(tmp_path))
    put(opened)
    assert stored(MISS.tuner, REQUEST, opened).config is REQUEST.configs[1]
    put(opened, **changes)
    opened._memory.clear()
    with caplog.at_level(logging.WARNING, "safetune"):
        assert stored(MISS.tuner, REQUEST, opened).config is None
        assert stored(MISS.tuner, REQUEST, opened).config is None
    assert reported in caplog.text
    opened.store.close()


def test_a_verdict_of_a_newer_version_is_kept_and_never_chosen(tmp_path, caplog) -> None:
    """Regression: an older process reported such a row as corrupt, and measured again."""
    opened = lookup.Lookup(lookup.GuardedStore.open(tmp_path))
    medians = (("numerically_unstable", 0.1), ("ok", 2.0), ("ok", 3.0))
    connection = sqlite3.connect(opened.store.path)
    for index, (verdict, median_ms) in enumerate(medians):
        outcome = Outcome(
            Verdict.OK, Timing(median_ms, 0.1, 9.0, 10, "final"), marks=("cooled: 3",)
        )
        config = config_record(REQUEST.configs[index])
        trial = TrialRecord(REQUEST.key.digest, DIGESTS[index], config, 1, outcome, 1.0)
        with connection:
            data = to_builtins(trial)
            data["outcome"]["verdict"] = verdict
            insert(connection, TRIAL, data)
    before = connection.execute("SELECT * FROM trial ORDER BY rowid").fetchall()

    with caplog.at_level(logging.WARNING, "safetune"):
        assert candidates.fallback(REQUEST, opened.store) is REQUEST.configs[1]
        trial = opened.store.trials(REQUEST.key.digest)[0]

    assert caplog.text == ""
    assert (trial.outcome.label, trial.outcome.ok) == ("numerically_unstable", False)
    assert trial.outcome.marks == ("cooled: 3",)
    assert connection.execute("SELECT * FROM trial ORDER BY rowid").fetchall() == before
    connection.close()
    opened.store.close()


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 400])
def test_a_key_of_a_number_of_any_size(opened, number: str) -> None:
    """How far another key is from the one that is missed: of it, a fallback is taken."""
    put(opened, key="other")
    connection = sqlite3.connect(opened.store.path)
    with connection:
        call = json.loads(CALL.replace("64", number))
        data = to_builtins(KeyRecord.of(REQUEST.key)) | {"digest": "other", "call": call}
        insert(connection, KEY, data)
    connection.close()
    assert candidates.fallback(REQUEST, opened.store) is REQUEST.configs[1]


ENDLESS = (
    "DROP TABLE choice; CREATE VIEW choice AS WITH RECURSIVE n(i) AS "
    "(SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS key FROM n"
)
COMPUTED = "ALTER TABLE choice ADD COLUMN more TEXT AS (printf('%.*c', 100000000, 'x'))"

EMPTYING = "CREATE TRIGGER t AFTER INSERT ON choice BEGIN DELETE FROM choice; END"


@pytest.mark.parametrize("made", [ENDLESS, COMPUTED, EMPTYING], ids=["view", "column", "trigger"])
@pytest.mark.parametrize("mode", ["tune", "frozen"])
def test_views_computed_columns_and_triggers_are_refused(tmp_path, monkeypatch, made, mode) -> None:
    """A view that never ends, or a trigger, would run inside our own statements."""
    lookup.GuardedStore.open(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "safetune.db")
    connection.executescript(made)
    connection.close()
    lookup._lookups.clear()
    monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("SAFETUNE_MODE", mode)
    with pytest.warns(UserWarning, match="triggers or views"):
        opened = lookup.open_lookup(Settings.current())
    assert opened.store.choice("key", "declared") is None
    lookup._lookups.clear()
    # Nor with those of a file from elsewhere, that `safetune import` or `merge` reads.
    with pytest.raises(StoreError, match="triggers or views"):
        exchange.collect(tmp_path / "safetune.db")
