"""`key={"n": f}`: one choice for all values with the same bucket."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from safetune import InvalidSetting, Workload, safetune
from safetune.keys.identity import encode
from safetune.keys.key_names import KeyReport
from safetune.miss.resolve import Miss
from safetune.offline import tasks
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from tests import stored_rows

CONFIGS = [triton.Config({"BLOCK": size}) for size in (16, 64)]


@triton.jit
def scale_kernel(x, n, hint, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n)
    tl.store(x + offsets, value * FACTOR, mask=offsets < n)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def launch(kernel: Any, n: Any = 100, hint: Any = 1, factor: Any = 2) -> None:
    x = torch.ones(int(n))
    kernel[grid](x, n, hint, factor)
    assert x.tolist() == [factor] * int(n)


def tuned(key: Any, **options: Any) -> Any:
    return safetune(configs=CONFIGS, key=key, **options)(scale_kernel)


def stored(cache_dir: Path) -> list[str]:
    connection = stored_rows.connected(cache_dir / "safetune.db")
    try:
        return sorted(call for (call,) in connection.execute("SELECT call FROM key"))
    finally:
        connection.close()


def test_values_of_one_bucket_have_one_choice(cache_dir: Path) -> None:
    kernel = tuned({"n": next_power_of_2})
    calls: list[int] = []
    kernel.prune_configs = lambda kwargs: calls.append(1) or CONFIGS
    for n in (100, 65, 128, 129, 200, 100):
        launch(kernel, n)
    assert len(calls) == len(kernel.cache) == 2
    assert [re.search(r'\["n",(\d+)\]', call)[1] for call in stored(cache_dir)] == ["128", "256"]


def test_the_name_of_a_mapping_is_never_dropped_or_pinned(cache_dir: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = tuned({"n": next_power_of_2, "hint": bool, "FACTOR": None}, phantom="error")
    report: KeyReport = kernel.explain_key()
    assert kernel.keys == ["n", "hint", "FACTOR"]
    assert isinstance(kernel.keys, list)
    assert (report.kept, report.pinned) == (("n", "hint", "FACTOR"), ())
    assert "hint    bucket  nothing reads it; its bucket is in the key" in str(report)
    assert re.search(r"n +read +read by the body .*; its bucket is in the key", str(report))
    for hint in (1, 5, 0):
        launch(kernel, hint=hint)
    assert len(kernel.cache) == 2


def test_a_mapping_to_none_is_a_list(cache_dir: Path) -> None:
    assert tuned({"n": None}).identity.digest == tuned(["n"]).identity.digest
    launch(tuned({"n": None, "FACTOR": None}))
    launch(tuned(["n", "FACTOR"]))
    assert len(stored(cache_dir)) == 1


def test_the_source_of_the_function_tells_choices_apart() -> None:
    """With another function, 128 means other values."""
    digests = {
        tuned({"n": f}).identity.digest
        for f in (next_power_of_2, lambda n: n // 64, lambda n: n // 32, triton.next_power_of_2)
    }
    assert len(digests) == 4
    assert tuned({"n": next_power_of_2}).identity.digest in digests
    assert tuned(["n"]).identity.digest not in digests


@pytest.mark.parametrize(
    "bucket", [3, True, "small", 0.5, torch.float16, tl.float32], ids=lambda value: str(value)
)
def test_what_a_bucket_may_be(bucket: Any) -> None:
    kernel = tuned({"n": lambda n: bucket})
    key = Miss(kernel, (torch.ones(100), 100, 1, 2), {"grid": grid}).key()
    assert key.values == (("n", encode(bucket, of_call=True)),)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda n: (n, 1), r"returned \(100, 1\) \(tuple\) for 100; return an int, bool, str"),
        (lambda n: None, r"returned None \(NoneType\) for 100"),
        (lambda n: np.int64(n), r"returned np.int64\(100\) \(int64\) for 100"),
        (lambda n: n["x"], "raised TypeError for 100"),
    ],
)
def test_another_result_is_an_error_with_the_name(function: Any, said: str) -> None:
    with pytest.raises(InvalidSetting, match=f"key of scale_kernel: the function for 'n' {said}"):
        launch(tuned({"n": function}))


def test_a_value_of_the_mapping_that_is_not_a_function() -> None:
    with pytest.raises(InvalidSetting, match="key of scale_kernel maps 'n' to 5, which is not"):
        tuned({"n": 5})


def test_an_unknown_name_of_a_mapping() -> None:
    with pytest.raises(InvalidSetting, match=r"'N' \(did you mean 'n'\?\)"):
        tuned({"N": next_power_of_2})


def test_dtypes_of_a_mapped_tensor_stay_in_the_key(cache_dir: Path) -> None:
    kernel = tuned({"x": lambda x: x.numel() > 50})
    launch(kernel)
    (call,) = stored(cache_dir)
    assert '["x",true]' in call
    assert '["x","float32"]' in call


def test_it_is_the_same_for_resolve_recorded_calls_and_workloads(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tuned({"n": next_power_of_2})
    monkeypatch.setenv("SAFETUNE_MODE", "record")
    launch(kernel, 100)
    launch(tuned({"n": next_power_of_2}), 90)
    (call,) = open_lookup(Settings.current()).store.calls()
    request = Miss(kernel, (torch.ones(65), 65, 1, 2), {"grid": grid}).request()
    assert call.key == request.key.digest
    monkeypatch.setenv("SAFETUNE_MODE", "tune")
    offline = tasks.OfflineKernel("scale_kernel", kernel, kernel)
    task = tasks.Task(offline, Workload("w", grid, (torch.ones(128), 128, 1, 2)), "float32")
    chosen = tasks.tune_task(task, lambda tally: None).choice
    assert kernel.resolve(torch.ones(70), 70, 1, 2, grid=grid).provenance == "stored"
    assert kernel.resolve(torch.ones(70), 70, 1, 2, grid=grid).config == chosen
    assert kernel.resolve(torch.ones(300), 300, 1, 2, grid=grid).provenance == "tuned"
