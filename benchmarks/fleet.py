"""What 64 nodes of 8 ranks ask of one shared store while they tune one list of keys.

Every rank is a process that does all that `safetune tune --shard I/512` does between two tunings:
turns, key locks, leases, publishing, copying what others have found. Ranks of a node share a local
database. Only the tuning itself is a sleep of random length; the config that it chooses is drawn,
so that two tunings of a key seldom agree. In the cases `killed` one node is killed when half of the
keys have a choice. With --threads the ranks of a node are threads of one process: all that they ask
of the shared store is the same, and eight times as many ranks find room on this machine. --slower 4
lets the clock of the fleet go four times as slowly: every time that the ranks wait is four times as
long, and the times here are divided by four. The server then has four times as long for the same.

Waits are the time of a rank that is neither tuning nor finished. All processes, and the PostgreSQL
server, share the CPUs of this machine, so waits are longer than on 64 nodes.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import recording
from recording import Figures, Row

PART_S = 300.0
CASES = ("postgres", "postgres_killed", "directory", "directory_killed")

#: Events of Python's audit hooks that are requests to a file server.
_FILE_EVENTS = {"open", "os.listdir", "os.link", "os.rename", "os.remove", "os.utime", "os.mkdir"}


def figures(rows: Sequence[Row]) -> Figures:
    """Return the sums and medians of each case over its nodes."""
    found: Figures = {}
    for case in sorted({row["part"] for row in rows}):
        nodes = [row for row in rows if row["part"] == case and row["finished"]]
        (whole,) = (row for row in rows if row["part"] == case and not row["finished"])
        waits = [wait for row in nodes for wait in row["waits_s"]]
        found |= {
            f"{case}_keys": whole["keys"],
            f"{case}_keys_with_one_choice": whole["keys_with_one_choice"],
            f"{case}_tunings": whole["tunings"],
            f"{case}_seconds": whole["seconds"],
            f"{case}_ideal_seconds": whole["ideal_seconds"],
            f"{case}_wait_s_median": statistics.median(waits),
            f"{case}_wait_s_max": max(waits),
            f"{case}_warnings": sum(row["warnings"] for row in nodes),
            f"{case}_stored_bytes": whole["stored_bytes"],
            f"{case}_requests_per_tuning": sum(r["requests"] for r in nodes) / whole["tunings"],
        }
        if any(row["bytes"] for row in nodes):
            found |= {
                f"{case}_kilobytes_per_tuning": sum(r["bytes"] for r in nodes)
                / whole["tunings"]
                / 1e3,
                f"{case}_connections_at_once": whole["connections_at_once"],
            }
        if "refused" in whole:
            found[f"{case}_connections_refused"] = whole["refused"]
    return found


class Counted:
    """What one process asks of the shared store: connections and their bytes, or file accesses."""

    def __init__(self) -> None:
        self.requests = self.bytes = self.warnings = 0

    def watch_postgres(self) -> None:
        """Count each connection when it is closed."""
        from safetune.store.shared.postgres import Postgres

        close = Postgres.close

        def counting(store: Postgres) -> None:
            if store._connection is not None and not store._connection.closed:
                self.requests += 1
                self.bytes += _bytes_of(store._connection.fileno())
            close(store)

        Postgres.close = counting  # type: ignore[method-assign]

    def watch_files(self, root: Path) -> None:
        """Count each access below a directory."""
        import sys

        start = f"{root}/"

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in _FILE_EVENTS and str(arguments[0]).startswith(start):
                self.requests += 1

        sys.addaudithook(hook)


def _bytes_of(descriptor: int) -> int:
    """Return what a TCP connection has sent and received, by the kernel's own count."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return sum(struct.unpack_from("QQ", info, 120))  # tcpi_bytes_acked, tcpi_bytes_received


