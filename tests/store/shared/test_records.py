"""A record says what it says, or it is none: nothing in it is taken on trust."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safetune.keys import encoding
from safetune.store.local.rows import RecordError
from safetune.store.shared import record as shared_record
from safetune.store.shared.record import ForeignRecord, decode, encode

from . import conftest as make


def sealed(content: dict[str, Any]) -> str:
    """Return what a hostile writer would write: any content, with the right checksum."""
    content.pop("checksum", None)
    return encoding.dumps({**content, "checksum": encoding.digest(content)})


def changed(*path: str, to: Any) -> str:
    content = json.loads(encode(make.stored()))
    place = content
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = to
    return sealed(content)


def test_what_is_encoded_is_decoded() -> None:
    record = make.stored(3, 128, 2)
    assert decode(encode(record)) == record


def test_what_is_of_one_machine_is_left_out() -> None:
    text = encode(make.stored())
    assert "def add_kernel" not in text
    assert "kernel_file" not in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no record"),
        (encode(make.stored())[:-20], "no record"),
        (encode(make.stored()).replace("1.5", "1.4"), "checksum"),
        ("[" * 50000, "no record"),
        ("x" * 70000, "bytes"),
        (changed("safetune", to=2), "format is 2"),
        (changed("choice", "key", to="0" * 32), "another key"),
        (changed("key", "call", to={"values": [["n", 7]], "dtypes": [], "options": []}), "another"),
        (changed("key", "device_digest", to="0" * 32), "another device"),
        (changed("key", "surprise", to=1), "surprise"),
        (changed("choice", "generation", to=2**62), "generation"),
        (changed("choice", "generation", to=0), "generation"),
        (changed("choice", "generation", to=True), "generation"),
        (changed("choice", "median_ms", to="fast"), "median_ms"),
        (changed("choice", "median_ms", to=-1.0), "median_ms"),
        (changed("choice", "config", to="import os"), "config"),
        (changed("choice", "config_digest", to="../../etc/passwd"), "digest"),
    ],
)
def test_what_is_none(text: str, reason: str) -> None:
    with pytest.raises(ForeignRecord, match=reason):
        decode(text)


def test_what_no_store_keeps_is_not_written() -> None:
    with pytest.raises(RecordError, match="median_ms"):
        encode(make.stored(median_ms=float("nan")))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
FIELDS = [
    (part, name)
    for part, values in json.loads(encode(make.stored())).items()
    if isinstance(values, dict)
    for name in values
]


@given(st.sampled_from(FIELDS), JSON)
def test_a_hostile_record_is_the_one_it_says_or_none(field: tuple[str, str], value: Any) -> None:
    """Whatever stands in a field, with the right checksum: it decodes to that, or is foreign."""
    try:
        text = changed(*field, to=value)
    except ValueError:  # a number that JSON does not have
        return
    try:
        found = decode(text)
    except ForeignRecord:
        return
    assert shared_record.encode(found) == text or value in (0, 1, True, False)


@given(st.binary(max_size=200) | JSON.map(lambda data: json.dumps(data).encode()))
def test_any_bytes_are_foreign(data: bytes) -> None:
    with pytest.raises(ForeignRecord):
        decode(data)
