"""A server that is there and cannot answer now is asked again, and one that is gone is not."""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

psycopg = pytest.importorskip("psycopg", reason="the extra `postgres` has psycopg")

from safetune.errors import SafetuneWarning, StoreError  # noqa: E402
from safetune.store.local.locks import try_lock  # noqa: E402
from safetune.store.lookup import GuardedStore  # noqa: E402
from safetune.store.shared import once_per_node  # noqa: E402
from safetune.store.shared.layer import RETRY_S, WAIT_S, SharedLayer  # noqa: E402
from safetune.store.shared.opening import open_shared  # noqa: E402
from safetune.store.shared.postgres import Postgres  # noqa: E402
from safetune.store.shared.protocol import NoLease, TryLater  # noqa: E402
from safetune.tuning import single_flight  # noqa: E402

from .conftest import LIST, SPACE, Clock, Full, Proxy, choice, key, stored  # noqa: E402

WITHOUT_LIMIT_S = 600.0


@pytest.fixture
def layer(full: Full, local: GuardedStore, clock: Clock) -> SharedLayer:
    """A node on the server, in which a busy machine may take its time to answer."""
    store = open_shared(full.url, node=local.path)
    return SharedLayer(store, local.connection, clock, budget_s=WITHOUT_LIMIT_S)


