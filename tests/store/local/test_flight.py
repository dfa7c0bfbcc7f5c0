"""Many processes miss one key: one tunes, the others wait, and another follows a dead one."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from triton import Config

from safetune.config import config_digest
from safetune.errors import Busy
from safetune.inputs.call import Call, Hooks
from safetune.keys.tuning_key import Device, KernelIdentity, Toolchain, TuningKey
from safetune.store.local import locks
from safetune.store.local.locks import Waited
from safetune.store.local.store import Store
from safetune.tuning.requests import TuningRequest
from safetune.tuning.single_flight import WaitBudget, compiling, compiling_name, elect
from tests import stored_rows

ROOT = Path(__file__).parents[3]
HERD = Path(__file__).parent / "scripts" / "herd.py"
CONFIGS = 4

#: How many processes miss the key at once.
HERD_SIZE = 8


class Herd:
    """A program that forks processes which launch one kernel at once: see `herd.py`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._busy = False

    def play(self, folder: Path, count: int, twice: bool = False, **environment: str) -> None:
        """Let that many processes launch, with a store in `folder`."""
        process = self._started()
        self._busy = True
        self.send(json.dumps([count, str(folder), environment, twice]))
        assert process is self._process

    def send(self, line: str = "") -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def launches(self, count: int | None = None) -> list[dict[str, Any]]:
        """What the next launches come to; those of all processes until they have ended if None."""
        assert self._process is not None
        assert self._process.stdout is not None
        found: list[dict[str, Any]] = []
        while len(found) != count:
            line = self._process.stdout.readline()
            assert line, "the herd died"
            if (launch := json.loads(line)) is None:
                self._busy = False
                assert count is None, f"{len(found)} launches"
                break
            found.append(launch)
        return found

    def _started(self) -> subprocess.Popen[str]:
        if self._busy:
            self.stop()  # a test has failed, and its processes may wait for something
        if self._process is None:
            paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
            self._process = subprocess.Popen(
                [sys.executable, str(HERD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "TRITON_INTERPRET": "1",
                },
            )
        return self._process

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
        self._process, self._busy = None, False


@pytest.fixture(scope="module")
def herd() -> Iterator[Herd]:
    started = Herd()
    yield started
    started.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "gate")
    return tmp_path


def query(folder: Path, statement: str) -> list[Any]:
    connection = stored_rows.connected(folder / "store" / "safetune.db")
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def owner(folder: Path) -> int:
    """The process that holds a lock of a key now."""
    with open(folder / "store" / f"safetune.db{locks.KEY_LOCKS}", "r+") as file:
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, pid = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, asked))
    assert kind == fcntl.F_WRLCK
    return int(pid)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[int]:
    """Yield the process that tunes while it measures the third config."""
    with open(folder / "gate", "w"):  # waits for the reader
        yield owner(folder)


def test_one_of_many_tunes_and_if_it_is_killed_one_other_measures_the_rest(
    herd: Herd, folder: Path
) -> None:
    (folder / "hold").touch()
    herd.play(folder, HERD_SIZE)
    with held(folder) as first:
        assert query(folder, "SELECT count(*) FROM trial") == [(2,)]
        os.kill(first, signal.SIGKILL)
    launches = herd.launches()
    assert first not in {launch["pid"] for launch in launches}
    *others, measured = sorted(launch["measured"] for launch in launches)
    assert others == [0] * (HERD_SIZE - 2)
    assert 2 <= measured <= CONFIGS, "what is left, and finalists again"
    assert len({launch["block"] for launch in launches}) == 1
    assert [bool(launch["started"]) for launch in launches] == [
        bool(launch["measured"]) for launch in launches
    ], "only the process that tunes starts others"
    assert [launch["warnings"] for launch in launches] == [[]] * (HERD_SIZE - 1)
    assert query(folder, "SELECT count(*) FROM trial") == [(CONFIGS,)]
    assert query(folder, "SELECT generation FROM choice") == [(1,)]


