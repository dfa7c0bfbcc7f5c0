"""A shared store that is broken in every way costs one warning and a bounded wait."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safetune.store.local import connection
from safetune.store.lookup import GuardedStore, Lookup
from safetune.store.shared.layer import RETRY_S, SharedLayer
from safetune.store.shared.opening import open_shared
from safetune.store.shared.protocol import NoLease, SharedStore

from .conftest import (
    LIST,
    SPACE,
    Children,
    Clock,
    MakeLayer,
    Proxy,
    choice,
    key,
    stored,
    tuned,
    until,
)

Patience = Callable[[float], None]

#: Short for a store that never answers, so that the tests do not take long.
IMPATIENT_S = 0.3


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


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as made:
        yield made


def url_of(listener: socket.socket) -> str:
    return f"postgresql://127.0.0.1:{listener.getsockname()[1]}/db?sslmode=disable"


def everything(layer: SharedLayer) -> list[str]:
    """Do all that a run does, three times, and return what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3):
            layer.refresh(SPACE)
            claim = layer.claim(SPACE, key(number).digest, LIST, force=False)
            assert isinstance(claim.lease, NoLease)
            assert claim.stored is None
            assert layer.publish(SPACE, stored(number)) == stored(number)
            layer.release(claim.lease)
    return [str(each.message) for each in said]


def answering(listener: socket.socket, answer: bytes) -> None:
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

    threading.Thread(target=serve, daemon=True).start()


class Dead:
    """A store that answers when it is back."""

    def __init__(self, store: SharedStore, back: threading.Event) -> None:
        self._store, self._back = store, back
        self.location, self.identity = store.location, store.identity
        self.asked = 0
        self.when_asked: Callable[[], object] = lambda: None

    def again(self) -> Dead:
        return self

    def __getattr__(self, name: str) -> Any:
        if name != "close":
            self.asked += 1
            self.when_asked()
            self._back.wait()
        return getattr(self._store, name)


