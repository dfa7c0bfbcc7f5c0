"""A shared store with more choices than can be pulled while a run waits."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safetune.errors import SafetuneWarning
from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.local import rows
from safetune.store.lookup import GuardedStore, Lookup
from safetune.store.packs import exchange
from safetune.store.records import KeyRecord, StoredChoice, TrialRecord
from safetune.store.shared import local_copy, once_per_node
from safetune.store.shared.layer import SharedLayer
from safetune.store.shared.once_per_node import Turn
from safetune.store.shared.opening import open_shared
from safetune.store.shared.protocol import Name, SharedStore

from .conftest import (
    AMPLE_S,
    LIST,
    ROOT,
    SPACE,
    TOOLCHAIN,
    Children,
    Clock,
    choice,
    key,
    stored,
    tuned,
)

MANY = 1000
LAST = MANY - 1


class Large:
    """A store that yields one record again and again, and the last one only when told to."""

    def __init__(self, store: SharedStore, clock: Clock | None = None) -> None:
        """Have the caller's half of `AMPLE_S` end by this clock once all others are pulled."""
        self._store = store
        self._clock = clock or Clock()
        self.location, self.identity = store.location, store.identity
        self.go_on = threading.Event()
        self.asked: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[StoredChoice]:
        self.asked.append(len(names))
        last = {name for name in names if name.key == key(LAST).digest}
        yield from self._store.pull(namespace, names - last)
        self._clock.leapt_s += AMPLE_S / 2
        while not self.go_on.is_set():
            yield stored(0)
        yield from self._store.pull(namespace, last)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of all records. They are written once, as each is synced to the disk."""
    directory = tmp_path_factory.mktemp("published")
    open_shared(f"file://{directory}").publish(SPACE, [stored(number) for number in range(MANY)])
    return directory


@pytest.fixture
def url(published: Path, tmp_path: Path) -> str:
    shutil.copytree(published, tmp_path / "shared")
    return f"file://{tmp_path}/shared"


@pytest.fixture
def large(url: str, clock: Clock) -> Iterator[Large]:
    opened = Large(open_shared(url), clock)
    yield opened
    opened.go_on.set()


def number_of_choices(store: GuardedStore) -> int:
    with store.connection.reading() as sqlite:
        return int(sqlite.execute("SELECT count(*) FROM choice").fetchone()[0])


def wait_until_complete(layer: SharedLayer) -> None:
    """Wait for one task of the layer's thread after the other: each slice of a pull is one."""
    for _ in range(10_000):
        if not layer._partial:
            return
        layer._thread.call(lambda: None, timeout_s=60.0)
    pytest.fail("the pull does not end")


def test_a_run_goes_on_while_the_thread_pulls_the_rest(
    local: GuardedStore, large: Large, clock: Clock
) -> None:
    layer = local.shared = SharedLayer(large, local.connection, clock, budget_s=AMPLE_S)
    lookup = Lookup(local)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # No node has tuned it; to wait for the whole pull would be to wait for `go_on`.
        assert lookup.find(key(MANY), LIST) is None
        # What is not pulled yet is asked for by its key, and then it is here.
        assert local.choice(key(LAST).digest) is None
        assert lookup.find(key(LAST), LIST) == choice(LAST)
        assert local.choice(key(LAST).digest) == choice(LAST)
        assert layer.claim(SPACE, key(LAST).digest, LIST, force=False).stored == stored(LAST)
        large.go_on.set()
        wait_until_complete(layer)
    assert said == []
    assert layer.is_on
    assert number_of_choices(local) == MANY
    # The next process has it all, and need not ask.
    after = Large(large._store)
    SharedLayer(after, local.connection, budget_s=AMPLE_S).refresh(SPACE)
    assert after.asked == []


