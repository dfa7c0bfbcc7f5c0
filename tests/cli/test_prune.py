"""`safetune prune` on a store that has trials of a kernel's configs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from safetune.store.local.store import Store
from tests.cli import rows

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCE = """\
import triton
import triton.language as tl

from safetune import autotune


@autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=4) for block in (32, 64, 128, 256, 512)],
    key=["N"],
)
@triton.jit
def fill(x, N, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1, mask=tl.arange(0, BLOCK) < N)
"""

#: Milliseconds by N, device and BLOCK. 512 was never tried.
TIMES = {
    (100, "small card"): {32: 1.0, 64: 1.004, 128: 2.0},
    (200, "small card"): {32: 1.5, 64: 1.0, 128: 1.002},
    (300, "large card"): {64: 1.2, 128: 1.0, 256: 0.996},
    (400, "large card"): {32: 4.0, 128: 1.0},
}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path, safetune: Any) -> str:
    """The TARGET of a kernel, in the working directory, with trials in the store."""
    monkeypatch.chdir(tmp_path)
    tuner = rows.tuner_in("filling.py", SOURCE)
    configs = {config.kwargs["BLOCK"]: config for config in tuner.configs}
    store = Store.open(cache_dir)
    for (size, card), times in TIMES.items():
        key = rows.key_record(tuner.identity, card, N=size)
        store.put_key(key)
        store.put_trial(*(rows.trial(key, configs[block], ms) for block, ms in times.items()))
    store.close()
    return "filling.py:fill"


def blocks(configs: list[Mapping[str, Any]]) -> list[int]:
    return [config["BLOCK"] for config in configs]


def test_two_configs_do_for_four_keys_and_what_was_not_tried_stays(
    source: str, safetune: Any
) -> None:
    found = safetune.json("prune", source)
    assert blocks(found["kept"]) == [32, 128, 512]
    assert blocks(found["never_tried"]) == [512]
    assert blocks(found["dropped"]) == [64, 256]
    assert found["cost"]["worst"] == pytest.approx(1.004016, abs=1e-6)
    assert found["held_out"]["keys"] == 4

    less = safetune.json("prune", source, "--within", "0.001", "--device", "SMALL")
    assert blocks(less["kept"]) == [32, 64, 256, 512], "256 was not tried on this card"
    assert less["devices"] == ["small card"]


def test_more_configs_stay_for_keys_that_were_not_measured(source: str, safetune: Any) -> None:
    assert blocks(safetune.json("prune", source, "--keep", "3")["kept"]) == [32, 64, 128, 512]
    assert "Error: --keep 1 is too few: 2 configs" in safetune.error("prune", source, "--keep", "1")


def test_the_short_list_is_printed_as_source(source: str, safetune: Any) -> None:
    shown = safetune("prune", source)
    assert shown.exit_code == 0
    assert "fill: 3 of 5 configs stay, by the trials of 4 keys on large card, small" in (
        shown.stdout
    )
    _, begin, rest = shown.stdout.partition("configs=[")
    listed = f"{begin}{rest.partition('],')[0]}],"
    head, _, after = SOURCE.partition("configs=[")
    Path("filling.py").write_text(f"{head}{listed}{after.partition('],')[2]}", encoding="utf-8")
    again = safetune.json("prune", source)
    assert (again["dropped"], blocks(again["kept"])) == ([], [32, 128, 512])
    assert "configs=[" not in safetune("prune", source).stdout, "nothing is left to change"


def test_a_list_that_is_another_one_here_is_noticed(source: str, safetune: Any) -> None:
    """The kernel is the same, and its configs depend on something else."""
    changed = SOURCE.replace("(32, 64, 128, 256, 512)", "(64, 128, 512)")
    Path("other.py").write_text(changed, encoding="utf-8")
    found = safetune.json("prune", "other.py:fill")
    assert blocks(found["kept"]) == [64, 128, 512]
    shown = safetune("prune", "other.py:fill")
    assert "the list on this machine lacks 2 configs with trials" in shown.stderr


def test_no_trial_of_the_present_kernel(source: str, safetune: Any) -> None:
    assert safetune.error("prune", source, "--device", "none like it").startswith(
        "Error: no trial of the current fill"
    )
