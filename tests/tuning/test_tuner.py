"""What is measured, what is stored and what is chosen: with real children, and times made up.

`do_bench` of these kernels launches once and then says what the test wants it to say.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import NoWorkingConfig, safetune
from safetune.config import config_digest
from safetune.isolation.measuring_child import MeasuringChild
from safetune.keys.tuning_key import Device
from safetune.miss import resolve
from safetune.miss.resolve import Miss
from safetune.outcome import Outcome, Verdict
from safetune.settings import Settings
from safetune.store.local import locks
from safetune.store.local.store import Store
from safetune.store.lookup import GuardedStore, open_lookup
from safetune.store.records import ChoiceRecord, TrialRecord
from safetune.tuning import bench, single_flight
from safetune.tuning.requests import Phases, Progress, TuningResult
from safetune.tuning.tuner import tune
from tests import stored_rows

ROOT = Path(__file__).parents[2]
N = 100

#: A config that ends its process, in the place of a time.
DIES = -1.0


@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


def copy_kernel_as_written() -> Any:
    """Return a kernel with the text of `copy_kernel`, elsewhere in the file."""

    @triton.jit
    def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
        offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

    return copy_kernel


def copy_kernel_from_the_end() -> Any:
    """Return a kernel with the name of `copy_kernel` and another text."""

    @triton.jit
    def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
        offset = n - 1 - tl.program_id(0) * BLOCK - tl.arange(0, BLOCK)
        tl.store(dst + offset, tl.load(src + offset, mask=offset >= 0), mask=offset >= 0)

    return copy_kernel


@dataclass
class Tuned:
    """One decorated kernel, as a fresh process would have it: nothing in memory."""

    kernel: Any
    log: Path
    seen: int = 0

    def launch(self, n: int = N, dtype: torch.dtype = torch.float32) -> int:
        """Launch it; return the BLOCK that was chosen."""
        src, dst = torch.arange(n).to(dtype), torch.zeros(n, dtype=dtype)
        self.kernel[grid](dst, src, n)
        assert torch.equal(dst, src)
        return int(self.kernel.best_config.kwargs["BLOCK"])

    def tried(self) -> list[int]:
        """Return the BLOCKs that children launched since the last call, sorted, each once."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        new, self.seen = lines[self.seen :], len(lines)
        pairs = {tuple(map(int, line.split())) for line in new}
        return sorted({block for pid, block in pairs if pid != os.getpid()})

    def tune(
        self,
        observe: Callable[[Progress], None] = lambda progress: None,
        store: Store | None = None,
        key: Callable[[Any], Any] = lambda key: key,
        force: bool = False,
    ) -> TuningResult:
        """Tune for N elements as a miss would, with another key or force if asked for."""
        src, dst = torch.zeros(N), torch.zeros(N)
        request = Miss(self.kernel, (dst, src, N), {"grid": grid}).request(force=force)
        return tune(replace(request, key=key(request.key)), store or open_store(), observe)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def open_store() -> Store:
    return open_lookup(Settings.current()).store


Make = Callable[..., Tuned]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A function that decorates a kernel whose configs take these milliseconds.

    The times are in a file: what a hook closes over is part of the kernel's identity.
    """
    log, table = tmp_path / "launches", tmp_path / "times"

    def tuned(
        times: Mapping[int, float],
        kernel: Any = copy_kernel,
        left: Sequence[int] = (),
        **options: Any,
    ) -> Tuned:
        path, told, current = str(log), str(table), {"BLOCK": 0}
        table.write_text(json.dumps({str(block): ms for block, ms in times.items()}))

        def milliseconds() -> float:
            with open(told) as file:
                return float(json.load(file)[str(current["BLOCK"])])

        def hook(arguments: dict[str, Any]) -> None:
            current["BLOCK"] = arguments["BLOCK"]
            with open(path, "a") as file:
                file.write(f"{os.getpid()} {arguments['BLOCK']}\n")
            if milliseconds() == DIES:
                ctypes.string_at(0)

        def bench(launch: Callable[[], None], quantiles: Any) -> list[float]:
            launch()
            return [milliseconds()] * 3

        configs = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in times]
        if left:
            keep = lambda configs, *_, **__: [c for c in configs if c.kwargs["BLOCK"] in left]  # noqa: E731
            options["prune_configs_by"] = {"early_config_prune": keep}
        decorate = safetune(configs=configs, key=["n"], do_bench=bench, **options)
        made = Tuned(decorate(kernel), log)
        made.tried()
        return made

    return tuned


class Rows:
    """The database as it is on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def count(self, table: str) -> int:
        return int(self.query(f"SELECT count(*) FROM {table}")[0][0])

    def query(self, statement: str, *values: Any) -> list[Any]:
        connection = stored_rows.connected(self._path)
        try:
            with connection:
                return connection.execute(statement, values).fetchall()
        finally:
            connection.close()

    def counts(self) -> tuple[int, int, int]:
        return self.count("key"), self.count("trial"), self.count("choice")


