"""Choices that may be in a pack, made without tuning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safetune.keys import encoding
from safetune.keys.tuning_key import key_digest
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice
from tests.miss.conftest import copies, packed  # noqa: F401

H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "capability": "90",
    "sm_count": 132,
    "shared_memory_bytes": 232448,
}
CONFIG = {"BLOCK": 64, "num_ctas": 1, "num_stages": 3, "num_warps": 4}
NOON = 1795262400.0  # 2026-11-21T12:00:00Z


def entry(n: Any = 1024, **changes: Any) -> StoredChoice:
    """A choice for `add` on an H100; `changes` are fields of the key or of the choice."""
    facts: dict[str, Any] = {
        "kernel_name": "add",
        "kernel_digest": "ab" * 16,
        "device": H100,
        "toolchain": {
            "triton": "3.6.0",
            "backend": "ptxas-12.8-90",
            "target": "cuda:90:32",
            "environment": {"default_fp_fusion": "True"},
        },
        "call": {"values": [["N", n]], "dtypes": [["x", "float16"]], "options": []},
        "config": CONFIG,
        "declared": "cd" * 16,
        "generation": 1,
        "median_ms": 0.0125,
        "measured": 8,
        "created": NOON,
        **changes,
    }
    parts = [facts[n] for n in ("kernel_name", "kernel_digest", "call", "device", "toolchain")]
    key = KeyRecord(
        digest=key_digest(*parts),
        kernel_file="",
        kernel_line=0,
        device_digest=encoding.digest(facts["device"]),
        **{name: facts[name] for name in KeyRecord.__annotations__ if name in facts},
    )
    choice = ChoiceRecord(
        key=key.digest,
        config_digest=encoding.digest(facts["config"]),
        **{name: facts[name] for name in ChoiceRecord.__annotations__ if name in facts},
    )
    return StoredChoice(key, choice)


def fill(store: Store, *entries: StoredChoice) -> None:
    for each in entries:
        store.put_key(replace(each.key, kernel_file="/src/add.py"))
        store.put_choice(each.choice)


class Choices:
    """What tests make choices and stores with."""

    entry = staticmethod(entry)
    fill = staticmethod(fill)
    noon = NOON
    h100 = H100
    config = CONFIG

    def store(self, directory: Path, *entries: StoredChoice) -> Store:
        store = Store.open(directory)
        fill(store, *entries)
        return store


@pytest.fixture(scope="session")
def choices() -> Choices:
    return Choices()
