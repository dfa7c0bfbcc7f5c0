"""Tables of configs in the files of vLLM, SGLang and Hugging Face kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safetune.errors import PackError
from safetune.store.packs import tables
from safetune.store.packs.tables import Kind
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice

CONFIG = {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
#: As these projects ship them: only the numbers are ours.
FILES = {
    "E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json": {
        "triton_version": "3.4.0",
        "1": CONFIG,
        "24": {**CONFIG, "num_stages": 2},
        "2048": None,
    },
    "N=512,K=64,device_name=Intel(R)_Arc(TM)_Pro,dtype=fp8_w8a8_down.json": {"16": CONFIG},
    "epilogue,E=2,device_name=NVIDIA_L4.json": {"1": {**CONFIG, "USE_TMA": True}},
}
OTHERS = {
    "E=1,device_name=X.json": '{"1": 3}',
    "E=2,device_name=X.json": '{"1": {}, "buckets": {"1": 2}}',
    "E=3,device_name=X.json": '{"version": "1"}',
    "E=4,device_name=X.json": "[1]",
    "E=5,device_name=X.json": '{"1": ',
}


@pytest.mark.parametrize("name", FILES)
def test_a_table_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(FILES[name], indent=4) + "\n", encoding="utf-8")
    table = tables.read_table(tmp_path / name)
    assert table.name == name
    assert table.text() == (tmp_path / name).read_text(encoding="utf-8")
    assert table.device in name


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_is_not_a_table_is_refused_with_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(OTHERS[name], encoding="utf-8")
    with pytest.raises(PackError, match=f"{name}: "):
        tables.read_table(tmp_path / name)


def test_the_nearest_row_is_that_of_each_reader() -> None:
    table = tables.Table((), {1: "one", 64: "some", 1024: "many"}, {})
    assert table.nearest(400, Kind.VLLM) == table.nearest(400, Kind.SGLANG) == "some"
    assert table.nearest(400, Kind.HF) == "many", "400 is nearer to 1,024 by their ratio"


def choice(size: int, created: float = 1.0, triton: str = "3.9.0", **values: Any) -> StoredChoice:
    named = {"M": size, "N": 512, **values}
    call = {"values": [list(pair) for pair in named.items()], "dtypes": [["x", "float16"]]}
    device = {"name": "NVIDIA L4"}
    key = KeyRecord(f"{named}{triton}", "gemm", "", "", 0, "", device, {"triton": triton}, call)
    config = {**CONFIG, "BLOCK_M": size, "num_ctas": 1, "maxnreg": None, "pre_hook": "f00"}
    return StoredChoice(key, ChoiceRecord(key.digest, 1, "", config, "", 1.0, 1, created))


def test_choices_become_one_table_for_each_shape() -> None:
    entries = [choice(64), choice(1), choice(2, block_shape=[128, 128]), choice(3, N=8)]
    found = tables.tables_of(entries, Kind.VLLM, {})
    assert list(found) == [
        "N=512,device_name=NVIDIA_L4.json",
        "N=512,device_name=NVIDIA_L4,block_shape=[128,128].json",
        "N=8,device_name=NVIDIA_L4.json",
    ]
    assert json.loads(found["N=512,device_name=NVIDIA_L4.json"].text()) == {
        "triton_version": "3.9.0",
        "1": {**CONFIG, "BLOCK_M": 1},
        "64": {**CONFIG, "BLOCK_M": 64},
    }
    assert list(tables.tables_of(entries[:1], Kind.SGLANG, {})) == [
        "triton_3_9_0/N=512,device_name=NVIDIA_L4.json"
    ]
    (table,) = tables.tables_of(entries[:1], Kind.HF, {}).values()
    assert list(json.loads(table.text())) == ["64"], "its reader takes every name for a number"


def test_a_row_has_options_that_are_set_and_no_defaults_that_few_set() -> None:
    config = {**CONFIG, "num_ctas": 2, "maxnreg": 64, "pre_hook": "f00"}
    record = replace(choice(1).choice, config=config)
    assert tables.table_config(record) == {**CONFIG, "num_ctas": 2, "maxnreg": 64}
    assert tables.table_config(choice(1).choice) == {**CONFIG, "BLOCK_M": 1}


def test_of_two_toolchains_the_later_choice_is_in_the_table() -> None:
    older = choice(1, created=1.0, triton="3.8.0")
    newer = replace(choice(1, created=2.0), choice=replace(choice(1).choice, config={"A": 1}))
    newer = replace(newer, choice=replace(newer.choice, created=2.0))
    (table,) = tables.tables_of([newer, older], Kind.HF, {}).values()
    assert table.rows == {1: {"A": 1}}


def test_a_key_without_m_is_refused_unless_another_name_stands_for_it() -> None:
    entry = choice(7)
    entry.key.call["values"][0][0] = "n_tokens"
    with pytest.raises(PackError, match="--name M=n_tokens"):
        tables.tables_of([entry], Kind.HF, {})
    (table,) = tables.tables_of([entry], Kind.HF, {"M": "n_tokens"}).values()
    assert list(table.rows) == [7]
