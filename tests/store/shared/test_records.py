"""A record is what it says, or it is foreign: nothing in it is trusted."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safetune.errors import PackError
from safetune.keys import encoding
from safetune.store.local.rows import RecordError
from safetune.store.packs import packs
from safetune.store.schema import Choice
from safetune.store.shared.protocol import decode, decoded, encode, name_of, namespace

from . import conftest as make
from .conftest import DEVICE, TOOLCHAIN


def sealed(content: dict[str, Any]) -> str:
    """Return what a hostile writer would write: any content, with the right checksum."""
    content.pop("checksum", None)
    return encoding.dumps({**content, "checksum": encoding.digest(content)})


CHOICE = ("tunings", 0, "choices", 0)


def changed(*path: str | int, to: Any) -> str:
    content = json.loads(encode(make.stored()))
    part = content
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = to
    return sealed(content)


def test_a_record_is_decoded_as_it_was_encoded() -> None:
    record = make.stored(3, 128, 2)
    assert decode(encode(record)) == record


def test_source_and_file_of_a_kernel_are_not_in_a_record() -> None:
    text = encode(make.stored())
    assert "def add_kernel" not in text
    assert "kernel_file" not in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not the JSON"),
        (encode(make.stored())[:-20], "not the JSON"),
        (encode(make.stored()).replace("1.5", "1.4"), "checksum"),
        (sealed(json.loads(encode(make.stored()))).replace('"checksum"', '"seal"'), "no checksum"),
        ("[" * 50000, "not the JSON"),
        ("x" * 70000, "bytes"),
        (changed("safetune_pack", to=2), "format 2"),
        (changed("tunings", to=[]), "0 choices"),
        (changed("kernel", "name", to="\x1b[31m"), "not the name of a function"),
        (changed("device", "name", to="H100\x1b[31m"), "control characters"),
        (changed("device", to={}), "device: object missing required field"),
        (changed("tunings", 0, "toolchain", "triton", to="3.6\x1b[31m"), "not a version of Triton"),
        (changed(*CHOICE, "values", to=5), r"choices\[0\].values: expected `array`"),
        (changed(*CHOICE, "dtypes", to=[["x", [1]]]), "dtypes.*expected `str`"),
        (changed(*CHOICE, "generation", to=2**62), "generation"),
        (changed(*CHOICE, "generation", to=10**10), "generation is 10000000000, too large"),
        (changed(*CHOICE, "values", to=[["n", json.loads("[" * 70 + "]" * 70)]]), "too deeply"),
        (changed(*CHOICE, "generation", to=0), "generation"),
        (changed(*CHOICE, "generation", to=True), "generation"),
        (changed(*CHOICE, "marks", to=["disputed: \x1b[31m"]), "marks have control characters"),
        (changed(*CHOICE, "median_ms", to="fast"), "median_ms"),
        (changed(*CHOICE, "median_ms", to=-1.0), "median_ms"),
        (changed(*CHOICE, "created", to=-1e300), "created"),
        (changed(*CHOICE, "created", to=1e300), "created"),
        (changed(*CHOICE, "config", to="import os"), "config"),
        (changed(*CHOICE, "config", "ir_override", to="/tmp/x.ptx"), "ir_override"),
        (changed("tunings", 0, "declared", to="../../etc/passwd"), "declared"),
    ],
)
def test_text_that_is_not_a_record_is_foreign(text: str, reason: str) -> None:
    with pytest.raises(PackError, match=reason):
        decode(text)


def test_a_record_counts_in_its_own_namespace_only() -> None:
    """A writer of the store can put it anywhere."""
    record = make.stored()
    text = encode(record)
    assert decoded(text, make.SPACE, name_of(record)) == record
    assert decoded(text, make.SPACE) == record
    assert (
        decoded(text, namespace({**record.key.device, "sm_count": 7}, record.key.toolchain)) is None
    )
    assert decoded(text, make.SPACE, name_of(make.stored(1))) is None


def test_the_next_forced_tuning_can_always_be_shared() -> None:
    """Whatever generation another node claims, a later one is still a record."""
    claimed = int(time.time()) - 1  # the last one, a second ago
    decode(changed(*CHOICE, "generation", to=claimed))
    assert decode(encode(make.stored(generation=claimed + 1))).choice.generation == claimed + 1


def test_a_record_is_a_pack_of_one_choice() -> None:
    """`safetune import` takes one as it is."""
    record = make.stored(created=1700000000.0)
    assert packs.load(encode(record).encode()) == [record]
    with pytest.raises(PackError, match="checksum"):
        packs.load(encode(record).replace("1.5", "1.4").encode())


@pytest.mark.parametrize("value", [2**64, -(2**64), -0.0, 0.1, 5e-324, 1e16, "\u2028", True])
def test_values_and_configs_come_back_exactly(value: Any) -> None:
    record = make.stored(config={"X": value}, config_digest=encoding.digest({"X": value}))
    found = decode(encode(record))
    assert repr(found.choice.config["X"]) == repr(value)
    assert found == record
    assert encode(found) == encode(record)


@pytest.mark.parametrize("path", [CHOICE, ("kernel",), (), ("tunings", 0)])
def test_a_field_of_a_newer_version_is_kept_in_the_same_text(path: tuple[Any, ...]) -> None:
    text = changed(*path, "clocks_mhz", to=[1980, -0.0, 2**64])
    found = decode(text)
    assert found.unknown == ("clocks_mhz",)
    assert found.choice == make.choice()
    assert encode(found) == text


def test_a_record_with_a_nan_is_refused() -> None:
    with pytest.raises(RecordError, match="median_ms"):
        encode(make.stored(median_ms=float("nan")))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
FIELDS = [
    ("safetune_pack",),
    *(("kernel", name) for name in ("name", "digest")),
    *(("device", name) for name in DEVICE.record()),
    ("tunings", 0, "declared"),
    *(("tunings", 0, "toolchain", name) for name in TOOLCHAIN.record()),
    *((*CHOICE, name) for name in (*Choice.__struct_fields__, "newer")),
]


@given(st.sampled_from(FIELDS), JSON)
def test_a_hostile_record_is_the_one_it_says_or_foreign(field: tuple[str, ...], value: Any) -> None:
    """Whatever is in a field, with the right checksum: it decodes to that, or is foreign."""
    try:
        text = changed(*field, to=value)
    except ValueError:  # a number that JSON does not have
        return
    try:
        found = decode(text)
    except PackError:
        return
    assert encode(found) == text
    assert found.unknown == (("newer",) if field[-1] == "newer" else ())


@given(st.binary(max_size=200) | JSON.map(lambda data: json.dumps(data).encode()))
def test_any_bytes_are_foreign(data: bytes) -> None:
    with pytest.raises(PackError):
        decode(data)
