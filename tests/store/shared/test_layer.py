"""A shared store that is broken in every way costs a warning and two seconds, once a minute."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sqlite3
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safetune.store.lookup import GuardedStore, Lookup
from safetune.store.shared import once_per_node
from safetune.store.shared.io_thread import IOThread, TimedOut
from safetune.store.shared.layer import BUDGET_S, RETRY_S, SharedLayer
from safetune.store.shared.once_per_node import Turn
from safetune.store.shared.opening import open_shared
from safetune.store.shared.protocol import NoLease, SharedStore

from .conftest import AMPLE_S, LIST, ROOT, SPACE, Children, Clock, Proxy, choice, key, stored, tuned


def wait_until_on(layer: SharedLayer) -> None:
    """Wait until the layer's thread has done its tasks, the one that timed out too."""
    IOThread.call(layer._thread, lambda: None, timeout_s=30.0)
    assert layer.is_on


@contextlib.contextmanager
def ends(within_s: int) -> Iterator[None]:
    """End a forked child here, with a status that says whether all went well."""
    signal.alarm(within_s)
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Waits(IOThread):
    """The thread of a layer, which notes how long callers would have waited for it."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        super().__init__("safetune-shared")
        self._budget_s = budget_s
        self.timeouts_s: list[float] = []
        self._asked_at: list[float] = []
        self._in_vain: list[bool] = []

    def call(self, work: Callable[[], Any], timeout_s: float) -> Any:
        self.timeouts_s.append(timeout_s)
        self._asked_at.append(time.monotonic())
        self._in_vain.append(False)
        try:
            return super().call(work, timeout_s)
        except TimedOut:
            self._in_vain[-1] = True
            raise

    def check(self) -> None:
        """Fail unless all waits together are one budget: each has what the earlier ones left."""
        assert not any(self._in_vain[:-1]), "asked again though it did not answer in time"
        assert self.timeouts_s[0] <= self._budget_s
        asked = zip(self._asked_at, self.timeouts_s, strict=True)
        for (then, earlier_s), (now, later_s) in itertools.pairwise(asked):
            came_back_s = (now - then) * self._budget_s / RETRY_S
            assert later_s <= earlier_s + came_back_s + 1e-3, self.timeouts_s


MakeLayer = Callable[..., SharedLayer]


@pytest.fixture
def layer_of(local: GuardedStore, clock: Clock) -> MakeLayer:
    def make(url: str, budget_s: float = AMPLE_S) -> SharedLayer:
        thread = Waits(budget_s)
        return SharedLayer(
            open_shared(url), local.connection, clock, budget_s=budget_s, thread=thread
        )

    return make


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as made:
        yield made


def url_of(listener: socket.socket) -> str:
    return f"postgresql://127.0.0.1:{listener.getsockname()[1]}/db?sslmode=disable"


def everything(layer: SharedLayer) -> list[str]:
    """Do all that a run does, three times, and return what was said.

    Fails where a caller would wait for longer than the budget.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3):
            layer.refresh(SPACE)
            claim = layer.claim(SPACE, key(number).digest, LIST, force=False)
            assert isinstance(claim.lease, NoLease)
            assert claim.stored is None
            assert layer.publish(SPACE, stored(number)) == stored(number)
            layer.release(claim.lease, published=True)
    assert isinstance(layer._thread, Waits)
    layer._thread.check()
    return [str(each.message) for each in said]


def answering(listener: socket.socket, answer: bytes) -> threading.Thread:
    """Have every connection answered with this, and kept open."""
    held = []

    def serve() -> None:
        try:
            while True:
                client = listener.accept()[0]
                client.sendall(answer)
                held.append(client)
        except OSError:
            for each in held:
                each.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


