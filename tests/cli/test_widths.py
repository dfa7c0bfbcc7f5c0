"""Tables at 60, 80 and 120 columns and without a terminal: no row is broken, no line too long."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from safetune.keys import encoding
from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.local.store import Store
from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord

#: The key names and parameters of a real kernel: FLA's chunked attention, and a matmul.
VALUES = {"H": 8, "HV": 16, "K": 128, "V": 256, "BT": 64, "USE_G": True, "STATE_V_FIRST": False}
SIZES = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")


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
            if place == 3:
                outcome = Outcome(Verdict.OUT_OF_RESOURCES, message="out of shared memory: " * 9)
            digest = encoding.digest(config)
            trials.append(TrialRecord(key.digest, digest, config, 1, outcome, 1.7e9))
        store.put_trial(*reversed(trials))
        best = trials[0]
        assert best.outcome.timing is not None
        chosen = (1, best.config_digest, best.config, f"{2:032x}", best.outcome.timing.median_ms)
        store.put_choice(ChoiceRecord(key.digest, *chosen, 8, 1.7e9))
    store.close()


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


@pytest.mark.parametrize("columns", ["60", "80", "120", None])
class TestWidths:
    @pytest.fixture(autouse=True)
    def _columns(self, safetune: Any, monkeypatch: pytest.MonkeyPatch, columns: str | None) -> None:
        """After the command's own fixture, which unsets it."""
        if columns:
            monkeypatch.setenv("COLUMNS", columns)

    def lines(self, safetune: Any, columns: str | None, *words: str) -> list[str]:
        shown = safetune(*words).stdout.splitlines()
        if columns:
            assert max(map(cell_len, shown)) <= int(columns), "\n".join(shown)
        return [line.rstrip() for line in shown]

    def test_every_config_is_one_row(self, safetune: Any, columns: str | None) -> None:
        """The fastest first, those without a time last."""
        lines = self.lines(safetune, columns, "show", "chunk_fwd_kernel", "--all")

        rows = rows_of(lines, "verdict")
        assert len(rows) == 16
        for of_key in (rows[:8], rows[8:]):
            assert of_key[0].startswith("*")
            assert [" ok " in row for row in of_key] == [True] * 7 + [False]
            assert of_key[-1].endswith("out_of_resources")
            sizes = [[word for word in row.split() if word.isdigit()][:3] for row in of_key]
            by_name = sorted(SIZES[:3])
            declared = [[str(config[name]) for name in by_name] for config in configs()]
            assert sizes == [*declared[:3], *declared[4:], declared[3]]
        assert sum("all configs: GROUP_SIZE_M=8 " in line for line in lines) == 2

    @pytest.mark.parametrize("command", ["list", "show"])
    def test_every_key_is_one_row(self, safetune: Any, columns: str | None, command: str) -> None:
        names = ["chunk_fwd_kernel"] if command == "show" else []

        lines = self.lines(safetune, columns, command, *names)

        times = ["0.123 ms", "100 ms"]
        rows = rows_of(lines, "time")
        assert [row.split()[0] for row in rows] == ["1000", "1000000"]
        assert all(time in row for time, row in zip(times, rows, strict=True))
        shared = " ".join(lines)
        assert "BLOCK_SIZE_M=64" in shared
        assert "STATE_V_FIRST=False" in shared


@pytest.mark.parametrize("columns", ["0", "", "wide", "²", "-80"])
def test_what_is_not_a_width_is_as_if_it_was_not_given(
    safetune: Any, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """Regression: at 0, which a container without a terminal may set, tables had no text."""
    whole = safetune("show", "chunk_fwd_kernel").stdout

    monkeypatch.setenv("COLUMNS", columns)

    assert safetune("show", "chunk_fwd_kernel").stdout == whole


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


@pytest.mark.parametrize("command", [["list"], ["show", "chunk_fwd_kernel"]])
def test_keys_that_differ_in_dtypes_or_options_look_different(
    safetune: Any, cache_dir: Path, command: list[str]
) -> None:
    with contextlib.closing(Store.open(cache_dir)) as store:
        key, _ = store.trials_of("chunk_fwd_kernel")[0]
        choice = store.choice(key.digest)
        assert choice is not None
        dtypes = [["q", "bfloat16"], ["g", "float32"], ["v", "bfloat16"]]
        other = [["q", "bfloat16"], ["g", "float32"], ["v", "float32"]]
        for number, call in enumerate(
            ({"dtypes": dtypes}, {"dtypes": other}, {"options": [["debug", True]]})
        ):
            digest = f"{number + 5:032x}"
            store.put_key(replace(key, digest=digest, call={**key.call, **call}))
            store.put_choice(replace(choice, key=digest))

    rows = rows_of(safetune(*command).stdout.splitlines(), "time")

    assert len({row.partition(" ms")[0] for row in rows}) == len(rows) == 5
