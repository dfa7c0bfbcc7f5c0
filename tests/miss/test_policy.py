"""The policies: `on_miss`, for a key without a choice, and `measure`, for short kernels."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import safetune
from safetune import InvalidSetting, MissError, TuningWarning
from safetune import settings as safetune_settings
from safetune.compilers.resolve import resolve
from safetune.miss.resolve import Miss
from safetune.settings import Settings
from safetune.store.lookup import open_lookup

MODES = ("tune", "background", "frozen", "record")


def verdicts(kernel: str = "copy_kernel") -> list[str]:
    of_keys = open_lookup(Settings.current()).store.trials_of(kernel)
    return [trial.outcome.verdict.value for _, trials in of_keys for trial in trials]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what the test sets by `configure`."""
    monkeypatch.setattr(safetune_settings, "_configured", safetune_settings._configured)


@pytest.fixture(params=["decorator", "environment", "configure"])
def given(
    request: pytest.FixtureRequest,
    copies: Any,
    monkeypatch: pytest.MonkeyPatch,
    configured: None,
) -> Any:
    """A function that makes a tuner with a policy, in each of the ways to set one."""

    def make(policy: str, **options: Any) -> Any:
        options.setdefault("blocks", (16, 32))
        if request.param == "decorator":
            return copies(on_miss=policy, **options)
        if request.param == "environment":
            monkeypatch.setenv("SAFETUNE_ON_MISS", policy)
        else:
            safetune.configure(on_miss=policy)
        return copies(**options)

    return make


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("this must not be called")


