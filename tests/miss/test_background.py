"""SAFETUNE_MODE=background: the caller goes on, and the choice comes later."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from safetune import sync
from safetune.errors import TuningWarning
from safetune.miss import background, failures
from safetune.outcome import Mark
from safetune.settings import Settings
from safetune.store.lookup import open_lookup
from tests import programs
from tests.isolation.conftest import fifo, log, processes, records, start  # noqa: F401

SOON_S = 60.0


@pytest.fixture(autouse=True)
def _in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing in the queue, which the tests of a process share."""
    for job in list(background._worker.jobs):
        assert job.over.wait(SOON_S), job.bench.request.key
    monkeypatch.setenv("SAFETUNE_MODE", "background")


class Gate:
    """Configs that wait in a child, before they run, until it opens."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._path = path
        self._keeper: int | None = os.open(path, os.O_RDWR)

    def hook(self) -> Any:
        path, caller = str(self._path), os.getpid()

        def wait(arguments: dict[str, Any]) -> None:
            if os.getpid() != caller:
                with open(path) as gate:  # nothing is written: it ends when no writer is left
                    gate.read()

        return wait

    def open(self) -> None:
        """Let everything through, now and later."""
        if self._keeper is not None:
            reader = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
            os.close(self._keeper)
            self._keeper = None
            # A file in its place, so that who comes later does not wait for a writer.
            os.unlink(self._path)
            self._path.touch()
            os.close(reader)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.open()


class Ended(logging.Handler):
    """Lets a test wait for what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []
        self._more = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._more:
            self.messages.append(record.getMessage())
            self._more.notify_all()

    def wait_for(self, text: str) -> str:
        """Return the first message, now or soon, that has the text."""
        with self._more:
            assert self._more.wait_for(lambda: any(text in m for m in self.messages), SOON_S), (
                self.messages
            )
            return next(message for message in self.messages if text in message)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ended]:
    handler, logger = Ended(), logging.getLogger("safetune")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_the_caller_goes_on_and_the_choice_is_swapped_in(copies: Any, gate: Gate) -> None:
    slow = gate.hook()
    made = copies(slow, None)
    assert [made() for _ in range(3)] == [16, 16, 16]
    assert copies.block(made.swaps.next()) == 16, "the fallback"
    assert made.swaps.idle

    gate.open()

    chosen = copies.block(made.swaps.next())
    assert made() == chosen
    (stored,) = open_lookup(Settings.current()).store.choices()
    assert stored.choice.config["BLOCK"] == chosen
    assert made.swaps.idle, "once"


def test_the_inputs_are_those_of_the_call(copies: Any, gate: Gate, tmp_path: Path) -> None:
    """The caller writes over them before the first config runs."""
    seen, caller, waits = str(tmp_path / "seen"), os.getpid(), gate.hook()

    def look(arguments: dict[str, Any]) -> None:
        if os.getpid() != caller:
            waits(arguments)
            with open(seen, "a") as file:
                file.write(f"{arguments['src'].sum().item()}\n")

    made = copies(look, None)
    src, dst = torch.full((8,), 3.0), torch.zeros(8)
    made.tuner[(1,)](dst, src, 8, FLAG=0)
    made.swaps.next()
    src.fill_(100.0)
    gate.open()
    made.swaps.next()
    assert set(Path(seen).read_text().split()) == {"24.0"}


def test_one_worker_takes_each_key_once_and_in_order(
    copies: Any, gate: Gate, logged: Ended
) -> None:
    made = copies(gate.hook(), None)
    before = threading.active_count()
    for n in (100, 101, 102, 100, 101, 102):
        made(n)
    threads = [t.name for t in threading.enumerate() if t.name == "safetune-background"]
    assert threads == ["safetune-background"]
    assert threading.active_count() <= before + 2
    assert len(background._worker.jobs) == 3
    gate.open()
    logged.wait_for("tuned for n=102")
    tuned = [message for message in logged.messages if " tuned for " in message]
    assert ["n=100" in tuned[0], "n=101" in tuned[1], "n=102" in tuned[2]] == [True] * 3
    assert len(tuned) == 3