class TestBroken:
    def test_a_server_that_is_down_costs_one_warning(self, layer_of: MakeLayer) -> None:
        with socket.socket() as silent:  # it keeps its port, and does not listen
            silent.bind(("127.0.0.1", 0))
            (told,) = everything(layer_of(url_of(silent)))
        assert "Connection refused" in told
        assert "continuing without it" in told

    def test_a_server_that_never_answers_costs_the_budget_once(
        self, layer_of: MakeLayer, listener: socket.socket
    ) -> None:
        """The connection is made, and the server never answers: libpq would wait for ever."""
        layer = layer_of(url_of(listener) + "&connect_timeout=600", BUDGET_S)
        (told,) = everything(layer)
        assert isinstance(layer._thread, Waits)
        assert layer._thread.timeouts_s == [BUDGET_S], "the first question is given all of it"
        assert "does not answer in time" in told

    def test_an_address_without_a_route_costs_one_warning(self, layer_of: MakeLayer) -> None:
        """An address for documentation: packets to it get lost, or are refused."""
        url = "postgresql://192.0.2.1/db?connect_timeout=600"
        told = everything(layer_of(url, BUDGET_S))
        assert len(told) == 1

    @pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 64, b"E\xff"])
    def test_a_server_that_is_not_postgresql_costs_one_warning(
        self, layer_of: MakeLayer, listener: socket.socket, answer: bytes
    ) -> None:
        answering(listener, answer)
        told = everything(layer_of(url_of(listener)))
        assert len(told) == 1

    def test_a_file_system_that_connects_when_it_is_made_does_so_on_the_thread(
        self, layer_of: MakeLayer
    ) -> None:
        """Some ask the network for credentials: not on the thread that launches."""
        pytest.importorskip("fsspec")
        told = everything(layer_of("ftp://127.0.0.1:1/folder"))
        assert len(told) == 1
        assert "ftp://127.0.0.1:1/folder" in told[0]

    def test_a_dead_mount_costs_the_budget_once_and_is_used_when_it_is_back(
        self, local: GuardedStore, clock: Clock, tmp_path: Path
    ) -> None:
        """A call that never returns, as on a hard NFS mount."""
        back = threading.Event()
        shared = Dead(open_shared(f"file://{tmp_path}/shared"), back)
        layer = SharedLayer(shared, local.connection, clock, thread=Waits())
        (told,) = everything(layer)
        assert "does not answer in time" in told

        clock.leapt_s += 2 * RETRY_S
        assert not layer.is_on, "its thread is still there, and a second one would be lost, too"
        back.set()
        wait_until_on(layer)

    def test_a_slow_store_costs_no_more_than_the_budget(
        self, local: GuardedStore, clock: Clock, tmp_path: Path
    ) -> None:
        """Each answer comes in time, and all of them together would not."""
        waits = Waits()
        slow = Slow(open_shared(f"file://{tmp_path}"))
        layer = SharedLayer(slow, local.connection, clock, thread=waits)
        told = everything(layer)
        assert len(told) == 1
        assert waits.timeouts_s[-1] <= BUDGET_S - 0.6, "a slow answer is paid for"

    def test_rows_that_are_not_records_are_a_miss(
        self, database: str, layer_of: MakeLayer, local: GuardedStore
    ) -> None:
        """The other rows are pulled."""
        import psycopg

        open_shared(database).publish(SPACE, [stored(number) for number in range(4)])
        with psycopg.connect(database, autocommit=True) as connection:
            for number, text in enumerate(["", "{}", "[" * 3000]):
                connection.execute(
                    "UPDATE safetune.choice SET record = %s WHERE key = %s",
                    (text, key(number).digest),
                )
        layer_of(database).refresh(SPACE)
        assert [local.choice(key(number).digest) for number in range(3)] == [None] * 3
        assert local.choice(key(3).digest) == choice(3)


class Dead:
    """A store that answers when it is back."""

    def __init__(self, store: SharedStore, back: threading.Event) -> None:
        self._store = store
        self._back = back
        self.location, self.identity = store.location, store.identity

    def __getattr__(self, name: str) -> Any:
        if name not in ("close", "is_connected"):
            self._back.wait()
        return getattr(self._store, name)


