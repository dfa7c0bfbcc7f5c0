"""Many processes miss one key: one tunes, the others wait, and what dies is taken over."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safetune.errors import Busy, LeaseLost
from safetune.store.local import lease
from safetune.tuning import single_flight
from safetune.tuning.single_flight import Patience

ROOT = Path(__file__).parents[3]
HERD = Path(__file__).parent / "scripts" / "herd.py"
CONFIGS = 4

#: How many processes miss the key at once; `make store-faults` has 32.
HERD_SIZE = 8


class Herd:
    """A herd at work, and the store that it works on."""

    def __init__(self, place: Path, count: int, sizes: tuple[int, ...], **environment: str) -> None:
        self.place, self.store = place, place / "store" / "safetune.db"
        arguments = [str(count), str(place), str(self.heartbeat_s), *map(str, sizes)]
        self._process = subprocess.Popen(
            [sys.executable, str(HERD), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "SAFETUNE_CACHE_DIR": str(place / "store"),
                "TRITON_INTERPRET": "1",
                **environment,
            },
        )

    heartbeat_s = 5.0

    def query(self, statement: str) -> list[Any]:
        connection = sqlite3.connect(self.store, timeout=30)
        try:
            return connection.execute(statement).fetchall()
        finally:
            connection.close()

    def leader(self) -> int:
        """The process that has the lease now."""
        ((owner,),) = self.query("SELECT owner FROM lease")
        return int(json.loads(owner)[2])

    def launches(self) -> list[dict[str, Any]]:
        """What each process says of each of its launches, once all have ended."""
        output, _ = self._process.communicate(timeout=120)
        assert self._process.returncode == 0
        return [json.loads(line) for line in output.splitlines()]

    def first_launches(self, count: int) -> list[dict[str, Any]]:
        """What the first processes say, as soon as they do."""
        assert self._process.stdout is not None
        return [json.loads(self._process.stdout.readline()) for _ in range(count)]

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


class FastHerd(Herd):
    heartbeat_s = 0.3


@pytest.fixture
def place(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "gate")
    return tmp_path


@contextlib.contextmanager
def stopped(herd: Herd) -> Iterator[Herd]:
    try:
        yield herd
    finally:
        herd.stop()


@contextlib.contextmanager
def held(place: Path) -> Iterator[None]:
    """From when the third config is being measured; opening the gate waits for its reader."""
    with open(place / "gate", "w"):
        yield


def test_one_of_many_tunes(place: Path) -> None:
    with stopped(Herd(place, HERD_SIZE, (100,))) as herd:
        launches = herd.launches()
    assert sorted(launch["measured"] for launch in launches) == [0] * (HERD_SIZE - 1) + [CONFIGS]
    assert len({launch["block"] for launch in launches}) == 1
    assert [bool(launch["started"]) for launch in launches] == [
        bool(launch["measured"]) for launch in launches
    ], "only the holder of the lease starts processes"
    assert [launch["warnings"] for launch in launches] == [[]] * HERD_SIZE
    assert herd.query("SELECT count(*) FROM trial") == [(CONFIGS,)]
    assert herd.query("SELECT generation, measured FROM choice") == [(1, CONFIGS)]
    assert herd.query("SELECT * FROM lease") == []


def test_a_killed_leader_is_followed_by_one_that_measures_the_rest(place: Path) -> None:
    (place / "hold").touch()
    with stopped(Herd(place, HERD_SIZE, (100,))) as herd:
        with held(place):
            before = herd.query("SELECT token FROM lease")
            os.kill(herd.leader(), signal.SIGKILL)
            killed = time.monotonic()
        launches = herd.launches()
        took_s = time.monotonic() - killed
    assert sorted(launch["measured"] for launch in launches) == [0] * (HERD_SIZE - 2) + [2]
    assert len({launch["block"] for launch in launches}) == 1
    assert herd.query("SELECT count(*) FROM trial") == [(CONFIGS,)]
    ((last,),) = herd.query("SELECT seq FROM sqlite_sequence WHERE name = 'lease'")
    assert last == before[0][0] + 1, "exactly one other took over"
    # Its end is seen at once; a process of its own has to import torch before it can measure.
    assert took_s < 2 * herd.heartbeat_s + 30


def test_a_leader_that_hangs_is_followed_and_adopts_what_was_chosen(place: Path) -> None:
    """Stopped, not dead: nothing but its heartbeats tells; and it wakes up and writes."""
    (place / "hold").touch()
    with stopped(FastHerd(place, 3, (100,))) as herd:
        with held(place):
            leader = herd.leader()
            os.kill(leader, signal.SIGSTOP)
            others = herd.first_launches(2)
            chosen = herd.query("SELECT * FROM choice")
            os.kill(leader, signal.SIGCONT)
        launches = [*others, *herd.launches()]
    by_pid = {launch.pop("pid"): launch for launch in launches}
    assert len({launch["block"] for launch in launches}) == 1
    assert by_pid[leader]["measured"] == 0, "what it measured is not what was chosen from"
    assert herd.query("SELECT * FROM choice") == chosen
    assert herd.query("SELECT count(*) FROM trial") == [(CONFIGS,)]


def test_who_has_waited_long_enough_goes_on_with_a_fallback(place: Path) -> None:
    (place / "hold").touch()
    with stopped(Herd(place, 3, (100,), SAFETUNE_WAIT="0.5")) as herd:
        with held(place):
            waiting = herd.first_launches(2)
        launches = herd.launches()
    for launch in waiting:
        assert launch["block"] == 16, "the first config"
        assert 0.5 <= launch["seconds"] < 5
        assert "SAFETUNE_WAIT" in launch["warnings"][0]
        assert "tried again later" in launch["warnings"][0]
    assert [launch["measured"] for launch in launches] == [CONFIGS]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not waited yet."""
    monkeypatch.setattr(single_flight, "_spent", single_flight._Spent())


