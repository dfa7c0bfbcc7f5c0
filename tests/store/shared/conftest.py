"""A real PostgreSQL server, databases of their own in it, and a network that can be cut."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from safetune.keys import encoding
from safetune.keys.tuning_key import Device, KernelIdentity, Toolchain, TuningKey
from safetune.outcome import Outcome, Timing, Verdict
from safetune.store.lookup import GuardedStore
from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice, TrialRecord
from safetune.store.shared import layer, puller
from safetune.store.shared.layer import SharedLayer
from safetune.store.shared.opening import open_shared
from safetune.store.shared.protocol import Name, SharedStore, namespace
from tests.store.children import ROOT, Children

DEVICE = Device("interpreter", "cpu", 0, 0)
TOOLCHAIN = Toolchain("3.9.0", "interpreter", "interpreter")

#: The namespace of all records here.
SPACE = namespace(DEVICE.record(), TOOLCHAIN.record())

LIST = encoding.digest("the configs that the decorator declares")

#: What callers may wait for a store where the test is not about that: enough on a busy machine.
AMPLE_S = 60.0


def module_in(path: Path) -> Any:
    """Return the module in a file, made anew."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(block: int) -> str:
    return encoding.digest({"BLOCK": block})


def key(number: int = 0) -> TuningKey:
    kernel = KernelIdentity("add_kernel", encoding.digest("add_kernel"), "def add_kernel(): ...")
    return TuningKey(kernel, (("n", number),), (("x", "float32"),), (), DEVICE, TOOLCHAIN)


def choice(number: int = 0, block: int = 64, generation: int = 1, **changes: Any) -> ChoiceRecord:
    record = ChoiceRecord(
        key=key(number).digest,
        generation=generation,
        config_digest=config(block),
        config={"BLOCK": block},
        declared=LIST,
        median_ms=1.5,
        measured=2,
        created=1700000000.5,
    )
    return replace(record, **changes)


def stored(number: int = 0, block: int = 64, generation: int = 1, **changes: Any) -> StoredChoice:
    """Return a choice as another node would publish it."""
    bare: dict[str, Any] = {"kernel_file": "", "kernel_line": 0}
    record: KeyRecord = replace(KeyRecord.of(key(number)), **bare)
    return StoredChoice(record, choice(number, block, generation, **changes))


def tuned(
    store: GuardedStore, number: int = 0, block: int = 64, marks: tuple[str, ...] = ()
) -> None:
    """Have a local store hold what a tuning on this node would have left."""
    outcome = Outcome(Verdict.OK, Timing(1.5, 1.4, 1.6, 10, "final"), marks=marks)
    store.put_key(KeyRecord.of(key(number)))
    trial = TrialRecord(key(number).digest, config(block), {"BLOCK": block}, 1, outcome, 1.0)
    store.put_trial(trial)
    store.put_choice(choice(number, block))


def pulled(store: SharedStore, names: Set[Name], space: str = SPACE) -> list[StoredChoice]:
    """Return the records with some names, of all batches."""
    return list(itertools.chain.from_iterable(store.pull(space, names)))


@pytest.fixture
def program() -> Any:
    """A program with a kernel of four configs."""
    return module_in(Path(__file__).with_name("ranks.py"))


@contextlib.contextmanager
def running(connections: int) -> Iterator[Any]:
    """A PostgreSQL server with this many connections."""
    pytest.importorskip("psycopg", reason="the extra `postgres` has psycopg")
    module = module_in(ROOT / "docs/examples/postgres_server.py")
    directory = Path(tempfile.mkdtemp(prefix="safetune-pg-"))
    try:
        started = module.Server(directory, max_connections=connections)
        started.start()
    except module.NoServer as error:
        shutil.rmtree(directory, ignore_errors=True)
        pytest.skip(f"{error} (the extra `dev` has one)")
    yield started
    started.stop()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    """A PostgreSQL server with 40 connections; as few as make a herd of nodes queue for them."""
    with running(40) as started:
        yield started


@pytest.fixture
def database(server: Any, tmp_path: Path) -> str:
    """The URL of an empty database."""
    psycopg = pytest.importorskip("psycopg", reason="the extra `postgres` has psycopg")
    name = f"test_{os.urandom(6).hex()}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return str(server.url(name))


class Clock:
    """A clock that goes on by itself, and by leaps."""

    def __init__(self) -> None:
        self.leapt_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.leapt_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Full:
    """A server with six connections, all of which the test holds until it lets go."""

    CONNECTIONS = 6

    def __init__(self, server: Any) -> None:
        self.url: str = server.url()
        self._log = server._directory / "log"
        self._held: list[Any] = []

    def hold(self) -> None:
        """Take all connections, also those that are still being closed."""
        import psycopg

        while len(self._held) < self.CONNECTIONS:
            with contextlib.suppress(psycopg.OperationalError):
                self._held.append(psycopg.connect(self.url))

    def let_go(self, number: int = CONNECTIONS) -> None:
        for _ in range(number):
            self._held.pop().close()

    @property
    def refused(self) -> int:
        """How often the server has refused a connection, by its log."""
        return int(self._log.read_text().count("too many clients already"))

    def wait_for_refusals(self, number: int, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait until it has refused this many more, or for something else."""
        before = self.refused
        while self.refused < before + number and not unless():
            threading.Event().wait(0.02)


@pytest.fixture
def full() -> Iterator[Full]:
    """A server that is full once the test says so."""
    with running(Full.CONNECTIONS) as started:
        yield Full(started)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[GuardedStore]:
    """A node's own store."""
    opened = GuardedStore.open(tmp_path / "node")
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how long answers are waited for: as long as a busy machine needs, if not called."""

    def set_to(seconds: float) -> None:
        monkeypatch.setattr(layer, "ANSWER_S", seconds)
        monkeypatch.setattr(puller, "FIRST_S", seconds)

    set_to(AMPLE_S)
    return set_to


MakeLayer = Callable[..., SharedLayer]


@pytest.fixture
def layer_of(local: GuardedStore, clock: Clock) -> Iterator[MakeLayer]:
    """Makes a process's view of a shared store, or of one at a URL; all stop at the end."""
    made: list[SharedLayer] = []

    def make(shared: str | SharedStore, node: GuardedStore = local, **options: Any) -> SharedLayer:
        backend = open_shared(shared) if isinstance(shared, str) else shared
        node.shared = SharedLayer(backend, node.connection, clock, **options)
        made.append(node.shared)
        return node.shared

    yield make
    for each in made:
        each.close()


def until(holds: Callable[[], object]) -> None:
    """Wait until something holds; fails after a minute."""
    end = time.monotonic() + AMPLE_S
    while not holds():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


class Proxy:
    """A TCP proxy in front of a server, which can stop forwarding, or hang up."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def stop_forwarding(self) -> None:
        """Take what comes, from old and new connections, and pass nothing on: a partition."""
        self._open.clear()

    def forward_again(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.set()
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                self.accepted += 1
                self._sockets.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._open.wait()
        try:
            upstream = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        self._sockets.append(upstream)
        for source, target in ((client, upstream), (upstream, client)):
            threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(server: Any) -> Iterator[Proxy]:
    made = Proxy(server.port)
    yield made
    made.close()


@pytest.fixture
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.stop()
