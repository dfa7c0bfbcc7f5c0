"""One choice through every encoding of it: row, shared record, pack, and back, with one digest."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safetune.errors import PackError
from safetune.keys import encoding
from safetune.store.local.rows import RecordError
from safetune.store.local.store import Store
from safetune.store.packs import exchange, packs
from safetune.store.records import StoredChoice
from safetune.store.shared import protocol as shared_record
from tests.store.packs.conftest import entry

numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.none() | st.booleans() | numbers | st.text(max_size=9) | st.just({"dtype": "bfloat16"})
exact = [2**64, -(2**64) - 1, 2**53 + 1, -0.0, 0.1, 5e-324, 1e16, 1.7976931348623157e308]


@pytest.fixture(scope="module")
def store() -> Store:
    return Store.in_memory()


def facts(stored: StoredChoice) -> str:
    """All that two encodings of a choice must agree about, with the spelling of every number."""
    key = stored.key
    return encoding.dumps([key.digest, key.call, key.device, key.toolchain, vars(stored.choice)])


@pytest.mark.parametrize("value", exact)
def test_a_number_comes_back_exactly(value: Any, store: Store) -> None:
    through_every_encoding(entry(value, config={"X": value}), store)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values, st.dictionaries(st.text(max_size=5), values, min_size=1, max_size=4))
def test_any_choice_comes_back_with_its_digests(
    store: Store, value: Any, config: dict[str, Any]
) -> None:
    config.pop("ir_override", None)
    through_every_encoding(entry(value, config=config or {"B": 1}), store)


def through_every_encoding(made: StoredChoice, store: Store) -> None:
    store.clear("add")
    store.put_key(made.key)
    store.put_choice(made.choice)
    (row,) = store.choices()
    record = shared_record.decode(shared_record.encode(row))
    (packed,) = packs.load(packs.dump([row]).encode())
    assert facts(row) == facts(record) == facts(packed) == facts(made)
    store.clear("add")
    assert exchange.import_into(store, [packed]).new == 1
    assert facts(store.choices()[0]) == facts(made)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_before_it_is_encoded(
    number: float, store: Store, tmp_path: Path
) -> None:
    right = entry()
    for bad, column in (
        (replace(right.choice, config={"X": [number]}), "choice: config"),
        (replace(right.choice, created=number), "choice: created"),
    ):
        with pytest.raises(RecordError, match=column):
            store.put_choice(bad)
        with pytest.raises(RecordError, match=column):
            shared_record.encode(replace(right, choice=bad))
        with pytest.raises(PackError, match=column):
            exchange.write(tmp_path / "pack.json", packs.dump([replace(right, choice=bad)]))
    assert list(tmp_path.iterdir()) == []