def other_process_holds(children: Any, directory: Path, *names: str) -> Any:
    """A process that holds leases until it is killed or told to go."""
    child = children.start(
        """
from safetune.store.local import lease
store = Store.open(directory)
held = [store.contender(name).attempt() for name in sys.argv[2:]]
print(all(held), flush=True)
sys.stdin.readline()
for each in held:
    each.release()
""",
        directory,
        *names,
    )
    assert child.stdout.readline() == "True\n"
    return child


def test_all_waits_of_a_process_count_together(store, children, patient) -> None:
    """Five keys must not wait five times SAFETUNE_WAIT: ranks meet in collectives."""
    other_process_holds(children, store.path.parent, *"abcde")
    begin = time.monotonic()
    for name in "abcde":
        with pytest.raises(Busy, match="SAFETUNE_WAIT"):
            single_flight._waited(store, name, Patience(0.4), lambda: None)
    assert 0.4 <= time.monotonic() - begin < 1.4


def test_the_choice_ends_a_wait(store, records, children, patient) -> None:
    child = other_process_holds(children, store.path.parent, "key")
    asked = []

    def chosen() -> Any:
        asked.append(1)
        if len(asked) == 3:
            store.put_choice(records.choice())
        return store.choice("key")

    assert single_flight._waited(store, "key", Patience(), chosen) == records.choice()
    assert child.poll() is None
    assert single_flight._spent.seconds == 0, "only a bounded wait is counted"


def test_one_process_of_a_node_compiles(store, children, patient) -> None:
    child = other_process_holds(children, store.path.parent, single_flight.COMPILING)
    with pytest.raises(Busy), single_flight.compiling(store, Patience(0.1)):
        pass
    child.kill()
    with single_flight.compiling(store, Patience()), single_flight.compiling(store, Patience()):
        assert store.contender(single_flight.COMPILING).attempt() is None
    freed = store.contender(single_flight.COMPILING).attempt()
    assert freed is not None
    freed.release()


def test_a_wait_ends_with_what_the_check_raises(store, children) -> None:
    other_process_holds(children, store.path.parent, "key")

    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        single_flight._waited(store, "key", Patience(math.inf, check), lambda: None)


def test_an_interrupt_ends_a_wait(store, children, patient) -> None:
    other_process_holds(children, store.path.parent, "key")
    child = children.start(
        """
from safetune.tuning import single_flight as flight
store = Store.open(directory)
waiting = flight.Patience(check=lambda: print("waiting", flush=True))
try:
    flight._waited(store, "key", waiting, lambda: None)
except KeyboardInterrupt:
    print("interrupted")
""",
        store.path.parent,
    )
    assert child.stdout.readline() == "waiting\n"
    child.send_signal(signal.SIGINT)
    assert children.end(child).splitlines()[-1] == "interrupted"