def request(number: int) -> Any:
    """Return what a miss of a key asks for: four configs."""
    from triton import Config

    from safetune.config import config_digest
    from safetune.keys import encoding
    from safetune.keys.tuning_key import Device, KernelIdentity, Toolchain, TuningKey
    from safetune.tuning.requests import TuningRequest

    configs = tuple(Config({"BLOCK": block}) for block in (16, 32, 64, 128))
    key = TuningKey(
        kernel=KernelIdentity("add_one", "0" * 32),
        values=(("n", number),),
        dtypes=(("x", "float32"),),
        options=(),
        device=Device("benchmark", "90", 132, 232448),
        toolchain=Toolchain("3.9.0", "benchmark", "cuda:90:32"),
    )
    call: Any = None
    declared = encoding.digest([config_digest(config) for config in configs])
    return TuningRequest(key, call, configs, declared)


@functools.cache
def _requests(keys: int) -> list[Any]:
    """Return all keys' requests, with their digests: every rank would compute the same."""
    wanted = [request(number) for number in range(keys)]
    for each in wanted:
        assert each.key.digest
        assert each.by_digest
    return wanted


def tune(wanted: Any, store: Any, seconds: float, drawn: random.Random, exclusive: bool) -> float:
    """Tune a key as `tuning.tuner.tune` does, with a sleep in its middle; return its seconds.

    Raises `Busy` where another process tunes it.
    """
    from safetune.config import config_digest, config_record
    from safetune.outcome import Outcome, Timing, Verdict
    from safetune.store.records import ChoiceRecord, KeyRecord, TrialRecord
    from safetune.tuning.single_flight import WaitBudget, elect

    with elect(wanted, store, WaitBudget(0.0, exclusive=exclusive)) as election:
        store.put_key(KeyRecord.of(wanted.key))
        if election.choice is not None:
            return 0.0
        time.sleep(seconds)
        config = drawn.choice(wanted.configs)
        digest, record = config_digest(config), config_record(config)
        outcome = Outcome(Verdict.OK, Timing(1.0, 1.0, 1.0, 10, "final"), judged=4)
        now, key = time.time(), wanted.key.digest
        for each in wanted.configs:
            trial = TrialRecord(key, config_digest(each), config_record(each), 1, outcome, now)
            store.put_trial(trial)
        choice = ChoiceRecord(key, 1, digest, record, wanted.declared, 1.0, 4, now)
        election.keep(choice, store, outcome)
    return seconds


def rank_main(url: str, folder: Path, rank: int, ranks: int, keys: int, seconds: float) -> Row:
    """Do what one rank does; return its waits, and which config it has for each key."""
    from safetune.errors import Busy, NotExclusive
    from safetune.offline.shards import Shard, SweepStates, Turns, Whose
    from safetune.store.lookup import GuardedStore
    from safetune.store.shared.layer import SWEEP_WAIT_S, SharedLayer
    from safetune.store.shared.opening import SWEEP_S, open_shared

    drawn = random.Random(rank)
    begin, tuned, tunings = time.monotonic(), 0.0, 0
    store = GuardedStore.open(folder)
    backend = open_shared(url, sweep=True, node=store.path)
    shared = SharedLayer(backend, store.connection, budget_s=SWEEP_S, wait_s=SWEEP_WAIT_S)
    store.shared = shared
    wanted = _requests(keys)
    states = SweepStates(store)
    turns = Turns(
        Shard(rank, ranks).order(range(keys)),
        lambda turn: states(
            wanted[turn.item].key, wanted[turn.item].declared, look=not turn.is_of_shards
        ),
        processes=ranks,
    )
    for turn in turns:
        took = drawn.uniform(0.5, 1.5) * seconds
        try:
            took = tune(wanted[turn.item], store, took, drawn, turn.whose is Whose.SHARDS)
        except NotExclusive:
            continue
        except Busy:
            turns.put_back(turn)
            continue
        tuned, tunings = tuned + took, tunings + (took > 0)
    waited = time.monotonic() - begin - tuned
    shared.flush()
    shared.write_unkept()
    chosen = [store.choice(w.key.digest, w.declared) for w in wanted]
    blocks = [c.config["BLOCK"] if c else 0 for c in chosen]
    return {"waits_s": waited, "tunings": tunings, "tuned_s": tuned, "blocks": blocks}


