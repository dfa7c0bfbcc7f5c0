"""PostgreSQL as a fleet meets it: many nodes at once, leases, roles, and tables of another time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

psycopg = pytest.importorskip("psycopg", reason="the extra `postgres` has psycopg")

from safetune.errors import StoreError  # noqa: E402
from safetune.store.shared.postgres import Postgres, connect  # noqa: E402
from safetune.store.shared.protocol import NoLease, Unwritable  # noqa: E402

from .conftest import LIST, SPACE, key, stored  # noqa: E402

ROLES = Path(__file__).parents[3] / "docs/examples/postgres_roles.sql"


@pytest.fixture
def shared(database: str) -> Iterator[Postgres]:
    opened = Postgres(database)
    yield opened
    opened.close()


def execute(url: str, statement: str) -> list[Any]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work` in so many threads, which begin at the same moment."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> Any:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def test_of_sixteen_writers_of_an_empty_database_one_makes_the_tables(database: str) -> None:
    """Each would make the tables: all but one find them made."""

    def publish(number: int) -> Any:
        with closing(Postgres(database)) as store:
            return store.publish(SPACE, [stored(number)])

    assert together(16, publish) == [[stored(number)] for number in range(16)]
    assert execute(database, "SELECT count(*) FROM safetune.version") == [(1,)]


def test_a_hundred_nodes_share_forty_connections(database: str, shared: Postgres) -> None:
    """A node that finds none free tries again, here for as long as a loaded machine needs."""
    shared.publish(SPACE, [stored(number) for number in range(20)])
    shared.close()

    def pull(number: int) -> int:
        with closing(Postgres(database, connect_for_s=60.0)) as store:
            return len(list(store.pull(SPACE, store.names(SPACE))))

    assert together(100, pull) == [20] * 100


def test_no_connection_is_open_between_tasks(database: str, shared: Postgres) -> None:
    shared.publish(SPACE, [stored()])
    shared.lease(key().digest, "node")
    shared.close()
    others = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'safetune'"
    with psycopg.connect(database, autocommit=True) as connection:
        for _ in range(200):  # a backend is gone some milliseconds after its client
            (count,) = connection.execute(others + " AND datname = current_database()").fetchone()
            if not count:
                break
            connection.execute("SELECT pg_sleep(0.01)")
    assert count == 0


def test_a_fork_between_two_statements_leaves_both_sides_working(shared: Postgres) -> None:
    """Regression: the child asked over its parent's connection, and then closed it."""
    shared.publish(SPACE, [stored()])
    with shared.reading() as connection:
        pid = os.fork()
        if pid == 0:
            try:
                shared.close()
                found = shared.get(SPACE, key().digest, LIST)
                shared.close()
                os._exit(0 if found == stored() else 1)
            finally:
                os._exit(2)
        status = os.waitpid(pid, 0)[1]
        assert connection is not None
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert status == 0


class TestLeases:
    def test_one_node_has_it_until_it_is_released(self, shared: Postgres) -> None:
        lease = shared.lease("key", "node")
        assert lease is not None
        assert shared.lease("key", "another node") is None
        assert shared.lease("another key", "another node") is not None
        assert lease.renew()
        lease.release()
        assert shared.lease("key", "another node") is not None

    def test_a_node_gets_its_own_lease_again(self, shared: Postgres) -> None:
        """Its process that had it has died; what that one still sends has no effect."""
        first, second = shared.lease("key", "node"), shared.lease("key", "node")
        assert first is not None
        assert second is not None
        assert not first.renew()
        first.release()
        first.release(published=False)
        assert shared.lease("key", "another node") is None
        assert second.renew()

    def test_of_sixteen_nodes_one_gets_it(self, database: str) -> None:
        def take(number: int) -> Any:
            with closing(Postgres(database)) as store:
                return store.lease("key", f"node {number}")

        assert sum(lease is not None for lease in together(16, take)) == 1

    def test_a_lease_that_is_not_renewed_expires(self, database: str) -> None:
        """By the server's clock; what its holder does afterwards has no effect."""
        store = Postgres(database, lease_s=0.05)
        first = store.lease("key", "node")
        assert first is not None
        execute(database, "SELECT pg_sleep(0.1)")
        second = Postgres(database).lease("key", "another node")
        assert second is not None
        assert (first.token, second.token) == (1, 2)
        assert not first.renew()
        first.release()
        first.release(published=False)
        assert store.lease("key", "node") is None
        assert second.renew()
        store.close()

    def test_every_node_gets_it_where_nothing_was_published(self, shared: Postgres) -> None:
        lease = shared.lease("key", "node")
        assert lease is not None
        lease.release(published=False)
        for node in ("node", "another node"):
            assert isinstance(shared.lease("key", node), NoLease)