def test_the_nearest_choice_is_the_fallback(
    copies: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(arguments: dict[str, Any]) -> None:
        if arguments["n"] == 100 and os.getpid() != caller:
            os.abort()

    caller = os.getpid()
    made = copies(dies, gate.hook())
    monkeypatch.setenv("SAFETUNE_MODE", "tune")
    gate.open()
    assert made(100) == 32
    monkeypatch.setenv("SAFETUNE_MODE", "background")
    assert made(101) == 32


def test_in_a_world_of_several_nothing_changes_before_sync(
    copies: Any, logged: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")

    def dies(arguments: dict[str, Any]) -> None:
        if os.getpid() != caller:
            os.abort()

    caller = os.getpid()
    made = copies(dies, None)
    assert made() == 16
    logged.wait_for("tuned for n=100")
    assert made() == 16
    sync()
    assert made() == 32
    sync()
    assert made() == 32


def test_a_world_that_no_launcher_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under srun: the program gives rank and world size to torch.distributed itself."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        found = Settings.current()
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert Settings.current().local_world_size == 4
    finally:
        torch.distributed.destroy_process_group()
    assert (found.world_size, found.local_world_size) == (8, 8)
    assert Settings.current().world_size == 1


def test_no_tensor_is_kept_once_it_is_tuned(copies: Any) -> None:
    """Though no other call comes, for which the thread would let go of the last one."""
    made, dst, src = copies(None, None), torch.zeros(100), torch.ones(100)
    made.tuner[(7,)](dst, src, 100, FLAG=0)
    (state,) = made.tuner.states
    background.wait(state)
    references = [weakref.ref(each) for each in (dst, src)]
    del dst, src
    assert [reference() for reference in references] == [None, None]


def test_no_tensor_is_kept_while_its_tuning_waits(copies: Any, gate: Gate) -> None:
    made, references = copies(gate.hook(), None), []
    for n in (100, 99, 98):
        dst, src = torch.zeros(n), torch.ones(n)
        references += [weakref.ref(dst), weakref.ref(src)]
        made.tuner[(7,)](dst, src, n, FLAG=0)
        del dst, src
    assert [reference() for reference in references] == [None] * 6


def test_the_copies_of_queued_calls_stay_within_the_limit(
    copies: Any, gate: Gate, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call for which there is no room launches its fallback, and is queued when there is."""
    monkeypatch.setenv("SAFETUNE_COPY_LIMIT", "1200")
    made = copies(gate.hook(), None)
    assert [made(n) for n in (100, 99)] == [16, 16]
    states = list(made.tuner.states)
    assert [len([job for job in background._worker.jobs if job.state is s]) for s in states] == [
        1,
        0,
    ]

    gate.open()
    background.wait(states[0])
    assert made(99) == 16, "not due yet"
    clock.now += failures.RETRY_S + 1
    made(99)
    background.wait(states[1])
    assert len(made.tuner.cache) == 2


class TestMarks:
    def marks(self) -> set[tuple[str, ...]]:
        store = open_lookup(Settings.current()).store
        ((_, trials),) = store.trials_of("copy_kernel")
        assert all(trial.outcome.timing is not None for trial in trials)
        return {trial.outcome.unmarked(Mark.FIRST).marks for trial in trials}

    def test_trials_beside_a_program_are_marked_contended(self, copies: Any) -> None:
        made = copies(None, None)
        made()
        made.swaps.next()
        made.swaps.next()
        assert self.marks() == {("contended",)}


def test_inputs_over_the_limit_are_left_to_offline_tuning(
    copies: Any, logged: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAFETUNE_COPY_LIMIT", str(2 * 4 * 100 - 1))
    made = copies(None, None)
    assert [made(), made()] == [16, 16]
    assert background._worker.jobs == []
    (message,) = [m for m in logged.messages if "offline" in m]
    assert message.startswith("tune copy_kernel offline for n=100 (float32): ")
    assert "its inputs have 800 bytes" in message
    assert made(99) == 16
    made.swaps.next()
    made.swaps.next()
    made.swaps.next()


def test_when_every_config_fails_the_fallback_stays_and_one_warning_says_so(
    copies: Any, clock: Any
) -> None:
    def dies(arguments: dict[str, Any]) -> None:
        if os.getpid() != caller:
            os.abort()

    caller = os.getpid()
    made = copies(dies, dies)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # the call, and once more when it is due
            assert made() == 16
            (state,) = made.tuner.states
            background.wait(state)
            clock.now += 10 * failures.RETRY_S
    assert copies.block(made.swaps.next()) == 16
    said = [str(each.message) for each in caught if issubclass(each.category, TuningWarning)]
    assert len(said) == 1
    assert "it is tried again later: none of the 2 configs of copy_kernel works" in said[0]


def test_a_kernel_that_cannot_be_sent_is_not_queued(copies: Any) -> None:
    lock = threading.Lock()

    def holds_a_lock(arguments: dict[str, Any]) -> None:
        assert not lock.locked()

    made = copies(holds_a_lock, None)
    with pytest.warns(UserWarning, match="copy_kernel is not tuned for n=100 .*first config"):
        assert made() == 16
    assert background._worker.jobs == []
    assert made() == 16


def test_descriptors_are_given_back(copies: Any) -> None:
    made = copies(None, None)
    made(1)
    made.swaps.next()
    made.swaps.next()
    before = memory_files()
    for n in (2, 3):
        made(n)
        made.swaps.next()
        made.swaps.next()
    with background._worker._lock:
        pass
    assert memory_files() <= before + 1, "the last one may be about to be closed"


def test_a_fork_keeps_no_copies_of_queued_calls(copies: Any, gate: Gate) -> None:
    made = copies(gate.hook(), None)
    assert [made(n) for n in (100, 99, 98)] == [16, 16, 16]
    waiting = [fd for job in background._worker.jobs[1:] for fd in job.bench._child.fds]
    assert memory_files(waiting) == 2
    if (pid := os.fork()) == 0:
        os._exit(memory_files(waiting))
    assert os.waitpid(pid, 0)[1] == 0


def memory_files(among: Iterable[object] | None = None) -> int:
    fds = os.listdir("/proc/self/fd") if among is None else among
    links = [f"/proc/self/fd/{fd}" for fd in fds]
    return sum("safetune-arguments" in os.readlink(x) for x in links if os.path.lexists(x))


PRELUDE = f"""
import json, os, sys, threading
{programs.COPY}"""
PRELUDE += """
caller = os.getpid()

def run(kernel, n):
    src, dst = torch.randn(n), torch.zeros(n)
    kernel[grid](dst, src, n)
    assert torch.equal(src, dst)

fifo, *rest = sys.argv[1:]
def hang(arguments):
    if os.getpid() != caller:
        with open(fifo, "w") as file:
            file.write(f"{os.getpid()} {os.getppid()}\\n")
        while True:
            pass
"""

LEAVES = """
kernel = tuner(None, hang, run_timeout_s=1000.0)
run(kernel, 100)
run(kernel, 101)
run(kernel, 102)
with open(rest[0]) as gate:
    gate.read()
if rest[1] == "raise":
    raise ValueError("on purpose")
if rest[1] == "thread":
    def last():
        threading.main_thread().join()
        run(kernel, 103)
        print("the thread is done")
    threading.Thread(target=last).start()
"""


class TestTheEnd:
    """With a config that hangs: the process ends at once, and nothing else is left or lost."""

    def ending(self, start: Any, fifo: Any, tmp_path: Path, how: str) -> Any:  # noqa: F811
        script, gate = tmp_path / "leaves.py", tmp_path / "end"
        script.write_text(PRELUDE + LEAVES)
        os.mkfifo(gate)
        parent = start(script, fifo.path, gate, how)
        return parent, list(map(int, fifo.line().split())), gate

    @pytest.mark.parametrize(
        ("how", "code", "stdout", "stderr"),
        [
            pytest.param("return", 0, "", "", marks=pytest.mark.full),
            ("raise", 1, "", "ValueError: on purpose"),
            ("thread", 0, "the thread is done", ""),
        ],
    )
    def test_the_end_of_the_program_ends_a_background_tuning(
        self,
        how: str,
        code: int,
        stdout: str,
        stderr: str,
        start: Any,  # noqa: F811
        fifo: Any,  # noqa: F811
        tmp_path: Path,
        processes: Any,  # noqa: F811
        records: Any,  # noqa: F811
    ) -> None:
        parent, pids, gate = self.ending(start, fifo, tmp_path, how)

        open(gate, "w").close()

        out, err = parent.communicate(timeout=SOON_S)
        assert parent.returncode == code
        assert out.strip() == stdout
        assert (err.strip().splitlines() or [""])[-1] == stderr
        assert err.count("Traceback") == (how == "raise")
        assert processes.gone(*pids)
        assert records.labels() == {16: "not_judged"}, "the one in flight has not failed"
        assert records.choices() == []

    def test_ctrl_c_ends_a_background_tuning(
        self,
        start: Any,  # noqa: F811
        fifo: Any,  # noqa: F811
        tmp_path: Path,
        processes: Any,  # noqa: F811
        records: Any,  # noqa: F811
    ) -> None:
        parent, pids, _ = self.ending(start, fifo, tmp_path, "return")

        os.killpg(parent.pid, signal.SIGINT)

        _, err = parent.communicate(timeout=SOON_S)
        assert parent.returncode == -signal.SIGINT
        assert err.count("Traceback") == 1
        assert err.splitlines()[-1] == "KeyboardInterrupt"
        assert "safetune" not in err, "the program's own lines and no others"
        assert processes.gone(*pids)
        assert records.labels() == {16: "not_judged"}

    def test_a_kill_ends_a_background_tuning(
        self,
        start: Any,  # noqa: F811
        fifo: Any,  # noqa: F811
        tmp_path: Path,
        processes: Any,  # noqa: F811
        records: Any,  # noqa: F811
    ) -> None:
        parent, pids, _ = self.ending(start, fifo, tmp_path, "return")
        parent.kill()
        assert processes.gone(*pids)
        assert records.labels() == {16: "not_judged"}


def test_the_trap_that_the_tests_wait_at_is_one(copies: Any, gate: Gate) -> None:
    """While the gate is closed nothing is stored for the config behind it."""
    made = copies(None, gate.hook())
    made()
    made.swaps.next()
    store = open_lookup(Settings.current()).store
    assert store.choices() == []
    gate.open()
    made.swaps.next()
    assert len(store.choices()) == 1