@pytest.fixture
def rows(cache_dir: Path) -> Rows:
    return Rows(cache_dir / "safetune.db")


def test_every_second_of_a_first_miss_is_in_one_phase(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the steps named here let the clock go on, each by another time."""
    now = [0.0]

    def slow(owner: Any, step: str, seconds: float) -> None:
        original = getattr(owner, step)

        def taking(*args: Any, **kwargs: Any) -> Any:
            now[0] += seconds
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, step, taking)

    monkeypatch.setattr(resolve, "Phases", lambda name: Phases(name, clock=lambda: now[0]))
    slow(resolve, "open_lookup", 1)
    slow(single_flight, "elect", 10)
    slow(bench, "copy_inputs", 100)
    slow(MeasuringChild, "wait", 1_000)
    slow(MeasuringChild, "measure", 10_000)
    slow(GuardedStore, "put_choice", 1_000_000)
    tuned = make({16: 2.0, 32: 20.0})
    assert tuned.launch() == 16
    assert tuned.kernel.tuning_phases == {
        "lookup": 1,
        "wait": 10,
        "transfer": 100,
        "torch": 3_000,
        "measure": 22_000,  # each measurement asks once more for the child
        "finals": 1_000,
        "store": 1_000_000,
    }
    assert tuned.kernel.bench_time == now[0]


EIGHT = {16 << i: 2.0 + i for i in range(8)}  # 16 is the fastest, 2048 the slowest


class TestRows:
    def test_each_trial_and_each_choice_has_one_row(self, make: Make, rows: Rows) -> None:
        tuned = make({16: 3.0, 32: 2.0, 64: DIES})
        assert tuned.launch() == 32
        assert tuned.tried() == [16, 32, 64]
        assert rows.counts() == (1, 3, 1)
        trials = rows.query("SELECT config, verdict, median_ms, count, created FROM trial")
        assert {
            json.loads(config)["BLOCK"]: (verdict, ms) for config, verdict, ms, _, _ in trials
        } == {16: ("ok", 3.0), 32: ("ok", 2.0), 64: ("died", None)}
        assert all(abs(created - time.time()) < 600 for *_, created in trials)
        ((config, measured, generation, ms),) = rows.query(
            "SELECT config, measured, generation, median_ms FROM choice"
        )
        assert (json.loads(config)["BLOCK"], measured, generation, ms) == (32, 3, 1, 2.0)

    def test_are_found_by_the_next_process(self, make: Make, rows: Rows) -> None:
        make({16: 3.0, 32: 2.0, 64: DIES}).launch()
        before = rows.query("SELECT * FROM trial") + rows.query("SELECT * FROM choice")
        again = make({16: 1.0, 32: 2.0, 64: DIES})
        assert again.launch() == 32, "stored, whatever a measurement would say now"
        assert again.tried() == []
        assert rows.query("SELECT * FROM trial") + rows.query("SELECT * FROM choice") == before
        timings = {c.kwargs["BLOCK"]: t for c, t in again.kernel.configs_timings.items()}
        assert timings == {16: [3.0] * 3, 32: [2.0] * 3, 64: [float("inf")] * 3}

    @pytest.mark.parametrize(
        "damage",
        [
            "DELETE FROM main.key",
            "UPDATE main.key SET record = replace(record, 'triton', 'notirt')",
        ],
    )
    def test_a_choice_whose_key_is_gone_is_listed_again_after_a_tuning(
        self, make: Make, rows: Rows, damage: str
    ) -> None:
        """It measures nothing: the choice is there, and is launched."""
        make({16: 3.0, 32: 2.0}).launch()
        rows.query(damage)
        assert open_store().choices() == []
        again = make({16: 3.0, 32: 2.0})
        assert again.tune().measured == 0
        assert [entry.choice.config["BLOCK"] for entry in open_store().choices()] == [32]

    def test_a_tuning_with_one_config_measures_and_stores_nothing(
        self, make: Make, rows: Rows, cache_dir: Path
    ) -> None:
        tuned = make({16: 1.0})
        assert tuned.launch() == 16
        assert tuned.tried() == []
        assert not cache_dir.exists() or rows.count("trial") == 0


class TestWhatIsShared:
    TIMES = {16: 3.0, 32: 2.0}  # noqa: RUF012

    def test_the_same_text_elsewhere(self, make: Make, rows: Rows) -> None:
        make(self.TIMES).launch()
        moved = make(self.TIMES, copy_kernel_as_written())
        assert moved.launch() == 32
        assert moved.tried() == []
        assert rows.counts() == (1, 2, 1)

    def test_another_order_of_the_configs(self, make: Make) -> None:
        make(self.TIMES).launch()
        turned = make(dict(reversed(self.TIMES.items())))
        assert turned.launch() == 32
        assert turned.tried() == []

    @pytest.mark.parametrize("what", ["source", "dtype", "key value"])
    def test_choices_are_not_shared_between_calls_or_kernels_that_differ(
        self, what: str, make: Make, rows: Rows
    ) -> None:
        make(self.TIMES).launch()
        kernel = copy_kernel_from_the_end() if what == "source" else copy_kernel
        other = make({16: 1.0, 32: 2.0}, kernel)
        if what == "dtype":
            chosen = other.launch(dtype=torch.float64)
        else:
            chosen = other.launch(n=N + 1 if what == "key value" else N)
        assert chosen == 16, "measured, not taken over"
        assert other.tried() == [16, 32]
        assert rows.counts() == (2, 4, 2)

    def test_choices_are_not_shared_between_devices_and_toolchains(
        self, make: Make, rows: Rows
    ) -> None:
        tuned = make(self.TIMES)
        device = Device("NVIDIA H100 80GB HBM3", "90", 132, 232448)
        variants: list[Callable[[Any], Any]] = [
            lambda key: key,
            lambda key: replace(key, device=device),
            lambda key: replace(key, device=replace(device, sm_count=114)),
            lambda key: replace(key, device=replace(device, name="NVIDIA H200")),
            lambda key: replace(key, toolchain=replace(key.toolchain, triton="3.8.0")),
            lambda key: replace(key, toolchain=replace(key.toolchain, backend="ptxas 13")),
            lambda key: replace(key, toolchain=replace(key.toolchain, target="cuda:100:32")),
            lambda key: replace(
                key, toolchain=replace(key.toolchain, environment=(("default_fp_fusion", "0"),))
            ),
        ]
        for variant in variants:
            assert tuned.tune(key=variant).measured == 2
        assert rows.counts() == (len(variants), 2 * len(variants), len(variants))
        for variant in variants:
            assert tuned.tune(key=variant).measured == 0

    def test_configs_that_differ_in_their_hook_alone(self, tmp_path: Path, rows: Rows) -> None:
        """Their code objects are equal, too; what they close over is not."""

        def hook_of(value: float) -> Callable[[dict[str, Any]], None]:
            def hook(arguments: dict[str, Any]) -> None:
                arguments["dst"].fill_(value)

            return hook

        def kind(name: str) -> Callable[[dict[str, Any]], None]:
            fills = {
                "zero": lambda arguments: arguments["dst"].zero_(),
                "neg": lambda arguments: arguments["dst"].neg_(),
            }
            return fills[name]

        for hooks in ([hook_of(1.0), hook_of(2.0)], [kind("zero"), kind("neg")]):
            before = rows.count("trial") if open_store().path else 0
            configs = [triton.Config({"BLOCK": 32}, pre_hook=hook) for hook in hooks]
            digests = {config_digest(config) for config in configs}
            assert len(digests) == 2
            Tuned(safetune(configs=configs, key=["n"])(copy_kernel), tmp_path / "x").launch()
            assert rows.count("trial") == before + 2


class TestAnotherList:
    def test_a_config_too_slow_to_matter_is_compared_with_the_incumbent(
        self, make: Make, rows: Rows
    ) -> None:
        assert make(EIGHT).launch() == 16
        nine = make({**EIGHT, 4096: 50.0})
        assert nine.launch() == 16
        assert nine.tried() == [16, 4096], "its time says nothing beside a stored one: both run"
        assert rows.query("SELECT DISTINCT judged FROM trial ORDER BY 1") == [(8,), (9,)]
        assert rows.query("SELECT generation, measured FROM choice") == [(1, 8), (1, 2)]
        assert rows.count("trial") == 9
        assert make({**EIGHT, 4096: 50.0}).launch() == 16
        assert nine.tried() == []

    @pytest.mark.parametrize(("milliseconds", "winner"), [(1.5, 4096), (1.98, 4096), (2.05, 16)])
    def test_a_config_near_the_incumbent_races_it_and_nothing_else_runs(
        self, milliseconds: float, winner: int, make: Make, rows: Rows
    ) -> None:
        assert make(EIGHT).launch() == 16
        nine = make({**EIGHT, 4096: milliseconds})
        assert nine.launch() == winner
        assert nine.tried() == [16, 4096]

    def test_those_that_a_final_has_beaten_by_more_than_the_margin_do_not_race_again(
        self, make: Make
    ) -> None:
        near = {16: 2.0, 32: 2.02, 64: 2.03, 128: 3.0, 256: 9.0}
        assert make(near).launch() == 16
        six = make({**near, 512: 2.05})
        assert six.launch() == 16
        assert six.tried() == [16, 32, 64, 512]
        seven = make({**near, 512: 2.05, 1024: 1.0})
        assert seven.launch() == 1024
        assert seven.tried() == [16, 32, 64, 512, 1024], "128 and 256 lost to those"

    @pytest.mark.parametrize("clock", [0.5, 1.0, 1.5, 2.0])
    @pytest.mark.parametrize(("added", "winner"), [(4.0, 32), (2.0, 64)])
    def test_a_config_that_is_added_under_another_clock(
        self, make: Make, clock: float, added: float, winner: int
    ) -> None:
        """Its time says nothing beside a stored one: both run."""
        assert make({16: 9.0, 32: 3.0}).launch() == 32
        three = make({16: 9.0 * clock, 32: 3.0 * clock, 64: added * clock})
        assert three.launch() == winner
        assert three.tried() == [32, 64]

    @pytest.mark.parametrize(
        "lists", [([16, 32, 64], [16, 64]), ([32, 64], [16, 64]), ([32], [64])]
    )
    def test_lists_in_turn_end_with_the_fastest_of_all(
        self, make: Make, lists: tuple[list[int], ...]
    ) -> None:
        """The newest choice of another list is not the fastest config that the store knows."""
        times = {16: 10.0, 32: 5.0, 64: 7.0, 128: 6.9}
        for blocks in lists:
            make({block: times[block] for block in blocks}).launch()
        assert make(times).launch() == 32
        again = make(times)
        assert again.launch() == 32
        assert again.tried() == []

    def test_two_lists_without_a_config_in_common_are_joined(self, make: Make, rows: Rows) -> None:
        """Both choices were made; neither config has ever run beside the other."""
        assert make({16: 5.0, 32: 9.0}).launch() == 16
        assert make({64: 4.0, 128: 8.0}).launch() == 64  # on a day with another clock
        joined = make({16: 2.5, 32: 4.5, 64: 4.0, 128: 8.0})
        assert joined.launch() == 16
        assert joined.tried() == [16, 64]
        assert rows.query("SELECT count(*) FROM trial") == [(4,)]
        again = make({16: 2.5, 32: 4.5, 64: 4.0, 128: 8.0})
        assert again.launch() == 16
        assert again.tried() == []

    @pytest.mark.parametrize(("gone", "choice"), [(128, 16), (16, 32)])
    def test_a_config_is_taken_away(self, make: Make, gone: int, choice: int) -> None:
        """What is known of the others is enough, also where it was the chosen one."""
        make(EIGHT).launch()
        seven = make({block: ms for block, ms in EIGHT.items() if block != gone})
        assert seven.launch() == choice
        assert seven.tried() == []

    def test_a_config_that_failed_is_not_tried_again(self, make: Make, rows: Rows) -> None:
        tuned = make({16: 2.0, 32: DIES})
        assert tuned.launch() == 16
        assert tuned.tried() == [16, 32]
        three = make({16: 2.0, 32: 0.1, 64: 9.0})
        assert three.launch() == 16
        assert three.tried() == [16, 64]
        verdicts = rows.query("SELECT verdict FROM trial ORDER BY rowid")
        assert sorted(verdicts) == [("died",), ("ok",), ("ok",)]

    def test_a_call_that_was_wrong_does_not_stop_the_next(self, make: Make, rows: Rows) -> None:
        """Neither its grid nor an argument that was forgotten is part of the key."""
        tuned, src, dst = make({16: 2.0, 32: 1.0}), torch.ones(N), torch.zeros(N)
        with pytest.raises(ZeroDivisionError):
            tuned.kernel[lambda meta: (1 // 0,)](dst, src, N)
        with pytest.raises(TypeError, match="missing 2 required positional arguments"):
            tuned.kernel[(4,)](dst)
        with pytest.raises(TypeError, match="multiple values for argument 'n'"):
            tuned.kernel[grid](dst, src, N, n=N)
        assert rows.counts()[1:] == (0, 0)
        assert tuned.tried() == []
        assert tuned.launch() == 32

    @pytest.mark.parametrize("verdict", [Verdict.OUT_OF_BOUNDS, Verdict.COMPILE_ERROR])
    def test_where_nothing_works_all_is_tried_by_a_later_process(
        self, make: Make, verdict: Verdict
    ) -> None:
        """What a tensor held, or the machine, may have been the reason."""
        tuned = make({16: 2.0, 32: 1.0})
        key = Miss(tuned.kernel, (torch.zeros(N), torch.zeros(N), N), {"grid": grid}).key()
        for config, outcome in zip(tuned.kernel.configs, (verdict, Verdict.DIED), strict=True):
            record = TrialRecord(key.digest, config_digest(config), {}, 1, Outcome(outcome), 1.0)
            open_store().put_trial(record)
        assert tuned.launch() == 32
        assert tuned.tried() == [16, 32]

    def test_a_working_config_joins_those_that_failed(self, make: Make, rows: Rows) -> None:
        with pytest.raises(NoWorkingConfig):
            make({16: DIES, 32: DIES}).launch()
        assert rows.counts() == (1, 2, 0)
        three = make({16: DIES, 32: DIES, 64: 1.0})
        assert three.launch() == 64
        assert three.tried() == [64]

    def test_no_memory_is_tried_again(self, make: Make, rows: Rows) -> None:
        """It says nothing of the config."""
        store = open_store()
        tuned = make({16: 2.0, 32: 1.0})
        key = Miss(tuned.kernel, (torch.zeros(N), torch.zeros(N), N), {"grid": grid}).key()
        for config, verdict in zip(
            tuned.kernel.configs, (Verdict.NO_MEMORY, Verdict.LAUNCH_ERROR), strict=True
        ):
            record = TrialRecord(
                key=key.digest,
                config_digest=config_digest(config),
                config={},
                generation=1,
                outcome=Outcome(verdict, message="from an earlier process"),
                created=1.0,
            )
            store.put_trial(record)
        assert tuned.launch() == 16
        assert tuned.tried() == [16]
        assert rows.query("SELECT verdict FROM trial ORDER BY verdict") == [
            ("launch_error",),
            ("ok",),
        ]


class TestPruning:
    """Pruning may read what is not in the key, and it may be mended."""

    def test_configs_that_it_newly_leaves_are_measured_once(self, make: Make, rows: Rows) -> None:
        times = {16: 2.0, 32: 3.0, 64: 9.0, 128: 8.0}
        assert make(times, left=(16, 32)).launch() == 16
        four = make(times)
        assert four.launch() == 16
        assert four.tried() == [16, 64, 128], "the choice is launched to be compared"
        again = make(times)
        assert again.launch() == 16
        assert again.tried() == []
        assert rows.query("SELECT generation FROM choice") == [(1,)]

    def test_a_faster_one_among_them_is_the_choice_from_then_on(
        self, make: Make, rows: Rows
    ) -> None:
        times = {16: 2.0, 32: 3.0, 64: 1.0}
        assert make(times, left=(16, 32)).launch() == 16
        assert make(times, left=(16, 64)).launch() == 64
        assert rows.query("SELECT generation FROM choice ORDER BY generation") == [(1,), (2,)]
        for left, chosen in (((16, 64), 64), ((16, 32, 64), 64), ((16, 32), 16)):
            later = make(times, left=left)
            assert later.launch() == chosen, "a choice stands while pruning leaves its config"
            assert later.tried() == []

    def test_a_subset_without_the_choice_opens_no_generation(self, make: Make, rows: Rows) -> None:
        times = {16: 2.0, 32: 3.0, 64: 9.0, 128: 8.0}
        assert make(times, left=(16, 32)).launch() == 16
        for tried in ([64, 128], []):
            others = make(times, left=(64, 128))
            assert others.launch() == 128
            assert others.tried() == tried
        assert make(times, left=(16, 32)).launch() == 16
        assert rows.query("SELECT generation FROM choice") == [(1,)]

    def test_the_offline_command_measures_them_too(self, make: Make) -> None:
        times = {16: 2.0, 32: 3.0, 64: 1.0}
        make(times, left=(16, 32)).launch()
        result = make(times).tune()
        assert result.choice.kwargs == {"BLOCK": 64}
        assert make(times).tune().measured == 0

    @pytest.mark.parametrize("mode", ["frozen", "background"])
    def test_other_modes_launch_the_stored_choice(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, mode: str
    ) -> None:
        times = {16: 2.0, 32: 3.0, 64: 1.0}
        make(times, left=(16, 32)).launch()
        monkeypatch.setenv("SAFETUNE_MODE", mode)
        three = make(times)
        assert three.launch() == 16
        assert three.tried() == []

    def test_the_choice_stands_while_another_process_measures_them(
        self, make: Make, rows: Rows, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        times = {16: 2.0, 32: 3.0, 64: 1.0}
        make(times, left=(16, 32)).launch()
        ((key,),) = rows.query("SELECT key FROM choice")
        monkeypatch.setenv("SAFETUNE_WAIT", "0.1")
        lock = locks.try_lock(cache_dir / "safetune.db", key)
        assert lock is not None
        assert make(times).launch() == 16
        lock.release()
        assert make(times).launch() == 64

    def test_other_nodes_take_the_faster_one_from_the_shared_store(
        self, make: Make, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And a node that has only adopted the choice measures nothing."""
        times = {16: 2.0, 32: 3.0, 64: 1.0}
        (tmp_path / "shared").mkdir()
        monkeypatch.setenv("SAFETUNE_SHARED", f"file://{tmp_path}/shared")
        make(times, left=(16, 32)).launch()
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "other node"))
        adopted = make(times)
        assert adopted.launch() == 16
        assert adopted.tried() == []
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(cache_dir))
        assert make(times).launch() == 64
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "third node"))
        third = make(times)
        assert third.launch() == 64
        assert third.tried() == []

    def test_an_imported_choice_stands(self, make: Make, rows: Rows) -> None:
        """It has no trials here, so nothing tells which configs were tried."""
        times = {16: 2.0, 32: 3.0}
        make(times).launch()
        rows.query("DELETE FROM main.trial")
        after = make(times)
        assert after.launch() == 16
        assert after.tried() == []


