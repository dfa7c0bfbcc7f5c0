"""One config of several misbehaves for real: it costs that config, and no other."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from safetune import NoWorkingConfig, safetune
from safetune.isolation import child_handle
from tests.conftest import stop_servers

N = 200
RUN_TIMEOUT_S = 5.0
GOOD, BAD, ALSO_GOOD = 64, 128, 256


@triton.jit
def step_kernel(x, y, n, BLOCK: tl.constexpr):
    """x += y: a launch on the caller's tensors that is one too many is seen."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask) + tl.load(y + offset, mask=mask)
    tl.store(x + offset, value, mask=mask)


@triton.jit
def body_kernel(x, y, n, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """`step_kernel`, misbehaving in the middle: the interpreter runs it as plain Python."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < n
    value = tl.load(x + offset, mask=mask) + tl.load(y + offset, mask=mask)
    tl.store(x + offset, value, mask=mask)
    if FAULT is not None:
        FAULTS[FAULT].act()


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@pytest.fixture(scope="module", autouse=True)
def servers_of_its_own() -> None:
    """The tests count them: here one is enough, where others compiled there are two."""
    stop_servers()


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock", threading.Lock())

    def __reduce__(self) -> Any:
        raise TypeError("never")


def segfault() -> None:
    print("about to read address zero", file=sys.stderr)
    ctypes.string_at(0)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(code: int) -> Callable[[], None]:
    def now() -> None:
        os._exit(code)

    return now


def throw(error: Callable[[], BaseException]) -> Callable[[], None]:
    def now() -> None:
        raise error()

    return now


def hang() -> None:
    print("going round", flush=True)
    while True:
        pass


def hang_with_the_gil() -> None:
    ctypes.PyDLL(None).sleep(1000)


def leave_a_grandchild() -> None:
    """Ends with a process of its own still running, whose pid is in its standard output."""
    grandchild = subprocess.Popen(["sleep", "1000"])
    print(f"grandchild {grandchild.pid}", flush=True)
    os.abort()


def leave_a_copy_with_the_pipe() -> None:
    """Ends, but a copy of it that was forked holds the pipe to the parent open."""
    copy = os.fork()
    if copy == 0:
        while True:
            signal.pause()
    print(f"grandchild {copy}", flush=True)
    os.abort()


def shout_and_leave() -> None:
    for _ in range(64):
        sys.stdout.write("o" * 65536)
        sys.stderr.write("e" * 65536)
    sys.stderr.write("\nthe last words\n")
    sys.stderr.flush()
    os._exit(7)


def pipes() -> list[int]:
    """Return this process's connected sockets: a child has one, the pipe to its parent."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def write_garbage() -> None:
    for fd in pipes():
        os.write(fd, b"\xff" * 512)


def write_text() -> None:
    for fd in pipes():
        os.write(fd, b"INFO: compiling kernel 1 of 1000\n")


def answer_no_object() -> None:
    for fd in pipes():
        os.write(fd, struct.pack("!IQ", 2, 0) + b"[]")


def answer_nonsense() -> None:
    text = b'{"verdict": "splendid", "timing": 3}'
    for fd in pipes():
        os.write(fd, struct.pack("!IQ", len(text), 0) + text)


def answer_by_half() -> None:
    """Half of an answer, and then it closes the pipe and goes on."""
    for fd in pipes():
        os.write(fd, struct.pack("!IQ", 100, 0) + b'{"verdict": "ok", ')
    close_everything()
    while True:
        signal.pause()


def leave_with_half_a_prefix() -> None:
    for fd in pipes():
        os.write(fd, b"\0\0\0")
    os._exit(0)


def close_everything() -> None:
    os.closerange(3, 1024)


@dataclass(frozen=True)
class Fault:
    act: Callable[[], object]
    label: str
    detail: str = ""
    message: str = ""
    stderr: str = ""


FAULTS = {
    "segfault": Fault(
        segfault, "died(SIGSEGV)", message="ended with SIGSEGV", stderr="about to read address zero"
    ),
    "abort": Fault(os.abort, "died(SIGABRT)", message="SIGABRT"),
    "kill": Fault(kill_itself, "died(SIGKILL)", message="SIGKILL"),
    "exit 0": Fault(leave(0), "died(exit code 0)", message="exit code 0"),
    "exit 3": Fault(leave(3), "died(exit code 3)", message="exit code 3"),
    "shouting": Fault(shout_and_leave, "died(exit code 7)", stderr="the last words"),
    "grandchild": Fault(leave_a_grandchild, "died(SIGABRT)", stderr="grandchild"),
    "forked copy": Fault(leave_a_copy_with_the_pipe, "died(SIGABRT)", stderr="grandchild"),
    "closed descriptors": Fault(close_everything, "died(exit code 1)"),
    "exception": Fault(
        throw(lambda: ValueError("a tile of 7 rows")), "launch_error", "ValueError", "a tile of 7"
    ),
    "no text": Fault(throw(AssertionError), "launch_error", "AssertionError", "AssertionError"),
    "unprintable": Fault(throw(UnprintableError), "launch_error", "UnprintableError"),
    "sys.exit": Fault(throw(lambda: SystemExit(3)), "launch_error", "SystemExit", "3"),
    "interrupt": Fault(throw(KeyboardInterrupt), "launch_error", "KeyboardInterrupt"),
    "unpicklable": Fault(
        throw(UnpicklableError), "launch_error", "UnpicklableError", "holds a lock"
    ),
    "registers": Fault(
        throw(lambda: OutOfResources(65600, 65536, "registers")),
        "out_of_resources",
        "OutOfResources",
        "registers, Required: 65600",
    ),
    "hang": Fault(hang, "timeout", message="5 s", stderr="going round"),
    "hang with the GIL": Fault(hang_with_the_gil, "timeout", message="5 s"),
    "stop": Fault(stop_itself, "timeout", message="5 s"),
    "garbage": Fault(write_garbage, "protocol_error", message="bytes is too large"),
    "text in the pipe": Fault(write_text, "protocol_error"),
    "no object": Fault(answer_no_object, "protocol_error", message="not a JSON object"),
    "nonsense": Fault(answer_nonsense, "protocol_error", message="splendid"),
    "half a message": Fault(
        answer_by_half, "protocol_error", message="closed after 30 bytes of a frame"
    ),
    "half a prefix": Fault(
        leave_with_half_a_prefix, "protocol_error", message="closed after 3 bytes of a frame"
    ),
}

#: The row of tests/faults/rows.py that each belongs to, where it has one.
ROWS = {
    "segfault": "segfault",
    "abort": "abort",
    "kill": "sigkill",
    "exit 0": "exit-zero",
    "shouting": "megabytes-printed",
    "closed descriptors": "no-message",
    "exception": "launch-exception",
    "unprintable": "launch-exception",
    "sys.exit": "launch-exception",
    "unpicklable": "unpicklable-exception",
    "registers": "no-registers",
    "hang": "endless-loop",
    "hang with the GIL": "endless-loop",
    "garbage": "garbage-message",
    "text in the pipe": "garbage-message",
    "no object": "garbage-message",
    "nonsense": "garbage-message",
    "half a message": "half-message",
    "half a prefix": "half-message",
}


def cases(*names: str) -> list[Any]:
    """Return test parameters, marked with the rows that they test."""
    return [
        pytest.param(name, marks=[pytest.mark.fault(ROWS[name])] if name in ROWS else [], id=name)
        for name in names
    ]


@dataclass
class Caller:
    """The caller's tensors: x lies inside a larger buffer that must stay as it is."""

    buffer: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor

    def bits(self) -> tuple[bytes, bytes]:
        return tuple(t.numpy().tobytes() for t in (self.buffer, self.y))  # type: ignore[return-value]


@pytest.fixture
def caller() -> Caller:
    torch.manual_seed(7)
    buffer = torch.randn(N + 64)
    buffer[:32] = float("nan")
    return Caller(buffer, buffer[32 : 32 + N], torch.randn(N))


@pytest.fixture
def no_idle_child() -> Iterator[None]:
    """Afterwards no child waits that the next test would be given."""
    yield
    child_handle.idle.drop()


def hook_of(log: Any, name: str | None) -> Callable[[dict[str, Any]], None]:
    """Return a pre_hook that notes where it runs and then does what `FAULTS[name]` does."""
    write = log.writer()
    act = None if name is None else FAULTS[name].act

    def hook(arguments: dict[str, Any]) -> None:
        write(arguments["BLOCK"])
        if act is not None:
            act()

    return hook


def limit_of(name: str) -> float:
    """Return seconds: few where they end a config; else a minute, for a machine may pause, too."""
    return RUN_TIMEOUT_S if FAULTS[name].label == "timeout" else 60.0


def check(
    caller: Caller, launch: Callable[[], Any], records: Any, fault: Fault, processes: Any
) -> None:
    """Launch, and check everything that is to hold whatever one config does."""
    expected = caller.buffer.clone()
    expected[32 : 32 + N] += caller.y
    y = caller.y.clone()

    launch()

    assert caller.bits() == (expected.numpy().tobytes(), y.numpy().tobytes())
    assert records.labels() == {GOOD: "ok", BAD: fault.label, ALSO_GOOD: "ok"}
    (bad,) = [trial for trial in records.trials() if trial.verdict != "ok"]
    assert fault.detail in bad.detail
    assert fault.message in bad.message
    assert bad.message
    assert fault.stderr in bad.stderr
    assert len(bad.stderr) <= 2000
    assert bad.median_ms is None
    assert len(records.choices()) == 1
    (server,) = processes.servers()
    assert processes.zombies(server) == []
    assert len(processes.children(server)) <= 1, "one idle measuring child may wait"
    if grandchild := re.search(r"grandchild (\d+)", bad.stderr):
        assert processes.gone(int(grandchild[1]))


@pytest.mark.parametrize("name", cases(*FAULTS))
def test_a_misbehaving_hook_costs_its_config(
    name: str, caller: Caller, records: Any, log: Any, processes: Any, harmless: Any
) -> None:
    configs = [
        triton.Config({"BLOCK": block}, pre_hook=hook_of(log, name if block == BAD else None))
        for block in (GOOD, BAD, ALSO_GOOD)
    ]
    kernel = safetune(configs=configs, key=["n"], run_timeout_s=limit_of(name))(step_kernel)

    check(caller, lambda: kernel[grid](caller.x, caller.y, N), records, FAULTS[name], processes)

    tried = [pid for pid, block in log.lines() if block == str(BAD)]
    tries = 1 + ("SIG" in FAULTS[name].label)  # a signal may come from outside
    assert len(set(tried)) == tries, "no other process tries it"
    if FAULTS[name].label != "out_of_resources":  # such a launch has not reached the device
        assert not processes.exists(tried[0])
    mine = [block for pid, block in log.lines() if pid == os.getpid()]
    assert mine == [str(kernel.best_config.kwargs["BLOCK"])], "only the choice runs here, once"
    harmless.check_nothing_is_left()


@pytest.mark.parametrize(
    "name", cases("segfault", "exit 0", "exception", "sys.exit", "hang", "garbage")
)
def test_a_misbehaving_kernel_costs_its_config(
    name: str, caller: Caller, records: Any, processes: Any, harmless: Any
) -> None:
    configs = [
        triton.Config({"BLOCK": block, "FAULT": name if block == BAD else None})
        for block in (GOOD, BAD, ALSO_GOOD)
    ]
    kernel = safetune(configs=configs, key=["n"], run_timeout_s=limit_of(name))(body_kernel)
    fault = FAULTS[name]
    if name == "exception":  # the interpreter wraps what its kernels raise
        fault = Fault(fault.act, fault.label, "InterpreterError")

    check(caller, lambda: kernel[grid](caller.x, caller.y, N), records, fault, processes)
    harmless.check_nothing_is_left()


@pytest.mark.fault("megabytes-printed")
def test_text_that_a_config_prints_does_not_reach_the_caller(
    caller: Caller, records: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not its standard output either: that is where `--json` goes. Megabytes block no process."""

    def shout(arguments: dict[str, Any]) -> None:
        if os.getpid() != parent:
            sys.stdout.write("o" * (1 << 20))
            os.write(1, b"written around Python" * 50_000)
            os.write(2, b"e" * (1 << 20))

    parent = os.getpid()
    configs = [
        triton.Config({"BLOCK": GOOD}),
        triton.Config({"BLOCK": BAD}, pre_hook=shout),
    ]
    kernel = safetune(configs=configs, key=["n"])(step_kernel)
    expected = caller.x + caller.y

    kernel[grid](caller.x, caller.y, N)

    assert torch.equal(caller.x, expected)
    assert records.labels() == {GOOD: "ok", BAD: "ok"}
    assert capfd.readouterr() == ("", "")


def test_an_answer_too_many_is_not_taken_for_the_next_config(
    caller: Caller, records: Any, no_idle_child: None
) -> None:
    """It forges a good time for itself; the real answer then waits in the pipe for the next job."""

    def forge(arguments: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        for fd in pipes():
            os.write(fd, struct.pack("!IQ", len(text), 0) + text)

    timing = {"median_ms": 4e-6, "p20_ms": 4e-6, "p80_ms": 4e-6, "count": 9, "stage": "screen"}
    answer = {"verdict": "ok", "timing": timing, "detail": "", "message": "", "gpu_uuid": ""}
    answer["dirty"] = False
    configs = [
        triton.Config({"BLOCK": GOOD}),
        triton.Config({"BLOCK": BAD}, pre_hook=forge),
        triton.Config({"BLOCK": ALSO_GOOD}),
    ]
    kernel = safetune(configs=configs, key=["n"])(step_kernel)
    expected = caller.x + caller.y

    kernel[grid](caller.x, caller.y, N)

    assert torch.equal(caller.x, expected)
    times = {trial.config: trial.median_ms for trial in records.trials()}
    assert len(times) == 3
    assert [t for config, t in times.items() if f'"BLOCK":{BAD}' not in config and t == 4e-6] == []


@pytest.mark.parametrize("isolation", ["worker", pytest.param("config", marks=pytest.mark.full)])
def test_all_failing_raises_a_table_and_stores_no_choice(
    isolation: str, caller: Caller, records: Any, log: Any, processes: Any, harmless: Any
) -> None:
    names = {16: "segfault", 32: "exception", 64: "exit 0", 128: "garbage", 256: "hang"}
    configs = [
        triton.Config({"BLOCK": block}, num_warps=2, pre_hook=hook_of(log, name))
        for block, name in names.items()
    ]
    kernel = safetune(configs=configs, key=["n"], run_timeout_s=RUN_TIMEOUT_S, isolation=isolation)(
        step_kernel
    )
    before = caller.bits()

    with pytest.raises(NoWorkingConfig) as caught:
        kernel[grid](caller.x, caller.y, N)

    head, *table, show, leave = str(caught.value).splitlines()
    assert "`safetune show step_kernel`" in show
    assert "SAFETUNE_LEAVE=step_kernel" in leave, "one hung"
    assert "none of the 5 configs of step_kernel works" in head
    assert str(N) in head
    assert len(table) == 5
    for (block, name), row in zip(names.items(), table, strict=True):
        assert f"BLOCK={block} num_warps=2" in row
        assert FAULTS[name].label in row
        assert FAULTS[name].message in row
    assert caught.value.measured == 5
    assert records.labels() == {block: FAULTS[name].label for block, name in names.items()}
    assert records.choices() == []
    assert caller.bits() == before
    assert os.getpid() not in {pid for pid, _ in log.lines()}
    (server,) = processes.servers()
    assert not [pid for pid, _ in log.lines() if pid in processes.children(server)]

    launched = log.lines()
    with pytest.raises(NoWorkingConfig) as again:
        kernel[grid](caller.x, caller.y, N)
    assert log.lines() == launched, "what failed is known, and is not tried a second time"
    assert again.value.measured == 0
    assert str(again.value).splitlines()[1:] == [*table, show, leave]
    harmless.check_nothing_is_left()


def test_a_config_that_kills_the_fork_server(
    caller: Caller, records: Any, processes: Any, harmless: Any, no_idle_child: None
) -> None:
    """It takes its own process with it: who killed the server is not known, so no one is blamed."""

    def kill_the_server(arguments: dict[str, Any]) -> None:
        if os.getpid() != parent:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)

    parent = os.getpid()
    configs = [
        triton.Config({"BLOCK": GOOD}),
        triton.Config({"BLOCK": BAD}, pre_hook=kill_the_server),
        triton.Config({"BLOCK": ALSO_GOOD}),
    ]
    kernel = safetune(configs=configs, key=["n"])(step_kernel)
    expected = caller.x + caller.y
    before = set(processes.servers())

    with pytest.warns(UserWarning, match="it is tried again later: the fork server"):
        kernel[grid](caller.x, caller.y, N)

    assert torch.equal(caller.x, expected)
    assert records.labels() == {GOOD: "not_judged"}
    assert kernel.cache == {}
    assert not set(processes.servers()) & before
    harmless.check_nothing_is_left()


@pytest.mark.fault("late-fault")
def test_a_fault_after_many_good_launches(
    caller: Caller, records: Any, log: Any, harmless: Any
) -> None:
    """It passes its first launches and dies while it is being timed."""
    write = log.writer()
    path = str(log.path)

    def dies_late(arguments: dict[str, Any]) -> None:
        write("launch")
        with open(path) as file:
            if len(file.readlines()) >= 5:
                ctypes.string_at(0)

    configs = [
        triton.Config({"BLOCK": GOOD}),
        triton.Config({"BLOCK": BAD}, pre_hook=dies_late),
    ]
    kernel = safetune(configs=configs, key=["n"])(step_kernel)
    expected = caller.x + caller.y

    kernel[grid](caller.x, caller.y, N)

    assert torch.equal(caller.x, expected)
    assert records.labels() == {GOOD: "ok", BAD: "died(SIGSEGV)"}
    assert len(log.lines()) == 6, "five launches, and one in the child that tries it again"
    harmless.check_nothing_is_left()


@pytest.mark.fault("invalid-time")
@pytest.mark.parametrize("time_ms", [float("nan"), 0.0, -1.0, float("inf")])
def test_a_time_that_is_not_a_positive_number_excludes_the_config(
    time_ms: float, caller: Caller, log: Any, harmless: Any
) -> None:
    """A user's do_bench may say anything; the config that it says it of is out, though first."""
    path = str(log.path)

    def measured(launch: Callable[[], object], quantiles: Any) -> list[float]:
        launch()
        with open(path) as file:
            last = file.readlines()[-1].split()[-1]
        return [time_ms if last == str(BAD) else 5.0] * 3

    configs = [
        triton.Config({"BLOCK": block}, pre_hook=hook_of(log, None)) for block in (BAD, GOOD)
    ]
    kernel = safetune(configs=configs, key=["n"], do_bench=measured)(step_kernel)

    trials = harmless.check(
        lambda: kernel[grid](caller.x, caller.y, N),
        {BAD: "invalid_time", GOOD: "ok"},
        after={"x": (caller.x, caller.x + caller.y), "y": (caller.y, caller.y.clone())},
    )
    assert str(time_ms) in trials[BAD].message


def test_configs_before_and_after_a_death_start_from_the_same_bits(
    caller: Caller, records: Any, log: Any
) -> None:
    """In place, without restore_value: each config sees the caller's values at its first launch."""
    write = log.writer()

    def hook(arguments: dict[str, Any]) -> None:
        write(f"{arguments['BLOCK']} {arguments['x'].double().sum().item()!r}")
        if arguments["BLOCK"] == BAD:
            ctypes.string_at(0)

    configs = [triton.Config({"BLOCK": b}, pre_hook=hook) for b in (GOOD, BAD, ALSO_GOOD)]
    kernel = safetune(configs=configs, key=["n"])(step_kernel)
    total = caller.x.double().sum().item()

    kernel[grid](caller.x, caller.y, N)

    firsts: dict[str, str] = {}
    for pid, text in log.lines():
        if pid != os.getpid():
            block, _, seen = text.partition(" ")
            firsts.setdefault(block, seen)
    assert firsts == dict.fromkeys(map(str, (GOOD, BAD, ALSO_GOOD)), repr(total))
