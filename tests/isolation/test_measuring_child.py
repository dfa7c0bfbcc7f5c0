"""Single children: asked, outlived, replaced. What whole tunings show is in tests/isolation."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from safetune import safetune
from safetune.both.protocol import Budget, Compile, Measure, Prepare, Release
from safetune.errors import WorkerUnavailable
from safetune.inputs import kernel_pickle
from safetune.inputs.call import Call, Hooks
from safetune.inputs.snapshot import Snapshot
from safetune.isolation.child_handle import Child, ChildFailed, start_job
from safetune.isolation.fork_server import plain_server, server, start_servers
from safetune.isolation.measuring_child import MeasuringChild
from safetune.outcome import Effects, Outcome, Verdict
from tests.conftest import ended, stop_servers

BUDGET = Budget(least=2, most=4, time_ms=0.0)


@triton.jit
def copy_kernel(dst, src, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + offset, tl.load(src + offset, mask=offset < n), mask=offset < n)


@pytest.fixture
def child() -> Iterator[Child]:
    started = Child(gpu_blind=True)
    yield started
    started.kill()


@contextmanager
def measuring(*hooks: Any, timeout_s: float = 60.0) -> Iterator[MeasuringChild]:
    """A measuring child with one call, and one config for each of these pre-hooks."""
    src, dst = torch.randn(64), torch.zeros(64)
    call = Call(
        kernel=copy_kernel,
        arg_names=("dst", "src", "n", "BLOCK"),
        args=(dst, src, 64),
        kwargs={},
        grid=None,
        pins={},
        hooks=Hooks(),
        index=-1,
    )
    configs = [triton.Config({"BLOCK": 64}, pre_hook=hook) for hook in hooks]
    tensors = kernel_pickle.TensorTable()
    blob = kernel_pickle.pack((call, configs), "a call", tensors, by_value=hooks)
    snapshot = Snapshot(tensors.tensors)
    grids = [(1,)] * len(hooks)
    job = Prepare(blob, snapshot.layout, index=-1, grids=grids, effects=Effects())
    made = MeasuringChild(job, (snapshot.fd,), timeout_s)
    try:
        yield made
    finally:
        made.replace()
        snapshot.close()


def writer(path: Path) -> Callable[[Any], None]:
    """Return a hook that appends its process's id."""
    text = str(path)

    def hook(arguments: Any) -> None:
        with open(text, "a") as file:
            file.write(f"{os.getpid()}\n")

    return hook


class Dies:
    """A kernel that ends its process when it is rebuilt: pipe first, last words, then the end."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (DIES,)


class Notes:
    """A kernel that writes down the program's arguments when it is rebuilt."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"import sys; open({self._path!r}, 'w').write(repr(sys.argv))",)


DIES = """
import os, select, socket
pipes = []
for name in os.listdir("/proc/self/fd"):
    try:
        if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
            pipes.append(socket.socket(fileno=int(name)))
            pipes[-1].shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the folder's own
select.select(pipes, [], [])  # until the parent has seen the end, and has closed its own
os.write(2, b"the last words")
os._exit(3)
"""


