"""PostgreSQL as a fleet meets it: many nodes at once, leases, roles, and tables of another time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

psycopg = pytest.importorskip("psycopg", reason="the extra `postgres` has psycopg")

from safetune.errors import StoreError  # noqa: E402
from safetune.keys.tuning_key import key_digest  # noqa: E402
from safetune.store.shared.postgres import Postgres, connect  # noqa: E402
from safetune.store.shared.protocol import (  # noqa: E402
    Unwritable,
    name_of,
)

from .conftest import LIST, SPACE, key, pulled, stored  # noqa: E402

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
    """Run `work` in this number of threads, which begin at the same moment."""
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


def test_two_nodes_that_publish_the_same_choices_do_not_lock_each_other_out(
    database: str, shared: Postgres
) -> None:
    """Regression: in any order, and the server ended one of the two: a deadlock."""
    first, second = sorted((stored(0), stored(1)), key=name_of)
    shared.publish(SPACE, [stored(2)])  # makes the tables
    insert = (
        "INSERT INTO safetune.choice (namespace, key, declared, generation, kernel, record) "
        "VALUES (%s, %s, %s, %s, 'add_kernel', '')"
    )
    waits = "SELECT 1 FROM pg_locks WHERE NOT granted"
    with (
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(database, autocommit=True) as watching,
        psycopg.connect(database) as other,
    ):
        other.execute(insert, (SPACE, *name_of(first)))
        published = pool.submit(shared.publish, SPACE, [second, first])
        while not published.done() and watching.execute(waits).fetchone() is None:
            pass
        other.execute(insert, (SPACE, *name_of(second)))
        other.commit()
        assert published.result() == [second, first]


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
        """Its process that had it has died."""
        assert shared.lease("key", "node") is not None
        second = shared.lease("key", "node")
        assert second is not None
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
        assert not first.renew()
        first.release()
        assert store.lease("key", "node") is None
        assert second.renew()
        store.close()


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
            with pytest.raises(Unwritable, match=r"denied \(InsufficientPrivilege 42501\)"):
                reader.publish(SPACE, [stored(1)])
            with pytest.raises(Unwritable, match="permission denied"):
                reader.lease("key", "node")

    def test_a_read_only_database_is_read(self, database: str, shared: Postgres) -> None:
        """As a standby is."""
        shared.publish(SPACE, [stored()])
        options = "&options=-c%20default_transaction_read_only%3Don"
        with closing(Postgres(database + options)) as standby:
            assert standby.get(SPACE, key().digest, LIST) == stored()
            with pytest.raises(Unwritable, match="the server is read-only"):
                standby.publish(SPACE, [stored(1)])


@pytest.mark.parametrize("version", [1, 99])
def test_tables_of_another_version_are_left_alone(
    database: str, shared: Postgres, version: int
) -> None:
    shared.publish(SPACE, [stored()])
    execute(database, f"UPDATE safetune.version SET version = {version}")
    for use in (
        lambda store: store.names(SPACE),
        lambda store: store.publish(SPACE, [stored(1)]),
        lambda store: store.lease("key", "node"),
    ):
        store = Postgres(database)
        told = f"its tables are version {version}, .* drop the schema safetune"
        with closing(store), pytest.raises(StoreError, match=told):
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
    with closing(store), pytest.raises(StoreError, match=r"certificate|SSL"):
        store.names(SPACE)


class TestEncodings:
    """`initdb` under LANG=C makes SQL_ASCII, which checks nothing; LATIN1 lacks most letters."""

    @pytest.fixture(params=["SQL_ASCII", "LATIN1"])
    def encoded(self, request: pytest.FixtureRequest, server: Any) -> str:
        name = f"test_{os.urandom(6).hex()}"
        execute(
            server.url(),
            f"CREATE DATABASE {name} ENCODING '{request.param}' TEMPLATE template0 "
            "LC_COLLATE 'C' LC_CTYPE 'C'",
        )
        return str(server.url(name))

    def test_records_of_kernels_with_any_name_are_shared(self, encoded: str) -> None:
        greek = stored()
        name = "κernel"
        parts = (greek.key.kernel_digest, greek.key.call, greek.key.device, greek.key.toolchain)
        digest = key_digest(name, *parts)
        greek = replace(
            greek,
            key=replace(greek.key, kernel_name=name, digest=digest),
            choice=replace(greek.choice, key=digest),
        )
        with closing(Postgres(encoded)) as store:
            assert store.publish(SPACE, [greek, stored(1)]) == [greek, stored(1)]
            names = store.names(SPACE)
            assert names == {name_of(greek), name_of(stored(1))}
            assert {found.key.kernel_name for found in pulled(store, names)} == {
                name,
                "add_kernel",
            }


class TestConnecting:
    def test_a_wrong_password_is_sent_once(self, server: Any, proxy: Any) -> None:
        """Each further one may lock the account."""
        role, (rules,) = f"role_{os.urandom(6).hex()}", server._directory.rglob("pg_hba.conf")
        before = rules.read_text()
        execute(server.url(), f"CREATE ROLE {role} LOGIN PASSWORD 'right'")
        rules.write_text(f"host all {role} 127.0.0.1/32 scram-sha-256\n{before}")
        try:
            execute(server.url(), "SELECT pg_reload_conf()")
            with pytest.raises(psycopg.OperationalError):
                while True:  # until the server has read the rules
                    psycopg.connect(server.url().replace("//postgres@", f"//{role}@")).close()
            url = f"postgresql://{role}:{{}}@127.0.0.1:{proxy.port}/postgres?sslmode=disable"
            with pytest.raises(
                StoreError, match=r"cannot read .*: the server rejected the password"
            ):
                Postgres(url.format("wrong")).names(SPACE)
            assert proxy.accepted == 1
            with closing(Postgres(url.format("right"))) as store:
                assert store.names(SPACE) == set()
        finally:
            rules.write_text(before)
            execute(server.url(), "SELECT pg_reload_conf()")

    def test_a_refusal_that_lasts_is_not_asked_for_again(self, proxy: Any) -> None:
        url = f"postgresql://nobody@127.0.0.1:{proxy.port}/postgres?sslmode=disable"
        with pytest.raises(StoreError, match="unknown user"):
            Postgres(url).names(SPACE)
        assert proxy.accepted == 1

    def test_variables_of_libpq_count(self, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PGAPPNAME", "training")
        with connect(database) as connection:
            assert connection.info.parameter_status("application_name") == "training"
        monkeypatch.delenv("PGAPPNAME")
        with connect(database) as connection:
            assert connection.info.parameter_status("application_name") == "safetune"
            assert connection.info.get_parameters()["connect_timeout"] == "4"
        monkeypatch.setenv("PGCONNECT_TIMEOUT", "7")
        with connect(database) as connection:
            assert connection.info.get_parameters().get("connect_timeout", "7") == "7"


def test_tables_that_are_dropped_are_made_again(database: str, shared: Postgres) -> None:
    """While a process of weeks is using them."""
    shared.publish(SPACE, [stored()])
    execute(database, "DROP SCHEMA safetune CASCADE")
    assert shared.names(SPACE) == set()
    assert shared.get(SPACE, key().digest, LIST) is None
    assert shared.publish(SPACE, [stored(0, 128)]) == [stored(0, 128)]


def test_a_role_that_may_not_read_is_told_so(database: str, shared: Postgres) -> None:
    """A choice made here does not need the shared store, so nothing is read either."""
    shared.publish(SPACE, [stored()])
    role = f"role_{os.urandom(6).hex()}"
    execute(database, f"CREATE ROLE {role} LOGIN")
    store = Postgres(database.replace("//postgres@", f"//{role}@"))
    with (
        closing(store),
        pytest.raises(StoreError, match=r"cannot read .*permission denied") as told,
    ):
        store.names(SPACE)
    assert not isinstance(told.value, Unwritable)
    execute(database, f"DROP ROLE {role}")


def test_a_row_of_any_size_is_a_miss(database: str, shared: Postgres) -> None:
    shared.publish(SPACE, [stored()])
    execute(database, "UPDATE safetune.choice SET record = repeat('x', 30000000)")
    assert shared.publish(SPACE, [stored(0, 128)]) == [stored(0, 128)]


def test_two_servers_are_two_stores_also_where_a_parameter_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was copied from one must not count as copied from the other."""
    urls = [
        "postgresql:///choices?host=/a",
        "postgresql:///choices?host=/b",
        "postgresql:///choices?host=/b&port=6000",
        "postgresql://one/choices",
        "postgresql://one/other",
    ]
    found = [Postgres(url).identity for url in urls]
    assert len(set(found)) == len(urls)
    monkeypatch.setenv("PGHOST", "two")
    assert Postgres(urls[0]).identity == found[0]
    without_host = Postgres("postgresql:///choices").identity
    monkeypatch.setenv("PGHOST", "three")
    assert Postgres("postgresql:///choices").identity != without_host
    with_password = Postgres("postgresql://me:secret@one/choices?sslmode=require").identity
    assert with_password == found[3], "a user, a password or TLS does not make it another store"
