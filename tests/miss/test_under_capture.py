"""A miss under CUDA graph capture: nothing is measured, and the graph's fallback stays the graph's.

The driver's answer to "is this stream part of a capture" is a stand-in here; the rest is real, in
Triton's interpreter. `tests/gpu/test_capture.py` has the real answer.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

import safetune
from safetune import InvalidSetting, MissError
from safetune.both import backend, cuda_driver
from safetune.both.cuda import Cuda
from safetune.miss import background, under_capture
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from tests import capturing

if TYPE_CHECKING:
    from pathlib import Path

    from tests.capturing import Copies, Driver, Gate

#: Fixtures of this module; `copies` is another one than that of the other tests of misses.
no_earlier_misses = capturing.no_earlier_misses
copies, driver = capturing.copies, capturing.driver
gate, tried = capturing.gate, capturing.tried

#: For anything that should happen soon; far more than it takes on a loaded machine.
SOON_S = 60.0
#: For what must not wait for a thing that does not happen; only a failure takes all of it.
WAITED_S = 20.0


def warned() -> Any:
    return pytest.warns(UserWarning, match="copy_kernel has no choice for")


class TestFallback:
    def test_one_warning_nothing_measured_and_a_later_call_tunes(
        self, copies: type[Copies], driver: Driver, tried: Callable[[], list[str]]
    ) -> None:
        copy = copies()
        with driver.capturing(7), warned() as caught:
            assert copy(100) == copy(100) == copy(200) == 16, "the first config"
        (warning,) = caught
        assert "copy_kernel has no choice for n=100" in str(warning.message)
        assert "safetune.prepare" in str(warning.message)
        assert tried() == []
        assert copy.tuner.cache == {}
        assert [(miss.kernel, miss.key, miss.capture) for miss in under_capture.misses()] == [
            ("copy_kernel", "n=100 (float32)", 7),
            ("copy_kernel", "n=200 (float32)", 7),
        ]

        copy(100)
        assert tried() == ["ok"] * 3

    def test_the_graph_that_keeps_it_is_named_once_there_is_another_choice(
        self, copies: type[Copies], driver: Driver, caplog: pytest.LogCaptureFixture
    ) -> None:
        copy = copies(fastest=32)
        with driver.capturing(7), warned():
            copy(100)
        (miss,) = under_capture.misses()
        assert not miss.outdated
        with caplog.at_level(logging.WARNING, "safetune"):
            assert copy(100) == 32
        assert miss.outdated
        assert [old for old in under_capture.misses() if old.outdated] == [miss]
        (line,) = caplog.messages
        assert "graph 'capture 7' was captured with BLOCK=16" in line
        assert "capture it again" in line

    def test_two_threads_have_the_choice_at_once(
        self, copies: type[Copies], driver: Driver, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The tuning thread and one in `safetune.sync`: the first warns, and the other goes on."""
        copy = copies(fastest=32)
        with driver.capturing(7), warned():
            copy(100)
        (state,) = copy.tuner.states

        class Second(logging.Filter):
            def filter(self, record: logging.LogRecord) -> bool:
                thread = threading.Thread(target=state.set_choice, args=(copy.tuner.configs[1],))
                thread.start()
                thread.join(SOON_S)
                return not thread.is_alive()

        caplog.handler.addFilter(second := Second())
        with caplog.at_level(logging.WARNING, "safetune"):
            assert copy(100) == 32
        caplog.handler.removeFilter(second)
        assert len(caplog.messages) == 1

    def test_the_same_choice_asks_for_nothing(
        self, copies: type[Copies], driver: Driver, caplog: pytest.LogCaptureFixture
    ) -> None:
        copy = copies(fastest=16)
        with driver.capturing(7), warned():
            copy(100)
        with caplog.at_level(logging.WARNING, "safetune"):
            assert copy(100) == 16
        assert not any(miss.outdated for miss in under_capture.misses())
        assert caplog.messages == []

    def test_a_stored_choice_is_used(self, copies: type[Copies], driver: Driver) -> None:
        """As in a process that captures at once, with a store that is warm."""
        assert copies(fastest=32)(100) == 32
        with driver.capturing(7), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert copies(fastest=32)(100) == 32
        assert under_capture.misses() == ()

    def test_a_stored_choice_is_used_also_where_a_config_has_no_outcome_yet(
        self, copies: type[Copies], driver: Driver
    ) -> None:
        """The key is tuned again at a later launch, and not now."""
        assert copies(fastest=32)(100) == 32
        with open_lookup(Settings.current()).store.connection.transaction() as connection:
            chosen = "SELECT config_digest FROM choice"
            connection.execute(f"DELETE FROM trial WHERE config_digest NOT IN ({chosen})")
        with driver.capturing(7), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert copies(fastest=32)(100) == 32
        assert under_capture.misses() == ()

    def test_the_nearest_key_s_choice_is_the_fallback(
        self, copies: type[Copies], driver: Driver
    ) -> None:
        copy = copies(fastest=32)
        copy(100)
        with driver.capturing(7), pytest.warns(UserWarning, match="BLOCK=32"):
            assert copy(101) == 32

    def test_a_hit_does_not_ask_the_store(
        self,
        copies: type[Copies],
        driver: Driver,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        copy = copies()
        chosen = copy(100)
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "never made"))
        with driver.capturing(7):
            assert copy(100) == chosen
        assert not (tmp_path / "never made").exists()

    def test_each_capture_has_one_config_for_a_key_and_counts_for_itself(
        self, copies: type[Copies], driver: Driver
    ) -> None:
        copy = copies()
        with warned():
            _capture_each((7, 7, 8), copy, driver)
        assert [len(under_capture.misses(number)) for number in (7, 8, 9)] == [1, 1, 0]

    def test_misses_are_not_remembered_without_end(
        self, copies: type[Copies], driver: Driver
    ) -> None:
        copy = copies()
        with driver.capturing(7), warned():
            copy(100)
        (miss,) = under_capture.misses()
        for number in range(10_000):
            under_capture._misses.append(replace(miss, capture=number))
        assert len(under_capture.misses()) < 5000
        assert under_capture.misses()[-1].capture == 9999

    def test_another_thread_s_tuning_is_not_waited_for(
        self, copies: type[Copies], driver: Driver, gate: Gate
    ) -> None:
        """Of the very key that is captured; and that thread goes on tuning."""
        copy = copies(gate.hook(), None)
        chosen: list[int] = []
        tuning = threading.Thread(target=lambda: chosen.append(copy(100)))
        tuning.start()
        gate.reached()
        with driver.capturing(7), warned():
            assert copy(100) == 16
        assert chosen == []
        gate.open()
        tuning.join(SOON_S)
        assert copy(100) in chosen

    def test_a_fallback_that_cannot_be_launched_is_replaced_without_waiting_for_a_tuning(
        self, copies: type[Copies], driver: Driver, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The config that takes its place is settled while the other thread still tunes."""
        copy = copies(gate.hook(), None)
        tuning = threading.Thread(target=copy, args=(100,))
        tuning.start()
        gate.reached()
        captured: list[int] = []

        def capture_one() -> None:
            with driver.capturing(7):
                captured.append(copy(100))

        capturing = threading.Thread(target=capture_one)
        run = copy.tuner.fn.run

        def too_large(*args: Any, BLOCK: int, **kwargs: Any) -> Any:
            if BLOCK == 16 and threading.current_thread() is capturing:
                raise OutOfResources(2, 1, "shared memory")
            return run(*args, BLOCK=BLOCK, **kwargs)

        monkeypatch.setattr(copy.tuner.fn, "run", too_large)
        with warned(), pytest.warns(UserWarning, match=r"BLOCK=16.* cannot be launched"):
            assert not _waits(capturing, gate), "for the thread that tunes"
        tuning.join(SOON_S)
        assert captured == [32]

    def test_a_fallback_that_cannot_be_launched_is_tried_once(
        self, copies: type[Copies], driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy = copies()
        run, tried = copy.tuner.fn.run, []

        def too_large(*args: Any, BLOCK: int, **kwargs: Any) -> Any:
            tried.append(BLOCK)
            if BLOCK == 16:
                raise OutOfResources(2, 1, "shared memory")
            return run(*args, BLOCK=BLOCK, **kwargs)

        monkeypatch.setattr(copy.tuner.fn, "run", too_large)
        with driver.capturing(7), warned(), pytest.warns(UserWarning, match="cannot be launched"):
            assert [copy(100) for _ in range(3)] == [32] * 3
        assert tried == [16, 32, 32, 32]

    def test_the_stream_is_the_one_of_the_launching_thread(
        self, copies: type[Copies], driver: Driver, tried: Callable[[], list[str]]
    ) -> None:
        copy = copies()
        with driver.capturing(7):
            thread = threading.Thread(target=copy, args=(100,))
            thread.start()
            thread.join(SOON_S)
        assert tried() == ["ok"] * 3
        assert under_capture.misses() == ()


class TestError:
    @pytest.fixture(params=["decorator", "environment"])
    def copy(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, copies: type[Copies]
    ) -> Copies:
        if request.param == "decorator":
            return copies(on_miss="error")
        monkeypatch.setenv("SAFETUNE_ON_MISS", "error")
        return copies()

    def test_nothing_is_launched_and_a_choice_made_since_is_used(
        self, copy: Copies, copies: type[Copies], driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dst, src = torch.zeros(100), torch.ones(100)
        with driver.capturing(7), pytest.raises(MissError) as caught:
            copy.launch(dst, src, 100)
        message = str(caught.value)
        assert message.startswith("copy_kernel has no choice for n=100 (float32) on interpreter")
        assert not dst.any(), "nothing was launched"
        assert under_capture.misses() == ()
        monkeypatch.delenv("SAFETUNE_ON_MISS", raising=False)
        chosen = copies(fastest=32)(100)
        monkeypatch.setenv("SAFETUNE_ON_MISS", "error")
        with driver.capturing(8):
            assert copies(fastest=32)(100) == chosen

    def test_the_decorator_wins(
        self, copies: type[Copies], driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_ON_MISS", "error")
        with driver.capturing(7):
            assert copies(on_miss="fallback")(100) == 16

    def test_another_value_is_refused(
        self, copies: type[Copies], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(InvalidSetting, match="on_miss='raise'"):
            copies(on_miss="raise")
        monkeypatch.setenv("SAFETUNE_ON_MISS", "")
        copies()(100)
        monkeypatch.setenv("SAFETUNE_ON_MISS", "raise")
        with pytest.raises(InvalidSetting, match="SAFETUNE_ON_MISS='raise'"):
            copies()(200)


class TestModes:
    def test_background_copies_nothing_and_queues_nothing(
        self, copies: type[Copies], driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", "background")
        copy = copies()
        with driver.capturing(7), warned():
            assert copy(100) == 16
        assert background._worker.jobs == []
        assert copy.tuner.cache == {}

    def test_mode_off_launches_the_first_config_without_a_warning(
        self, copies: type[Copies], driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", "off")
        with driver.capturing(7), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert copies()(100) == 16
        assert under_capture.misses() == ()

    @pytest.mark.parametrize("mode", ["frozen", "record"])
    def test_a_mode_that_never_tunes_counts_them_too(
        self, mode: str, copies: type[Copies], driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The graph's config is not a choice; a launch outside of it has the same one."""
        monkeypatch.setenv("SAFETUNE_MODE", mode)
        copy = copies()
        with driver.capturing(7), warnings.catch_warnings():
            warnings.simplefilter("error")  # the log has it
            assert [copy(100), copy(100)] == [16, 16]
        assert copy(100) == 16
        (miss,) = under_capture.misses()
        assert (miss.capture, miss.outdated) == (7, False)
        assert len(open_lookup(Settings.current()).store.calls()) == (mode == "record")

    @pytest.mark.parametrize("mode", ["frozen", "record"])
    def test_an_error_in_a_mode_that_never_tunes(
        self,
        mode: str,
        copies: type[Copies],
        driver: Driver,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", mode)
        copy = copies(on_miss="error")
        with driver.capturing(7), pytest.raises(MissError):
            copy(100)
        assert "runs with" not in caplog.text
        calls = open_lookup(Settings.current()).store.calls()
        assert len(calls) == (mode == "record"), "the call is noted first"
        with pytest.raises(MissError):
            safetune.prepare(copy, 100)

    def test_inline_is_not_tuned_either_and_has_no_store(
        self,
        copies: type[Copies],
        driver: Driver,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("SAFETUNE_CACHE_DIR", str(tmp_path / "never made"))
        copy = copies(isolation="inline", do_bench=_never)
        with driver.capturing(7), warned():
            assert copy(100) == 16
        assert not (tmp_path / "never made").exists()

    def test_one_config_left_by_pruning_needs_no_choice(
        self, copies: type[Copies], driver: Driver
    ) -> None:
        def last(configs: list[Any], named: Any, **_: Any) -> list[Any]:
            return configs[-1:]

        with driver.capturing(7), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert copies(prune_configs_by={"early_config_prune": last})(100) == 64


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (0, 0, 0),
        (0, 1, 42),
        (0, 2, -1),  # the capture has become invalid
        (906, 0, -1),  # the legacy stream, beside a capture that it would disturb
        (3, 1, 0),  # CUDA is not initialised
        (201, 1, 0),  # this thread has no context
    ],
)
def test_the_capture_of_a_stream_is_the_drivers_answer(
    error: int, status: int, expected: int
) -> None:
    class Library:
        def cuStreamGetCaptureInfo_v2(
            self, stream: ctypes.c_void_p, state: Any, number: Any, *optional: None
        ) -> int:
            assert stream.value == 0x1234
            assert optional == (None, None, None)
            state._obj.value, number._obj.value = status, 42
            return error

    assert Cuda(cuda_driver.Driver(Library())).capture_id(0x1234) == expected


def test_without_a_device_nothing_is_captured() -> None:
    assert backend.capture_under_way() == 0


def _capture_each(numbers: Iterable[int], copy: Copies, driver: Driver) -> None:
    for number in numbers:
        with driver.capturing(number):
            copy(100)


def _waits(thread: threading.Thread, gate: Gate) -> bool:
    """Run a thread to its end; whether it was only done once the gate had opened."""
    thread.start()
    thread.join(WAITED_S)
    waited = thread.is_alive()
    gate.open()
    thread.join(SOON_S)
    return waited


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("this must not be called")