class TestTimeLimits:
    """A config that took too long is tried again once it may take longer, and only then."""

    @pytest.fixture(
        params=[Verdict.TIMEOUT, pytest.param(Verdict.COMPILE_TIMEOUT, marks=pytest.mark.full)]
    )
    def timed_out(self, request: pytest.FixtureRequest) -> Callable[..., None]:
        def store(tuned: Tuned, detail: str, blocks: Sequence[int]) -> None:
            call = (torch.zeros(N), torch.zeros(N), N)
            key = Miss(tuned.kernel, call, {"grid": grid}).key()
            for config in tuned.kernel.configs:
                if config.kwargs["BLOCK"] in blocks:
                    digest, outcome = config_digest(config), Outcome(request.param, detail=detail)
                    open_store().put_trial(TrialRecord(key.digest, digest, {}, 1, outcome, 1.0))

        return store

    @pytest.mark.parametrize("limit", ["8 s", "", "9 s", "9.5 s"])
    def test_a_key_that_has_only_timeouts(
        self, make: Make, timed_out: Callable[..., None], limit: str
    ) -> None:
        """Of an earlier process: what the call's tensors held may have been the reason."""
        tuned = make({16: 2.0, 32: 3.0}, run_timeout_s=9, compile_timeout_s=9)
        timed_out(tuned, limit, (16, 32))
        assert tuned.launch() == 16
        assert tuned.tried() == [16, 32]

    def test_a_key_that_has_a_choice(self, make: Make, timed_out: Callable[..., None]) -> None:
        times = {16: 2.0, 32: 1.0}
        timed_out(make(times), "5 s", (32,))
        assert make(times, run_timeout_s=5, compile_timeout_s=5).launch() == 16
        later = make(times, run_timeout_s=9, compile_timeout_s=9)
        assert later.launch() == 32
        assert later.tried() == [16, 32], "the choice is launched to be compared"
        assert make(times).launch() == 32

    def test_a_trial_knows_its_limit(self, tmp_path: Path, rows: Rows) -> None:
        def bench(launch: Callable[[], None], quantiles: Any) -> list[float]:
            select.select([], [], [])  # for ever
            return []

        configs = [triton.Config({"BLOCK": block}) for block in (16, 32)]
        kernel = safetune(configs=configs, key=["n"], do_bench=bench, run_timeout_s=0.2)
        with pytest.raises(NoWorkingConfig):
            kernel(copy_kernel)[grid](torch.zeros(N), torch.zeros(N), N)
        assert rows.query("SELECT verdict, detail FROM trial") == [("timeout", "0.2 s")] * 2


