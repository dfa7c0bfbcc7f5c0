"""Single flight across nodes: who waits, who takes over, and who does not have to wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safetune.config import config_digest, config_record
from safetune.errors import Busy, StoreWarning
from safetune.outcome import Mark, Outcome, Verdict
from safetune.store.lookup import GuardedStore
from safetune.store.records import ChoiceRecord, StoredChoice, space_of
from safetune.store.shared.files import Directory
from safetune.store.shared.postgres import Postgres
from safetune.store.shared.protocol import NoLease, SharedStore
from safetune.tuning import single_flight
from safetune.tuning.requests import Plan, TuningRequest
from safetune.tuning.single_flight import Election, WaitBudget, elect, elect_cluster
from safetune.tuning.tuner import tune

from .conftest import Children, MakeLayer, Proxy, choice, until

OK = Outcome(Verdict.OK)
NOW = WaitBudget(0.0)

Node = Callable[..., GuardedStore]


@pytest.fixture
def request_(program: Any) -> TuningRequest:
    """What a miss of a kernel with four configs asks for."""
    wanted: TuningRequest = program.request(100)
    return wanted


@pytest.fixture
def node(database: str, tmp_path: Path, layer_of: MakeLayer) -> Iterator[Node]:
    """A function that makes another node's store."""
    made: list[GuardedStore] = []

    def new(shared: SharedStore | None = None) -> GuardedStore:
        store = GuardedStore.open(tmp_path / f"node{len(made)}")
        layer_of(shared or database, store)
        made.append(store)
        return store

    yield new
    for store in made:
        store.close()


def best(request: TuningRequest, number: int) -> ChoiceRecord:
    config = request.configs[number]
    return choice(
        key=request.key.digest,
        declared=request.declared,
        config_digest=config_digest(config),
        config=config_record(config),
    )


def test_one_node_tunes_and_the_others_take_its_choice(node: Node, request_: TuningRequest) -> None:
    first, second = node(), node()
    with elect_cluster(Plan.read(request_, first), first, NOW) as election:
        assert election.choice is None
        with pytest.raises(Busy), elect_cluster(Plan.read(request_, second), second, NOW):
            pass
        assert election.publish(best(request_, 1), OK) == best(request_, 1)
        with elect_cluster(Plan.read(request_, second), second, NOW) as other:
            assert other.choice == best(request_, 1)
    assert second.choice(request_.key.digest) == best(request_, 1)


def test_a_node_that_publishes_second_launches_the_first_choice(
    node: Node, request_: TuningRequest
) -> None:
    """Such as a node that was taken for dead."""
    first, second = node(), node()
    with elect_cluster(Plan.read(request_, first), first, NOW) as election:
        other = Election(Plan.read(request_, second), second.shared)
        assert other.publish(best(request_, 2), OK) == best(request_, 2)
        assert election.publish(best(request_, 1), OK) == best(request_, 2)


def test_force_opens_the_generation_after_those_of_other_nodes(
    node: Node, request_: TuningRequest
) -> None:
    """Also on a node that has none of it yet; else its choice would be the second of its name."""
    others, fresh = node(), node()
    for generation in (1, 2, 3):
        record = replace(best(request_, 1), generation=generation)
        Election(Plan.read(request_, others), others.shared).publish(record, OK)
    result = tune(replace(request_, force=True), fresh)
    assert result.measured == len(request_.configs)
    found = fresh.choice(request_.key.digest)
    assert (found.generation, found.config_digest) == (4, config_digest(result.choice))
    with elect_cluster(Plan.read(request_, others), others, NOW) as other:
        assert other.choice == found


