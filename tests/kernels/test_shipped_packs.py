"""The packs in cache/ are of the kernels as they are now."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton

from safetune.config import config_digest, config_record, declared_digest
from safetune.kernels import launches
from safetune.kernels.configs import (
    backward_configs,
    forward_configs,
    prune_backward_configs,
    prune_configs,
)
from safetune.offline.tasks import OfflineKernel, find_kernels
from safetune.store.packs import packs
from safetune.store.packs.packs import name_of, read_pack, shipped

if TYPE_CHECKING:
    from tests.conftest import FreshProcess

pytestmark = pytest.mark.internals

ROOT = Path(__file__).resolve().parents[2]

#: The card that packs must be there for, and those that some are there for.
DEVICES = {
    "NVIDIA_H100_80GB_HBM3",
    *(p.name.split(".")[1] for p in (ROOT / "cache").glob("*.json")),
}


def shipped_kernels() -> dict[str, OfflineKernel]:
    module = importlib.import_module("safetune.kernels.layer_norm")
    return {kernel.name: kernel for kernel in find_kernels(vars(module))}


def problems(directory: Path) -> list[str]:
    """What is wrong with the packs in a directory, and what to do about it."""
    kernels, found = shipped_kernels(), []
    for path in sorted(directory.glob("*.json")):
        for entry in read_pack(path):
            kernel = kernels.get(entry.key.kernel_name)
            found += [f"{path.name}: {text}" for text in _problems_of(entry, kernel)]
        if path.read_text() != packs.dump(read_pack(path)):
            found.append(f"{path.name}: not as export writes it")
        if {name_of(entry) for entry in read_pack(path)} != {path.name}:
            found.append(f"{path.name}: not under the name by which it is found")
    return sorted(set(found))


def _problems_of(entry: Any, kernel: OfflineKernel | None) -> list[str]:
    if kernel is None:
        return [f"there is no kernel {entry.key.kernel_name}: delete the file"]
    if entry.key.kernel_digest != kernel.tuner.identity.digest:
        return [f"{kernel.name} has changed since: delete the file, tune and export it again"]
    if entry.choice.declared != declared_digest(kernel.tuner.configs):
        return [f"the configs of {kernel.name} have changed since: tune and export it again"]
    if entry.choice.config_digest not in map(config_digest, kernel.tuner.configs):
        return [f"{kernel.name} has no such config"]
    if entry.choice.config_digest not in map(config_digest, _left_on_its_device(entry, kernel)):
        return [f"{kernel.name} does not try that config for such a key: tune and export it again"]
    return []


def _left_on_its_device(entry: Any, kernel: OfflineKernel) -> list[triton.Config]:
    """The configs that pruning leaves for the key of an entry, on the card of that entry."""
    configs, values = kernel.tuner.configs, dict(entry.key.call["values"])
    prune = kernel.tuner.pruning[0]
    fast_memory = entry.key.device["name"] == "NVIDIA H200"
    if prune is prune_backward_configs:
        return backward_configs(configs, fast_memory, **values)
    if prune is prune_configs:
        return forward_configs(configs, values["COLUMNS"], fast_memory)
    return prune(configs, {}, **values) if prune else configs


def test_every_pack_is_of_a_kernel_as_it_is() -> None:
    assert problems(ROOT / "cache") == []
    assert shipped() is not None


def keys_of(kernel: OfflineKernel) -> set[str]:
    """The keys of a kernel's workloads on a card: shapes are enough for them."""
    (declared,) = kernel.tuner.workloads
    workloads = declared.function(torch.device("meta"), torch.bfloat16)
    return {
        str([[name, work.kwargs[name]] for name in kernel.tuner.key_names]) for work in workloads
    }