class TestForce:
    def test_opens_the_next_generation(self, make: Make, rows: Rows) -> None:
        assert make({16: 3.0, 32: 2.0}).launch() == 32
        other = make({16: 1.0, 32: 2.0})
        result = other.tune(force=True)
        assert result.choice.kwargs == {"BLOCK": 16}
        assert result.measured == 2
        assert other.tried() == [16, 32]
        assert rows.query("SELECT generation, median_ms FROM choice ORDER BY generation") == [
            (1, 2.0),
            (2, 1.0),
        ]
        assert rows.query("SELECT generation, count(*) FROM trial GROUP BY generation") == [
            (1, 2),
            (2, 2),
        ]
        after = make({16: 9.0, 32: 9.0})
        assert after.launch() == 16, "the newest generation counts"
        assert after.tried() == []

    def test_measures_what_failed_too(self, make: Make) -> None:
        with pytest.raises(NoWorkingConfig):
            make({16: DIES, 32: DIES}).launch()
        mended = make({16: 1.0, 32: 2.0})
        assert mended.tune(force=True).choice.kwargs == {"BLOCK": 16}
        assert mended.tried() == [16, 32]

    def test_a_choice_of_a_generation_is_never_replaced(self, make: Make, rows: Rows) -> None:
        """Two processes tune the same: the later one adopts the choice of the first."""
        tuned = make({16: 3.0, 32: 2.0})
        result = tuned.tune()
        assert result.choice.kwargs == {"BLOCK": 32}
        before = rows.query("SELECT * FROM choice")
        key = Miss(tuned.kernel, (torch.zeros(N), torch.zeros(N), N), {"grid": grid}).key()
        mine = choice_of(tuned, 0, key.digest, generation=1)
        assert open_store().put_choice(mine).config_digest == config_digest(result.choice)
        assert rows.query("SELECT * FROM choice") == before


