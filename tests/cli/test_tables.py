"""`safetune export --format` and `import --format`: a kernel's choices in the files of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safetune.config import declared_digest
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord
from tests.cli import rows

SOURCE = """\
import triton
import triton.language as tl

from safetune import autotune


def hook(arguments):
    pass


@autotune(
    configs=[
        triton.Config({"BLOCK_M": size}, num_warps=warps, pre_hook=hook)
        for size in (16, 32, 64)
        for warps in (4, 8)
    ],
    key=["M", "N"],
)
@triton.jit
def gemm(x, M, N, BLOCK_M: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK_M), N, mask=tl.arange(0, BLOCK_M) < M)
"""
KEYS = [(1, 512), (64, 512), (1024, 512), (64, 8)]
CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safetune: Any) -> Any:
    monkeypatch.chdir(tmp_path)
    return rows.tuner_in("gemms.py", SOURCE)


Fill = Callable[..., None]


@pytest.fixture
def fill(kernel: Any, cache_dir: Path) -> Fill:
    """A function that stores keys, and for each a choice by its number among the configs."""

    def run(keys: list[tuple[int, int]], *chosen: int) -> None:
        store = Store.open(cache_dir)
        declared = declared_digest(kernel.configs)
        for number, (m, n) in enumerate(keys):
            key = rows.key_record(kernel.identity, CARD, M=m, N=n)
            store.put_key(key)
            if chosen:
                made = rows.trial(key, kernel.configs[chosen[number]], 0.5)
                store.put_trial(made)
                config = (made.config_digest, made.config, declared)
                store.put_choice(ChoiceRecord(key.digest, 1, *config, 0.5, 6, 1.0))
        store.close()

    return run


def chosen(safetune: Any) -> dict[tuple[int, int], tuple[int, int]]:
    return {
        tuple(entry["call"]["values"].values()): (
            entry["config"]["BLOCK_M"],
            entry["config"]["num_warps"],
        )
        for entry in safetune.json("list")
    }


@pytest.mark.parametrize("kind", ["vllm", "sglang", "hf"])
def test_choices_come_back_from_the_tables_of_others(
    safetune: Any, fill: Fill, kind: str, tmp_path: Path
) -> None:
    fill(KEYS, 0, 3, 5, 2)
    before = chosen(safetune)
    written = safetune.json("export", "out", "--format", kind)["written"]
    assert [(Path(each["path"]).name, each["choices"]) for each in written] == [
        ("N=512,device_name=NVIDIA_H100_80GB_HBM3.json", 3),
        ("N=8,device_name=NVIDIA_H100_80GB_HBM3.json", 1),
    ]
    safetune.json("clear", "gemm", "--yes")
    fill([*KEYS, (400, 512)])
    assert chosen(safetune) == {}

    done = safetune.json("import", "out", "--format", kind, "--target", "gemms.py:gemm")
    assert done["new"] == 5
    nearest = before[1024, 512] if kind == "hf" else before[64, 512]
    assert chosen(safetune) == {**before, (400, 512): nearest}


def test_what_no_table_decides_is_left_out_with_the_reason(
    safetune: Any, fill: Fill, tmp_path: Path
) -> None:
    fill([(1, 512), (2, 8), (3, 9)])
    row = {"BLOCK_M": 32, "num_warps": 8}
    card = "device_name=NVIDIA_H100_80GB_HBM3"
    for name, of_file in {
        f"N=512,{card}.json": row,
        f"N=8,{card},dtype=a.json": row,
        f"N=8,{card},dtype=b.json": row,
        "N=9,device_name=NVIDIA_L4.json": row,
        f"E=4,N=9,{card}.json": row,
    }.items():
        Path(name).write_text(json.dumps({"16": of_file}), encoding="utf-8")
    done = safetune("import", ".", "--format", "vllm", "--target", "gemms.py:gemm")
    assert done.exit_code == 0, done.stderr
    assert chosen(safetune) == {(1, 512): (32, 8)}
    assert "[['M', 2], ['N', 8]] on NVIDIA H100 80GB HBM3: 2 tables fit: N=8" in done.stderr
    assert "[['M', 3], ['N', 9]] on NVIDIA H100 80GB HBM3: no table fits" in done.stderr

    Path(f"N=512,{card}.json").write_text('{"1": {"BLOCK_M": 99}}', encoding="utf-8")
    words = ("import", f"N=512,{card}.json", "--format", "vllm", "--target", "gemms.py:gemm")
    refused = safetune(*words)
    assert refused.exit_code == 2
    assert "{'BLOCK_M': 99} is not one of the configs it declares" in refused.stderr
    assert "--format vllm needs --target" in safetune.error(*words[:4])


@pytest.mark.parametrize(
    "text",
    [
        *("{}", "[]", "5", "no JSON", "[" * 100_000),
        *('{"M": {"BLOCK_M": 64}}', '{"1": "BLOCK_M: 64"}', '{"1": {}, "timings": []}'),
    ],
)
def test_a_file_of_another_form_is_named(
    safetune: Any, fill: Fill, tmp_path: Path, text: str
) -> None:
    fill([(1, 512)])
    Path("cache.json").write_text(text, encoding="utf-8")
    line = safetune.error("import", "cache.json", "--target", "gemms.py:gemm", "--format", "vllm")
    assert line.startswith("Error: cache.json: ")
    assert len(line) < 200


def test_choices_of_others_have_no_time_and_can_be_packed(safetune: Any, fill: Fill) -> None:
    """Whether configs of the key were timed here or not."""
    fill(KEYS, 0, 3, 5, 2)
    safetune.json("export", "out", "--format", "vllm")
    safetune.json("clear", "gemm", "--yes")
    fill(KEYS[:1])
    words = ("import", "out", "--format", "vllm", "--target", "gemms.py:gemm")
    assert safetune.json(*words)["new"] == 1
    assert "0 us" not in safetune("list").stdout
    assert "its time is unknown" in safetune("show", "gemm", "--all").stdout
    assert safetune("show", "gemm", "--python").exit_code == 0
    assert safetune.json("export", "packs")["written"][0]["choices"] == 1
    safetune.json("clear", "gemm", "--yes")
    assert safetune.json("import", "packs")["new"] == 1
    assert [entry["median_ms"] for entry in safetune.json("list")] == [0.0]


@pytest.mark.parametrize("kind", ["vllm", "pack"])
def test_a_folder_that_cannot_be_made_is_named(safetune: Any, fill: Fill, kind: str) -> None:
    fill([(1, 512)], 0)
    assert safetune.error("export", "gemms.py", "--format", kind).startswith(
        "Error: cannot write gemms.py/"
    )
