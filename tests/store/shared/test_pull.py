"""One process of a node pulls at a time; the others read what it has written."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.local import rows
from safetune.store.lookup import GuardedStore, Lookup
from safetune.store.packs import exchange
from safetune.store.records import KeyRecord, StoredChoice, TrialRecord
from safetune.store.shared import local_copy, puller
from safetune.store.shared.layer import SharedLayer
from safetune.store.shared.opening import open_shared
from safetune.store.shared.protocol import Name, SharedStore

from .conftest import (
    LIST,
    SPACE,
    TOOLCHAIN,
    Children,
    MakeLayer,
    Proxy,
    choice,
    key,
    stored,
    tuned,
    until,
)

MANY = 1000
LAST = MANY - 1


class Held:
    """A store that answers, and whose pull does not end until the test lets it go on."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self.location, self.identity = store.location, store.identity
        self.go_on = threading.Event()
        self.asked: list[int] = []

    def again(self) -> Held:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def pull(self, namespace: str, names: Set[Name]) -> Iterator[list[StoredChoice]]:
        self.asked.append(len(names))
        last = {name for name in names if name.key == key(LAST).digest}
        yield from self._store.pull(namespace, names - last)
        self.go_on.wait()
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
def held(url: str) -> Iterator[Held]:
    opened = Held(open_shared(url))
    yield opened
    opened.go_on.set()


def number_of_choices(store: GuardedStore) -> int:
    return len(store.choices_of_lists())


def test_a_run_goes_on_while_a_thread_pulls_the_rest(
    local: GuardedStore, held: Held, layer_of: MakeLayer, patience: Callable[[float], None]
) -> None:
    """The first miss waits once; who wants to tune a key asks for that one."""
    patience(0.1)
    layer, lookup = layer_of(held), Lookup(local)
    assert lookup.find(key(LAST), LIST) is None
    assert not lookup.is_pulled(key())
    patience(60.0)
    assert layer.claim(SPACE, key(LAST).digest, LIST, force=False).stored == stored(LAST)
    assert lookup.find(key(LAST), LIST) == choice(LAST)
    held.go_on.set()
    until(lambda: lookup.is_pulled(key()))
    assert number_of_choices(local) == MANY
    after = Held(open_shared(held.location))
    layer_of(after).pull(SPACE)
    assert after.asked == [], "the next process has it all"


def test_what_got_a_fallback_before_the_first_pull_is_looked_up_after_it(
    local: GuardedStore, held: Held, layer_of: MakeLayer, patience: Callable[[float], None]
) -> None:
    patience(0.1)
    layer_of(held, writes=False)
    lookup, found = Lookup(local), []

    def look() -> None:
        found.append(lookup.find(key(LAST), LIST))

    look()
    lookup.after_pull(key(), look)
    assert found == [None]
    held.go_on.set()
    until(lambda: len(found) == 2)
    assert found[1] == choice(LAST)
    lookup.after_pull(key(), look)
    assert found[2:] == [choice(LAST)], "at once where all is here"


