"""A cluster of 64 processes on eight nodes, and one PostgreSQL with 20 connections: see `nodes.py`.

The tunings are real. With `SAFETUNE_TEST_FULL=1` there are 50 keys; without it, 2, and 16 processes
on four nodes that share 8 connections.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safetune.store.shared.layer import ANSWER_S
from tests import stored_rows
from tests.selection import FULL

from .conftest import Children, Proxy, running

psycopg = pytest.importorskip("psycopg", reason="the extra `postgres` has psycopg")

NODES, PROCESSES, CONNECTIONS = (8, 8, 20) if FULL else (4, 4, 8)
KEYS = 50 if FULL else 2

#: How long a process waits for a shared store that answers, on however busy a machine, and for one
#: that does not. A node polls the lease of another, and each poll counts: with two seconds for
#: these, a node took the store for dead on a busy machine, and tuned a key once more.
ANSWERS_S = 60.0
CUT_OFF_S = 20.0 if FULL else ANSWER_S


class Cluster:
    """The nodes, as one test commands them."""

    def __init__(self, children: Children, directory: Path, nodes: list[tuple[float, str]]) -> None:
        self._children = children
        self._directory = directory
        script = Path(__file__).with_name("nodes.py")
        self.seconds: list[float] = []
        # What a node waits for another must not end this test's patience.
        self.process: subprocess.Popen[str] = children.start(
            script,
            directory,
            PROCESSES,
            *itertools.chain(*nodes),
            SAFETUNE_WAIT="600",
            OMP_NUM_THREADS="1",
        )

    def send(self, numbers: list[int]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(numbers) + "\n")
        self.process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        answers: list[dict[str, Any]] = json.loads(line)
        assert len(answers) == NODES * PROCESSES
        self.seconds.append(max(each["seconds"] for each in answers))
        return answers

    def launch(self, numbers: list[int]) -> list[dict[str, Any]]:
        """Have every process launch every number; return what each says."""
        self.send(numbers)
        return self.answers()

    def tunings(self) -> Counter[int]:
        """How many nodes have tuned each number: what is left of a tuning are its trials."""
        found: Counter[int] = Counter()
        for database in self._directory.glob("node*/cache/safetune.db"):
            connection = stored_rows.connected(database)
            query = "SELECT DISTINCT key.call FROM key JOIN trial ON trial.key = key.digest"
            found.update(json.loads(call)["values"][0][1] for (call,) in connection.execute(query))
            ((most,),) = connection.execute(
                "SELECT max(n) FROM (SELECT count(*) AS n FROM trial GROUP BY key)"
            ).fetchall()
            assert most in (None, 4), "a config of a key was measured twice"
            connection.close()
        return found

    def figures(self) -> str:
        """How long each round took the slowest process, and how often the keys were tuned."""
        tuned = sum(self.tunings().values())
        return f"{tuned} tunings, slowest {[round(each, 1) for each in self.seconds]} s"


def chosen(answers: list[dict[str, Any]], number: int, nodes: set[int]) -> set[int]:
    """What the processes of these nodes launch."""
    return {each["found"][str(number)] for each in answers if each["node"] in nodes}


def wait_for_choices(database: str, count: int) -> None:
    query = "SELECT pg_sleep(0.02), (SELECT count(*) FROM safetune.choice)"
    with psycopg.connect(database, autocommit=True) as connection:
        while connection.execute(query).fetchone()[1] < count:
            pass


@pytest.fixture
def few() -> Iterator[Any]:
    """A server with fewer connections than there are processes."""
    with running(CONNECTIONS) as started:
        yield started


def test_a_cluster_tunes_each_key_once_and_outlives_its_server(
    few: Any, children: Children, tmp_path: Path
) -> None:
    everywhere, others = set(range(NODES)), set(range(NODES - 1))
    server, database, proxy = few, few.url(), Proxy(few.port)
    proxied = server.url(port=proxy.port)
    nodes = [(ANSWERS_S, database)] * (NODES - 1) + [(CUT_OFF_S, proxied)]
    cluster = Cluster(children, tmp_path, nodes)

    first = list(range(100, 100 + KEYS))
    answers = cluster.launch(first)
    assert [each["said"] for each in answers] == [[]] * len(answers)
    assert cluster.tunings() == dict.fromkeys(first, 1)
    assert {number: len(chosen(answers, number, everywhere)) for number in first} == dict.fromkeys(
        first, 1
    )

    # The last node is cut off: it goes on alone, and the others are not held up by that.
    proxy.stop_forwarding()
    cut = list(range(200, 200 + KEYS))
    answers = cluster.launch(cut)
    tunings = cluster.tunings()
    assert {number: tunings[number] for number in cut} == dict.fromkeys(cut, 2)
    for node in everywhere:
        said = [each["said"] for each in answers if each["node"] == node]
        assert max(map(len, said)) == (node == NODES - 1), said
    for number in cut:
        assert len(chosen(answers, number, others)) == 1
        assert len(chosen(answers, number, {NODES - 1})) == 1

    # The server dies while they are at it: everybody finishes, each node with what it finds.
    cluster.send(list(range(300, 300 + KEYS)))
    wait_for_choices(database, 2 * KEYS + 1)
    server.stop()
    try:
        answers = cluster.answers()
    finally:
        server.start()
    for number in range(300, 300 + KEYS):
        for node in everywhere:
            assert len(chosen(answers, number, {node})) == 1
    assert [each["said"] for each in answers if len(each["said"]) > 1] == []
    proxy.close()
    children.end(cluster.process)
    print(f"{len(answers)} processes on {KEYS} keys three times, {cluster.figures()}")
