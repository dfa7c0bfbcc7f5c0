"""A record is what it says, or it is foreign: nothing in it is trusted."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from safetune.errors import PackError
from safetune.keys import encoding
from safetune.store.packs import packs
from safetune.store.shared.protocol import decode, encode

from . import conftest as make


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
        ("x" * 70000, "bytes"),
        (changed("tunings", to=[]), "0 choices"),
        (changed(*CHOICE, "config", "ir_override", to="/tmp/x.ptx"), "ir_override"),
    ],
)
def test_text_that_is_not_a_record_is_foreign(text: str, reason: str) -> None:
    with pytest.raises(PackError, match=reason):
        decode(text)


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


@pytest.mark.parametrize("path", [CHOICE, ("kernel",), (), ("tunings", 0)])
def test_a_field_of_a_newer_version_is_kept_in_the_same_text(path: tuple[Any, ...]) -> None:
    text = changed(*path, "clocks_mhz", to=[1980, -0.0, 2**64])
    found = decode(text)
    assert found.unknown == ("clocks_mhz",)
    assert found.choice == make.choice()
    assert encode(found) == text
