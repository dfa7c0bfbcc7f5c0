"""PgBouncer in transaction mode between the nodes and their server: two connections for all."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from safetune.errors import SafetuneWarning
from safetune.store.lookup import GuardedStore, Lookup

from .conftest import LIST, SPACE, MakeLayer, choice, key, stored, until

NODES = 12


@pytest.fixture
def pooled(server: Any, database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the database behind a pooler."""
    program = shutil.which("pgbouncer")
    if program is None:
        pytest.skip("needs pgbouncer on PATH")
    name = database.rpartition("/")[2].partition("?")[0]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    directory = tmp_path_factory.mktemp("pooler")
    (directory / "pgbouncer.ini").write_text(
        f"[databases]\n{name} = host=127.0.0.1 port={server.port} user=postgres\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        "pool_mode = transaction\ndefault_pool_size = 2\nmax_client_conn = 100\n"
    )
    command = [program, str(directory / "pgbouncer.ini")]
    if os.geteuid() == 0:  # it refuses to run as root
        command += ["-u", "nobody"]
        for each in (directory, *list(directory.parents)[:2], directory / "pgbouncer.ini"):
            each.chmod(0o755)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        assert process.poll() is None, "it has ended"
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    until(answers)
    yield database.replace(f":{server.port}/", f":{port}/")
    process.kill()
    process.wait()


def test_nodes_behind_a_pooler_tune_each_key_once(
    pooled: str, tmp_path: Path, layer_of: MakeLayer
) -> None:
    stores = [GuardedStore.open(tmp_path / f"node{number}") for number in range(NODES)]
    for store in stores:
        layer_of(pooled, store)

    def tune(store: GuardedStore) -> int:
        """What a process of a node does with three keys; return how many it tunes."""
        tuned, lookup = 0, Lookup(store)
        for number in range(3):
            while lookup.find(key(number), LIST) is None:
                claim = store.shared.claim(SPACE, key(number).digest, LIST, force=False)
                if claim.lease is not None:
                    published = store.shared.publish(SPACE, stored(number))
                    store.put_choice(published.choice)
                    store.shared.release(claim.lease)
                    tuned += 1
        return tuned

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(NODES) as pool:
            assert sum(pool.map(tune, stores)) == 3
    assert [each for each in said if issubclass(each.category, SafetuneWarning)] == []
    for store in stores:
        assert [store.choice(key(number).digest) for number in range(3)] == list(
            map(choice, range(3))
        )
        store.close()