class TestLease:
    def test_is_had_by_one(self, store) -> None:
        first = store.contender("key").attempt()
        assert store.contender("key").attempt() is None
        other = store.contender("other").attempt()
        first.release()
        second = store.contender("key").attempt()
        assert second.token > other.token > first.token
        for each in (second, other):
            each.release()

    def test_a_token_is_never_used_twice(self, store) -> None:
        """A stale owner would hold the lease of whoever got its token."""
        tokens = []
        for _ in range(3):
            held = store.contender("key").attempt()
            tokens.append(held.token)
            held.release()
        assert tokens == sorted(set(tokens))

    def test_who_lost_it_writes_nothing(self, store, records) -> None:
        stale = store.contender("key").attempt()
        connection = sqlite3.connect(store.path)
        with connection:
            connection.execute("DELETE FROM lease")
        connection.close()
        current = store.contender("key").attempt()
        for put, record in (
            (store.put_trial, records.trial()),
            (store.put_choice, records.choice()),
        ):
            with pytest.raises(LeaseLost):
                put(record, stale)
        assert store.choice("key") is None
        assert store.trials("key") == []
        stale.release()
        store.put_trial(records.trial(), current)
        assert store.put_choice(records.choice(), current) == store.choice("key")
        current.release()

    def test_of_a_dead_process_is_free_at_once(self, store, children) -> None:
        child = other_process_holds(children, store.path.parent, "key")
        contender = store.contender("key")
        assert contender.attempt() is None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie: nobody has reaped it
        taken = contender.attempt()
        assert taken is not None
        taken.release()

    def test_of_a_process_that_cannot_be_seen_is_free_after_two_heartbeats(
        self, store, monkeypatch
    ) -> None:
        """Of another machine, boot or container; whatever its clock says."""
        monkeypatch.setattr(lease, "HEARTBEAT_S", 3600.0)
        now = 1000.0
        monkeypatch.setattr(lease.time, "monotonic", lambda: now)
        monkeypatch.setattr(lease, "_node", lambda: ("elsewhere", 1))
        lease._me.cache_clear()
        held = store.contender("key").attempt()
        held._ended.set()
        lease._me.cache_clear()
        monkeypatch.undo()
        monkeypatch.setattr(lease.time, "monotonic", lambda: now)

        contender, late = store.contender("key"), store.contender("key")
        assert contender.attempt() is None
        now += lease.expiry_s()
        assert contender.attempt() is None
        assert late.attempt() is None, "it has only just seen it"
        now += 0.1
        taken = contender.attempt()
        assert taken is not None
        assert late.attempt() is None, "one takes over"
        taken.release()

    def test_lives_as_long_as_its_heart_beats(self, store, monkeypatch) -> None:
        monkeypatch.setattr(lease, "HEARTBEAT_S", 0.02)
        held = store.contender("key").attempt()
        contender = store.contender("key")
        seen = set()
        while len(seen) < 4:
            assert contender.attempt() is None
            seen.add(contender._seen)
        held.release()

    def test_a_fork_does_not_have_its_parents(self, store, records, tmp_path, children) -> None:
        output = children.run(
            """
from safetune.errors import LeaseLost
store = Store.open(directory)
held = store.contender("key").attempt()
pid = os.fork()
if pid == 0:
    held.release()
    try:
        store.put_choice(choice("c1"), held)
    except LeaseLost:
        os._exit(0 if store.contender("key").attempt() is None else 2)
    os._exit(1)
print(os.waitpid(pid, 0)[1], store.put_choice(choice("c2"), held).config_digest)
""",
            tmp_path,
        )
        assert output == "0 c2\n"

    @pytest.mark.parametrize("owner", ["", "[]", "{}", "[1, 2, 3, 4]", "\0", '["", 0, 1, ""]'])
    def test_an_owner_that_means_nothing_expires(self, store, owner, monkeypatch) -> None:
        connection = sqlite3.connect(store.path)
        with connection:
            connection.execute("INSERT INTO lease VALUES (7, 'key', ?, 'x')", (owner,))
        connection.close()
        contender = store.contender("key")
        assert contender.attempt() is None
        monkeypatch.setattr(lease, "HEARTBEAT_S", -1)
        taken = contender.attempt()
        assert taken.token == 8
        taken._ended.set()

    def test_threads_get_it_one_by_one(self, store) -> None:
        inside, most = [0], [0]

        def work() -> None:
            with single_flight.compiling(store, Patience()):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert most == [1]


def test_a_tuning_within_a_tuning_does_not_wait_for_itself(tmp_path: Path) -> None:
    """Of another kernel it is tuned; of the same key it gets the fallback, with a warning."""
    done = subprocess.run(
        [sys.executable, str(HERD.with_name("nested.py"))],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "SAFETUNE_CACHE_DIR": str(tmp_path),
            "TRITON_INTERPRET": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 1 1\n"