def choice_of(tuned: Tuned, number: int, key: str, generation: int) -> ChoiceRecord:
    request = Miss(tuned.kernel, (torch.zeros(N), torch.zeros(N), N), {"grid": grid}).request()
    return ChoiceRecord(
        key=key,
        generation=generation,
        config_digest=config_digest(tuned.kernel.configs[number]),
        config={"BLOCK": 4096, "num_warps": 4},
        declared=request.declared,
        median_ms=0.001,
        measured=1,
        created=time.time(),
    )


class TestARow:
    """A writer of the store can select one of the declared configs, and nothing else."""

    def test_selects_a_declared_config(self, make: Make) -> None:
        tuned = make({16: 3.0, 32: 2.0})
        tuned.tune()
        key = Miss(tuned.kernel, (torch.zeros(N), torch.zeros(N), N), {"grid": grid}).key()
        open_store().put_choice(choice_of(tuned, 0, key.digest, generation=2))
        again = make({16: 3.0, 32: 2.0})
        assert again.launch() == 16, "by its digest; what the row says of its values is for people"
        assert again.tried() == []

    def test_with_an_undeclared_config_is_ignored(self, make: Make) -> None:
        tuned = make({16: 3.0, 32: 2.0})
        tuned.tune()
        key = Miss(tuned.kernel, (torch.zeros(N), torch.zeros(N), N), {"grid": grid}).key()
        forged = replace(
            choice_of(tuned, 0, key.digest, generation=2),
            config_digest=config_digest(triton.Config({"BLOCK": 4096})),
        )
        open_store().put_choice(forged)
        again = make({16: 3.0, 32: 2.0})
        assert again.launch() == 32
        assert again.tried() == [], "what was measured is still known"

    def test_edited_by_hand_is_ignored(self, make: Make, rows: Rows) -> None:
        tuned = make({16: 3.0, 32: 2.0})
        assert tuned.launch() == 32
        digest = config_digest(tuned.kernel.configs[0])
        rows.query(
            "UPDATE main.choice SET config_digest = ?, "
            "record = json_set(record, '$.config_digest', ?)",
            *(digest, digest),
        )
        again = make({16: 3.0, 32: 2.0})
        assert again.launch() == 32
        assert again.tried() == []