@pytest.mark.parametrize("device", sorted(DEVICES))
def test_every_workload_has_a_choice(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """For the kernels as they are: to delete what is outdated is not enough."""
    monkeypatch.setattr(launches, "sm_count", lambda _: 132)
    found: dict[str, set[str]] = {name: set() for name in shipped_kernels()}
    for path in (ROOT / "cache").glob(f"*.{device}.*.json"):
        for entry in read_pack(path):
            found[entry.key.kernel_name].add(str(entry.key.call["values"]))
    assert found == {name: keys_of(kernel) for name, kernel in shipped_kernels().items()}


@pytest.fixture
def choices_for() -> Any:
    """A choice for a shipped kernel, as a tuning on a card would leave it."""
    from safetune.keys import encoding
    from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice

    def make(kernel: OfflineKernel, **changes: Any) -> StoredChoice:
        identity, config = kernel.tuner.identity, kernel.tuner.configs[1]
        device = {"name": "GPU", "capability": "90", "sm_count": 1, "shared_memory_bytes": 1}
        toolchain = {"triton": "3.6.0", "backend": "b", "target": "t", "environment": {}}
        flags = {
            "IN_PLACE": False,
            "HAS_WEIGHT": True,
            "HAS_BIAS": True,
            "HAS_RESIDUAL_GRADIENT": False,
        }
        values = [["COLUMNS", 256], *map(list, flags.items())]
        call = {"values": values, "dtypes": [], "options": []}
        facts = {
            "kernel_digest": identity.digest,
            "declared": declared_digest(kernel.tuner.configs),
        }
        facts |= {"config": config_record(config), **changes}
        key = KeyRecord("", kernel.name, facts["kernel_digest"], "", 0, "", device, toolchain, call)
        choice = ChoiceRecord(
            "",
            1,
            encoding.digest(facts["config"]),
            facts["config"],
            facts["declared"],
            1.0,
            6,
            1.0,
        )
        return packs.checked(StoredChoice(key, choice))

    return make


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"kernel_digest": "ab" * 16}, "layer_norm_finalize_kernel has changed since: delete"),
        ({"declared": "ab" * 16}, "the configs of layer_norm_finalize_kernel have changed since"),
        ({"config": {"TILE_COLUMNS": 5}}, "layer_norm_finalize_kernel has no such config"),
    ],
    ids=["as it is", "another source", "another list", "another config"],
)
def test_it_can_fail(choices_for: Any, tmp_path: Path, changes: Any, problem: str | None) -> None:
    kernel = shipped_kernels()["layer_norm_finalize_kernel"]
    entry = choices_for(kernel, **changes)
    (tmp_path / name_of(entry)).write_text(packs.dump([entry]))
    found = problems(tmp_path)
    assert [problem in text for text in found] == [True] if problem else found == []


def test_a_choice_of_what_is_not_tried_any_more(choices_for: Any, tmp_path: Path) -> None:
    kernel = shipped_kernels()["layer_norm_backward_kernel"]
    (wide,) = (c for c in kernel.tuner.configs if c.num_warps == 16 and c.kwargs["LOAD_AGAIN"])
    entry = choices_for(kernel, config=config_record(wide))
    (tmp_path / name_of(entry)).write_text(packs.dump([entry]))
    assert ["does not try that config" in text for text in problems(tmp_path)] == [True]


def test_other_ways_to_fail(choices_for: Any, tmp_path: Path) -> None:
    kernel = shipped_kernels()["layer_norm_finalize_kernel"]
    text = packs.dump([choices_for(kernel)])
    (tmp_path / "renamed.json").write_text(text.replace("  ", " "))
    (tmp_path / "gone.json").write_text(text.replace(kernel.name, "gone"))
    assert [each.partition(": ")[2] for each in problems(tmp_path)] == [
        "not under the name by which it is found",
        "there is no kernel gone: delete the file",
        "not as export writes it",
        "not under the name by which it is found",
    ]


def test_an_edited_kernel_is_another_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The source itself, in a copy of the module."""
    source = (ROOT / "kernels/layer_norm.py").read_text()
    edited = source.replace("tl.sum(", "tl.sum(0.0 + ", 1)
    for name, text in (("same_kernels", source), ("edited_kernels", edited)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for name in ("same_kernels", "edited_kernels"):
        found = find_kernels(vars(importlib.import_module(name)))
        digests.append({kernel.name: kernel.tuner.identity.digest for kernel in found})
    now = {name: kernel.tuner.identity.digest for name, kernel in shipped_kernels().items()}
    assert digests[0] == now
    assert digests[1] != now


def test_compiler_and_interpreter_agree(fresh_process: FreshProcess) -> None:
    """A pack from a card is checked here without one."""
    done = fresh_process(
        "import importlib, json\n"
        "from safetune.offline.tasks import find_kernels\n"
        "found = find_kernels(vars(importlib.import_module('safetune.kernels.layer_norm')))\n"
        "print(json.dumps({k.name: k.tuner.identity.digest for k in found}))\n",
        env={"TRITON_INTERPRET": None},
        warm=True,
    )
    here = {name: kernel.tuner.identity.digest for name, kernel in shipped_kernels().items()}
    assert json.loads(done.stdout) == here
