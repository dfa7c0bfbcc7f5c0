"""What a tuning in a program tells: a line on a terminal, the log, and Triton's print knob."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import safetune
from safetune.miss import reporting
from safetune.miss.how_far import HowFar
from safetune.miss.progress import Bar
from safetune.miss.resolve import Miss
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from safetune.tuning.requests import Phases, Progress, TuningRequest
from safetune.tuning.tuner import tune
from tests.cli.conftest import Terminal

SOON_S = 60.0

SCRIPT = """
import os, sys
import torch, triton, triton.language as tl
from safetune import safetune

@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)

gate, at_once = sys.argv[1:]
if at_once == "True":
    from safetune.miss import progress, reporting
    progress.DELAY_S = reporting.FIRST_S = 0.0
    reporting.EVERY_S = 0.02
caller = os.getpid()

def fail(arguments):
    if os.getpid() != caller:
        os.abort()

def wait(arguments):
    if os.getpid() != caller and gate != "none":
        with open(gate) as file:
            file.read()

hooks = [None, fail, wait]
configs = [triton.Config({"BLOCK": 16 << i}, pre_hook=hook) for i, hook in enumerate(hooks)]
src, dst = torch.randn(100), torch.zeros(100)
tuner = safetune(configs=configs, key=["n"], run_timeout_s=1000.0)(copy_kernel)
tuner[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](dst, src, 100)
sys.stderr.write("the program goes on\\n")
"""


@pytest.fixture(autouse=True)
def programs_level() -> Iterator[None]:
    """The level of the log again, which SAFETUNE_LOG sets."""
    yield
    logging.getLogger("safetune").setLevel(logging.NOTSET)


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def run(tmp_path: Path, terminal: Terminal) -> Callable[..., Any]:
    """Start the script with its standard error on the terminal."""
    script = tmp_path / "program.py"
    script.write_text(SCRIPT)

    def start(
        env: dict[str, str], gate: object = "none", at_once: bool = False, **changes: Any
    ) -> Any:
        root = str(Path(safetune.__file__).parents[1])
        outputs = {"stdout": subprocess.PIPE, "stderr": terminal.theirs, **changes}
        return subprocess.Popen(
            [sys.executable, str(script), str(gate), str(at_once)],
            env={**os.environ, "PYTHONPATH": root, "TERM": "xterm-256color", **env},
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **outputs,
        )

    return start


def test_a_line_on_a_terminal_that_goes_again(run: Any, terminal: Terminal, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    terminal.resize(80)
    process = run({}, gate)

    line = terminal.wait_for("copy_kernel", "2/3 1 failed")

    assert re.match(
        r"copy_kernel [━╸╺ ]{10} 2/3 1 failed best [\d.]+ [mu]?s \(1.0x\) 0:\d\d < 0:\d\d n=100",
        line,
    ), line
    assert len(line) <= 80
    writer = os.open(gate, os.O_WRONLY)
    gate.unlink()
    gate.touch()
    os.close(writer)
    stdout, _ = process.communicate(timeout=SOON_S)
    assert process.returncode == 0
    assert stdout == ""
    terminal.read_to_the_end()
    *_, summary, last, empty = terminal.lines
    assert summary.startswith("safetune: copy_kernel tuned for n=100 (float32) in "), summary
    assert (last, empty) == ("the program goes on", "")
    assert b"\x1b[2K" in terminal._shown, "the line is removed"


KEY = "M=160, N=160, K=160 (float32)"
FAR = HowFar("matmul_kernel", 7, 12, 2, 239.0, 502.0, 16.2, 9.4, KEY, "measures BLOCK=64")
BEGUN = HowFar("matmul_kernel", 0, 12, seconds=3.0, key=KEY, doing="waits for process 7")

#: What a terminal with these columns shows.
SHOWN = {
    60: (
        "matmul_ke… ━━━━    7/12 2 failed 239 ms (2.1x) 0:16 < 0:09 …",
        "matmul_kernel         0/12   0:03 waits for process 7, M=16…",
    ),
    80: (
        "matmul_kernel ━━━━━╸     7/12 2 failed best 239 ms (2.1x) 0:16 < 0:09 M=160, N=…",
        "matmul_kernel            0/12   0:03 waits for process 7, M=160, N=160, K=160 (…",
    ),
    120: (
        "matmul_kernel ━━━━━━━━╸       7/12 2 failed best 239 ms (2.1x) 0:16 < 0:09 "
        "M=160, N=160, K=160 (float32), measures BLOC…",
        "matmul_kernel                 0/12   0:03 "
        "waits for process 7, M=160, N=160, K=160 (float32)",
    ),
}


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_line_fits_and_the_key_is_what_gets_cut(columns: int) -> None:
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    for far in (FAR, BEGUN):
        bar = Bar(lambda far=far: far, console=console, auto_refresh=False)
        console.print(*bar.get_renderables())
    lines = console.file.getvalue().splitlines()
    assert tuple(line.rstrip() for line in lines) == SHOWN[columns]


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        pytest.param({}, {"stderr": subprocess.PIPE}, id="a pipe"),
        pytest.param({"TERM": "dumb"}, {}, id="a dumb terminal", marks=pytest.mark.full),
    ],
)
def test_lines_where_no_line_can_be_shown(
    env: dict[str, str], changes: Any, run: Any, terminal: Terminal, tmp_path: Path
) -> None:
    """How far the tuning is, which config crashed, and at its end what came of it."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    process = run(env, gate, at_once=True, **changes)
    if changes:
        seen = iter(process.stderr.readline, "")
        line = next(line for line in seen if "measures BLOCK=64 " in line)
    else:
        line = terminal.wait_for("2/3, 1 failed", "measures BLOCK=64 ")
    writer = os.open(gate, os.O_WRONLY)
    gate.unlink()
    gate.touch()
    os.close(writer)
    _, stderr = process.communicate(timeout=SOON_S)
    terminal.read_to_the_end()
    *_, last, own = (stderr or "\n".join(terminal.lines)).split("\n")[:-1]

    assert own == "the program goes on"
    assert re.match(
        r"safetune: tuning copy_kernel 2/3, 1 failed, best [\d.]+ [mu]?s \(1.0x\), "
        r"0:\d\d < 0:\d\d, n=100 \(float32\), measures BLOCK=64 ",
        line,
    ), line
    assert re.fullmatch(
        r"safetune: copy_kernel tuned for n=100 \(float32\) in [\d.]+ s: BLOCK=\d+ num_warps=4 "
        r"num_stages=3 \([\d.]+ [mu]?s\); 3 of 3 configs measured, failed: 1 died",
        last,
    ), last