class TestTheChoice:
    def test_ties_go_to_the_config_declared_first(self, make: Make) -> None:
        assert make({64: 1.001, 16: 1.0, 32: 1.002, 128: 1.1}).launch() == 64
        assert make({32: 1.002, 64: 1.001, 16: 1.0, 128: 1.1}).launch(n=50) == 32

    def test_a_difference_beyond_a_tie_counts(self, make: Make) -> None:
        assert make({64: 1.01, 16: 1.0, 32: 1.02}).launch() == 16

    def test_times_that_are_none_are_not_chosen(self, make: Make, rows: Rows) -> None:
        times = {16: 0.0, 32: float("nan"), 64: float("inf"), 128: 5.0, 256: -3.0}
        assert make(times).launch() == 128
        verdicts = rows.query("SELECT config, verdict, message FROM trial")
        found = {json.loads(config)["BLOCK"]: verdict for config, verdict, _ in verdicts}
        assert found == dict.fromkeys(times, "invalid_time") | {128: "ok"}
        assert any("nan" in message for _, _, message in verdicts)

    def test_what_was_slower_before_the_final_does_not_win_because_that_was_disturbed(
        self, tmp_path: Path
    ) -> None:
        """A busy host slows all finalists down; the others were timed while it was quiet."""
        current: dict[str, int] = {}
        timed: list[int] = []

        def hook(arguments: dict[str, Any]) -> None:
            current["BLOCK"] = arguments["BLOCK"]

        def bench(launch: Callable[[], None], quantiles: Any) -> list[float]:
            launch()
            block = current["BLOCK"]
            timed.append(block)
            slowed = 5.0 if timed.count(block) > 1 else 1.0
            return [{16: 1.02, 32: 1.0, 64: 3.0}[block] * slowed] * 3

        configs = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in (16, 32, 64)]
        kernel = safetune(configs=configs, key=["n"], do_bench=bench)(copy_kernel)
        assert Tuned(kernel, tmp_path / "no log").launch() == 32

    def test_a_finalist_that_dies_in_the_final_is_out(self, tmp_path: Path, rows: Rows) -> None:
        """Its screening was fine, so it is only then that it is seen."""
        path = str(tmp_path / "count")
        current: dict[str, int] = {}

        def hook(arguments: dict[str, Any]) -> None:
            current["BLOCK"] = arguments["BLOCK"]
            if arguments["BLOCK"] == 16:
                with open(path, "a") as file:
                    file.write("x")
                if os.path.getsize(path) > 3:
                    ctypes.string_at(0)

        def bench(launch: Callable[[], None], quantiles: Any) -> list[float]:
            launch()
            return [1.0 if current["BLOCK"] == 16 else 1.02] * 3

        configs = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in (16, 32, 64)]
        kernel = safetune(configs=configs, key=["n"], do_bench=bench)(copy_kernel)
        assert Tuned(kernel, tmp_path / "no log").launch() == 32
        verdicts = rows.query("SELECT config, verdict FROM trial")
        assert {json.loads(config)["BLOCK"]: verdict for config, verdict in verdicts} == {
            16: "died",
            32: "ok",
            64: "ok",
        }


