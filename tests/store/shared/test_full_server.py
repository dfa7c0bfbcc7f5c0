"""A server without a free connection is asked again for a while, and one that is gone is not."""

from __future__ import annotations

import contextlib
import socket
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

psycopg = pytest.importorskip("psycopg", reason="the extra `postgres` has psycopg")

from safetune.errors import SafetuneWarning, StoreError  # noqa: E402
from safetune.store.lookup import GuardedStore  # noqa: E402
from safetune.store.shared import postgres  # noqa: E402
from safetune.store.shared.layer import RETRY_S, SharedLayer  # noqa: E402
from safetune.store.shared.opening import open_shared  # noqa: E402
from safetune.store.shared.postgres import Postgres  # noqa: E402
from safetune.store.shared.protocol import NoLease  # noqa: E402

from .conftest import (  # noqa: E402
    AMPLE_S,
    LIST,
    SPACE,
    Clock,
    Full,
    MakeLayer,
    Proxy,
    choice,
    key,
    stored,
    until,
)


def is_over(work: Future[Any], within_s: float) -> bool:
    return bool(wait([work], within_s).done)


@pytest.fixture
def layer(full: Full, layer_of: MakeLayer) -> SharedLayer:
    """A node on the server."""
    return layer_of(full.url)


def said(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what `work` returns, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = work()
    return found, [str(e.message) for e in caught if issubclass(e.category, SafetuneWarning)]


@pytest.fixture(autouse=True)
def full_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how long a full server is asked again: as long as a busy machine needs by default."""

    def set_to(seconds: float) -> None:
        monkeypatch.setattr(postgres, "FULL_FOR_S", seconds)

    set_to(AMPLE_S)
    return set_to


def test_a_claim_waits_for_a_connection(full: Full, layer: SharedLayer) -> None:
    """It is no right to tune, as of a server that is gone."""
    full.hold()
    with ThreadPoolExecutor(1) as pool:
        claimed = pool.submit(
            said, lambda: layer.claim(SPACE, key().digest, LIST, force=False).lease
        )
        full.wait_for_refusals(2, unless=claimed.done)
        full.let_go()
        lease, warned = claimed.result()
    assert warned == []
    assert lease is not None
    assert not isinstance(lease, NoLease)


def test_a_choice_waits_for_a_connection_to_be_published(full: Full, layer: SharedLayer) -> None:
    """Regression: its node launched it, and another node the one that was published first."""
    open_shared(full.url).publish(SPACE, [stored(0, 128)])
    full.hold()
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(said, lambda: layer.publish(SPACE, stored(0, 64)))
        full.wait_for_refusals(2, unless=published.done)
        full.let_go()
        assert published.result() == (stored(0, 128), [])


def test_choices_are_pulled_once_there_is_a_connection(
    full: Full, layer: SharedLayer, local: GuardedStore, patience: Callable[[float], None]
) -> None:
    """The first miss waits for that once, and the pull is tried again."""
    open_shared(full.url).publish(SPACE, [stored(0)])
    full.hold()
    patience(2.0)
    assert said(lambda: layer.refresh(SPACE))[1] == []
    assert layer.is_on
    assert local.choice(key().digest) is None
    full.let_go()
    until(lambda: local.choice(key().digest) == choice())


def test_a_server_that_is_full_for_too_long_costs_one_warning(
    full: Full, layer: SharedLayer, clock: Clock, full_for: Callable[[float], None]
) -> None:
    """A node works alone then, as without a server, and asks once a minute."""

    def claim() -> Any:
        return layer.claim(SPACE, key().digest, LIST, force=False)

    full_for(0.0)
    full.hold()
    claimed, (warning,) = said(claim)
    assert isinstance(claimed.lease, NoLease)
    assert "the server has no connections left" in warning
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
    database: str, layer_of: MakeLayer, what: str
) -> None:
    """As a full pooler does, which queues what it is asked; here a lock does."""
    open_shared(database).publish(SPACE, [stored(0, 128)])
    layer = layer_of(database)

    def claimed() -> Any:
        return layer.claim(SPACE, key(1).digest, LIST, force=False).lease

    def published() -> Any:
        return layer.publish(SPACE, stored(0, 64))

    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    with ThreadPoolExecutor(1) as pool, psycopg.connect(database) as other:
        other.execute("LOCK TABLE safetune.lease, safetune.choice IN ACCESS EXCLUSIVE MODE")
        found = pool.submit(said, claimed if what == "claim" else published)
        while other.execute(waits).fetchone() != (1,):
            pass
        assert not is_over(found, within_s=0.8)
        other.commit()
        answer, warned = found.result()
    assert warned == []
    if what == "publish":
        assert answer == stored(0, 128)
    else:
        assert answer is not None
        assert not isinstance(answer, NoLease)


def test_a_dropped_connection_is_made_again(database: str) -> None:
    store = Postgres(database)
    with pytest.raises(StoreError, match="57P01"), store.writing() as connection:
        (pid,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (0,)
        with psycopg.connect(database, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s)", (pid,))
        connection.execute("SELECT 1")
    assert store.names(SPACE) == set()
    store.close()


def test_a_server_that_hangs_up_and_is_gone_is_not_waited_for(
    database: str, server: Any, proxy: Proxy, layer_of: MakeLayer
) -> None:
    """To connect again says that it is gone."""
    backend: Any = open_shared(database.replace(str(server.port), str(proxy.port)))
    with pytest.raises(StoreError), backend.writing() as connection:
        proxy.close()
        connection.execute("SELECT 1")
    layer = layer_of(backend)
    claim, (warning,) = said(lambda: layer.claim(SPACE, key().digest, LIST, force=False))
    assert isinstance(claim.lease, NoLease)
    assert "nothing is listening there" in warning


@pytest.mark.parametrize(
    ("answer", "is_full"),
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
def test_what_servers_and_poolers_say(
    answer: str, is_full: bool, full_for: Callable[[float], None]
) -> None:
    """A full one is asked again, any other once: one more wrong password may lock the account."""
    fields = b"SFATAL\0VFATAL\0C53300\0M" + answer.encode() + b"\0\0"
    asked = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client = listener.accept()[0]
                asked.append(client.recv(1000))
                client.sendall(b"E" + (len(fields) + 4).to_bytes(4, "big") + fields)
                client.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        url = f"postgresql://127.0.0.1:{listener.getsockname()[1]}/choices?sslmode=disable"
        full_for(0.3)
        with pytest.raises(StoreError, match="cannot read the shared store"):
            Postgres(url).names(SPACE)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert (len(asked) > 1) is is_full