class Ended(threading.Event):
    """The end of a tuning that has a few lines before; it notes how long it is waited for."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._lines = lines

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return len(self.waits) > self._lines


@pytest.fixture
def request_(copies: Any) -> TuningRequest:
    """A tuning of two configs."""
    arguments = (torch.zeros(100), torch.zeros(100), 100)
    return Miss(copies(None, None).tuner, arguments, {"FLAG": 0, "grid": (1,)}).request()


@pytest.mark.parametrize(
    ("env", "speaks"),
    [
        ({}, True),
        ({"SAFETUNE_LOG": "quiet"}, False),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, True),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, False),
    ],
    ids=["alone", "quiet", "the first rank of a node", "another rank"],
)
def test_which_process_tells_of_a_long_tuning(
    env: dict[str, str],
    speaks: bool,
    request_: TuningRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    store = open_lookup(Settings.current()).store
    result = tune(request_, store)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    Settings.current()
    tally = reporting.Tally(request_)
    with reporting.showing(tally.how_far, ended=Ended(1)):
        pass
    for seconds in (9.99, 10.0):
        reporting.tell_result(request_, replace(result, phases={"measure": seconds}))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 * speaks, lines
    assert not speaks or " in 10.00 s: BLOCK=" in lines[1]


@pytest.mark.parametrize(
    ("options", "log", "begins"),
    [({}, "", True), ({"quiet": True}, "", False), ({}, "quiet", False)],
    ids=["in the way of the program", "in the background", "quiet"],
)
def test_which_tuning_tells_how_far_it_is(
    options: dict[str, bool],
    log: str,
    begins: bool,
    request_: TuningRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SAFETUNE_LOG", log)
    store = open_lookup(Settings.current()).store
    with reporting.observing(request_, store, **options):
        threads = [thread.name for thread in threading.enumerate()]
    assert ("safetune-progress" in threads) == begins


def test_the_first_line_comes_after_ten_seconds_and_then_one_every_thirty(
    request_: TuningRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an event in place of the clock: it says how long it is asked to wait."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    ended = Ended(3)
    now = iter([0.0, 10.0, 40.0, 70.0])
    tally = reporting.Tally(request_, clock=lambda: next(now))
    with reporting.showing(tally.how_far, ended=ended):
        pass
    assert ended.waits == [10.0, 30.0, 30.0, 30.0]
    assert capsys.readouterr().err.splitlines() == [
        f"safetune: tuning copy_kernel 0/2, {passed}, n=100 (float32)"
        for passed in ("0:10", "0:40", "1:10")
    ]


def test_a_line_of_text_is_short_and_ends_with_the_whole_config() -> None:
    """With the names of FLA and of vLLM: the config that hangs is the one that must be seen."""
    key = "H=8, HV=16, K=128, V=256, BT=64, USE_G=True, STATE_V_FIRST=False (bfloat16/float32)"
    config = "BLOCK_SIZE_M=128 BLOCK_SIZE_N=128 BLOCK_SIZE_K=64 GROUP_SIZE_M=8 num_warps=8"
    name = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
    far = HowFar(name, 31, 72, 2, 1.0, 2.1, 40.0, 53.0, key, f"measures {config}")

    line = f"safetune: tuning {far}"

    assert line.endswith(f" 0:40 < 0:53, {key[:59]}…, measures {config}")
    assert len(line) < 280


def test_a_choice_from_stored_trials_is_not_told_as_a_tuning(
    copies: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A shorter list of configs, all of which were measured for the longer one."""
    copies(None, None, None)()
    caplog.set_level(logging.INFO, logger="safetune")
    block = copies(None, None)()
    (text,) = caplog.messages
    chosen = rf"BLOCK={block} num_warps=4 num_stages=3 \([\d.]+ \wm?s\)"
    told = rf"copy_kernel for n=100 \(float32\): {chosen}; chosen from stored trials, none measured"
    assert re.fullmatch(told, text), text