def test_another_process_of_the_node_does_not_pull_as_well(
    local: GuardedStore, large: Large, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a part of its time, and then asks for its key."""
    waits_s = []

    def tries(wait_s: float, *pauses_s: float) -> Iterator[None]:
        waits_s.append(wait_s)
        yield  # once, instead of all that time

    monkeypatch.setattr(once_per_node, "tries", tries)
    store = GuardedStore.open(tmp_path / "node")
    again = Large(large._store)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SafetuneWarning)  # as where it does not answer in time
        first = SharedLayer(large, local.connection, clock, budget_s=AMPLE_S)
        first.refresh(SPACE)
        store.shared = SharedLayer(again, store.connection, budget_s=AMPLE_S)
        assert Lookup(store).find(key(LAST), LIST) == choice(LAST)
    assert again.asked == [], "both pull"
    assert waits_s[-1] == pytest.approx(AMPLE_S / 2, abs=1.0)
    large.go_on.set()
    wait_until_complete(first)
    store.close()


def test_the_next_process_pulls_what_a_killed_one_has_left(
    url: str, tmp_path: Path, children: Children
) -> None:
    """And the next one pulls the rest."""
    script = f"""
import sys, threading
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.store.shared.test_pull import *
class Hanging(Large):
    def pull(self, namespace, names):
        yield from list(self._store.pull(namespace, names))[:650]
        print(flush=True)
        threading.Event().wait()
local = GuardedStore.open(Path(sys.argv[2]))
SharedLayer(Hanging(open_shared(sys.argv[1])), local.connection).refresh(SPACE)
threading.Event().wait()  # its thread may still be at it
"""
    child = children.start(script, url, tmp_path / "node")
    assert child.stdout is not None
    assert child.stdout.readline() == "\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    local = GuardedStore.open(tmp_path / "node")
    assert number_of_choices(local) == 600, "whole batches"
    rest = Large(open_shared(url))
    rest.go_on.set()
    layer = SharedLayer(rest, local.connection, budget_s=AMPLE_S)
    layer.refresh(SPACE)
    wait_until_complete(layer)
    assert rest.asked == [MANY - 600]
    assert number_of_choices(local) == MANY
    local.close()


def test_a_fork_does_not_keep_the_turn_of_a_parent_that_is_gone(
    tmp_path: Path, children: Children
) -> None:
    """A worker that lives on would keep its node from ever pulling again."""
    database = tmp_path / "safetune.db"
    database.write_text("")
    child = children.start(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from safetune.store.shared import once_per_node\n"
        "with once_per_node.turn(Path(sys.argv[1]), 'x', 'store', 0.0, 1.0):\n"
        "    if os.fork() == 0:\n"
        "        print(flush=True)\n"
        "        sys.stdin.read()\n"
        "        os._exit(0)\n"
        "    signal.pause()\n",
        database,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    with once_per_node.turn(database, "x", "store", 0.0, 0.0) as turn:
        assert turn is Turn.BUSY
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with once_per_node.turn(database, "x", "store", 0.0, 0.0) as turn:
        assert turn is Turn.MINE


def node(directory: Path, shared: Path | str) -> tuple[Lookup, GuardedStore]:
    """A process of a node: its database, and a shared store or another one."""
    url = shared if isinstance(shared, str) else f"file://{shared}"
    opened = GuardedStore.open(directory)
    opened.shared = SharedLayer(open_shared(url), opened.connection, budget_s=AMPLE_S)
    return Lookup(opened), opened


def block_of(lookup: Lookup, number: int = 1) -> Any:
    lookup.forget(key(number).digest, LIST)
    found = lookup.find(key(number), LIST)
    return found and found.config["BLOCK"]


def imported(directory: Path) -> None:
    with contextlib.closing(GuardedStore.open(directory)) as opened:
        exchange.import_into(opened, [stored(1, 128)])


def agreed_in_sync(directory: Path) -> None:
    with contextlib.closing(GuardedStore.open(directory)) as opened:
        local_copy.adopt(opened.connection, [stored(1, 128)])


def tuned_here(directory: Path) -> None:
    with contextlib.closing(GuardedStore.open(directory)) as opened:
        tuned(opened, 1, 128)


def of_another_store(directory: Path) -> None:
    other = directory.parent / "other"
    other.mkdir()
    open_shared(f"file://{other}").publish(SPACE, [stored(1, 128)])
    lookup, opened = node(directory, other)
    assert block_of(lookup) == 128
    opened.close()


@pytest.mark.parametrize("before", [imported, agreed_in_sync, tuned_here, of_another_store])
def test_a_shared_record_replaces_what_a_node_has_from_elsewhere(
    tmp_path: Path, before: Callable[[Path], None]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    open_shared(f"file://{shared}").publish(SPACE, [stored(1, 64)])
    before(tmp_path / "node")
    lookup, opened = node(tmp_path / "node", shared)
    assert block_of(lookup) == 64
    opened.close()


def test_a_node_that_goes_back_to_a_shared_store_launches_its_record_again(tmp_path: Path) -> None:
    blocks = {}
    for name, block in (("one", 128), ("two", 64)):
        (tmp_path / name).mkdir()
        open_shared(f"file://{tmp_path / name}").publish(SPACE, [stored(1, block)])
    for turn, name in enumerate(("one", "two", "one")):
        lookup, opened = node(tmp_path / "node", tmp_path / name)
        blocks[turn] = block_of(lookup)
        opened.close()
    assert blocks == {0: 128, 1: 64, 2: 128}


@pytest.mark.parametrize("then", [lambda directory: None, imported])
def test_what_was_cleared_comes_back_from_the_shared_store_at_once(
    tmp_path: Path, then: Callable[[Path], None]
) -> None:
    """Also where this node has asked for all of it less than a minute ago."""
    shared = tmp_path / "shared"
    shared.mkdir()
    open_shared(f"file://{shared}").publish(SPACE, [stored(1, 64)])
    lookup, opened = node(tmp_path / "node", shared)
    assert block_of(lookup) == 64
    assert opened.clear("add_kernel") == 1
    opened.close()
    then(tmp_path / "node")
    lookup, opened = node(tmp_path / "node", shared)
    assert block_of(lookup) == 64
    opened.close()


def test_a_record_is_read_once_also_where_this_node_has_published_it(
    local: GuardedStore, url: str
) -> None:
    large = Large(open_shared(url))
    large.go_on.set()
    layer = local.shared = SharedLayer(large, local.connection, budget_s=AMPLE_S)
    tuned(local, MANY, 128)
    layer.publish(SPACE, StoredChoice(KeyRecord.of(key(MANY)), choice(MANY, 128)))
    for _ in range(2):
        layer.refresh(SPACE, since=time.time())
        wait_until_complete(layer)
    assert large.asked == [MANY], "not its own, and none twice"


def old_choices(local: GuardedStore, numbers: range) -> None:
    """What this node tuned with an older Triton."""
    for number in numbers:
        before = replace(key(number), toolchain=replace(TOOLCHAIN, triton="3.1.0"))
        outcome = Outcome(Verdict.OK, Timing(1.5, 1.4, 1.6, 10, "final"))
        chosen = replace(choice(number), key=before.digest)
        facts = (before.digest, chosen.config_digest, chosen.config)
        with local.connection.transaction() as sqlite:
            for table, row in rows.key_rows(KeyRecord.of(before)):
                table.insert(sqlite, row, "IGNORE")
            rows.TRIAL.insert(
                sqlite, rows.trial_row(TrialRecord(*facts, 1, outcome, 1.0)), "IGNORE"
            )
            rows.CHOICE.insert(sqlite, rows.choice_row(chosen), "IGNORE")


def test_choices_of_other_toolchains_cost_no_query(local: GuardedStore, tmp_path: Path) -> None:
    """Regression: each process paid 0.1 s per thousand of them, holding the database."""
    (tmp_path / "shared").mkdir()
    shared = open_shared(f"file://{tmp_path}/shared")
    layer = SharedLayer(shared, local.connection, budget_s=AMPLE_S)
    tuned(local, 7)
    counts = []
    for last in (1, 21):
        old_choices(local, range(last))
        statements: list[str] = []
        with local.connection.reading() as sqlite:
            sqlite.set_trace_callback(statements.append)
        layer.refresh(SPACE, since=time.time())
        wait_until_complete(layer)
        with local.connection.reading() as sqlite:
            sqlite.set_trace_callback(None)
        counts.append(len(statements))
        for path in (tmp_path / "shared").rglob("*.json"):
            assert key(7).digest in path.name
            path.unlink()
    assert counts[0] == counts[1] > 0


def test_what_a_node_has_tuned_alone_is_published_in_batches(
    local: GuardedStore, tmp_path: Path
) -> None:
    """Regression: the first refresh waited for all of it, and the store was taken for dead."""
    (tmp_path / "shared").mkdir()
    shared = open_shared(f"file://{tmp_path}/shared")
    published: list[int] = []

    class Counting(Large):
        def publish(self, namespace: str, records: Iterable[StoredChoice]) -> list[StoredChoice]:
            found = list(records)
            published.append(len(found))
            return self._store.publish(namespace, found)

    for number in range(5):
        tuned(local, number)
    layer = SharedLayer(Counting(shared), local.connection, batch=2, budget_s=AMPLE_S)
    layer.refresh(SPACE)
    wait_until_complete(layer)
    assert sum(published) == len(shared.names(SPACE)) == 5
    assert max(published) == 2