class TestAChild:
    def test_a_killed_child_returns_its_status_once(self, child: Child) -> None:
        assert os.WTERMSIG(child.kill() or 0) == signal.SIGKILL
        assert ended(child.pid, within_s=0)
        assert child.kill() is None

    def test_a_child_that_dies_between_jobs_fails_the_next(self, child: Child) -> None:
        os.kill(child.pid, signal.SIGTERM)
        assert ended(child.pid)
        with pytest.raises(ChildFailed) as caught:
            child.ask(Measure(0), timeout_s=60)
        assert caught.value.outcome.label == "died(SIGTERM)"
        assert child.kill() is None, "it has been waited for"

    def test_a_child_that_does_not_answer_is_killed(self, child: Child) -> None:
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(ChildFailed) as caught:
            child.ask(Release(), timeout_s=0.2)
        assert caught.value.outcome.verdict is Verdict.TIMEOUT
        assert caught.value.outcome.message == "no answer within 0.2 s"
        assert ended(child.pid)

    def test_a_child_that_reads_no_job_is_killed(self, child: Child) -> None:
        """A blob larger than the socket's buffer, and no process that reads it."""
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(ChildFailed) as caught:
            child.ask(Compile(bytes(1 << 24)), timeout_s=0.2)
        assert caught.value.outcome.verdict is Verdict.TIMEOUT
        assert "0.2 s" in caught.value.outcome.message
        assert ended(child.pid)

    def test_an_abandoned_child_ends_by_itself(self, child: Child) -> None:
        child.abandon()
        assert ended(child.pid)

    def test_a_child_answers_in_order(self, child: Child) -> None:
        """Two jobs at once, as the compile pool sends them."""
        child.send(Release())
        child.send(Compile(b"of no kernel"))
        assert child.answer(60)[0].outcome.ok
        outcome = child.answer(60)[0].outcome
        assert outcome.verdict is Verdict.COMPILE_ERROR
        assert outcome.detail == "EOFError"

    def test_text_that_a_child_prints_at_its_end_is_in_the_outcome(self, child: Child) -> None:
        """Written after it closed its pipe, which is when its parent knows that it is ending."""
        child.ask(start_job(True, kernel=pickle.dumps(Dies())), timeout_s=60)
        with pytest.raises(ChildFailed) as caught:
            child.ask(Compile(b""), timeout_s=60)
        outcome = caught.value.outcome
        assert outcome.stderr == "the last words"
        assert outcome.detail == "exit code 3"

    def test_reads_nothing_from_our_standard_input(self, child: Child) -> None:
        assert os.readlink(f"/proc/{child.pid}/fd/0") == os.devnull
        assert os.readlink(f"/proc/{child.pid}/fd/1") == os.readlink(f"/proc/{child.pid}/fd/2")

    def test_has_the_arguments_of_the_program(
        self, child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As they are at each start, and not the server's own."""
        seen = tmp_path / "seen"
        for argv in (["train.py", "--depth", "3"], []):
            monkeypatch.setattr(sys, "argv", argv)
            start = start_job(True, kernel=pickle.dumps(Notes(str(seen))))
            child.ask(start, timeout_s=60)
            child.ask(Compile(b""), timeout_s=60)
            assert seen.read_text() == repr(argv)

    def test_has_no_descriptor_of_ours(self, tmp_path: Path) -> None:
        """Neither a file that the caller has open, nor the pipe of another child."""
        with open(tmp_path / "of the caller", "w") as file:
            os.set_inheritable(file.fileno(), True)
            first, second = Child(gpu_blind=True), Child(gpu_blind=True)
            try:
                for child in (first, second):
                    folder = f"/proc/{child.pid}/fd"
                    open_files = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
                    assert file.name not in open_files
                    sockets = [name for name in open_files if name.startswith("socket:")]
                    assert len(sockets) == 1
                first.abandon()
                assert ended(first.pid), "no other process holds its pipe open"
            finally:
                first.kill()
                second.kill()


class TestAMeasuringChild:
    def test_is_one_process_while_all_is_well(self, tmp_path: Path) -> None:
        hook = writer(tmp_path / "pids")
        with measuring(hook, hook) as child:
            for config in (0, 1, 0):
                outcome = child.measure(config, BUDGET)[0]
                assert outcome.verdict is Verdict.OK, outcome
                assert outcome.timing is not None
                assert outcome.timing.median_ms > 0
        assert len(set((tmp_path / "pids").read_text().split())) == 1

    def test_is_another_process_after_a_fault(self, tmp_path: Path) -> None:
        note = writer(tmp_path / "pids")

        def raises(arguments: Any) -> None:
            note(arguments)
            raise ValueError("once")

        with measuring(note, raises) as child:
            verdicts = [child.measure(config, BUDGET)[0].verdict for config in (0, 1, 0, 1)]
        assert verdicts == [Verdict.OK, Verdict.LAUNCH_ERROR] * 2
        pids = list(dict.fromkeys((tmp_path / "pids").read_text().split()))
        assert len(pids) == 2
        assert ended(*map(int, pids))

    def test_configs_in_turn_have_their_jobs_before_the_first_is_answered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The child waits for no job between two. After one that dies it is another child."""
        hook = writer(tmp_path / "pids")

        def dies(arguments: Any) -> None:
            hook(arguments)
            os._exit(3)

        with measuring(hook, hook, dies, hook) as child:
            waiting: list[int] = []
            answer = Child.answer

            def noted(asked: Child, timeout_s: float) -> Any:
                waiting.append(asked.unanswered)
                return answer(asked, timeout_s)

            child.wait()
            monkeypatch.setattr(Child, "answer", noted)
            first = child.in_turn({1: BUDGET, 0: BUDGET})
            assert list(first) == [1, 0]
            assert all(outcome.timing is not None for outcome in first.values())
            assert waiting == [2, 1]
            assert list(child.in_turn({0: BUDGET, 2: BUDGET, 3: BUDGET, 1: BUDGET})) == [0]
            assert list(child.in_turn({3: BUDGET, 1: BUDGET})) == [3, 1]
        assert len(set((tmp_path / "pids").read_text().split())) == 2

    def test_tells_of_the_last_words_of_its_last_config_only(self) -> None:
        def chats(arguments: Any) -> None:
            print("a fine config", file=sys.stderr, flush=True)

        def dies(arguments: Any) -> None:
            os.write(2, b"x" * 5000 + b" the end")
            os.abort()

        def dies_in_silence(arguments: Any) -> None:
            os.abort()

        with measuring(chats, dies, dies_in_silence) as child:
            assert child.measure(0, BUDGET)[0].stderr == ""
            outcome = child.measure(1, BUDGET)[0]
            assert outcome.stderr.endswith("x the end")
            assert len(outcome.stderr) == 2000
            assert child.measure(0, BUDGET)[0].ok
            assert child.measure(2, BUDGET)[0].stderr == ""

    def test_with_a_frame_that_never_ends_is_out_of_time(self) -> None:
        """It announces more than it sends: waiting for the rest is bounded, too."""

        def announces(arguments: Any) -> None:
            for name in os.listdir("/proc/self/fd"):
                try:
                    if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                        os.write(int(name), struct.pack("!IQ", 1 << 20, 0) + b"{")
                except OSError:
                    pass
            while True:
                pass

        with measuring(announces, timeout_s=1.0) as child:
            outcome = child.measure(0, BUDGET)[0]
        assert outcome.verdict is Verdict.TIMEOUT

    def test_a_child_given_another_call_forgets_the_last_one(self, tmp_path: Path) -> None:
        """Released and taken again: the configs, tensors and hooks are the new call's."""
        hook = writer(tmp_path / "pids")

        def fails(arguments: Any) -> None:
            raise ValueError("of the first call")

        with measuring(fails, hook) as first:
            assert first.measure(1, BUDGET)[0].ok
            first.release()
            with measuring(hook) as second:
                assert second.measure(0, BUDGET)[0].ok
        assert len(set((tmp_path / "pids").read_text().split())) == 1


def test_a_fresh_process_for_every_config_is_fresh_for_the_first(tmp_path: Path) -> None:
    """isolation="config" right after a tuning that left an idle child."""
    hook = writer(tmp_path / "pids")

    def tune(n: int, isolation: str) -> list[str]:
        configs = [triton.Config({"BLOCK": block}, pre_hook=hook) for block in (32, 64)]
        kernel = safetune(configs=configs, key=["n"], isolation=isolation)(copy_kernel)
        src, dst = torch.randn(n), torch.zeros(n)
        kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](dst, src, n)
        assert torch.equal(dst, src)
        pids = dict.fromkeys((tmp_path / "pids").read_text().split())
        (tmp_path / "pids").unlink()
        return [pid for pid in pids if pid != str(os.getpid())]

    shared = tune(64, "worker")
    assert len(shared) == 1
    alone = tune(63, "config")
    assert len(alone) >= 2
    assert not set(shared) & set(alone)