def test_a_line_says_what_the_tuning_waits_for(request_: TuningRequest) -> None:
    phases = Phases("lookup")
    tally = reporting.Tally(request_, phases)
    said = []
    for phase in ("wait", "compile", "start", "measure"):
        phases.enter(phase)
        said.append(tally.doing)
    tally(Progress("copy_kernel", "screen", request_.configs[1], None, 1, 2))
    said.append(tally.doing)
    tally.wait_for("process 7, which compiles")
    said.append(tally.doing)
    assert said == [
        "waits for its turn",
        "waits for the compiler",
        "waits for a measuring process",
        "",
        "measures BLOCK=32 num_warps=4 num_stages=3",
        "waits for process 7, which compiles",
    ]


def test_no_line_for_a_short_tuning(
    run: Any, terminal: Terminal, copies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, whose server runs already: a tuning takes a fraction of the delay."""
    stderr = os.fdopen(os.dup(terminal.theirs), "w")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", stderr)
    made = copies(None, None)
    made(100)
    made(101)
    stderr.close()
    terminal.read_to_the_end()
    assert terminal.lines == [""]


def test_the_print_knob_has_the_terminal_to_itself(
    run: Any, terminal: Terminal, tmp_path: Path
) -> None:
    process = run({"TRITON_PRINT_AUTOTUNING": "1"}, at_once=True)
    stdout, _ = process.communicate(timeout=SOON_S)
    assert stdout.count("Autotuning kernel copy_kernel with config BLOCK") == 3
    assert "best config selected: BLOCK: " in stdout
    terminal.read_to_the_end()
    assert terminal.lines == ["the program goes on", ""]


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "replaced"])
def test_a_standard_error_that_only_writes(
    copies: Any, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """As where a program sends its output to a logger, or has become a daemon."""
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if closed else SimpleNamespace(write=len))
    assert copies(None, None)() in (16, 32)


def test_the_log(copies: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fails(arguments: dict[str, Any]) -> None:
        if os.getpid() != caller:
            raise ValueError("on purpose")

    caller = os.getpid()
    caplog.set_level(logging.DEBUG, logger="safetune")
    made = copies(fails, None, fails)
    made()

    infos = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    (text,) = infos
    assert text.startswith("copy_kernel tuned for n=100 (float32) in ")
    assert " s: BLOCK=32 num_warps=4 num_stages=3 (" in text
    assert "s); 3 of 3 configs measured, " in text
    assert text.endswith("failed: 2 launch_error")
    debugs = [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]
    assert len(debugs) == 3
    assert debugs[0].startswith("copy_kernel: screen: BLOCK=16 num_warps=4 num_stages=3 launch_err")
    assert debugs[0].endswith(": on purpose")
    assert debugs[1].endswith(" ms")

    caplog.clear()
    caplog.set_level(logging.INFO, logger="safetune")
    made(101)
    assert {r.levelno for r in caplog.records} == {logging.INFO}


def test_a_choice_of_another_process_is_not_told_as_a_tuning(
    request_: TuningRequest, copies: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_lookup(Settings.current()).store
    tune(request_, store)
    result = tune(request_, store)  # finds the choice when it has the lock
    caplog.set_level(logging.INFO, logger="safetune")
    reporting.tell_result(request_, result)
    (text,) = caplog.messages
    assert text.startswith(
        "copy_kernel uses the choice of another process for n=100 (float32) after 0.0"
    )


def test_a_kernel_says_its_key_its_configs_and_its_choices(
    copies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = copies(None, None, key=["n", "FLAG"])
    texts = [repr(made.tuner)]
    made(100)
    texts.append(repr(made.tuner))
    monkeypatch.setenv("SAFETUNE_MODE", "frozen")
    made(101)
    texts.append(repr(made.tuner))
    kernel = "<safetune kernel copy_kernel, key="
    assert texts == [
        f"{kernel}['n', 'FLAG'], 2 configs, 0 keys with a choice>",
        f"{kernel}['n', 'FLAG'], 2 configs, 1 key with a choice>",
        f"{kernel}['n', 'FLAG'], 2 configs, 1 key with a choice and 1 without>",
    ]
