"""What is launched where there is no choice, and when tuning is tried again."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import SafetuneWarning, safetune, sync
from safetune.miss import candidates, failures
from safetune.miss.resolve import Miss
from safetune.outcome import Outcome, Timing, Verdict
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from safetune.tuning.search import distance
from safetune.tuning.tuner import tune
from tests.conftest import stop_servers

BLOCKS = (16, 32, 64)


@triton.jit
def scale_kernel(x, n, MODE, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, tl.load(x + offset, mask=offset < n) * 2, mask=offset < n)


@pytest.mark.parametrize(
    ("values", "others", "expected"),
    [
        ([["n", 3]], [["n", 3]], 0.0),
        ([["n", 3]], [["n", 7]], 1.0),
        ([["n", 7]], [["n", 3]], 1.0),
        ([["n", 3], ["m", 0]], [["n", 7], ["m", 1]], 2.0),
        ([["n", 1]], [["n", -1]], 2.0),
        ([["n", 3.0]], [["n", 7.0]], 1.0),
        ([["n", 3]], [["n", 3.0]], None),
        ([["n", 1]], [["n", True]], None),
        ([["n", True]], [["n", False]], None),
        ([["n", True]], [["n", True]], 0.0),
        ([["n", "a"]], [["n", "b"]], None),
        ([["n", {"dtype": "float16"}]], [["n", {"dtype": "float16"}]], 0.0),
        ([["n", {"dtype": "float16"}]], [["n", {"dtype": "float32"}]], None),
        ([["n", 3]], [["m", 3]], None),
        ([["n", 3]], [], None),
    ],
)
def test_the_distance_of_two_keys_is_a_sum_of_ratios(
    values: Any, others: Any, expected: float | None
) -> None:
    assert distance(values, others) == expected


class Keys:
    """Keys of one kernel, each with the choice that a test wants."""

    def __init__(self, blocks: tuple[int, ...] = BLOCKS) -> None:
        configs = [triton.Config({"BLOCK": block}) for block in blocks]
        self.tuner = safetune(configs=configs, key=["n", "MODE"], keep=["MODE"])(scale_kernel)
        self.store = open_lookup(Settings.current()).store

    def request(self, n: int, mode: Any = 0, dtype: Any = torch.float32, **options: Any) -> Any:
        arguments = (torch.zeros(n, dtype=dtype), n, mode)
        return Miss(self.tuner, arguments, {"grid": (1,), **options}).request()

    def choose(self, block: int, *key: Any, **options: Any) -> None:
        """Tune a key for real, to the config with this BLOCK."""
        arguments = (torch.zeros(key[0], dtype=options.pop("dtype", torch.float32)), *key)
        arguments += (0,) * (3 - len(arguments))
        request = Miss(self.tuner, arguments, {"grid": (1,), **options}).request()
        (config,) = (c for c in request.configs if c.kwargs["BLOCK"] == block)
        tune(replace(request, configs=(config,)), self.store)

    def fallback(self, *key: Any, **options: Any) -> int:
        return candidates.fallback(self.request(*key, **options), self.store).kwargs["BLOCK"]


@pytest.fixture
def keys() -> Keys:
    return Keys()


class TestTheFallback:
    def test_without_any_outcome_is_the_first_config(self, keys: Keys) -> None:
        assert keys.fallback(100) == 16

    def test_has_a_grid_that_launches_something(self, keys: Keys) -> None:
        assert keys.fallback(100, grid=lambda meta: (meta["BLOCK"] // 32,)) == 32

    def test_is_the_choice_of_the_nearest_key(self, keys: Keys) -> None:
        keys.choose(32, 100)
        keys.choose(64, 1000)
        assert [keys.fallback(n) for n in (1, 200, 400, 10_000)] == [32, 32, 64, 64]

    def test_comes_from_keys_of_the_same_dtypes_options_and_flags_only(self, keys: Keys) -> None:
        keys.choose(32, 100)
        assert keys.fallback(101) == 32
        assert keys.fallback(101, dtype=torch.float16) == 16
        assert keys.fallback(101, debug=True) == 16
        assert keys.fallback(101, True) == 16

    def test_comes_from_keys_of_the_same_toolchain_and_device_only(self, keys: Keys) -> None:
        keys.choose(32, 100)
        request = keys.request(101)
        others = (
            replace(request.key, toolchain=replace(request.key.toolchain, triton="2.0")),
            replace(request.key, device=replace(request.key.device, name="another")),
            replace(request.key, kernel=replace(request.key.kernel, digest="another")),
        )
        assert candidates.fallback(request, keys.store).kwargs["BLOCK"] == 32
        for key in others:
            other = replace(request, key=key)
            assert candidates.fallback(other, keys.store).kwargs["BLOCK"] == 16

    def test_is_one_of_the_configs_that_are_declared_now(self, keys: Keys) -> None:
        keys.choose(32, 100)
        assert Keys((16, 64)).fallback(101) == 16

    @pytest.mark.parametrize("blocks", [(32, 64), (64, 32)])
    def test_is_the_newest_choice_of_the_key_from_another_list(
        self, keys: Keys, blocks: tuple[int, int]
    ) -> None:
        for block in blocks:
            Keys((16, block)).choose(block, 100)
        assert keys.fallback(100) == blocks[1]

    @pytest.mark.parametrize("may_work", [Verdict.NO_MEMORY, Verdict.NOT_JUDGED])
    def test_is_not_a_config_that_is_known_to_fail_for_the_key(
        self, keys: Keys, may_work: Verdict
    ) -> None:
        from safetune.config import config_digest, config_record
        from safetune.store.records import TrialRecord

        keys.choose(32, 100)
        request = keys.request(101)
        for config, verdict in zip(
            request.configs, (Verdict.DIED, Verdict.TIMEOUT, may_work), strict=True
        ):
            keys.store.put_trial(
                TrialRecord(
                    key=request.key.digest,
                    config_digest=config_digest(config),
                    config=config_record(config),
                    generation=1,
                    outcome=Outcome(verdict),
                    created=1.0,
                )
            )
        assert keys.fallback(101) == 64, "this is not held against a config"


class TestTheRanking:
    def ranked(self, keys: Keys, works: int, fails: int = 0, **order: bool) -> dict[int, str]:
        """Return the reason for each BLOCK, best first, of a key beside one with the choice 32."""
        keys.choose(32, 100)
        request = keys.request(101)
        timing = Timing(1.0, 1.0, 1.0, 9, "final")
        outcomes = [
            (config, Outcome(Verdict.OK, timing) if block == works else Outcome(Verdict.DIED))
            for config in request.configs
            if (block := config.kwargs["BLOCK"]) in (works, fails)
        ]
        related = keys.store.related(request.key.kernel.digest, request.key.device.digest)
        found = list(candidates.ranked(request, outcomes, related, **order))
        reasons = {config.kwargs["BLOCK"]: reason for config, reason in found}
        assert len(reasons) == len(found), "a config comes once"
        return reasons

    def test_related_choices_come_before_measured_and_untried_configs(self, keys: Keys) -> None:
        assert list(self.ranked(keys, works=64).items()) == [
            (32, "the choice for n=100, MODE=0 (float32)"),
            (64, "the fastest config known to work"),
            (16, "the first config not known to fail"),
        ]

    def test_after_a_rejection_measured_configs_come_first(self, keys: Keys) -> None:
        assert list(self.ranked(keys, works=64, measured_first=True)) == [64, 32, 16]

    def test_a_config_that_is_known_to_fail_is_left_out(self, keys: Keys) -> None:
        assert list(self.ranked(keys, works=64, fails=32)) == [64, 16]
        assert list(self.ranked(keys, works=32, fails=16)) == [32, 64]


class Memory:
    """Measuring fails for lack of memory while a file exists, in whatever process it is asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tries = path.with_suffix(".tries")

    def hook(self) -> Any:
        short, tries, caller = str(self._path), str(self._tries), os.getpid()

        def check(arguments: dict[str, Any]) -> None:
            if os.getpid() == caller:
                return
            with open(tries, "a") as file:
                file.write("x")
            if os.path.exists(short):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        return check

    def fill(self) -> None:
        self._path.touch()

    def free(self) -> None:
        self._path.unlink()

    @property
    def tries(self) -> int:
        return len(self._tries.read_text()) if self._tries.exists() else 0


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    made = Memory(tmp_path / "short")
    made.fill()
    return made


