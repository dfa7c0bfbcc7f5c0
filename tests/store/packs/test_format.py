"""The text of a pack, and that nothing but a pack is taken for one."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safetune.errors import PackError
from safetune.store.packs import packs
from safetune.store.packs.packs import dump, file_name, load, name_of

EXPECTED = """\
{
  "safetune_pack": 1,
  "kernel": {"name": "add", "digest": "abababababababababababababababab"},
  "device": {"capability": "90", "name": "NVIDIA H100 80GB HBM3", "shared_memory_bytes": 232448, \
"sm_count": 132},
  "tunings": [
    {
      "toolchain": {"backend": "ptxas-12.8-90", "environment": {"default_fp_fusion": "True"}, \
"target": "cuda:90:32", "triton": "3.6.0"},
      "declared": "cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd",
      "choices": [
        {
          "values": [["N", 256]],
          "dtypes": [["x", "float16"]],
          "options": [],
          "config": {"BLOCK": 64, "num_ctas": 1, "num_stages": 3, "num_warps": 4},
          "median_ms": 0.0125,
          "measured": 8,
          "generation": 1,
          "created": "2026-11-21T12:00:00Z"
        },
        {
          "values": [["N", 1024]],
          "dtypes": [["x", "float16"]],
          "options": [],
          "config": {"BLOCK": 64, "num_ctas": 1, "num_stages": 3, "num_warps": 4},
          "median_ms": 0.33333,
          "measured": 8,
          "generation": 1,
          "created": "2026-11-21T12:00:00Z"
        }
      ]
    }
  ]
}
"""


def test_a_pack_has_one_fact_per_line(choices: Any) -> None:
    entries = [
        choices.entry(1024, median_ms=1 / 3, created=choices.noon),
        choices.entry(256),
    ]
    assert dump(entries) == dump(reversed(entries)) == EXPECTED
    assert load(EXPECTED.encode()) == [
        packs.checked(choices.entry(256)),
        packs.checked(choices.entry(1024, median_ms=1 / 3)),
    ]


def test_values_of_any_types_have_an_order(choices: Any) -> None:
    values = (None, True, 3, 2.5, "three", {"dtype": "bfloat16"}, {"tuple": [1]})
    entries = [choices.entry(value) for value in values]
    text = dump(entries)
    assert dump(reversed(entries)) == text
    assert len(load(text.encode())) == len(entries)


def test_a_new_choice_changes_its_own_lines(choices: Any) -> None:
    """What a reviewer sees when one key was tuned again."""
    before = [choices.entry(n) for n in (256, 512, 1024)]
    wide = {**choices.config, "BLOCK": 128}
    after = [*before[:1], choices.entry(512, config=wide, median_ms=0.011), *before[2:]]
    lines = zip(dump(before).splitlines(), dump(after).splitlines(), strict=True)
    assert [b.split()[0] for b, a in lines if a != b] == ['"config":', '"median_ms":']


def test_the_file_name_has_kernel_and_device(choices: Any) -> None:
    name = name_of(choices.entry())
    assert name == name_of(choices.entry(7, toolchain=choices.entry().key.toolchain))
    assert name.startswith("add.NVIDIA_H100_80GB_HBM3.")
    others = [
        choices.entry(kernel_digest="ef" * 16),
        choices.entry(device={**choices.h100, "sm_count": 114}),
    ]
    assert len({name, *map(name_of, others)}) == 3
    assert len(file_name("k" * 999, "", "d/../" * 999, "")) < 255
    assert "/" not in file_name("k", "", "../d", "")


def broken(change: Any) -> bytes:
    data = json.loads(EXPECTED)
    change(data)
    return json.dumps(data).encode()


def set_in(path: str, value: Any) -> Any:
    def change(data: Any) -> None:
        *way, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
        for part in way:
            data = data[part]
        if value is KeyError:
            del data[last]
        else:
            data[last] = value

    return change


FIRST = "tunings.0.choices.0"


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("safetune_pack", 2, r"pack format 2, but this safetune reads 1"),
        ("safetune_pack", 0, r"pack format 0"),
        ("safetune_pack", True, "it is not a pack"),
        ("safetune_pack", KeyError, "it is not a pack"),
        ("kernel.name", "../add", "kernel: '../add' is not the name of a function"),
        ("kernel.name", 5, "kernel.name: expected `str`, got `int`"),
        (
            "kernel.digest",
            "AB" * 16,
            r"kernel.digest: expected `str` matching regex .*\[0-9a-f\]\{32\}",
        ),
        ("kernel", [], "kernel: expected `object`, got `array`"),
        ("device.sm_count", True, "device.sm_count: expected `int`, got `bool`"),
        ("device.name", "H100\x1b[31m", "control characters"),
        ("device.name", None, "device.name: expected `str`, got `null`"),
        ("device.sm_count", KeyError, "device: object missing required field `sm_count`"),
        ("tunings", {}, "tunings: expected `array`, got `object`"),
        (
            "tunings.0.toolchain.environment",
            {"a": 1},
            r"toolchain.environment\[...\]: expected `str`, got `int`",
        ),
        (
            "tunings.0.toolchain.triton",
            KeyError,
            r"tunings\[0\].toolchain: object missing required field `triton`",
        ),
        ("tunings.0.toolchain.triton", "3.6\x1b[31m", "not a version of Triton"),
        ("tunings.0.declared", "x", r"tunings\[0\].declared: expected `str` matching"),
        (
            f"{FIRST}.config",
            KeyError,
            r"tunings\[0\].choices\[0\]: object missing required field `config`",
        ),
        (f"{FIRST}.config", {}, r"choices\[0\].config: expected `object` of length >= 1"),
        (f"{FIRST}.config.ir_override", "/tmp/x.ptx", "config sets ir_override, which is code"),
        (f"{FIRST}.config.ir_override", None, "config sets ir_override"),
        (f"{FIRST}.median_ms", -1.5, r"\[0\].median_ms: expected `float` >= 0"),
        (f"{FIRST}.median_ms", "1", "median_ms: expected `float`, got `str`"),
        (f"{FIRST}.generation", 0, r"\[0\].generation: expected `int` >= 1"),
        (f"{FIRST}.generation", 2**63, "generation is 9223372036854775808, too large"),
        (f"{FIRST}.generation", 10**10, "generation is 10000000000, too large"),
        (f"{FIRST}.generation", 1.0, "generation: expected `int`, got `float`"),
        (f"{FIRST}.measured", True, "measured: expected `int`, got `bool`"),
        (f"{FIRST}.created", "yesterday", "created is 'yesterday', not a time such as"),
        (f"{FIRST}.created", "2026-11-21T12:00:00", "created is '2026-11-21T12:00:00'"),
        (f"{FIRST}.created", "0001-01-01T00:00:00Z", "created is '0001"),
        (f"{FIRST}.created", None, "created: expected `float | str`, got `null`"),
        (f"{FIRST}.created", -1e300, "created: expected `float` >= 0"),
        (f"{FIRST}.created", 1e300, "created: expected `float` <= 253402300799"),
        (f"{FIRST}.values", [["N"]], r"\[0\].values\[0\]: expected `array` of length 2, got 1"),
        (f"{FIRST}.values", [["N", json.loads("[" * 70 + "]" * 70)]], "nested too deeply"),
        (f"{FIRST}.marks", ["disputed: \x1b[31m"], "marks have control characters"),
        (f"{FIRST}.options", "no", "options: expected `array`, got `str`"),
        (f"{FIRST}.values.0.1", 1024, "two choices for"),
    ],
)
def test_a_bad_field_is_named(path: str, value: Any, reason: str) -> None:
    with pytest.raises(PackError, match=reason):
        load(broken(set_in(path, value)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not the JSON of a pack"),
        (b"[]", "it is not a pack"),
        (b"null", "it is not a pack"),
        (EXPECTED.encode()[:-20], "not the JSON of a pack"),
        (b"\xff\xfe", "not the JSON of a pack"),
        (EXPECTED.replace("0.0125", "NaN").encode(), "NaN is not a finite number"),
        (EXPECTED.replace("0.0125", "-Infinity").encode(), "-Infinity is not a finite number"),
        (EXPECTED.replace("0.0125", "1e999").encode(), "1e999 is not a finite number"),
        (EXPECTED.replace("256", "9" * 5000).encode(), "not the JSON of a pack"),
        (EXPECTED.replace('"measured"', '"generation"').encode(), "an object has a duplicate name"),
        (b'{"safetune_pack": ' + b"[" * 100_000, "not the JSON of a pack|too deeply"),
        (EXPECTED.replace("256", "[" * 900 + "]" * 900).encode(), None),
        (EXPECTED.encode() + b" " * packs.MAX_BYTES, "over 64 MiB"),
    ],
    ids=str,
)
def test_bytes_that_are_not_a_pack_are_refused(data: bytes, reason: str | None) -> None:
    if reason is None:  # as deep as JSON may be in this process
        with contextlib.suppress(PackError):
            dump(load(data))
        return
    with pytest.raises(PackError, match=reason):
        load(data)


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def places(data: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a pack."""
    inner = data.items() if isinstance(data, dict) else enumerate(data)
    found = [way] if way else []
    if isinstance(data, (dict, list)):
        for name, value in inner:
            found += places(value, (*way, name)) if isinstance(value, (dict, list)) else []
            found.append((*way, name))
    return found


PLACES = places(json.loads(EXPECTED))


@given(st.lists(st.tuples(st.sampled_from(PLACES), any_json), min_size=1, max_size=3))
def test_a_doctored_pack_is_a_pack_or_an_error(changes: list[Any]) -> None:
    data = copy.deepcopy(json.loads(EXPECTED))
    for way, value in changes:
        target = data
        try:
            for part in way[:-1]:
                target = target[part]
            target[way[-1]] = value
        except (IndexError, KeyError, TypeError):
            continue  # an earlier change took the place away
    try:
        entries = load(json.dumps(data).encode())
    except PackError:
        return
    if entries:
        assert load(dump(entries).encode()) == load(dump(reversed(entries)).encode())


@given(st.binary(max_size=200), st.integers(0, len(EXPECTED)), st.integers(0, 40))
def test_bytes_are_a_pack_or_an_error(noise: bytes, place: int, cut: int) -> None:
    data = EXPECTED.encode()
    with contextlib.suppress(PackError):
        assert dump(load(data[:place] + noise + data[place + cut :]))