@pytest.fixture
def set_pauses(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Sets the shortest and the longest pause between two pulls, in seconds."""

    def set_to(shortest_s: float, longest_s: float) -> None:
        monkeypatch.setattr(puller, "PAUSES_S", (shortest_s, longest_s))

    return set_to


def test_one_of_thirty_processes_of_a_node_connects(
    database: str,
    server: Any,
    proxy: Proxy,
    tmp_path: Path,
    layer_of: MakeLayer,
    set_pauses: Callable[[float, float], None],
) -> None:
    """Threads with a connection and a layer each, as processes of one node would have."""
    set_pauses(600.0, 600.0)
    open_shared(database).publish(SPACE, [stored(number) for number in range(20)])
    url = database.replace(str(server.port), str(proxy.port))
    stores = [GuardedStore.open(tmp_path / "node") for _ in range(30)]
    barrier = threading.Barrier(len(stores))
    found: list[int] = []

    def start(store: GuardedStore) -> None:
        layer_of(url, store)
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


LEADER = """
import sys, threading
from pathlib import Path
from safetune.store.lookup import GuardedStore
from safetune.store.shared import layer, puller
from safetune.store.shared.layer import SharedLayer
from safetune.store.shared.opening import open_shared
from tests.store.shared.conftest import SPACE
from tests.store.shared.test_pull import Held
puller.FIRST_S = 60.0
class Hanging(Held):
    def pull(self, namespace, names):
        yield from list(self._store.pull(namespace, names))[:3]
        print(flush=True)
        threading.Event().wait()
local = GuardedStore.open(Path(sys.argv[2]))
kind = Hanging if sys.argv[3:] == ["hangs"] else lambda store: store
SharedLayer(kind(open_shared(sys.argv[1])), local.connection).refresh(SPACE)
print(flush=True)
sys.stdin.read()
"""


def test_a_process_that_ends_is_followed_by_another(
    url: str,
    local: GuardedStore,
    layer_of: MakeLayer,
    children: Children,
    set_pauses: Callable[[float, float], None],
) -> None:
    """Which had only read what that one wrote."""
    child = children.start(LEADER, url, local.path.parent)
    assert child.stdout.readline() == "\n", child.communicate()[1]
    set_pauses(0.05, 60.0)
    mine = Held(open_shared(url))
    layer_of(mine)
    assert Lookup(local).find(key(LAST), LIST) == choice(LAST)
    open_shared(url).publish(SPACE, [stored(MANY)])
    assert mine.asked == []
    child.kill()
    child.wait()
    mine.go_on.set()
    until(lambda: local.choice(key(MANY).digest, LIST))
    assert mine.asked == [1]


def test_the_next_process_pulls_what_a_killed_one_has_left(
    url: str, local: GuardedStore, children: Children, layer_of: MakeLayer
) -> None:
    child = children.start(LEADER, url, local.path.parent, "hangs")
    assert child.stdout.readline() == "\n", child.communicate()[1]
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert number_of_choices(local) == 600, "whole batches"
    rest = Held(open_shared(url))
    rest.go_on.set()
    layer_of(rest).refresh(SPACE)
    assert rest.asked == [MANY - 600]
    assert number_of_choices(local) == MANY


def test_new_choices_are_pulled_every_few_seconds(
    tmp_path: Path,
    local: GuardedStore,
    layer_of: MakeLayer,
    set_pauses: Callable[[float, float], None],
) -> None:
    """And what this node has chosen meanwhile without the store is published."""
    set_pauses(0.05, 0.05)
    (tmp_path / "shared").mkdir()
    shared = open_shared(f"file://{tmp_path}/shared")
    layer_of(shared).refresh(SPACE)
    shared.publish(SPACE, [stored(1)])
    tuned(local, 2)
    until(lambda: local.choice(key(1).digest) and shared.get(SPACE, key(2).digest, LIST))


def test_sync_pulls_also_where_another_process_of_the_node_does_that(
    tmp_path: Path,
    local: GuardedStore,
    layer_of: MakeLayer,
    set_pauses: Callable[[float, float], None],
) -> None:
    set_pauses(600.0, 600.0)
    (tmp_path / "shared").mkdir()
    shared = open_shared(f"file://{tmp_path}/shared")
    for layer in (layer_of(shared), follower := layer_of(shared)):
        layer.refresh(SPACE)
    shared.publish(SPACE, [stored(1)])
    follower.pull(SPACE)
    assert local.choice(key(1).digest) == choice(1)


def node(directory: Path, shared: Path) -> tuple[Lookup, GuardedStore]:
    """A process of a node: its database, and a shared store."""
    opened = GuardedStore.open(directory)
    opened.shared = SharedLayer(open_shared(f"file://{shared}"), opened.connection)
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
    local: GuardedStore, url: str, layer_of: MakeLayer
) -> None:
    held = Held(open_shared(url))
    held.go_on.set()
    layer = layer_of(held)
    tuned(local, MANY, 128)
    layer.publish(SPACE, StoredChoice(KeyRecord.of(key(MANY)), choice(MANY, 128)))
    for _ in range(2):
        layer.pull(SPACE)
    assert held.asked == [MANY], "not its own, and none twice"


def old_choices(local: GuardedStore, numbers: range) -> None:
    """What this node tuned with an older Triton."""
    for number in numbers:
        before = replace(key(number), toolchain=replace(TOOLCHAIN, triton="3.1.0"))
        outcome = Outcome(Verdict.OK, Timing(1.5, 1.4, 1.6, 10, "final"))
        chosen = replace(choice(number), key=before.digest)
        facts = (before.digest, chosen.config_digest, chosen.config)
        with local.connection.transaction() as sqlite:
            rows.KEY.insert(sqlite, rows.KEY.seal(KeyRecord.of(before)), "IGNORE")
            trial = TrialRecord(*facts, 1, outcome, 1.0)
            rows.TRIAL.insert(sqlite, rows.TRIAL.seal(trial), "IGNORE")
            rows.CHOICE.insert(sqlite, rows.CHOICE.seal(chosen), "IGNORE")


def test_choices_of_other_toolchains_cost_no_query(
    local: GuardedStore, tmp_path: Path, layer_of: MakeLayer
) -> None:
    """Regression: each process paid 0.1 s per thousand of them, holding the database."""
    (tmp_path / "shared").mkdir()
    layer = layer_of(f"file://{tmp_path}/shared")
    tuned(local, 7)
    layer.refresh(SPACE)
    counts = []
    for last in (1, 21):
        old_choices(local, range(last))
        statements: list[str] = []
        with layer._local.reading() as sqlite:
            sqlite.set_trace_callback(statements.append)
        layer.pull(SPACE)
        with layer._local.reading() as sqlite:
            sqlite.set_trace_callback(None)
        counts.append(len(statements))
    assert counts[0] == counts[1] > 0