def told(found: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in found if issubclass(w.category, SafetuneWarning)]


class TestALackOfMemory:
    def test_costs_one_warning_and_is_tried_again(
        self, copies: Any, memory: Memory, clock: Any
    ) -> None:
        made = copies(memory.hook(), memory.hook())
        store = open_lookup(Settings.current()).store
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert [made(), made()] == [16, 16]
            first = memory.tries
            clock.now += failures.RETRY_S - 1
            assert made() == 16
            assert memory.tries == first, "not yet"
            clock.now += 1
            assert made() == 16
            assert memory.tries == 2 * first, "tried again, in vain"
            clock.now += 2 * failures.RETRY_S - 1
            made()
            assert memory.tries == 2 * first, "less often each time"
            assert store.choices() == []
            assert made.tuner.cache == {}
            memory.free()
            clock.now += 1
            chosen = made()
        assert memory.tries > 2 * first
        (message,) = told(found)
        assert message.startswith(
            "safetune: copy_kernel is not tuned for n=100 (float32) and runs with "
        )
        assert "its first config (BLOCK=16 " in message
        assert "tried again later" in message
        assert "no_memory  CUDA out of memory. Tried to allocate 2.00 GiB" in message
        (stored,) = store.choices()
        assert stored.choice.config["BLOCK"] == chosen
        assert len(made.tuner.cache) == 1

    def test_each_key_has_one_warning(self, copies: Any, memory: Memory, clock: Any) -> None:
        made = copies(memory.hook(), memory.hook())
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for n in (100, 101, 100, 101):
                made(n)
        assert ["n=100" in text for text in told(found)] == [True, False]

    def test_for_some_configs_only_leaves_the_others_to_choose_from(
        self, copies: Any, memory: Memory
    ) -> None:
        made = copies(memory.hook(), None)
        assert made() == 32
        assert len(made.tuner.cache) == 1

    def test_with_several_ranks_is_tried_again_only_after_sync(
        self, copies: Any, memory: Memory, clock: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        made = copies(memory.hook(), memory.hook())
        with pytest.warns(UserWarning, match="not tuned"):
            made()
        first = memory.tries
        memory.free()
        clock.now += 10 * failures.RETRY_S
        made()
        assert memory.tries == first
        sync()
        made()
        assert memory.tries > first
        assert not made.tuner.cache, "the choice waits until all ranks call sync"
        sync()
        assert len(made.tuner.cache) == 1


def test_a_tuning_whose_process_cannot_start_is_tried_again(
    copies: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again: a limit may be raised, as a card may be emptied."""
    made = copies(None, None)
    stop_servers()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/nonexistent/python")
        with pytest.warns(UserWarning, match=r"n=100 .*first config .*/nonexistent/python"):
            made()
    made()
    assert made.tuner.cache == {}
    clock.now += failures.RETRY_S
    made()
    assert len(made.tuner.cache) == 1


def test_the_time_between_two_attempts_grows_up_to_a_limit() -> None:
    retry = failures.Retry()
    delays = [(retry := retry.again()).delay_s for _ in range(20)]
    assert (delays[0], delays[-1]) == (2 * failures.RETRY_S, failures.MAX_RETRY_S)


def test_offline_tuning_without_isolation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a launch would be tuned in the caller, `safetune tune` says that it cannot."""
    from safetune import WorkerUnavailable, Workload
    from safetune.offline import tasks

    tuner = safetune(configs=[triton.Config({"BLOCK": b}) for b in BLOCKS], key=["n"])(scale_kernel)
    (kernel,) = tasks.find_kernels({"scale": tuner})
    task = tasks.Task(kernel, Workload("one", (1,), (torch.zeros(8), 8, 0), {}), "float32")
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(
        WorkerUnavailable, match="scale_kernel cannot be tuned offline: safetune cannot isolate"
    ):
        tasks.tune_task(task, lambda tally: None)
    assert open_lookup(Settings.current()).store.kernels() == []


@pytest.mark.parametrize("mode", ["tune", "background"])
def test_a_full_card_is_a_fallback_for_now(
    mode: str, copies: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the background too, where the inputs are copied before the launch returns."""
    from safetune import NoMemory
    from safetune.tuning import bench

    def full(*args: Any, **kwargs: Any) -> None:
        raise NoMemory("the card is full")

    monkeypatch.setenv("SAFETUNE_MODE", mode)
    made = copies(None, None)
    with monkeypatch.context() as patched:
        patched.setattr(bench.LaunchBench, "__init__", full)
        with pytest.warns(UserWarning, match="tried again later: the card is full"):
            assert made() == 16
    made()
    assert made.tuner.cache == {}
    clock.now += failures.RETRY_S
    made()
    for _ in range(2 if mode == "background" else 1):  # the fallback, and the choice
        made.swaps.next()
    assert len(made.tuner.cache) == 1