class TestObservers:
    def test_see_every_config_before_and_after(self, make: Make) -> None:
        seen: list[Progress] = []
        result = make({16: 2.0, 32: DIES, 64: 2.01, 128: 9.0}).tune(seen.append)
        screened = [
            (p.config.kwargs["BLOCK"], p.outcome and p.outcome.label, p.done)
            for p in seen
            if p.stage == "screen"
        ]
        assert screened == [
            (16, None, 0),
            (16, "ok", 1),
            (32, None, 1),
            (32, "died(SIGSEGV)", 2),
            (64, None, 2),
            (64, "ok", 3),
            (128, None, 3),
            (128, "ok", 4),
        ]
        assert {p.total for p in seen} == {4}
        assert {p.kernel for p in seen} == {"copy_kernel"}
        finals = {p.config.kwargs["BLOCK"] for p in seen if p.stage == "final"}
        assert finals == {16, 64}
        assert [p.outcome.label for p in seen if p.stage == "final" and p.outcome] == ["ok", "ok"]
        assert [(c.kwargs["BLOCK"], o.label) for c, o in result.outcomes] == [
            (16, "ok"),
            (32, "died(SIGSEGV)"),
            (64, "ok"),
            (128, "ok"),
        ]
        assert result.measured == 4

    def test_see_nothing_where_nothing_runs(self, make: Make) -> None:
        tuned = make({16: 2.0, 32: 3.0})
        tuned.tune()
        seen: list[Progress] = []
        result = tuned.tune(seen.append)
        assert seen == []
        assert result.measured == 0
        assert [o.timing.median_ms for _, o in result.outcomes if o.timing] == [2.0, 3.0]

    def test_an_observer_that_raises_ends_the_tuning_and_loses_nothing(self, make: Make) -> None:
        """Ctrl-C may come anywhere; what was measured before it is stored."""

        def interrupt(progress: Progress) -> None:
            if progress.config.kwargs["BLOCK"] == 64 and progress.outcome is None:
                raise KeyboardInterrupt

        times = {16: 3.0, 32: 2.0, 64: 4.0, 128: 5.0}
        tuned = make(times)
        with pytest.raises(KeyboardInterrupt):
            tuned.tune(interrupt)
        assert tuned.tried() == [16, 32]
        assert tuned.tune().choice.kwargs == {"BLOCK": 32}
        assert tuned.tried() == [16, 32, 64, 128], "those of before are compared, and not timed"