class TestBroken:
    def test_a_server_that_is_down_costs_one_warning(self, layer_of: MakeLayer) -> None:
        with socket.socket() as silent:  # it keeps its port, and does not listen
            silent.bind(("127.0.0.1", 0))
            (told,) = everything(layer_of(url_of(silent)))
        assert "nothing is listening there" in told
        assert "continuing without it" in told

    def test_a_server_that_never_answers_costs_one_wait(
        self, layer_of: MakeLayer, listener: socket.socket, patience: Patience
    ) -> None:
        """The connection is made, and the server never answers: libpq would wait for ever."""
        patience(IMPATIENT_S)
        layer = layer_of(url_of(listener) + "&connect_timeout=600")
        (told,) = everything(layer)
        assert "does not answer in time" in told
        assert not layer.is_on

    @pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 64, b"E\xff"])
    def test_a_server_that_is_not_postgresql_costs_one_warning(
        self, layer_of: MakeLayer, listener: socket.socket, answer: bytes
    ) -> None:
        answering(listener, answer)
        assert len(everything(layer_of(url_of(listener)))) == 1

    def test_a_file_system_that_connects_when_it_is_made_does_so_on_a_thread(
        self, layer_of: MakeLayer
    ) -> None:
        """Some ask the network for credentials: not on the thread that launches."""
        pytest.importorskip("fsspec")
        (told,) = everything(layer_of("ftp://127.0.0.1:1/folder"))
        assert "ftp://127.0.0.1:1/folder" in told

    def test_a_dead_mount_costs_one_wait_and_is_used_when_it_is_back(
        self, layer_of: MakeLayer, clock: Clock, tmp_path: Path, patience: Patience
    ) -> None:
        """A call that never returns, as on a hard NFS mount."""
        patience(IMPATIENT_S)
        back = threading.Event()
        dead = Dead(open_shared(f"file://{tmp_path}/shared"), back)
        layer = layer_of(dead)
        (told,) = everything(layer)
        assert "does not answer in time" in told
        clock.leapt_s += RETRY_S
        assert everything(layer) == []
        assert dead.asked <= 2, "the puller's and one more: a further one would be lost, too"
        back.set()
        until(lambda: layer.puller(SPACE).is_complete and layer.is_on)
        assert layer.publish(SPACE, stored(5)) == stored(5)

    def test_what_a_signal_handler_raises_during_a_wait_is_the_programs(
        self, layer_of: MakeLayer, tmp_path: Path
    ) -> None:
        back = threading.Event()
        dead = Dead(open_shared(f"file://{tmp_path}/shared"), back)
        layer = layer_of(dead)

        def too_long(*_: object) -> None:
            raise TimeoutError("the program's own limit")

        before = signal.signal(signal.SIGUSR1, too_long)
        dead.when_asked = lambda: os.kill(os.getpid(), signal.SIGUSR1)
        try:
            with pytest.raises(TimeoutError, match="the program's own limit"):
                layer.publish(SPACE, stored(0))
        finally:
            signal.signal(signal.SIGUSR1, before)
            back.set()
        assert layer.is_on

    def test_a_pull_that_takes_long_does_not_turn_the_store_off(
        self, layer_of: MakeLayer, local: GuardedStore, tmp_path: Path, patience: Patience
    ) -> None:
        """As the first one of many choices: it goes on while the program does."""
        (tmp_path / "shared").mkdir()
        shared = open_shared(f"file://{tmp_path}/shared")
        shared.publish(SPACE, [stored(0)])
        patience(IMPATIENT_S)
        back = threading.Event()
        layer = layer_of(Dead(shared, back))
        layer.pull(SPACE)
        assert layer.is_on
        back.set()
        until(lambda: local.choice(key(0).digest) == choice(0))

    def test_a_server_whose_disk_is_full_is_read_on(
        self, database: str, layer_of: MakeLayer, local: GuardedStore
    ) -> None:
        """It still answers: its choices are used, and one warning says that nothing is written."""
        import psycopg

        open_shared(database).publish(SPACE, [stored(5)])
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE "
                "'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; "
                "END $$"
            )
            for table in ("choice", "lease"):
                connection.execute(
                    f"CREATE TRIGGER refused BEFORE INSERT ON safetune.{table} "
                    "EXECUTE FUNCTION refuse()"
                )
        layer = layer_of(database)
        (told,) = everything(layer)
        assert "the server has no disk space left" in told
        assert "not shared for now" in told
        assert local.choice(key(5).digest) == choice(5)
        assert layer.is_on


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A directory that nodes share."""
    (tmp_path / "shared").mkdir()
    return f"file://{tmp_path}/shared"


class TestExchange:
    def test_choices_of_others_replace_those_of_this_node(
        self, url: str, layer_of: MakeLayer, local: GuardedStore
    ) -> None:
        """Also where this node had chosen otherwise: the first that was published wins."""
        open_shared(url).publish(SPACE, [stored(0, 64), stored(1, 64), stored(2, 64, 2)])
        tuned(local, 1, block=128)
        layer_of(url).refresh(SPACE)
        assert local.choice(key(0).digest, LIST) == choice(0, 64)
        assert local.choice(key(1).digest, LIST) == choice(1, 64)
        assert local.choice(key(2).digest, LIST) == choice(2, 64, 2)
        assert len(local.choices()) == 3

    def test_choices_that_were_measured_here_are_published(
        self, url: str, layer_of: MakeLayer, local: GuardedStore
    ) -> None:
        """Such as those tuned while the store was down; not those whose times hold here only."""
        tuned(local, 0)
        tuned(local, 1, marks=("contended",))
        tuned(local, 2, marks=("regenerated: x",))
        tuned(local, 3, marks=("disputed: y",))
        tuned(local, 5, marks=("of a newer version",))  # what it means is not known
        local.put_choice(choice(4))  # from a pack, or from another store
        layer_of(url).refresh(SPACE)
        shared = open_shared(url)
        assert {name.key for name in shared.names(SPACE)} == {key(0).digest, key(3).digest}
        assert shared.get(SPACE, key(0).digest, LIST) == stored(0)

    @pytest.mark.parametrize("why", ["it is frozen", "its table is lost"])
    def test_pulled_choices_are_in_memory_where_the_local_store_is_not_written(
        self, url: str, local: GuardedStore, layer_of: MakeLayer, why: str
    ) -> None:
        """The pulled one replaces what this node has of the same generation, and no later one."""
        pulled = [stored(0, 64), stored(0, 128, 2), stored(1, 64), stored(3, 64)]
        open_shared(url).publish(SPACE, pulled)
        if why == "it is frozen":
            local.put_choice(choice(1, 128))
            local.put_choice(choice(3, 128, 2))
            tuned(local, 2, 16)
            layer_of(url, writes=False)
        else:
            with local.connection.transaction() as writing:
                writing.execute("DROP TABLE choice")
                writing.execute("CREATE VIEW choice AS SELECT 1")
            layer_of(url)
        assert Lookup(local).find(key(0), LIST) == choice(0, 128, 2)
        assert Lookup(local).find(key(1), LIST) == choice(1, 64)
        if why == "it is frozen":
            assert local.choice(key(1).digest) == choice(1, 128), "the database is as it was"
            assert Lookup(local).find(key(2), LIST) == choice(2, 16)
            assert Lookup(local).find(key(3), LIST) == choice(3, 128, 2)
            assert key(2).digest not in {name.key for name in open_shared(url).names(SPACE)}

    def test_a_local_store_that_another_process_locks_costs_no_warning(
        self,
        url: str,
        layer_of: MakeLayer,
        tmp_path: Path,
        patience: Patience,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """What is pulled is in memory, and the next pull after the lock is gone writes it."""
        monkeypatch.setattr(connection, "BUSY_TIMEOUT_S", 40.0)
        patience(20.0)
        local = GuardedStore.open(tmp_path / "node")
        open_shared(url).publish(SPACE, [stored(1), stored(2)])
        tuned(local, 0)
        layer = layer_of(url, local)
        other = sqlite3.connect(local.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert layer.publish(SPACE, stored(2, 128)) == stored(2), "the first one wins"
            assert layer.claim(SPACE, key(2).digest, LIST, force=False).stored == stored(2)
            found = [Lookup(local).find(key(number), LIST) for number in range(2)]
        assert found == [choice(0), choice(1)]
        assert not said
        assert layer.is_on
        other.close()
        assert local.choice(key(1).digest) is None
        layer.pull(SPACE)
        assert local.choice(key(1).digest) == choice(1)
        local.close()


def test_a_lease_is_released_when_the_process_ends(
    database: str, server: Any, proxy: Proxy, children: Children, tmp_path: Path
) -> None:
    """And a server that does not answer does not hold up the end."""
    script = """
