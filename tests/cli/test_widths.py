"""Tables without a terminal, and at 60, 80 and 120 columns: no row is broken, no line too long."""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from safetune.keys import encoding
from safetune.outcome import Mark, Outcome, Timing, Verdict
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord

#: The key names and parameters of a real kernel: FLA's chunked attention, and a matmul.
VALUES = {"H": 8, "HV": 16, "K": 128, "V": 256, "BT": 64, "USE_G": True, "STATE_V_FIRST": False}
SIZES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")


TABLES = Path(__file__).with_name("tables.txt")


def configs() -> list[dict[str, Any]]:
    sizes = itertools.product((64, 128), (64, 256), (32, 64), (8,))
    options = {"num_warps": 8, "num_stages": 3, "num_ctas": 1}
    return [{**dict(zip(SIZES, each, strict=True)), **options} for each in sizes]


@pytest.fixture(autouse=True)
def store(cache_dir: Path) -> None:
    """Two keys of a kernel with eight configs, of which one did not compile."""
    store = Store.open(cache_dir)
    device = {"name": "NVIDIA H100 80GB HBM3", "capability": 90, "sm_count": 132}
    for number, length in enumerate((1000, 1000000)):
        values = [[name, value] for name, value in {**VALUES, "T_BUCKET": length}.items()]
        call = {"values": values, "dtypes": [["q", "bfloat16"], ["g", "float32"]], "options": []}
        toolchain = {"triton": "3.6.0", "backend": "cuda", "target": "cuda:90", "environment": {}}
        file = ("chunk_fwd_kernel", f"{1:032x}", "/fla/chunk.py", 58)
        key = KeyRecord(f"{number:032x}", *file, encoding.digest(device), device, toolchain, call)
        store.put_key(key)
        trials = []
        for place, config in enumerate(configs()):
            ms = 0.0123 * (10 + place) + 100 * number
            outcome = Outcome(Verdict.OK, Timing(ms, ms * 0.98, ms * 1.02, 50, "final"), judged=7)
            if place == 1:
                outcome = replace(outcome, marks=(Mark.FIRST.value,))
            if place == 3:
                outcome = Outcome(Verdict.OUT_OF_RESOURCES, message="out of shared memory: " * 9)
            digest = encoding.digest(config)
            trials.append(TrialRecord(key.digest, digest, config, 1, outcome, 1.7e9))
        store.put_trial(*reversed(trials))
        best = trials[0]
        assert best.outcome.timing is not None
        chosen = (1, best.config_digest, best.config, f"{2:032x}", best.outcome.timing.median_ms)
        marks = ("disputed: 1 of 2 configs have this result",) * number
        store.put_choice(ChoiceRecord(key.digest, *chosen, 8, 1.7e9, marks))
    store.close()


def test_what_people_see(safetune: Any, tmp_path: Path) -> None:
    """`tables.txt` has it, but for the hour, which depends on the time zone."""
    shown = ""
    for words in (
        "list",
        "show chunk_fwd_kernel",
        "show chunk_fwd_kernel --all",
        "show chunk_fwd_kernel --python",
    ):
        shown += f"$ safetune {words}\n{safetune(*words.split()).stdout}\n"
    shown = re.sub(r"2023-11-1\d(T\d\d:\d\d)?", "2023-11-14", shown)
    now = tmp_path / "tables.txt"
    now.write_text(shown, encoding="utf-8")
    assert shown == TABLES.read_text(encoding="utf-8"), f"if this is meant: cp {now} {TABLES}"


def rows_of(lines: list[str], under: str) -> list[str]:
    """The rows of the tables whose heading has a word."""
    tables: list[str] = []
    inside = False
    for before, line in itertools.pairwise(["", *lines]):
        if line.startswith("───"):
            inside = under in before
        elif not line.strip() or line.startswith("  BLOCK"):
            inside = False
        elif inside:
            tables.append(line)
    return tables


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize(
    ("words", "under", "firsts"),
    [
        ("list", "time", "1000 1000000"),
        ("show chunk_fwd_kernel", "time", "1000 1000000"),
        ("show chunk_fwd_kernel --all", "verdict", "* 64 32 32 64 32 64 64 " * 2),
    ],
)
def test_every_key_and_config_is_one_row_of_a_terminal(
    safetune: Any, columns: int, words: str, under: str, firsts: str
) -> None:
    safetune.set(COLUMNS=columns)

    lines = safetune(*words.split()).stdout.splitlines()

    assert max(map(cell_len, lines)) <= columns, "\n".join(lines)
    rows = rows_of(lines, under)
    assert [row.split()[0] for row in rows] == firsts.split()
    for row in rows:
        assert "ms" in row or row.rstrip().endswith("out_of_resources"), "neither is dropped"


def test_a_terminal_of_no_columns_is_none(safetune: Any) -> None:
    shown = safetune("list").stdout
    safetune.set(COLUMNS=0)
    assert safetune("list").stdout == shown


def test_sources_that_were_tuned_earlier_are_folded(safetune: Any, cache_dir: Path) -> None:
    """One key of an older source, whose configs and times are those of a key of the newer one."""
    whole = safetune("list").stdout, safetune("show", "chunk_fwd_kernel").stdout
    with contextlib.closing(Store.open(cache_dir)) as store:
        key, trials = store.trials_of("chunk_fwd_kernel")[0]
        old = replace(key, digest=f"{9:032x}", kernel_digest=f"{8:032x}")
        store.put_key(old)
        store.put_trial(*(replace(trial, key=old.digest, created=1.6e9) for trial in trials))
        choice = store.choice(key.digest)
        assert choice is not None
        store.put_choice(replace(choice, key=old.digest, created=1.6e9))
    note = "1 key of 1 source tuned earlier not shown; --all shows them\n"

    assert safetune("list").stdout == whole[0] + note
    assert safetune("show", "chunk_fwd_kernel").stdout == whole[1] + note
    for words in (["list", "--all"], ["show", "chunk_fwd_kernel", "--all"]):
        everything = safetune(*words).stdout
        assert "source 00000000" in everything
        assert f"{8:032x}"[:8] in everything
        assert "tuned earlier" not in everything
    assert len(safetune.json("list")) == 3, "programs get all of them"