def said(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what `work` returns, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = work()
    return found, [str(e.message) for e in caught if issubclass(e.category, SafetuneWarning)]


def test_a_claim_on_a_full_server_is_to_be_made_again(full: Full, layer: SharedLayer) -> None:
    """Not a right to tune, as of a server that is gone; and the budget of answers is not spent."""
    full.hold()
    left_s = layer._budget.spend()
    claim, warned = said(lambda: layer.claim(SPACE, key().digest, LIST, force=False))
    assert (claim.lease, claim.stored, warned) == (None, None, [])
    assert "too many clients already" in claim.later
    assert layer._budget.spend() == left_s
    full.let_go()
    while claim.later:  # the server closes connections in its own time
        claim, warned = said(lambda: layer.claim(SPACE, key().digest, LIST, force=False))
        assert warned == []
    assert claim.lease is not None
    assert not isinstance(claim.lease, NoLease)


@pytest.mark.slow
def test_a_choice_waits_for_a_connection_to_be_published(full: Full, layer: SharedLayer) -> None:
    """Regression: its node launched it, and another node the one that was published first."""
    open_shared(full.url).publish(SPACE, [stored(0, 128)])
    full.hold()
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(said, lambda: layer.publish(SPACE, stored(0, 64)))
        full.wait_for_refusals(12, unless=published.done)
        full.let_go()
        assert published.result() == (stored(0, 128), [])


def test_a_lease_is_renewed_sooner_after_a_full_server_has_refused_that(full: Full) -> None:
    """Regression: after three refusals it had expired, and another node tuned the key once more."""
    ended = threading.Event()
    with closing(Postgres(full.url, lease_s=12.0)) as store:
        lease = store.lease("key", "node")
    assert lease is not None
    full.hold()
    single_flight._start_heartbeat(lease, ended)
    full.wait_for_refusals(3)
    ended.set()
    full.let_go()
    assert lease.renew()


def test_choices_are_looked_up_once_there_is_a_connection(
    full: Full, layer: SharedLayer, local: GuardedStore
) -> None:
    """A lookup that finds none waits for the budget of lookups, and the next one looks again."""
    open_shared(full.url).publish(SPACE, [stored(0)])
    full.hold()
    assert said(lambda: layer.refresh(SPACE))[1] == []
    assert said(lambda: layer.choice(SPACE, key().digest, LIST)) == (None, [])
    assert layer.is_on
    full.let_go()
    layer.refresh(SPACE)
    assert local.choice(key().digest) == choice()


def test_a_server_that_is_full_for_too_long_costs_one_warning(
    full: Full, layer: SharedLayer, clock: Clock
) -> None:
    """A node works alone then, as without a server, and asks once a minute."""

    def claim() -> Any:
        return layer.claim(SPACE, key().digest, LIST, force=False)

    full.hold()
    assert said(claim)[0].later
    for _ in range(3):
        clock.leapt_s += WAIT_S / 4
        assert said(claim)[0].later
    clock.leapt_s += WAIT_S / 4
    claimed, (warning,) = said(claim)
    assert isinstance(claimed.lease, NoLease)
    assert "too many clients already" in warning
    assert "continuing without it" in warning
    refused = full.refused
    assert layer.publish(SPACE, stored()) == stored()
    assert full.refused == refused
    clock.leapt_s += RETRY_S
    claimed, warned = said(claim)
    assert isinstance(claimed.lease, NoLease)
    assert (full.refused, warned) == (refused + 1, [])


@pytest.mark.parametrize("what", ["claim", "publish"])
def test_a_server_that_lets_a_node_in_and_is_slow_is_waited_for(
    database: str, local: GuardedStore, what: str
) -> None:
    """As a full pooler does, which queues what it is asked; here a lock does.

    Regression: after two seconds the node tuned alone, or launched what it had not published.
    """
    open_shared(database).publish(SPACE, [stored(0, 128)])
    layer = SharedLayer(open_shared(database), local.connection)
    late: list[Any] = []

    def claimed() -> Any:
        while (claim := layer.claim(SPACE, key(1).digest, LIST, force=False)).later:
            late.append(claim)
        return claim.lease

    def published() -> Any:
        return layer.publish(SPACE, stored(0, 64))

    asked = "SELECT count(DISTINCT pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as pool, psycopg.connect(database) as other:
        other.execute("LOCK TABLE safetune.lease, safetune.choice IN ACCESS EXCLUSIVE MODE")
        found = pool.submit(said, claimed if what == "claim" else published)
        while not found.done() and not (late or layer._thread.is_stuck):
            other.execute(asked).fetchone()
        other.commit()
        answer, warned = found.result()
    assert warned == []
    if what == "publish":
        assert answer == stored(0, 128)
    else:
        assert answer is not None
        assert not isinstance(answer, NoLease)


def test_a_dropped_connection_is_made_again_once(database: str) -> None:
    """A second one in a row is not: something between this node and the server drops them all."""
    store = Postgres(database)

    def dropped() -> None:
        with store.writing() as connection:
            (pid,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (0,)
            with psycopg.connect(database, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s)", (pid,))
            connection.execute("SELECT 1")

    for _ in range(2):
        with pytest.raises(TryLater, match="terminating connection"):
            dropped()
        with pytest.raises(StoreError) as error:
            dropped()
        assert not isinstance(error.value, TryLater)
        assert store.names(SPACE) == set()
    store.close()


def test_a_server_that_hangs_up_and_is_gone_is_not_waited_for(
    database: str, server: Any, proxy: Proxy, local: GuardedStore
) -> None:
    """To connect again says that it is gone."""
    backend: Any = open_shared(database.replace(str(server.port), str(proxy.port)))
    layer = SharedLayer(backend, local.connection, budget_s=WITHOUT_LIMIT_S)
    with pytest.raises(TryLater), backend.writing() as connection:
        proxy.close()
        connection.execute("SELECT 1")
    claim, (warning,) = said(lambda: layer.claim(SPACE, key().digest, LIST, force=False))
    assert isinstance(claim.lease, NoLease)
    assert "Connection refused" in warning


@pytest.mark.parametrize(
    ("answer", "is_for_now"),
    [
        ("sorry, too many clients already", True),
        ("remaining connection slots are reserved for roles with the SUPERUSER attribute", True),
        ('too many connections for role "safetune_writer"', True),
        ("the database system is starting up", True),
        ("the database system is not yet accepting connections", True),
        ("no more connections allowed (max_client_conn)", True),
        ("client connections exceeded (max_user_client_connections)", True),
        ("query_wait_timeout", True),
        ('database "choices" does not exist', False),
        ('role "stranger" does not exist', False),
        ("server login has been failing, cached error: connect failed", False),
    ],
)
def test_what_servers_and_poolers_say(answer: str, is_for_now: bool) -> None:
    """Each is asked once: the layer decides whether and when to ask again."""
    fields = b"SFATAL\0VFATAL\0C53300\0M" + answer.encode() + b"\0\0"
    asked = []

    def serve() -> None:
        client = listener.accept()[0]
        asked.append(client.recv(1000))
        client.sendall(b"E" + (len(fields) + 4).to_bytes(4, "big") + fields)
        client.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        url = f"postgresql://127.0.0.1:{listener.getsockname()[1]}/choices?sslmode=disable"
        with pytest.raises(StoreError, match="cannot read the shared store") as error:
            Postgres(url).names(SPACE)
        thread.join()
    assert isinstance(error.value, TryLater) is is_for_now
    assert len(asked) == 1


class TestTurns:
    def test_processes_of_a_node_take_turns_to_connect(self, database: str, tmp_path: Path) -> None:
        """The turn lasts as long as the connection is open."""
        node = tmp_path / "safetune.db"
        node.touch()
        first = Postgres(database, node=node)
        with closing(first), first.writing():
            assert once_per_node.to_connect(node, first.location, wait_s=0.0) is None
            other = once_per_node.to_connect(tmp_path / "other.db", first.location, wait_s=0.0)
            assert other is not None
            other.release()
        turn = once_per_node.to_connect(node, first.location, wait_s=0.0)
        assert turn is not None
        turn.release()

    def test_a_process_that_cannot_connect_gives_its_turn_to_another(
        self, full: Full, tmp_path: Path
    ) -> None:
        node = tmp_path / "safetune.db"
        node.touch()
        store = Postgres(full.url, node=node)
        full.hold()
        with pytest.raises(TryLater):
            store.names(SPACE)
        assert once_per_node.to_connect(node, store.location, wait_s=0.0) is not None

    def test_a_process_that_hangs_does_not_hold_up_the_others(
        self, database: str, tmp_path: Path
    ) -> None:
        """Its turn is a courtesy: without an end to it, the others connect beside it."""
        node = tmp_path / "safetune.db"
        node.touch()
        store = Postgres(database, node=node, turn_s=0.05)
        held = try_lock(node, f"connection {store.location}")
        assert held is not None
        with closing(store):
            assert store.names(SPACE) == set()
        held.release()
