"""How far a sweep is: what the one line says, and that plain lines come without a terminal."""

from __future__ import annotations

import math
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from safetune.cli.display import Display, FleetDisplay, Place, Teller
from safetune.miss.reporting import Tally
from safetune.outcome import Outcome, Timing, Verdict
from safetune.tuning.requests import Limits, Progress
from tests.ready import is_ready

SOON_S = 60.0


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def plan(*new: int, most_s: float = math.inf) -> Any:
    """A plan of keys with these numbers of new configs."""
    return SimpleNamespace(tunings=new, new=sum(new), most_s=most_s)


def step(done: int, total: int, median_ms: float | None = None, block: int = 64) -> Progress:
    timing = None if median_ms is None else Timing(median_ms, median_ms, median_ms, 5, "screen")
    outcome = Outcome(Verdict.TIMEOUT if timing is None else Verdict.OK, timing=timing)
    return Progress("add", "screen", triton.Config({"BLOCK": block}), outcome, done, total)


def tally(count: int, clock: Clock) -> Tally:
    request: Any = SimpleNamespace(configs=range(count), limits=Limits())
    return Tally(request, clock=clock)


def test_the_line_has_key_configs_failures_best_rate_and_time_left() -> None:
    clock = Clock()
    display = Display(plan(4, 8), hidden=True, clock=clock)
    display.begin("add small float32")
    clock.now += 1
    assert display.rows(", ")[0] == "1/2 add small float32", "nothing is known yet"
    first = tally(4, clock)
    display.watch(first)
    for done, median_ms in enumerate((3.0, None, 0.5, 2.0), 1):
        first(step(done, 4, median_ms, block=16 << done))
    clock.now += 1

    assert display.rows(", ")[0] == (
        "1/2 add small float32, 4/4, 1 failed, best 0.5 ms, 1 s, 2 configs/s, about 4 s left, "
        "measures BLOCK=256 num_warps=4 num_stages=3"
    )
    first.wait_for("process 7")
    assert display.rows(", ")[0].endswith(", waits for process 7")

    display.begin("add large float32")
    second = tally(8, clock)
    display.watch(second)
    clock.now += 2
    second(step(4, 8, 7.0))
    assert display.rows(", ")[0].startswith(
        "2/2 add large float32, 4/8, 0 failed, best 7 ms, 2 s, 2 configs/s, about 2 s left, "
    )
    second(step(9, 8, 7.0))
    assert "8/8" in display.rows(", ")[0], "those of the final were counted"
    assert "about 0 s left" in display.rows(", ")[0]


def test_no_more_time_is_left_than_the_command_has() -> None:
    clock = Clock()
    display = Display(plan(4, 8, most_s=5.0), hidden=True, clock=clock)
    display.begin("add small float32")
    first = tally(4, clock)
    display.watch(first)
    clock.now += 2
    first(step(1, 4, 3.0))
    assert "about 3 s left" in display.rows(", ")[0], "not 22 s"


def test_without_a_terminal_there_are_plain_lines_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stderr", open(writer, "w", buffering=1))  # noqa: SIM115
    with Display(plan(4), pauses_s=(0.01, 0.01)) as display:
        display.begin("add small float32")
        begun = tally(4, Clock())
        display.watch(begun)
        begun(step(1, 4, 2.0))
        assert is_ready(reader, SOON_S), "no line came"
        lines = os.read(reader, 65536).decode()
    assert lines.startswith("safetune: 1/1 add small float32, 1/4, 0 failed, best 2 ms, ")
    assert "\x1b" not in lines
    sys.stderr.close()
    os.close(reader)


@pytest.mark.parametrize("hidden", [True, False])
def test_a_short_sweep_prints_nothing(capsys: pytest.CaptureFixture[str], hidden: bool) -> None:
    with Display(plan(4), hidden=hidden) as display:
        display.begin("add small float32")
        display.watch(tally(4, Clock()))
    assert capsys.readouterr().err == ""


def test_a_sweep_of_several_processes_has_a_line_for_each_and_one_for_all() -> None:
    clock = Clock()
    display = FleetDisplay(hidden=True, clock=clock)
    display.take("GPU 0", {})
    assert display.rows(", ") == [], "it is not known yet what there is to do"
    for name in ("GPU 0", "GPU 1", "GPU 2"):
        display.take(name, {"planned": 3, "new": 24, "left_out": []})
    display.take("GPU 0", {"at": vars(Place(6, ["add small", "2/8", "1 failed"], "compares A"))})
    display.take("GPU 1", {"at": vars(Place(0, ["add large"], "waits for its turn"))})
    display.take("GPU 2", {"at": vars(Place(2, [""]))})
    display.take("GPU 0", {"facts": {"key": "k", "shape": "tiny", "dtype": "float32"}})
    clock.now += 4
    assert display.rows(", ") == [
        "1/3 tunings, 8/24 configs, 2 configs/s, about 8 s left",
        "GPU 0: add small, 2/8, 1 failed, compares A",
        "GPU 1: add large, waits for its turn",
        "GPU 2: waits for the others",
    ]
    display.take("GPU 0", {"dropped": "its process ended with exit code 2"})
    assert "GPU 0: dropped out" in display.rows(", ")
    assert display.rows(", ")[0].startswith("1/3 tunings, 8/24 configs"), "what it did is stored"


def test_several_processes_have_no_more_time_left_than_their_budget() -> None:
    clock = Clock()
    display = FleetDisplay(hidden=True, clock=clock, most_s=10.0)
    display.take("GPU 0", {"planned": 1, "new": 100, "left_out": []})
    display.take("GPU 0", {"at": vars(Place(2, ["add small"]))})
    clock.now += 4
    assert display.rows(", ")[0].endswith("0.5 configs/s, about 6 s left")


def test_a_worker_tells_what_has_changed_and_ends_where_nothing_happens() -> None:
    clock, told, ended = Clock(), list[Any](), list[float]()
    display = Display(plan(4), hidden=True, clock=clock)
    teller = Teller(display, told.append, ended.append, clock)
    clock.now += 10_000
    teller.look()
    teller.look()
    display.begin("add small float32")
    begun = tally(4, clock)
    display.watch(begun)
    begun(step(1, 4, 2.0))
    teller.look()
    assert [event["at"]["steps"] for event in told] == [
        [""],
        ["add small float32", "1/4", "0 failed", "best 2 ms", "0 s"],
    ]
    clock.now += display.stuck_after_s
    teller.look()
    assert ended == [], "a config may take that much time"
    begun.wait_for("process 7")
    count, clock.now = len(told), clock.now + 10
    teller.look()
    assert len(told) == count + 1, "a worker that waits is not silent"
    assert ended == [], "another process may take any time"
    begun.wait_for("")
    teller.look()
    assert ended == [display.stuck_after_s + 10]