class TestRoles:
    @pytest.fixture
    def roles(self, database: str) -> Iterator[dict[str, str]]:
        execute(database, ROLES.read_text())
        yield {
            role: database.replace("//postgres@", f"//safetune_{role}@")
            for role in ("writer", "reader")
        }
        for role in ("writer", "reader"):
            execute(database, f"DROP OWNED BY safetune_{role}; DROP ROLE safetune_{role}")

    def test_a_reader_reads_and_cannot_write(self, roles: dict[str, str]) -> None:
        writer, reader = Postgres(roles["writer"]), Postgres(roles["reader"])
        with closing(writer), closing(reader):
            assert reader.names(SPACE) == set()  # before the first writer, too
            with pytest.raises(Unwritable):
                reader.publish(SPACE, [stored()])
            assert writer.publish(SPACE, [stored()]) == [stored()]
            assert reader.get(SPACE, key().digest, LIST) == stored()
            with pytest.raises(Unwritable, match="permission denied for table choice"):
                reader.publish(SPACE, [stored(1)])
            with pytest.raises(Unwritable, match="permission denied for table lease"):
                reader.lease("key", "node")

    def test_a_read_only_database_is_read(self, database: str, shared: Postgres) -> None:
        """As a standby is."""
        shared.publish(SPACE, [stored()])
        options = "&options=-c%20default_transaction_read_only%3Don"
        with closing(Postgres(database + options)) as standby:
            assert standby.get(SPACE, key().digest, LIST) == stored()
            with pytest.raises(Unwritable, match="read-only transaction"):
                standby.publish(SPACE, [stored(1)])


def test_a_newer_schema_is_left_alone(database: str, shared: Postgres) -> None:
    shared.publish(SPACE, [stored()])
    execute(database, "UPDATE safetune.version SET version = 99")
    for use in (
        lambda store: store.names(SPACE),
        lambda store: store.publish(SPACE, [stored(1)]),
        lambda store: store.lease("key", "node"),
    ):
        store = Postgres(database)
        with closing(store), pytest.raises(StoreError, match=r"newer safetune \(schema 99"):
            use(store)
    assert execute(database, "SELECT count(*) FROM safetune.choice") == [(1,)]


def test_tables_of_another_program_are_an_error(database: str) -> None:
    execute(database, "CREATE SCHEMA safetune; CREATE TABLE safetune.version (name text)")
    store, told = Postgres(database), "cannot read the shared store postgresql://127"
    with closing(store), pytest.raises(StoreError, match=told):
        store.names(SPACE)


def test_connection_options_in_the_url_count(database: str) -> None:
    """TLS among others: this server has none, so a URL that insists on it must not connect."""
    insisting = database.replace("sslmode=disable", "sslmode=verify-full&connect_timeout=3")
    store = Postgres(insisting)
    with closing(store), pytest.raises(StoreError, match=r"root certificate|SSL"):
        store.names(SPACE)


def test_a_server_that_has_no_connection_left_is_tried_again(database: str) -> None:
    """Once the one that has them all lets go, the next attempt succeeds."""
    held = []
    with pytest.raises(psycopg.OperationalError):
        while True:
            held.append(psycopg.connect(database))
    attempts = 0

    def clock() -> float:
        nonlocal attempts
        attempts += 1
        if attempts == 3:
            for connection in held:
                connection.close()
        return 0.0

    with connect(database, clock=clock) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert attempts >= 3