def test_a_process_of_the_node_that_died_is_followed_at_once(
    node: Node, request_: TuningRequest, database: str, children: Children
) -> None:
    """Its lease expires after 15 s; another process of its node does not wait for that."""
    first, second = node(), node()
    child = children.start(
        """
import sys
from pathlib import Path
from safetune.store.local.locks import node_id, try_lock
from safetune.store.shared.postgres import Postgres
path, url, key = Path(sys.argv[1]), *sys.argv[2:]
held = try_lock(path, key), Postgres(url).lease(key, node_id(path))
print(None not in held, flush=True)
sys.stdin.readline()
""",
        str(first.path),
        database,
        request_.key.digest,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "True\n", child.communicate()[1]
    for store in (first, second):
        with pytest.raises(Busy), elect(request_, store, NOW):
            pass
    child.kill()
    child.wait()
    with elect(request_, first, NOW) as election:
        assert election.choice is None
        assert election.lease is not None
        with pytest.raises(Busy), elect(request_, second, NOW):
            pass


@pytest.mark.parametrize("how", ["interrupted", "timed beside the program", "failed"])
def test_another_node_takes_over_where_nothing_was_published(
    node: Node, request_: TuningRequest, how: str
) -> None:
    first, second, third = node(), node(), node()
    with (
        contextlib.suppress(KeyboardInterrupt, ValueError),
        elect_cluster(Plan.read(request_, first), first, NOW) as election,
    ):
        if how != "timed beside the program":
            raise KeyboardInterrupt if how == "interrupted" else ValueError
        contended = Outcome(Verdict.OK, marks=(Mark.CONTENDED.value,))
        assert election.publish(best(request_, 1), contended) == best(request_, 1)
    with (
        elect_cluster(Plan.read(request_, second), second, NOW) as election,
        pytest.raises(Busy),
        elect_cluster(Plan.read(request_, third), third, NOW),
    ):
        assert election.choice is None


def test_a_node_that_is_cut_off_while_it_tunes_is_followed_by_another(
    node: Node,
    request_: TuningRequest,
    database: str,
    server: Any,
    proxy: Proxy,
    patience: Callable[[float], None],
) -> None:
    """It keeps its own choice for now, and has the other's once it is back."""
    url = database.replace(str(server.port), str(proxy.port)) + "&connect_timeout=1"
    cut, other = node(Postgres(url, lease_s=1.0)), node()
    with elect_cluster(Plan.read(request_, cut), cut, NOW) as election:
        assert election.lease is not None
        proxy.stop_forwarding()
        with elect_cluster(Plan.read(request_, other), other, WaitBudget(60.0)) as following:
            assert following.choice is None
            assert following.publish(best(request_, 1), OK) == best(request_, 1)
        patience(0.5)
        with pytest.warns(StoreWarning, match="continuing without it"):
            kept = election.keep(best(request_, 2), cut, OK)
        assert kept == best(request_, 2)
    proxy.forward_again()
    patience(60.0)
    space = space_of(request_.key)
    cut.shared._away_until = 0.0
    until(lambda: cut.shared.pull(space) or cut.choice(request_.key.digest) == best(request_, 1))


def test_a_lease_is_renewed_while_its_holder_tunes() -> None:
    class Counting(NoLease):
        expires_after_s = 30.0

        def __init__(self) -> None:
            self.renewed = threading.Semaphore(0)

        def renew(self) -> bool:
            self.renewed.release()
            return True

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return len(waits) > 3

    lease, waits = Counting(), list[float]()
    single_flight._start_heartbeat(lease, Ended())
    assert all(lease.renewed.acquire(timeout=20) for _ in range(3))
    assert max(waits) < lease.expires_after_s / 2, "one that fails is made good by the next"


def test_a_choice_is_published_before_another_process_of_the_node_sees_it(
    request_: TuningRequest, tmp_path: Path, layer_of: MakeLayer
) -> None:
    """That one would launch it, though the choice of a faster node is the first published."""
    other, seen = best(request_, 2), []

    class Late(Directory):
        def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
            seen.append(sibling.choice(request_.key.digest))
            mine = list(records)
            super().publish(namespace, [replace(record, choice=other) for record in mine])
            return super().publish(namespace, mine)

    store, sibling = (GuardedStore.open(tmp_path / "node") for _ in range(2))
    late = Late(tmp_path / "shared")
    layer_of(late, store)
    assert tune(request_, store).stored == other
    assert seen == [None]
    assert sibling.choice(request_.key.digest) == other
    for each in (store, sibling):
        each.close()