class Slow:
    """A store that takes its time."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self.location, self.identity = store.location, store.identity

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in ("close", "is_connected"):
            threading.Event().wait(0.6)
        return method


def test_a_store_that_comes_back_is_used_again(
    database: str, server: Any, layer_of: MakeLayer, clock: Clock, proxy: Proxy
) -> None:
    """And what was chosen meanwhile is published."""
    url = database.replace(str(server.port), str(proxy.port))
    proxy.stop_forwarding()
    layer = layer_of(url, BUDGET_S)
    assert len(everything(layer)) == 1
    assert open_shared(database).names(SPACE) == set()

    proxy._open.set()
    clock.leapt_s += RETRY_S / 2
    assert not layer.is_on
    clock.leapt_s += RETRY_S
    wait_until_on(layer)  # the thread is back once the old connection is
    assert layer.publish(SPACE, stored(7)) == stored(7)
    layer.flush()
    assert open_shared(database).get(SPACE, key(7).digest, LIST) == stored(7)


def test_a_store_that_may_only_be_read_is_read_on(
    database: str, layer_of: MakeLayer, local: GuardedStore
) -> None:
    """Reading goes on; one warning for all that is not written."""
    open_shared(database).publish(SPACE, [stored(5)])
    layer = layer_of(database + "&options=-c%20default_transaction_read_only%3Don")
    (told,) = everything(layer)
    assert "read-only transaction" in told
    assert "not shared for now" in told
    assert local.choice(key(5).digest) == choice(5)
    assert layer.is_on


def test_a_server_whose_disk_is_full_is_read_on(
    database: str, layer_of: MakeLayer, local: GuardedStore
) -> None:
    """It still answers: its choices are used, and one warning says that nothing is written."""
    import psycopg

    open_shared(database).publish(SPACE, [stored(5)])
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE "
            "'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$"
        )
        for table in ("choice", "lease"):
            connection.execute(
                f"CREATE TRIGGER refused BEFORE INSERT ON safetune.{table} "
                "EXECUTE FUNCTION refuse()"
            )
    layer = layer_of(database)
    (told,) = everything(layer)
    assert "No space left on device" in told
    assert "not shared for now" in told
    assert local.choice(key(5).digest) == choice(5)
    assert layer.is_on


class TestExchange:
    def test_choices_of_others_replace_those_of_this_node(
        self, tmp_path: Path, layer_of: MakeLayer, local: GuardedStore
    ) -> None:
        """Also where this node had chosen otherwise: the first that was published wins."""
        url = f"file://{tmp_path}/shared"
        open_shared(url).publish(SPACE, [stored(0, 64), stored(1, 64), stored(2, 64, 2)])
        tuned(local, 1, block=128)
        layer_of(url).refresh(SPACE)
        assert local.choice(key(0).digest, LIST) == choice(0, 64)
        assert local.choice(key(1).digest, LIST) == choice(1, 64)
        assert local.choice(key(2).digest, LIST) == choice(2, 64, 2)
        assert len(local.choices()) == 3

    def test_choices_that_were_measured_here_are_published(
        self, tmp_path: Path, layer_of: MakeLayer, local: GuardedStore
    ) -> None:
        """Such as those tuned while the store was down; not those whose times hold here only."""
        url = f"file://{tmp_path}/shared"
        tuned(local, 0)
        tuned(local, 1, marks=("contended",))
        tuned(local, 2, marks=("regenerated: x",))
        tuned(local, 3, marks=("disputed: y",))
        local.put_choice(choice(4))  # from a pack, or from another store
        layer_of(url).refresh(SPACE)
        shared = open_shared(url)
        assert {name.key for name in shared.names(SPACE)} == {key(0).digest, key(3).digest}
        assert shared.get(SPACE, key(0).digest, LIST) == stored(0)

    def test_pulled_choices_are_found_in_memory_where_the_local_store_fails(
        self, tmp_path: Path, database: str
    ) -> None:
        """What was pulled is in memory then, and is found."""
        open_shared(database).publish(SPACE, [stored(0, 64), stored(0, 128, 2)])
        store = GuardedStore.open(tmp_path / "node")
        with store.connection.transaction() as writing:
            writing.execute("DROP TABLE choice")
            writing.execute("CREATE VIEW choice AS SELECT 1")
        store.shared = SharedLayer(open_shared(database), store.connection, budget_s=AMPLE_S)
        found = Lookup(store).find(key(), LIST)
        assert found == choice(0, 128, 2)
        store.close()

    def test_a_local_store_that_another_process_locks_costs_no_warning(
        self, tmp_path: Path, layer_of: MakeLayer, local: GuardedStore
    ) -> None:
        """A stored choice is found at once, and no warning calls the shared store slow."""
        url = f"file://{tmp_path}/shared"
        open_shared(url).publish(SPACE, [stored(1)])
        tuned(local, 0)
        local.shared = layer_of(url)
        other = sqlite3.connect(local.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = [Lookup(local).find(key(number), LIST) for number in range(2)]
        assert found == [choice(0), choice(1)]
        assert not said
        assert local.shared.is_on
        other.close()

    @pytest.mark.parametrize("then", ["another choice", "flush", "the end of a sweep"])
    def test_what_is_in_memory_is_written_when_the_lock_is_gone(
        self, tmp_path: Path, layer_of: MakeLayer, local: GuardedStore, then: str
    ) -> None:
        """Else a sweep would end with keys that the node's other processes do not have."""
        url = f"file://{tmp_path}/shared"
        open_shared(url).publish(SPACE, [stored(0), stored(1)])
        layer = layer_of(url)
        other = sqlite3.connect(local.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert layer.claim(SPACE, key(0).digest, LIST, force=False).stored == stored(0)
        other.close()
        assert local.choice(key(0).digest, LIST) is None
        if then == "another choice":
            layer.claim(SPACE, key(1).digest, LIST, force=False)
        elif then == "flush":
            layer.flush()
        else:
            layer.write_unkept()
        assert local.choice(key(0).digest, LIST) == choice(0)

    def test_what_is_written_is_not_kept_in_memory_for_another_one_that_is_not(
        self, tmp_path: Path, layer_of: MakeLayer, local: GuardedStore
    ) -> None:
        url = f"file://{tmp_path}/shared"
        open_shared(url).publish(SPACE, [stored(0), stored(1)])
        layer = layer_of(url)
        other = sqlite3.connect(local.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        layer.claim(SPACE, key(0).digest, LIST, force=False)
        other.execute("COMMIT")
        refused = f"CREATE TRIGGER refuse BEFORE INSERT ON choice WHEN NEW.key = '{key(0).digest}' "
        other.execute(f"{refused} BEGIN SELECT RAISE(ABORT, 'refused'); END")
        other.close()
        layer.claim(SPACE, key(1).digest, LIST, force=False)
        assert local.choice(key(1).digest, LIST) == choice(1)
        found = [layer.choice(SPACE, key(number).digest, LIST) for number in range(2)]
        assert found == [choice(0), None]

    def test_the_source_of_a_kernel_is_not_published(
        self, tmp_path: Path, layer_of: MakeLayer, local: GuardedStore
    ) -> None:
        url = f"file://{tmp_path}/shared"
        tuned(local, 0)
        layer_of(url).refresh(SPACE)
        ((record, _),) = local.trials_of("add_kernel")
        assert record.kernel_source == "def add_kernel(): ..."
        (path,) = (tmp_path / "shared").rglob("*.json")
        assert "def add_kernel" not in path.read_text()


class TestOncePerNode:
    def test_one_of_thirty_processes_of_a_node_connects(
        self, database: str, server: Any, proxy: Proxy, tmp_path: Path
    ) -> None:
        """Threads with a connection and a layer each, as processes of one node would have."""
        open_shared(database).publish(SPACE, [stored(number) for number in range(20)])
        url = database.replace(str(server.port), str(proxy.port))
        stores = [GuardedStore.open(tmp_path / "node") for _ in range(30)]
        barrier = threading.Barrier(len(stores))
        found: list[int] = []

        def start(store: GuardedStore) -> None:
            store.shared = SharedLayer(open_shared(url), store.connection, budget_s=AMPLE_S)
            barrier.wait()
            lookup = Lookup(store)
            found.append(sum(lookup.find(key(n), LIST) is not None for n in range(20)))

        threads = [threading.Thread(target=start, args=(store,)) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [20] * len(stores)
        assert proxy.accepted == 1
        for store in stores:
            store.close()

    def test_for_a_new_database_the_store_is_asked_again(self, tmp_path: Path) -> None:
        database = tmp_path / "safetune.db"
        database.write_text("old")
        since = time.time() - 60
        with once_per_node.turn(database, "x", "store", since, 1.0) as turn:
            assert turn is Turn.MINE
        with once_per_node.turn(database, "x", "store", since, 1.0) as turn:
            assert turn is Turn.DONE
        (tmp_path / "new").write_text("new")
        (tmp_path / "new").rename(database)
        with once_per_node.turn(database, "x", "store", since, 1.0) as turn:
            assert turn is Turn.MINE

    def test_a_process_that_failed_has_not_asked(self, tmp_path: Path) -> None:
        database = tmp_path / "safetune.db"
        database.write_text("")
        with pytest.raises(OSError), once_per_node.turn(database, "x", "store", 0.0, 1.0):
            raise OSError
        with once_per_node.turn(database, "x", "store", 0.0, 1.0) as turn:
            assert turn is Turn.MINE

    def test_an_answer_from_the_future_does_not_count(self, tmp_path: Path) -> None:
        """The clock was set back since."""
        database = tmp_path / "safetune.db"
        database.write_text("")
        with once_per_node.turn(database, "x", "store", 0.0, 1.0):
            pass
        (answered,) = tmp_path.glob("safetune-shared-*")
        os.utime(answered, (time.time() + 1e6, time.time() + 1e6))
        with once_per_node.turn(database, "x", "store", 0.0, 1.0) as turn:
            assert turn is Turn.MINE

    def test_a_process_that_hangs_does_not_hold_up_the_others(self, tmp_path: Path) -> None:
        database = tmp_path / "safetune.db"
        database.write_text("")
        with (
            once_per_node.turn(database, "x", "store", 0.0, 1.0) as first,
            once_per_node.turn(database, "x", "store", 0.0, 0.05) as second,
        ):
            assert (first, second) == (Turn.MINE, Turn.BUSY)


def test_unsent_choices_are_published_when_the_process_ends(
    database: str, server: Any, proxy: Proxy, children: Children, tmp_path: Path
) -> None:
    """And a server that does not answer does not hold up the end."""
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.store.shared.conftest import SPACE, stored
from pathlib import Path
from safetune.store.lookup import GuardedStore
from safetune.store.shared.opening import open_shared
from safetune.store.shared.layer import SharedLayer
store = GuardedStore.open(Path(sys.argv[2]))
layer = SharedLayer(open_shared(sys.argv[1]), store.connection)
layer._thread.submit(lambda: layer._deliver(SPACE, [stored()]))
"""
    children.run(script, database, tmp_path / "a")
    assert open_shared(database).get(SPACE, key().digest, LIST) == stored()

    proxy.stop_forwarding()
    url = database.replace(str(server.port), str(proxy.port))
    children.run(script, url, tmp_path / "b")  # which ends; without a budget it never would


def test_a_forked_child_starts_a_thread_of_its_own(database: str, local: GuardedStore) -> None:
    """The thread is not there in the child: a task for the parent's thread would never run."""
    layer = SharedLayer(open_shared(database), local.connection, budget_s=AMPLE_S)
    assert layer.publish(SPACE, stored(0)) == stored(0)
    pid = os.fork()
    if pid == 0:
        layer.publish(SPACE, stored(1))
        os._exit(0 if layer.is_on else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert {name.key for name in open_shared(database).names(SPACE)} == {
        key(0).digest,
        key(1).digest,
    }


def test_a_fork_during_a_query_leaves_both_sides_working(
    database: str, local: GuardedStore
) -> None:
    """Regression: the child waited for the lock of its parent's connection, and closed that."""
    import psycopg

    shared = open_shared(database)
    shared.publish(SPACE, [stored(0)])
    backend: Any = open_shared(database)
    layer = SharedLayer(backend, local.connection, budget_s=AMPLE_S)
    answers: list[Any] = []

    def query() -> None:
        with backend.writing() as connection:
            answers.append(connection.execute("SELECT pg_advisory_lock(1)").fetchall())
            answers.append(connection.execute("SELECT 1").fetchall())

    with psycopg.connect(database, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(1)")
        layer._thread.submit(lambda: layer._run(query))
        while other.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is None:
            other.execute("SELECT pg_sleep(0.01)")
        pid = os.fork()
        if pid == 0:
            with ends(20):
                claim = layer.claim(SPACE, key(0).digest, LIST, force=False)
                assert claim.stored == stored(0)
                assert layer.is_on
        status = os.waitpid(pid, 0)[1]
    layer._thread.call(lambda: None, 20)  # behind all other tasks
    assert status == 0
    assert len(answers) == 2
    assert answers[1] == [(1,)]


def test_a_fork_while_a_thread_holds_the_lock_of_the_budget_goes_on(
    tmp_path: Path, layer_of: MakeLayer
) -> None:
    """Regression: the lock that it held was held in the child for ever."""
    layer = layer_of(f"file://{tmp_path}/shared")
    with layer._budget._lock:
        pid = os.fork()
        if pid == 0:
            with ends(20):
                assert layer.publish(SPACE, stored(0)) == stored(0)
                assert layer.is_on
    assert os.waitpid(pid, 0)[1] == 0