class TestError:
    @pytest.mark.parametrize("mode", MODES)
    def test_nothing_is_launched_tuned_or_chosen(
        self, given: Any, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", mode)
        made = given("error")
        dst = torch.zeros(100)
        for _ in range(2):
            with pytest.raises(MissError) as caught:
                made.tuner[(7,)](dst, torch.ones(100), 100, FLAG=0)
        assert not dst.any()
        assert verdicts() == []
        assert made.tuner.cache == {}
        text = str(caught.value)
        assert text.startswith("copy_kernel has no choice for n=100 (float32) on interpreter")
        assert "safetune tune --recorded" in text
        assert isinstance(caught.value, safetune.SafetuneError)
        assert len(open_lookup(Settings.current()).store.calls()) == (mode == "record")

    @pytest.mark.parametrize("mode", MODES)
    def test_what_has_a_choice_or_needs_none_is_no_miss(
        self, given: Any, copies: Any, packed: Any, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", mode)
        made = given("error")
        packed(made, 32)
        assert made() == 32, "a choice of a pack"
        assert given("error", blocks=(64,))() == 64, "one config"
        last = {"early_config_prune": lambda configs, named, **_: configs[-1:]}
        assert given("error", prune_configs_by=last)(77) == 32, "one config that pruning leaves"
        made.tuner[(0,)](torch.zeros(0), torch.zeros(0), 0, FLAG=0)  # no work

    def test_a_choice_that_was_written_is_no_miss(self, given: Any, copies: Any) -> None:
        """Of the very key, by the user's own table."""
        first = copies(blocks=(16, 32))
        first()
        made = given("error")
        (key,) = first.tuner.cache
        with pytest.raises(MissError):
            made(101)
        made.tuner.cache[key] = made.tuner.configs[1]
        assert made() == 32

    def test_mode_off_looks_for_no_choice(
        self, given: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", "off")
        assert given("error")() == 16

    def test_a_choice_that_is_made_later_is_used(self, given: Any, copies: Any) -> None:
        made = given("error")
        with pytest.raises(MissError):
            made()
        with pytest.warns(TuningWarning):
            chosen = copies(blocks=(16, 32), on_miss="warn")()
        assert made() == chosen

    def test_an_inline_kernel_is_not_tuned_here_either(self, given: Any) -> None:
        with pytest.raises(MissError):
            given("error", isolation="inline", do_bench=never)()

    def test_resolve_and_prepare(self, given: Any) -> None:
        made = given("error")
        dst = torch.zeros(100)
        with pytest.raises(MissError):
            resolve(made.tuner, (dst, torch.ones(100), 100), {"FLAG": 0}, grid=(7,))
        with pytest.raises(MissError):
            safetune.prepare(made)
        assert verdicts() == []

    def test_workloads_are_named(self, given: Any) -> None:
        made = given("error")
        made.tuner.workload(lambda device, dtype: [])
        with pytest.raises(MissError, match=r"`safetune tune tests\.miss\.conftest:copy_kernel`"):
            made()


class TestFallback:
    @pytest.mark.parametrize("mode", MODES)
    def test_nothing_is_tuned_and_nothing_warns(
        self, given: Any, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", mode)
        made = given("fallback")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [made(), made(), made(101)] == [16] * 3
        assert verdicts() == []
        assert made.tuner.cache == {}, "a fallback is no choice"

    def test_the_nearest_key_s_choice_is_launched(self, given: Any, packed: Any) -> None:
        made = given("fallback")
        packed(made, 32)
        assert made(101) == 32

    def test_an_inline_kernel_is_not_tuned(self, given: Any) -> None:
        assert given("fallback", isolation="inline", do_bench=never)() == 16


class TestWarn:
    @pytest.mark.parametrize(
        ("mode", "words"),
        [
            ("tune", "it is tuned. To"),
            ("background", "it is tuned in the background. To"),
            ("frozen", "it launches a fallback. To"),
            ("record", "it launches a fallback. To"),
        ],
    )
    def test_each_key_warns_once_and_the_mode_decides(
        self, given: Any, mode: str, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", mode)
        made = given("warn")
        with pytest.warns(TuningWarning, match="has no choice for") as caught:
            [made(n) for n in (100, 100, 101)]
        texts = [str(warning.message) for warning in caught]
        assert [text.split(" has no choice for ")[1].split(":")[0] for text in texts] == [
            "n=100 (float32)",
            "n=101 (float32)",
        ]
        assert all(words in text for text in texts)
        if mode == "tune":
            assert verdicts() == ["ok"] * 4
        if mode in ("frozen", "record"):
            assert verdicts() == []

    def test_a_stored_choice_does_not_warn(self, given: Any, packed: Any) -> None:
        made = given("warn")
        packed(made, 32)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert made() == 32

    def test_an_inline_kernel_warns_too(self, given: Any) -> None:
        with pytest.warns(TuningWarning, match="it is tuned"):
            given("warn", isolation="inline", do_bench=lambda f, quantiles: [1.0] * 3)()


class TestUnset:
    def test_the_mode_decides(self, copies: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            copies(blocks=(16, 32))()
        assert verdicts() == ["ok"] * 2

    @pytest.mark.parametrize(
        "call",
        [
            lambda copies: copies(blocks=(16, 32), on_miss="never"),
            lambda copies: safetune.configure(on_miss="never"),
        ],
        ids=["decorator", "configure"],
    )
    def test_another_value_is_refused(self, copies: Any, call: Any) -> None:
        before = triton.autotune
        with pytest.raises(InvalidSetting, match="on_miss='never' is not valid; use one of: fall"):
            call(copies)
        assert triton.autotune is before


class TestMeasure:
    """How short kernels are timed is a part of the key, where it is given."""

    @staticmethod
    def options(made: Any) -> list[Any]:
        args = (torch.zeros(100), torch.ones(100), 100)
        return Miss(made.tuner, args, {"FLAG": 0}).key().record()["options"]

    def test_only_a_policy_that_is_given_identifies_a_choice(
        self, copies: Any, monkeypatch: pytest.MonkeyPatch, configured: None
    ) -> None:
        assert self.options(copies()) == []
        assert self.options(copies(measure="graph")) == [["measure", "graph"]]
        safetune.configure(measure="hot")
        assert self.options(copies()) == [["measure", "hot"]]
        monkeypatch.setenv("SAFETUNE_MEASURE", "events")
        assert self.options(copies()) == [["measure", "events"]]
        assert self.options(copies(measure="graph")) == [["measure", "graph"]]

    def test_a_choice_of_another_policy_is_not_launched(self, copies: Any) -> None:
        for options in ({}, {"measure": "graph"}, {"measure": "graph"}, {}):
            copies(blocks=(16, 32), **options)()
        assert verdicts() == ["ok"] * 4

    @pytest.mark.parametrize("way", ["decorator", "environment", "configure"])
    def test_another_value_is_refused(
        self, copies: Any, way: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if way == "environment":
            monkeypatch.setenv("SAFETUNE_MEASURE", "graphs")
        calls = {
            "decorator": lambda: copies(measure="graphs"),
            "environment": copies,
            "configure": lambda: safetune.configure(measure="graphs"),
        }
        with pytest.raises(InvalidSetting, match="='graphs' is not valid; use one of: events, gr"):
            calls[way]()


SCRIPT = """
import torch, triton, triton.language as tl
import safetune

safetune.install()
safetune.configure(on_miss="error")

@triton.autotune(configs=[triton.Config({"BLOCK": b}) for b in (16, 32)], key=["n"])
@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + offset, tl.load(x + offset, mask=offset < n) * 2, mask=offset < n)

x = torch.ones(30)
try:
    double[(2,)](x, 30)
    print("launched", x[0].item(), double.best_config.kwargs["BLOCK"])
except safetune.MissError as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_installed_then_recorded_tuned_and_launched(fresh_process: Any, tmp_path: Path) -> None:
    """The commands that the error names make the same program work."""
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)
    first = fresh_process(script, warm=True)
    assert first.stdout.startswith("MissError: double has no choice for n=30 (float32)"), first
    command = f"`safetune tune --recorded {script}`"
    assert f"SAFETUNE_MODE=record and then {command}" in first.stdout

    recording = fresh_process(script, env={"SAFETUNE_MODE": "record"}, warm=True)
    assert f"{command} for this call" in recording.stdout
    import subprocess
    import sys

    command_line = [sys.executable, "-m", "safetune", "tune", "--recorded", str(script)]
    tuned = subprocess.run(command_line, env={**os.environ}, capture_output=True, text=True)
    assert tuned.returncode == 0, tuned.stderr
    assert fresh_process(script, warm=True).stdout.startswith("launched 2.0 ")
