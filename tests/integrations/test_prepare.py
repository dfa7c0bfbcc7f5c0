"""`safetune.prepare`: afterwards a capture of the same call does nothing but launch."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import safetune
from safetune import CaptureError, NoWorkingConfig, TuningWarning
from safetune.errors import TooMuchPinned
from safetune.frontend import observers
from safetune.integrations.graph import Watch
from safetune.miss import background
from tests.conftest import stop_servers

if TYPE_CHECKING:
    from tests.capturing import Copies, Driver, Gate

#: For anything that should happen soon; far more than it takes on a loaded machine.
SOON_S = 60.0


def test_it_reports_keys_and_tunings(copies: type[Copies], tried: Callable[[], list[str]]) -> None:
    copy, single = copies(fastest=32), copies(None)

    def step(*sizes: int, twice: bool) -> None:
        for n in sizes * (1 + twice):
            copy(n)
        single(5)

    report = safetune.prepare(step, 100, 200, twice=True)
    assert [(key.kernel, key.key, key.settled) for key in report.keys] == [
        ("copy_kernel", "n=100 (float32)", True),
        ("copy_kernel", "n=200 (float32)", True),
        ("copy_kernel", "n=5 (float32)", True),
    ]
    assert [key.config.partition(" ")[0] for key in report.keys] == [
        "BLOCK=32",
        "BLOCK=32",
        "BLOCK=16",
    ]
    assert (report.tunings, report.unsettled) == (2, ())
    assert tried() == ["ok"] * 6

    assert safetune.prepare(step, 100, 200, twice=False).tunings == 0


def test_a_call_with_too_much_pinned_memory_is_not_tuned_in_this_process(
    copies: type[Copies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter pins nothing, so a stand-in says how much it is."""

    def refuse(*_: object, **__: object) -> None:
        raise TooMuchPinned("x: 8 GiB of pinned host memory")

    monkeypatch.setattr("safetune.tuning.tuner.tune", refuse)
    copy = copies()
    with pytest.warns(TuningWarning, match="x: 8 GiB of pinned host memory"):
        safetune.prepare(copy, 100)
    assert not vars(copy.tuner).get("configs_timings")


def test_a_capture_afterwards_only_launches(copies: type[Copies], driver: Driver) -> None:
    copy = copies()
    safetune.prepare(copy, 100)
    with driver.capturing(7), warnings.catch_warnings(), Watch() as watch:
        warnings.simplefilter("error")
        watch.begin()
        copy(100)
    assert watch.report.misses == ()


def test_launches_of_other_threads_count(copies: type[Copies]) -> None:
    """As autograd's do."""
    copy = copies()

    def step() -> None:
        thread = threading.Thread(target=copy, args=(100,))
        thread.start()
        thread.join(SOON_S)

    assert [key.key for key in safetune.prepare(step).keys] == ["n=100 (float32)"]


def test_it_names_the_graphs_to_capture_again(copies: type[Copies], driver: Driver) -> None:
    copy = copies(fastest=32)
    with driver.capturing(7), pytest.warns(UserWarning, match="has no choice"):
        copy(100)
    (miss,) = safetune.prepare(copy, 100).recapture
    assert (miss.graph, miss.key) == ("capture 7", "n=100 (float32)")


class TestBackground:
    @pytest.fixture(autouse=True)
    def _in_background(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SAFETUNE_MODE", "background")

    def test_it_tunes_at_once(self, copies: type[Copies], tried: Callable[[], list[str]]) -> None:
        report = safetune.prepare(copies(fastest=32), 100)
        assert [key.config[:8] for key in report.keys] == ["BLOCK=32"]
        assert tried() == ["ok"] * 3
        assert background._worker.jobs == []

    def test_it_waits_for_a_tuning_under_way_and_launches_its_choice(
        self, copies: type[Copies], gate: Gate
    ) -> None:
        copy = copies(gate.hook(), None, fastest=32)
        assert copy(100) == 16
        gate.reached()
        launched: list[int] = []

        def step() -> None:
            launched.append(copy(100))
            gate.open()

        report = safetune.prepare(step)
        assert launched == [16, 32]
        assert [(key.config[:8], key.settled) for key in report.keys] == [("BLOCK=32", True)]


def test_a_key_that_cannot_be_tuned_now_is_named(
    copies: type[Copies], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_servers()
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.warns(UserWarning, match="is not tuned for n=100"):
        report = safetune.prepare(copies(), 100)
    assert [key.key for key in report.unsettled] == ["n=100 (float32)"]


def test_no_measuring_process_is_left(copies: type[Copies]) -> None:
    """Not for its two seconds either: its context is memory that the caller may be counting."""
    safetune.prepare(copies(), 100)
    assert _children_of_servers("torch") == []


def test_an_exception_is_the_function_s_own(copies: type[Copies]) -> None:
    with pytest.raises(NoWorkingConfig):
        safetune.prepare(copies(_fail, _fail), 100)
    assert observers.active == ()


def test_prepare_is_refused_under_capture(copies: type[Copies], driver: Driver) -> None:
    with driver.capturing(7), pytest.raises(CaptureError, match="call it before"):
        safetune.prepare(copies(), 100)


def _fail(arguments: dict[str, Any]) -> None:
    raise ValueError("of a hook")


def _children_of_servers(imported: str) -> list[int]:
    """The processes forked by this process's fork servers that imported a module."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if state not in "ZX":
            parents[int(folder.name)], commands[int(folder.name)] = int(parent), command
    wanted = b"worker_main", imported.encode()
    return [
        pid
        for pid, parent in parents.items()
        if parents.get(parent) == os.getpid() and all(word in commands[parent] for word in wanted)
    ]
