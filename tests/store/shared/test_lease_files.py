"""Leases of a directory, which shards of a sweep take."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from safetune.store.lookup import GuardedStore
from safetune.store.shared.layer import SharedLayer
from safetune.store.shared.lease_files import EXPIRES_AFTER_S, LeasedDirectory
from safetune.store.shared.opening import open_shared
from safetune.store.shared.protocol import UNSHARED_S, Lease, NoLease

from .conftest import AMPLE_S, SPACE, stored


@pytest.fixture
def shared(tmp_path: Path) -> LeasedDirectory:
    (tmp_path / "shared").mkdir()
    return LeasedDirectory(tmp_path / "shared")


def only_file(shared: LeasedDirectory) -> Path:
    (path,) = (p for p in shared._leases.rglob("*") if p.is_file())
    return path


def expire(shared: LeasedDirectory, after_s: float = EXPIRES_AFTER_S) -> None:
    path = only_file(shared)
    then = path.stat().st_mtime - after_s - 1
    os.utime(path, (then, then))


def test_one_node_has_it_until_it_is_released(shared: LeasedDirectory) -> None:
    lease = shared.lease("key", "node")
    assert lease is not None
    assert shared.lease("key", "another") is None
    assert shared.lease("another key", "another") is not None
    assert lease.renew()
    lease.release()
    assert shared.lease("key", "another") is not None
    assert not lease.renew()


def test_of_many_nodes_at_once_one_gets_it(shared: LeasedDirectory) -> None:
    """Also where each finds an expired one, which only one of them may replace."""
    for _ in range(5):
        shared.lease("key", "dead")
        expire(shared)
        found: list[Lease | None] = []
        together = threading.Barrier(8)

        def take(number: int, together: threading.Barrier = together) -> None:
            together.wait()
            found.append(shared.lease("key", f"node {number}"))  # noqa: B023

        threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        holders = [lease for lease in found if lease is not None and lease.renew()]
        assert len(holders) == 1
        holders[0].release()


def test_one_that_is_not_renewed_expires_and_its_holder_learns_that(
    shared: LeasedDirectory,
) -> None:
    first = shared.lease("key", "node")
    assert first is not None
    expire(shared)
    assert first.renew()  # it is late, and no node took it meanwhile
    assert shared.lease("key", "another") is None
    expire(shared)
    second = shared.lease("key", "another")
    assert second is not None
    assert not first.renew()
    first.release()
    first.release(published=False)
    assert second.renew()


def test_a_node_gets_its_own_lease_again(shared: LeasedDirectory) -> None:
    first, second = shared.lease("key", "node"), shared.lease("key", "node")
    assert first is not None
    assert second is not None
    assert (first.renew(), second.renew()) == (False, True)


def test_where_nothing_was_published_every_node_may_tune(shared: LeasedDirectory) -> None:
    lease = shared.lease("key", "node")
    assert lease is not None
    lease.release(published=False)
    for node in ("another", "a third"):
        assert isinstance(shared.lease("key", node), NoLease)
    expire(shared, UNSHARED_S)
    assert not isinstance(shared.lease("key", "another"), NoLease), "one tunes it for all again"
    assert shared.lease("key", "a third") is None


def test_nothing_of_a_finished_sweep_stays(shared: LeasedDirectory) -> None:
    lease = shared.lease("key", "node")
    assert lease is not None
    shared.lease("key", "another")
    lease.release()
    assert [path for path in shared._leases.rglob("*") if path.is_file()] == []
    shared.publish(SPACE, [stored()])
    assert shared.namespaces() == [SPACE]


def test_a_directory_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    with pytest.raises(Exception, match="as where nothing is mounted"):
        LeasedDirectory(tmp_path / "mnt" / "shared").lease("key", "node")
    assert list((tmp_path / "mnt").iterdir()) == []


def test_a_launch_takes_no_lease_in_a_directory(tmp_path: Path, local: GuardedStore) -> None:
    """It may be a copy, or read-only; and a launch must not wait for a dead node."""
    (tmp_path / "shared").mkdir()
    shared = open_shared(f"file://{tmp_path}/shared")
    layer = SharedLayer(shared, local.connection, budget_s=AMPLE_S)
    claim = layer.claim(SPACE, "key", "list", force=False)
    assert isinstance(claim.lease, NoLease)
    assert list((tmp_path / "shared").iterdir()) == []