def test_children_are_started_from_many_threads(tmp_path: Path) -> None:
    """The fork server answers one at a time; no thread gets the answer of another."""
    barrier = threading.Barrier(8)

    def start(number: int) -> tuple[int, Outcome | None]:
        barrier.wait()
        child = Child(gpu_blind=True)
        try:
            if number % 2:
                os.kill(child.pid, signal.SIGKILL)
            child.ask(Release(), timeout_s=60)
        except ChildFailed as failure:
            return child.pid, failure.outcome
        else:
            return child.pid, None
        finally:
            child.kill()

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(start, range(8)))
    assert len({pid for pid, _ in results}) == 8
    labels = [outcome and outcome.label for _, outcome in results]
    assert labels == [None, "died(SIGKILL)"] * 4
    assert ended(*(pid for pid, _ in results), within_s=0)


def test_a_server_that_was_stopped_starts_again(child: Child) -> None:
    server.stop()
    assert ended(child.pid), "no child outlives its server"
    other = Child(gpu_blind=True)
    try:
        assert other.ask(Release(), timeout_s=60)[0].outcome.ok
    finally:
        other.kill()


def test_a_server_of_the_other_kind_is_replaced(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's own library is interpreted or not, as TRITON_INTERPRET said at its import."""
    old = interprets(child)
    monkeypatch.setenv("TRITON_INTERPRET", "0" if old == "1" else "1")
    other = Child(gpu_blind=True)
    try:
        assert ended(child.pid), "its server is gone"
        assert {old, interprets(other)} == {"0", "1"}
    finally:
        other.kill()


def interprets(child: Child) -> str:
    """Return what the child's server had for TRITON_INTERPRET when it imported Triton."""
    parent = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[1]
    environment = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    return next(v.partition(b"=")[2].decode() for v in environment if b"TRITON_INTERPRET=" in v)


def test_both_servers_start_at_once_and_are_not_waited_for() -> None:
    stop_servers()
    start_servers(compiling=True, with_torch=True)
    assert plain_server._process is not None
    assert server._process is not None
    pids = plain_server._process.pid, server._process.pid
    assert not plain_server._ready, "it is importing Triton, and no launch has waited for it"
    assert not server._ready
    compiler = Child(gpu_blind=True, forks=plain_server)
    measurer = Child(gpu_blind=True)
    try:
        assert (plain_server._process.pid, server._process.pid) == pids
        assert compiler.ask(Release(), timeout_s=60)[0].outcome.ok
        assert measurer.ask(Release(), timeout_s=60)[0].outcome.ok
    finally:
        compiler.kill()
        measurer.kill()


def test_a_server_imports_once_what_children_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not what it does not find: another version of Triton may have moved its compiler."""
    told = tmp_path / "told"
    text = f"import os\nopen({str(told)!r}, 'a').write(f'{{os.getpid()}} ')\n"
    (tmp_path / "asked_for.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    stop_servers()
    modules = ("moved_elsewhere", "asked_for")
    children = [Child(True, forks=plain_server, modules=modules) for _ in range(2)]
    try:
        assert plain_server._process is not None
        assert told.read_text() == f"{plain_server._process.pid} "
    finally:
        for child in children:
            child.kill()
        stop_servers()


def test_a_server_is_stopped_while_another_thread_waits_for_it() -> None:
    """As at the end of a program that was interrupted while torch was being imported."""
    stop_servers()
    server.start()
    waiting = threading.Event()

    def fork() -> str:
        waiting.set()
        try:
            Child(gpu_blind=True).kill()
        except WorkerUnavailable as error:
            return str(error)
        return "came up"

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(fork)
        waiting.wait()
        server.stop()
        said = result.result(timeout=60)
    assert said == "came up" or "did not start" in said
    server.stop()
