"""Single flight across nodes: who waits, who takes over, and who does not have to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from safetune.config import config_digest, config_record
from safetune.errors import Busy, NoMemory, NotExclusive, NoWorkingConfig, WorkerUnavailable
from safetune.outcome import Mark, Outcome, Verdict
from safetune.store.lookup import GuardedStore
from safetune.store.records import ChoiceRecord, StoredChoice
from safetune.store.shared.files import Directory
from safetune.store.shared.layer import SharedLayer
from safetune.store.shared.opening import open_shared
from safetune.store.shared.protocol import NoLease
from safetune.tuning import single_flight
from safetune.tuning.requests import TuningRequest
from safetune.tuning.single_flight import Election, WaitBudget, elect, elect_cluster
from safetune.tuning.tuner import tune

from .conftest import AMPLE_S, Children, choice

OK = Outcome(Verdict.OK)
NOW = WaitBudget(0.0)


@pytest.fixture
def request_() -> TuningRequest:
    """What a miss of a kernel with four configs asks for."""
    spec = spec_from_file_location("ranks", Path(__file__).with_name("ranks.py"))
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    wanted: TuningRequest = module.request(100)
    return wanted


@pytest.fixture
def node(database: str, tmp_path: Path) -> Iterator[Callable[[], GuardedStore]]:
    """A function that makes another node's store."""
    made: list[GuardedStore] = []

    def new() -> GuardedStore:
        store = GuardedStore.open(tmp_path / f"node{len(made)}")
        store.shared = SharedLayer(open_shared(database), store.connection, budget_s=AMPLE_S)
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


Node = Callable[[], GuardedStore]


def test_one_node_tunes_and_the_others_take_its_choice(node: Node, request_: TuningRequest) -> None:
    first, second = node(), node()
    with elect_cluster(request_, first, NOW) as election:
        assert election.choice is None
        with pytest.raises(Busy), elect_cluster(request_, second, NOW):
            pass
        assert election.publish(best(request_, 1), OK) == best(request_, 1)
        with elect_cluster(request_, second, NOW) as other:
            assert other.choice == best(request_, 1)
    assert second.choice(request_.key.digest) == best(request_, 1)


def test_a_node_that_publishes_second_launches_the_first_choice(
    node: Node, request_: TuningRequest
) -> None:
    """Such as a node that was taken for dead."""
    first, second = node(), node()
    with elect_cluster(request_, first, NOW) as election:
        other = Election(request_, second.shared)
        assert other.publish(best(request_, 2), OK) == best(request_, 2)
        assert election.publish(best(request_, 1), OK) == best(request_, 2)


def test_a_key_of_another_shard_is_tuned_only_with_a_lease_that_excludes_it(
    node: Node, request_: TuningRequest, tmp_path: Path
) -> None:
    stealing = WaitBudget(0.0, exclusive=True)
    first, second = node(), node()
    with elect_cluster(request_, first, stealing) as election:
        assert election.lease is not None
        with pytest.raises(Busy) as busy, elect_cluster(request_, second, stealing):
            pass
        assert not isinstance(busy.value, NotExclusive)
    # The first has published nothing, so every node that begins with the key tunes it.
    first.shared.flush()
    with elect_cluster(request_, second, NOW) as election:
        assert isinstance(election.lease, NoLease)
    with pytest.raises(NotExclusive), elect_cluster(request_, second, stealing):
        pass
    alone = GuardedStore.open(tmp_path / "alone")
    with pytest.raises(NotExclusive), elect_cluster(request_, alone, stealing):
        pass
    alone.close()


def test_force_opens_the_generation_after_those_of_other_nodes(
    node: Node, request_: TuningRequest
) -> None:
    """Also on a node that has none of it yet; else its choice would be the second of its name."""
    others, fresh = node(), node()
    for generation in (1, 2, 3):
        record = replace(best(request_, 1), generation=generation)
        Election(request_, others.shared).publish(record, OK)
    result = tune(replace(request_, force=True), fresh)
    assert result.measured == len(request_.configs)
    found = fresh.choice(request_.key.digest)
    assert (found.generation, found.config_digest) == (4, config_digest(result.choice))
    with elect_cluster(request_, others, NOW) as other:
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


def none_works(verdict: Verdict) -> NoWorkingConfig:
    return NoWorkingConfig("add_kernel", "a key", [("BLOCK=64", Outcome(verdict))])


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        WorkerUnavailable("no process"),
        Busy("another process compiles"),
        NoMemory("others have it"),
        none_works(Verdict.NO_MEMORY),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_node_that_is_interrupted_lets_one_other_take_over(
    node: Node, request_: TuningRequest, error: BaseException
) -> None:
    """Whatever says something of this node alone: the others need not tune all at once."""
    first, second, third = node(), node(), node()
    with pytest.raises(type(error)), elect_cluster(request_, first, NOW):
        raise error
    first.shared.flush()
    with (
        elect_cluster(request_, second, NOW),
        pytest.raises(Busy),
        elect_cluster(request_, third, NOW),
    ):
        pass


@pytest.mark.parametrize("how", ["timed beside the program", "failed", "none works"])
def test_all_nodes_tune_at_once_where_nothing_was_published(
    node: Node, request_: TuningRequest, how: str
) -> None:
    """One after the other, 64 nodes would wait for 63 tunings that give them nothing."""
    first, second, third = node(), node(), node()
    try:
        with elect_cluster(request_, first, NOW) as election:
            if how == "failed":
                raise ValueError
            if how == "none works":
                raise none_works(Verdict.COMPILE_ERROR)
            contended = Outcome(Verdict.OK, marks=(Mark.CONTENDED.value,))
            assert election.publish(best(request_, 1), contended) == best(request_, 1)
    except (ValueError, NoWorkingConfig):
        pass
    first.shared.flush()
    with (
        elect_cluster(request_, second, NOW) as election,
        elect_cluster(request_, third, NOW) as other,
    ):
        assert isinstance(election.lease, NoLease)
        assert isinstance(other.lease, NoLease)
        assert election.choice is other.choice is None


def test_a_lease_is_renewed_while_its_holder_tunes() -> None:
    class Counting(NoLease):
        expires_after_s = 0.03

        def __init__(self) -> None:
            self.renewed = threading.Semaphore(0)

        def renew(self) -> bool:
            self.renewed.release()
            return True

    lease, ended = Counting(), threading.Event()
    single_flight._start_heartbeat(lease, ended)
    assert all(lease.renewed.acquire(timeout=20) for _ in range(3))
    ended.set()


def test_a_choice_is_published_before_another_process_of_the_node_sees_it(
    request_: TuningRequest, tmp_path: Path
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
    store.shared = SharedLayer(late, store.connection, budget_s=AMPLE_S)
    assert tune(request_, store).stored == other
    assert seen == [None]
    assert sibling.choice(request_.key.digest) == other
    for each in (store, sibling):
        each.close()