def slow_down(factor: float) -> None:
    """Stretch all times that ranks wait, and after which leases end."""
    from safetune.offline import shards
    from safetune.store.shared import layer, opening

    changed = (
        (shards, "_LOOK_S"),
        (shards, "_REFRESH_S"),
        (opening, "SWEEP_S"),
        (layer, "SWEEP_WAIT_S"),
        (layer, "BUDGET_S"),
        (layer, "RETRY_S"),
        (layer, "REFRESH_S"),
        (layer, "_SLICE_S"),
    )
    for module, name in changed:
        setattr(module, name, getattr(module, name) * factor)
    shards._PAUSES_S = tuple(each * factor for each in shards._PAUSES_S)


def process_main(url: str, folder: Path, ours: range, options: argparse.Namespace) -> None:
    """Be some ranks of a node, each in a thread. Each answers with one line in its file; the first
    one's line has what all of them ask of the shared store.
    """
    counted, rows, ranks = Counted(), dict[int, Row](), options.nodes * options.ranks
    if url.startswith("file:"):
        counted.watch_files(Path(url.removeprefix("file://")))
    else:
        counted.watch_postgres()

    def be(rank: int) -> None:
        node = folder / f"node{rank // options.ranks}"
        seconds = options.seconds * options.slower
        row = rank_main(url, node, rank, ranks, options.keys, seconds)
        rows[rank] = row | {name: row[name] / options.slower for name in ("waits_s", "tuned_s")}

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=be, args=(rank,)) for rank in ours]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    warned = [str(each.message) for each in said if each.category is not ResourceWarning]
    asked = {"requests": counted.requests, "bytes": counted.bytes, "warnings": len(warned)}
    for rank, row in rows.items():
        of_rank = asked if rank == ours[0] else dict.fromkeys(asked, 0)
        said_here = {"said": warned if rank == ours[0] else []}
        (folder / f"{rank}.json").write_text(json.dumps(row | of_rank | said_here))