def test_a_stopped_owner_costs_the_wait_and_its_choice_is_adopted_once_it_wakes(
    herd: Herd, folder: Path
) -> None:
    (folder / "hold").touch()
    herd.play(folder, 3, twice=True, SAFETUNE_WAIT="0.5")
    with held(folder) as stopped:
        os.kill(stopped, signal.SIGSTOP)
        waited = herd.launches(2)
        assert query(folder, "SELECT * FROM choice") == []
        os.kill(stopped, signal.SIGCONT)
    for launch in waited:
        assert launch["pid"] != stopped
        assert (launch["block"], launch["measured"]) == (16, 0), "the first config"
        assert launch["seconds"] >= 0.5
        (warning,) = launch["warnings"]
        assert "SAFETUNE_WAIT" in warning
        assert "tried again later" in warning
    (tuned,) = herd.launches(1)
    assert (tuned["pid"], tuned["measured"]) == (stopped, CONFIGS)
    assert query(folder, "SELECT generation, measured FROM choice") == [(1, CONFIGS)]
    herd.send()
    launches = herd.launches()
    assert [launch["block"] for launch in launches] == [tuned["block"]] * 3
    assert [launch["measured"] for launch in launches] == [0] * 3
    assert [launch["warnings"] for launch in launches] == [[]] * 3
    assert query(folder, "SELECT count(*) FROM trial") == [(CONFIGS,)]


def request(name: str = "key", **changes: Any) -> TuningRequest:
    """A miss of the key with this name."""
    device = Device("interpreter", "cpu", 0, 0)
    toolchain = Toolchain("3.9.0", "interpreter", "interpreter")
    key = TuningKey(KernelIdentity(name, name, ""), (), (), (), device, toolchain)
    call = Call(None, (), (), {}, None, {}, Hooks(), -1)
    return TuningRequest(key, call, (Config({"BLOCK": 64}),), "declared", **changes)


def choice_for(request: TuningRequest, records: Any) -> Any:
    return records.choice(config_digest(request.configs[0]), key=request.key.digest)


@pytest.fixture
def other_process(holding: Any, store: Store) -> Any:
    """A function that starts a process which locks names until it is killed."""
    return functools.partial(holding, store.path.parent)


def test_all_waits_of_a_process_count_together(store: Store, other_process: Any) -> None:
    """Five keys must not wait five times SAFETUNE_WAIT: ranks meet in collectives."""
    wanted = [request(name) for name in "abcde"]
    other_process(*(each.key.digest for each in wanted))
    waited = Waited()
    budget = WaitBudget(0.4, waited=waited)
    for each in wanted:
        with pytest.raises(Busy, match="SAFETUNE_WAIT"), elect(each, store, budget):
            pass
    assert waited.seconds >= 0.4
    before = waited.seconds
    with pytest.raises(Busy), elect(wanted[0], store, budget):
        pass
    assert waited.seconds == before, "nothing is left, so nothing more is waited"


def test_the_choice_ends_a_wait(store: Store, records: Any, other_process: Any) -> None:
    wanted = request()
    child = other_process(wanted.key.digest)
    asked: list[int] = []

    def choose() -> None:
        asked.append(1)
        if len(asked) == 3:
            store.put_choice(choice_for(wanted, records))

    waited = Waited()
    with elect(wanted, store, WaitBudget(check=choose, waited=waited)) as election:
        assert election.choice == choice_for(wanted, records)
    assert child.poll() is None
    assert waited.seconds == 0, "only a bounded wait is counted"


def test_a_choice_made_just_before_the_owner_let_go_is_found(
    store: Store, records: Any, other_process: Any
) -> None:
    """Between the last look and the lock; else the next owner would tune once more."""
    wanted = request()
    child = other_process(wanted.key.digest)

    def choose() -> None:
        if child.poll() is None:
            store.put_choice(choice_for(wanted, records))
            child.kill()
            child.wait()

    with elect(wanted, store, WaitBudget(check=choose)) as election:
        assert election.choice == choice_for(wanted, records)
    assert locks.locked(store.path, [wanted.key.digest]) == set()


