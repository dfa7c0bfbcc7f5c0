"""How far a sweep is: what the one line says. tests/miss/test_progress.py shows it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton

from safetune.cli.display import Sweep
from safetune.miss.reporting import Tally
from safetune.outcome import Outcome, Timing, Verdict, duration
from safetune.tuning.requests import Limits, Progress
from tests.cli.conftest import DEADLINE_S, Fifo, Start, Terminal


class Clock:
    """Seconds that pass when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def sweep(clock: Clock, *new: int, most_s: float = math.inf) -> Sweep:
    """A sweep of keys with these numbers of new configs."""
    made = Sweep(most_s, clock)
    made.take({"plan": {str(number): (1, count) for number, count in enumerate(new)}})
    return made


def step(config: triton.Config, done: int, total: int, median_ms: float | None) -> Progress:
    timing = None if median_ms is None else Timing(median_ms, median_ms, median_ms, 5, "screen")
    outcome = Outcome(Verdict.TIMEOUT if timing is None else Verdict.OK, timing=timing)
    return Progress("add", "screen", config, outcome, done, total)


def tally(count: int, clock: Clock) -> Tally:
    configs = [triton.Config({"BLOCK": 16 << place}) for place in range(count)]
    request: Any = SimpleNamespace(configs=configs, limits=Limits())
    return Tally(request, clock=clock)


def line(sweep: Sweep) -> str:
    return str(sweep.how_far())


def try_one(of: Tally, done: int, total: int, median_ms: float | None) -> None:
    of(step(of.request.configs[min(done, total) - 1], done, total, median_ms))


def test_the_line_has_the_whole_sweep_and_the_best_of_the_tuning_under_way() -> None:
    clock = Clock()
    both = sweep(clock, 4, 8)
    assert line(both) == "0/2 tunings 0/12, 0:00"
    both.begin("add", "small float32")
    clock.now += 1
    assert line(both) == "1/2 add 0/12, 0:01, small float32", "nothing is known yet"
    first = tally(4, clock)
    both.watch(first)
    for done, median_ms in enumerate((3.0, None, 0.5, 2.0), 1):
        try_one(first, done, 4, median_ms)
    clock.now += 1

    begun = "1/2 add 4/12, 1 failed, best 0.5 ms (6.0x), 0:02 < 0:04, small float32, "
    assert line(both) == f"{begun}measures BLOCK=128 num_warps=4 num_stages=3"
    first.wait_for("process 7")
    assert line(both) == f"{begun}waits for process 7"

    both.end()
    both.begin("add", "large float32")
    second = tally(8, clock)
    both.watch(second)
    clock.now += 2
    try_one(second, 4, 8, 7.0)
    assert line(both).startswith(
        "2/2 add 8/12, 1 failed, best 7 ms, 0:04 < 0:02, large float32, measures "
    ), "the first config of this one has no time yet"
    try_one(second, 9, 8, 7.0)
    assert "12/12" in line(both), "those of the final were counted"
    assert "0:04 < 0:00" in line(both)
    both.end()
    assert line(both) == "2/2 tunings 12/12, 1 failed, 0:04 < 0:00"


def test_no_more_time_is_left_than_the_command_has() -> None:
    clock = Clock()
    both = sweep(clock, 4, 8, most_s=5.0)
    both.begin("add", "small float32")
    first = tally(4, clock)
    both.watch(first)
    clock.now += 2
    try_one(first, 1, 4, 3.0)
    assert "0:02 < 0:03" in line(both), "not 22 s"


def test_several_processes_have_one_line_for_all() -> None:
    clock = Clock()
    fleet = Sweep(clock=clock)
    fleet.take({"tried": 0, "failed": 0}, "GPU 0")
    assert fleet.how_far() is None, "it is not known yet what there is to do"
    fleet.take({"plan": {"a": [1, 8], "b": [2, 16]}, "left_out": []}, "GPU 0")
    fleet.take({"plan": {"a": [1, 2], "b": [2, 16]}, "left_out": []}, "GPU 1")
    fleet.take({"tried": 6, "failed": 1}, "GPU 0")
    fleet.take({"tried": 1, "failed": 1}, "GPU 1")
    fleet.take({"tried": 2, "failed": 1}, "GPU 1")
    fleet.take({"facts": {"key": "a", "shape": "tiny", "dtype": "float32"}}, "GPU 0")
    clock.now += 4
    words = "1/3 tunings 8/24, 2 failed, 0:04 < 0:08"
    assert line(fleet) == words, "the later plan had found six configs stored"
    fleet.take({"dropped": "its process ended with exit code 2"}, "GPU 0")
    assert line(fleet) == words, "what it did is stored"
    fleet.take({"plan": {"c": [1, 4]}}, "GPU 2")
    assert line(fleet).startswith("1/4 tunings 8/28"), "another GPU has keys of its own"


def test_the_live_line(
    safetune: Any, start: Start, terminal: Terminal, fifo: Fifo, targets: Path
) -> None:
    """While the last of five configs runs: one has failed, and the best of three times is shown."""
    target = targets / "sweep.py"
    env = {**fifo.env, "TERM": "xterm-256color", "COLUMNS": "200"}
    process = start("tune", target, "--shape", "second", env=env, terminal=terminal.theirs)
    fifo.pids()

    line = terminal.wait_for("measures BLOCK=256 ")

    assert line.startswith("1/1 add_one ━")
    assert " 4/5 1 failed best " in line
    stored = [trial["timing"] for trial in safetune.json("show", "add_one")]
    medians = [timing["median_ms"] for timing in stored if timing is not None]
    assert len(medians) == 3
    assert f" best {duration(min(medians))} (" in line
    fifo.let_go()
    assert process.wait(DEADLINE_S) == 0
    terminal.read_to_the_end()
    shown = terminal.lines
    assert [each.split()[0] for each in shown if "over median" in each] == ["shape"]
    assert shown[-2:] == ["1 tuning, 5 configs measured", ""]