import sys
from pathlib import Path
from safetune.store.lookup import GuardedStore
from safetune.store.shared.layer import SharedLayer
from safetune.store.shared.opening import open_shared
from tests.store.shared.conftest import LIST, SPACE
layer = SharedLayer(open_shared(sys.argv[1]), GuardedStore.open(Path(sys.argv[2])).connection)
claim = layer.claim(SPACE, "key", LIST, force=False)
print(claim.lease, flush=True)
sys.stdin.readline()
layer.release(claim.lease)
"""
    child = children.start(script, database, tmp_path / "a")
    assert "PostgresLease" in child.stdout.readline()
    assert open_shared(database).lease("key", "another node") is None
    children.end(child, "\n")
    assert open_shared(database).lease("key", "another node") is not None

    url = database.replace(str(server.port), str(proxy.port))
    child = children.start(script.replace('"key"', '"another key"'), url, tmp_path / "b")
    assert "PostgresLease" in child.stdout.readline()
    proxy.stop_forwarding()
    children.end(child, "\n")


def test_a_forked_child_starts_threads_of_its_own(
    database: str, layer_of: MakeLayer, local: GuardedStore
) -> None:
    """The parent's are not there in the child: a task for them would never run."""
    layer = layer_of(database)
    layer.refresh(SPACE)
    assert layer.publish(SPACE, stored(0)) == stored(0)
    pid = os.fork()
    if pid == 0:
        with ends(60):
            assert layer.publish(SPACE, stored(1)) == stored(1)
            open_shared(database).publish(SPACE, [stored(2)])
            layer.pull(SPACE)
            assert local.choice(key(2).digest) == choice(2)
            assert layer.is_on
    assert os.waitpid(pid, 0)[1] == 0
    assert open_shared(database).get(SPACE, key(1).digest, LIST) == stored(1)


def test_a_fork_during_a_query_leaves_both_sides_working(
    database: str, layer_of: MakeLayer
) -> None:
    """Regression: the child waited for the lock of its parent's connection, and closed that."""
    import psycopg

    open_shared(database).publish(SPACE, [stored(0)])
    layer = layer_of(database)
    layer.refresh(SPACE)
    answers: list[Any] = []

    def publish() -> None:
        answers.append(layer.publish(SPACE, stored(1)))

    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE safetune.choice IN ACCESS EXCLUSIVE MODE")
        asking = threading.Thread(target=publish)
        asking.start()
        while other.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is None:
            other.execute("SELECT pg_sleep(0.01)")
        pid = os.fork()
        if pid == 0:
            with ends(60):
                lease = layer.claim("a space", "a key", LIST, force=False).lease
                assert lease is None or layer.is_on
        other.commit()
        status = os.waitpid(pid, 0)[1]
    asking.join()
    assert status == 0
    assert answers == [stored(1)]