HALF_WAY = """
import os, sys, time
import torch, triton, triton.language as tl
from safetune import safetune

DIRECTORY = os.path.dirname(os.path.abspath(__file__))
current = {}

def hook(arguments, directory=DIRECTORY):
    current["BLOCK"] = arguments["BLOCK"]
    with open(os.path.join(directory, "log"), "a") as file:
        file.write(f"{arguments['BLOCK']}\\n")
    if arguments["BLOCK"] == 128 and os.path.exists(os.path.join(directory, "gate")):
        with open(os.path.join(directory, "fifo"), "w") as file:
            file.write(f"{os.getpid()}\\n")
        while True:
            pass

def bench(launch, quantiles):
    launch()
    return [1.0 + abs(current["BLOCK"] - 32) / 32 / 100] * 3

@safetune(
    configs=[triton.Config({"BLOCK": 16 << i}, pre_hook=hook) for i in range(6)],
    key=["n"], do_bench=bench, run_timeout_s=1000.0,
)
@triton.jit
def kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

def run():
    src, dst = torch.randn(100), torch.zeros(100)
    kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](dst, src, 100)
    return torch.equal(dst, src)

if __name__ == "__main__":
    run()
"""


def test_killed_half_way_and_resumed(tmp_path: Path, rows: Rows) -> None:
    """SIGKILL while the fourth of six is running: three are timed, and are not timed again."""
    script, log, fifo, gate = (tmp_path / name for name in ("script.py", "log", "fifo", "gate"))
    script.write_text(HALF_WAY)
    gate.touch()
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR)
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(script)], env=env, cwd=tmp_path)
    try:
        assert poll.poll(60_000), "the fourth config was never reached"
        child = os.pidfd_open(int(os.read(reader, 100)))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.close(reader)
    gone = select.poll()
    gone.register(child, select.POLLIN)
    assert gone.poll(20_000)
    os.close(child)
    assert rows.counts() == (1, 3, 0)
    assert rows.query("SELECT DISTINCT verdict FROM trial") == [("not_judged",)]
    assert set(log.read_text().split()) == {"16", "32", "64", "128"}

    log.unlink()
    gate.unlink()
    spec = importlib.util.spec_from_file_location("half_way", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    assert module.run()
    assert module.kernel.best_config.kwargs == {"BLOCK": 16}, "it ties with 32, the fastest"
    launched = log.read_text().split()
    remainder = launched.index("512") + 1
    while launched[remainder] == "512":
        remainder += 1
    assert set(launched[:remainder]) == {"128", "256", "512"}
    finalists = {"16", "32", "64", "128", "256"}
    assert set(launched[remainder:]) == finalists, "those within 8% of the best"
    assert rows.counts() == (1, 6, 1)
    assert rows.query("SELECT measured FROM choice") == [(6,)]