def test_force_waits_for_the_lock_and_not_for_a_choice(store: Store, records: Any) -> None:
    store.put_choice(choice_for(request(), records))
    with elect(request(force=True), store, WaitBudget(0.0)) as election:
        assert election.choice is None


def test_the_same_key_within_its_own_tuning_is_busy_at_once(store: Store) -> None:
    for each in (store, Store.in_memory()):
        with elect(request(), each, WaitBudget()) as election:
            assert election.choice is None
            with pytest.raises(Busy, match="same key"), elect(request(), each, WaitBudget()):
                pass


def test_two_tunings_that_want_each_others_key_end_with_the_wait(store: Store) -> None:
    """Each launches the other's kernel in its grid: neither may wait without end."""
    both, ends = threading.Barrier(2), []

    def work(mine: str, other: str) -> None:
        budget = WaitBudget(0.2, waited=Waited())
        with elect(request(mine), store, budget):
            both.wait()
            try:
                with elect(request(other), store, budget):
                    ends.append("locked")
            except Busy:
                ends.append("busy")

    threads = [threading.Thread(target=work, args=names) for names in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ends) == 2
    assert "busy" in ends, "the other may have it after that"


@pytest.mark.skipif(sys.platform != "linux", reason="another system does not say who has a lock")
def test_a_wait_tells_which_process_it_waits_for(store: Store, other_process: Any) -> None:
    """By its number, also in the log and where the wait is over; and that it waits no longer."""
    wanted, told = request(), list[str]()
    child = other_process(wanted.key.digest)
    budget = WaitBudget(0.1, waited=Waited(), tell=told.append)
    kernel = wanted.key.kernel.name
    doing = f"process {child.pid}, which tunes {kernel} for {wanted.key}"
    with pytest.raises(Busy, match=re.escape(doing)), elect(wanted, store, budget):
        pass
    assert (set(told[:-1]), told[-1]) == ({doing}, "")
    assert locks.holder(store.path, wanted.key.digest) == child.pid
    child.kill()
    child.wait()
    assert locks.holder(store.path, wanted.key.digest) == 0
    with elect(wanted, store, budget):
        assert locks.holder(store.path, wanted.key.digest) == os.getpid()


def test_one_process_of_a_machine_compiles(store: Store, other_process: Any) -> None:
    child = other_process(compiling_name())
    with pytest.raises(Busy), compiling(store, WaitBudget(0.1, waited=Waited())):
        pass
    child.kill()
    with compiling(store, WaitBudget()), compiling(store, WaitBudget()):
        assert locks.locked(store.path, [compiling_name()]) == {compiling_name()}
    assert locks.locked(store.path, [compiling_name()]) == set()


def test_a_wait_ends_with_what_the_check_raises(store: Store, other_process: Any) -> None:
    other_process(compiling_name())

    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), compiling(store, WaitBudget(check=check)):
        pass


def test_threads_compile_one_by_one(store: Store) -> None:
    inside, most = [0], [0]

    def work() -> None:
        with compiling(store, WaitBudget()):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_without_a_lock_file_every_process_tunes_and_one_warning_says_so(
    store: Store, other_process: Any
) -> None:
    lock_file = Path(f"{store.path}{locks.KEY_LOCKS}")
    lock_file.mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("a", "b"):
            with elect(request(name), store, WaitBudget(0.0)) as election:
                assert election.choice is None
        with compiling(store, WaitBudget(0.0)):
            pass
    (warning,) = [str(each.message) for each in caught]
    assert warning == (
        f"safetune: cannot lock keys beside {store.path} (Is a directory); processes do not wait "
        "for one another, and each may tune the same key"
    )


def test_a_tuning_within_a_tuning_does_not_wait_for_itself(fresh_process: Any) -> None:
    """A grid launches another kernel, and its own with the same key: each is tuned, and once."""
    done = fresh_process(HERD.with_name("nested.py"), warm=True)
    assert done.stdout == "1 1 0\n"
