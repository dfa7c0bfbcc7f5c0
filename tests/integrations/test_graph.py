"""`safetune.graph` without a GPU: what it counts, what it says, and when it takes too long.

The capture itself, which torch only does on a GPU, is in `tests/gpu/test_capture.py`.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

import safetune
from safetune.integrations.graph import Watch, unmasked

if TYPE_CHECKING:
    from tests.capturing import Copies, Driver

#: For anything that should happen soon; far more than it takes on a loaded machine.
SOON_S = 60.0


class TestCounts:
    def test_misses_are_summed_up_in_one_warning(
        self, copies: type[Copies], driver: Driver
    ) -> None:
        one, other = copies(), copies(on_miss="fallback")
        watch = Watch("decode")
        with driver.capturing(7), pytest.warns(UserWarning, match="decode") as caught:
            _watched(watch, lambda: (one(100), one(200), other(100)))
        (warning,) = caught
        assert "decode had 3 keys without a choice (copy_kernel for n=100" in str(warning.message)
        assert [miss.graph for miss in watch.report.misses] == ["decode"] * 3
        assert watch.report.tunings == 0
        assert watch.report.outdated == ()

    def test_the_report_says_when_to_capture_again(
        self, copies: type[Copies], driver: Driver
    ) -> None:
        copy = copies(fastest=32)
        watch = Watch("decode")
        with driver.capturing(7), pytest.warns(UserWarning, match="decode"):
            _watched(watch, lambda: copy(100))
        report = watch.report
        copy(100)
        assert watch.report == report, "it is of the capture, and over"
        (miss,) = report.outdated
        assert miss.config.kwargs["BLOCK"] == 16

    def test_nothing_to_say_of_a_capture_that_only_launches(
        self, copies: type[Copies], driver: Driver
    ) -> None:
        copy = copies()
        copy(100)
        watch = Watch()
        with driver.capturing(7), warnings.catch_warnings():
            warnings.simplefilter("error")
            _watched(watch, lambda: copy(100))
        assert watch.report.misses == ()

    def test_a_tuning_of_another_thread_counts(self, copies: type[Copies], driver: Driver) -> None:
        copy = copies()

        def elsewhere() -> None:
            thread = threading.Thread(target=copy, args=(100,))
            thread.start()
            thread.join(SOON_S)

        watch = Watch("decode")
        with driver.capturing(7), pytest.warns(UserWarning, match="1 tuning and"):
            _watched(watch, elsewhere)
        assert watch.report.misses == ()

    def test_misses_of_another_capture_do_not(self, copies: type[Copies], driver: Driver) -> None:
        copy = copies()
        with driver.capturing(6), pytest.warns(UserWarning, match="has no choice"):
            copy(100)
        watch = Watch("decode")
        with driver.capturing(7), warnings.catch_warnings():
            warnings.simplefilter("error")
            _watched(watch, lambda: None)
        assert watch.report.misses == ()


class TestExceptions:
    def test_the_body_s_comes_through_where_warnings_are_errors(
        self, copies: type[Copies], driver: Driver, caplog: pytest.LogCaptureFixture
    ) -> None:
        copy = copies()

        def fail() -> None:
            copy(100)
            raise KeyError("the body's")

        watch = Watch("decode")
        with driver.capturing(7), warnings.catch_warnings(), pytest.raises(KeyError, match="body"):
            warnings.simplefilter("error")
            _watched(watch, fail)
        assert len(watch.report.misses) == 1
        assert "decode had 1 key without a choice" in caplog.text

    def test_the_body_s_comes_through_where_the_capture_cannot_be_ended(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(KeyError, match="body"), unmasked(_BadEnd()):
            raise KeyError("the body's")
        assert "the end's" in caplog.text

    def test_the_end_s_own_comes_through(self) -> None:
        with pytest.raises(RuntimeError, match="the end's"), unmasked(_BadEnd()):
            pass

    def test_graph_without_a_gpu_says_so(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("there is one")
        with pytest.raises(safetune.NoDevice, match="torch does not find"), safetune.graph(None):
            pass

    @pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "30"])
    def test_a_watchdog_that_means_nothing(self, seconds: Any) -> None:
        with pytest.raises(safetune.InvalidSetting, match="None turns it off"):
            Watch(watchdog_s=seconds)

    def test_a_watchdog_that_never_wakes(self) -> None:
        assert Watch(watchdog_s=1e10)._watchdog.interval == threading.TIMEOUT_MAX


class _BadEnd:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("the end's")


class TestWatchdog:
    def test_it_shows_where_every_thread_is(
        self, driver: Driver, logged: Callable[[str], str]
    ) -> None:
        release = threading.Event()

        def a_function_that_blocks() -> None:
            release.wait(SOON_S)

        blocked = threading.Thread(target=a_function_that_blocks, name="the blocked one")
        blocked.start()
        with driver.capturing(7), Watch("decode", watchdog_s=0.01) as watch:
            watch.begin()
            text = logged("has taken more than")
        release.set()
        blocked.join(SOON_S)
        assert text.startswith("decode has taken more than 0.01 s")
        assert "thread the blocked one:" in text
        assert "a_function_that_blocks" in text
        assert "thread MainThread:" in text
        assert "test_it_shows_where_every_thread_is" in text

    def test_it_keeps_quiet_about_a_short_capture(
        self, driver: Driver, caplog: pytest.LogCaptureFixture
    ) -> None:
        with driver.capturing(7), Watch("decode", watchdog_s=SOON_S) as watch:
            watch.begin()
            (guard,) = [t for t in threading.enumerate() if t.name == "safetune-watchdog"]
        guard.join(SOON_S)
        assert not guard.is_alive()
        assert caplog.text == ""


@pytest.fixture
def logged() -> Iterator[Callable[[str], str]]:
    """A function that returns the first message, now or soon, that has a text."""
    messages: list[str] = []
    more = threading.Condition()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with more:
                messages.append(record.getMessage())
                more.notify_all()

    handler = Handler()
    logging.getLogger("safetune").addHandler(handler)

    def wait_for(text: str) -> str:
        with more:
            assert more.wait_for(lambda: any(text in message for message in messages), SOON_S)
            return next(message for message in messages if text in message)

    yield wait_for
    logging.getLogger("safetune").removeHandler(handler)


def _watched(watch: Watch, body: Callable[[], object]) -> None:
    with watch:
        watch.begin()
        body()