def _fork(url: str, folder: Path, ours: range, options: argparse.Namespace) -> int:
    """Fork a process of some ranks."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        process_main(url, folder, ours, options)
        code = 0
    finally:
        os._exit(code)


def part_name(case: str, options: argparse.Namespace) -> str:
    """Return the name of a case with its number of ranks, and of connections if that is not 100."""
    size = f"{case}_{options.nodes}x{options.ranks}"
    return size if options.connections == 100 else f"{size}_{options.connections}_connections"


def run_case(case: str, url: str, folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Run one fleet; yield a row for each node, and one for the whole."""
    from safetune.store.shared.opening import open_shared
    from safetune.store.shared.protocol import space_of

    part = part_name(case, options)
    ranks, space = options.nodes * options.ranks, space_of(_requests(options.keys)[0].key)
    connected = _watcher(url)  # the ranks may take all connections
    gc.freeze()  # what is forked stays shared
    slow_down(options.slower)
    begin = time.monotonic()
    every = range(0, ranks, options.ranks if options.threads else 1)
    pids = {_fork(url, folder, range(r, r + every.step), options): r for r in every}
    watched = open_shared(url, sweep=True)
    kill, connections = case.endswith("_killed"), 0
    left = set(pids)
    while left:
        time.sleep(0.5)
        connections = max(connections, connected())
        if kill and len(watched.names(space)) >= options.keys / 2:
            kill = False
            for pid, rank in pids.items():
                if rank < options.ranks and pid in left:
                    os.kill(pid, signal.SIGKILL)
        left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
    seconds = (time.monotonic() - begin) / options.slower
    rows = {r: _answer(folder / f"{r}.json") for r in range(ranks)}
    finished = {rank: row for rank, row in rows.items() if row}
    blocks = [{row["blocks"][n] for row in finished.values()} for n in range(options.keys)]
    for node in range(options.nodes):
        of_node = [r for rank, r in finished.items() if rank // options.ranks == node]
        if of_node:
            waits = [round(row["waits_s"], 2) for row in of_node]
            sums = {n: sum(r[n] for r in of_node) for n in ("requests", "bytes", "warnings")}
            head = {"part": part, "case": case, "finished": True, "node": node}
            yield head | {"tunings": sum(r["tunings"] for r in of_node), "waits_s": waits} | sums
    stored = list(watched.pull(space, watched.names(space)))
    watched.close()
    yield {
        "part": part,
        "case": case,
        "finished": False,
        "nodes": options.nodes,
        "ranks": options.ranks,
        "threads": options.threads,
        "slower": options.slower,
        "keys": options.keys,
        "killed_ranks": ranks - len(finished),
        "keys_with_one_choice": sum(len(found) == 1 and 0 not in found for found in blocks),
        "published": len(stored),
        "tunings": sum(row["tunings"] for row in finished.values()),
        "seconds": seconds,
        "ideal_seconds": sum(row["tuned_s"] for row in finished.values()) / ranks,
        "stored_bytes": _stored_bytes(url),
        "connections_at_once": connections,
        "refused": _refused(folder),
        "said": Counter(_PORT.sub(":PORT", text) for r in finished.values() for text in r["said"]),
    }


def _answer(path: Path) -> Row:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _watcher(url: str) -> Callable[[], int]:
    """Return a function that counts the connections of all ranks now."""
    if url.startswith("file:"):
        return lambda: 0
    import psycopg

    connection = psycopg.connect(url, application_name="watch", autocommit=True)
    return lambda: int(connection.execute(_COUNT).fetchall()[0][0])


def _stored_bytes(url: str) -> int:
    if not url.startswith("file:"):
        return int(_queried(url, "SELECT pg_database_size(current_database())"))
    files = Path(url.removeprefix("file://")).rglob("*")
    return sum(path.stat().st_size for path in files if path.is_file())


def _refused(folder: Path) -> int:
    """Return how often the server had no connection left, by its log."""
    log = folder / "server" / "log"
    return log.read_text().count("too many clients already") if log.exists() else 0


_PORT = re.compile(r"(?<=127\.0\.0\.1)(:|\", port )[0-9]+")

_COUNT = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'safetune'"


def _queried(url: str, statement: str) -> Any:
    import psycopg

    with psycopg.connect(url, application_name="watch") as connection:
        row = connection.execute(statement).fetchone()
        return row[0] if row else 0


def _server_module() -> Any:
    path = recording.ROOT / "docs/examples/postgres_server.py"
    spec = importlib.util.spec_from_file_location("postgres_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def case_rows(case: str, options: argparse.Namespace) -> list[Row]:
    """Run a case on a store of its own."""
    import psycopg  # noqa: F401 - before the forks

    from safetune.offline import shards  # noqa: F401
    from safetune.store import lookup  # noqa: F401
    from safetune.store.shared import layer, lease_files, postgres  # noqa: F401
    from safetune.tuning import single_flight  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="fleet-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # a server that root starts runs as the user nobody
        if case.startswith("directory"):
            (folder / "shared").mkdir()
            return list(run_case(case, f"file://{folder}/shared", folder, options))
        server = _server_module().Server(folder / "server", options.connections)
        server.start()
        try:
            return list(run_case(case, server.url(), folder, options))
        finally:
            server.stop()


def main() -> None:
    """Run the cases that are still missing."""
    parser = recording.part_arguments(__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=8, help="of each node")
    parser.add_argument("--keys", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=40.0, help="the mean of a tuning")
    parser.add_argument("--slower", type=float, default=1.0, help="how slowly the clock goes")
    parser.add_argument("--connections", type=int, default=100, help="of the PostgreSQL server")
    parser.add_argument("--threads", action="store_true", help="a process for each node, not rank")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    options = parser.parse_args()
    result = recording.begin("fleet")
    cases = {part_name(case, options): case for case in options.cases}
    if not options.fresh:
        recording.take_over(result, [options.out])
        ours = {"commit": result.commit}
        result.rows = [r for r in result.rows if r["part"] not in cases or r | ours == r]
    for part in recording.parts_to_run(cases, result.rows, options, PART_S):
        print(part, flush=True)
        result.rows += case_rows(cases[part], options)
        result.save(options.out, figures)
    print(recording.figures_table(result, result.save(options.out, figures)))


if __name__ == "__main__":
    main()
