"""What a shared store costs: a herd of processes on PostgreSQL, a directory of 10,000 records.

`herd`: 300 processes that begin at the same moment to bring their stores up to date from one server
with 100 connections: as 300 nodes with a store each, and as one node. How many had every choice
when they went on, how long that took them, and how often they connected.

`directory`: publishing a record, listing the names, bringing an empty store and one that lacks
nothing up to date, looking for one record, and how long the first miss of an empty store's process
waits, and how long it takes until all is pulled behind it.

benchmarks/store.py runs these parts with its own; this file runs them alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import recording
from recording import Figures, Row

PROCESSES, CHOICES, RECORDS = 300, 200, 10_000
PART_S = 120.0


def figures(rows: Sequence[Row]) -> Figures:
    """Return the medians of each case, and the share of a herd that was served."""
    found: Figures = {}
    for nodes in sorted({row["nodes"] for row in rows if row["what"] == "herd"}):
        herd = [row for row in rows if row["what"] == "herd" and row["nodes"] == nodes]
        found[f"herd_served_share_{nodes}_nodes"] = statistics.mean(r["served"] for r in herd)
        found[f"herd_ms_p50_{nodes}_nodes"] = statistics.median(row["ms"] for row in herd)
        found[f"herd_ms_max_{nodes}_nodes"] = max(row["ms"] for row in herd)
    shared = recording.medians([r for r in rows if r["what"] == "directory"], "ms", "case")
    return found | {f"directory_{case}_ms": value for (case,), value in sorted(shared.items())}


def herd(part: str, options: argparse.Namespace) -> Iterator[Row]:
    """Fork a herd on a server of its own, twice."""
    from safetune.store.shared.opening import open_shared

    module = _server_module()
    with tempfile.TemporaryDirectory(prefix="store-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # a server that root starts runs as the user nobody
        try:
            import psycopg  # noqa: F401

            server = module.Server(folder / "server")
            server.start()
        except (ImportError, module.NoServer) as error:
            print(f"no herd: {error}", flush=True)
            return
        try:
            shared = open_shared(server.url())
            shared.publish(_space(), [_stored(number) for number in range(CHOICES)])
            shared.close()
            processes = min(PROCESSES, getattr(options, "most_processes", PROCESSES))
            for nodes in (processes, 1):
                for number, answer in enumerate(_herd(server.url(), folder, processes, nodes)):
                    row = {"part": part, "what": "herd", "nodes": nodes, "number": number}
                    yield {**row, "processes": processes, **answer}
        finally:
            server.stop()


def _herd(url: str, folder: Path, processes: int, nodes: int) -> list[dict[str, Any]]:
    import psycopg  # noqa: F401 - before the forks

    from safetune.store.shared import layer as shared_layer  # noqa: F401

    receive, send = os.pipe()
    answers, answer = os.pipe()
    stores = [folder / f"{nodes}-nodes" / str(number % nodes) for number in range(processes)]
    children = [_child(url, store, (receive, send, answer)) for store in stores]
    os.close(answer)
    os.close(receive)
    os.close(send)  # the start
    with os.fdopen(answers) as lines:
        found = [json.loads(line) for line in lines]
    for child in children:
        os.waitpid(child, 0)
    return found


def _child(url: str, store: Path, pipes: tuple[int, int, int]) -> int:
    """Fork one, which begins when the last copy of `send` is closed."""
    if pid := os.fork():
        return pid
    receive, send, answer = pipes
    try:
        os.close(send)
        local = _local(store)
        os.read(receive, 1)
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it goes on without the others' choices
            _refresh(url, local)
        seconds = time.perf_counter() - begin
        served = all(local.choice(_key(number).digest) for number in range(CHOICES))
        line = json.dumps({"ms": seconds * 1e3, "served": float(served)}) + "\n"
        os.write(answer, line.encode())
    finally:
        os._exit(0)


def directory(part: str, options: argparse.Namespace) -> Iterator[Row]:
    """Time a directory of many records."""
    from safetune.store.shared.opening import open_shared

    with tempfile.TemporaryDirectory(prefix="store-") as name:
        url = f"file://{name}/shared"
        shared, space = open_shared(url), _space()
        records = min(RECORDS, getattr(options, "most", RECORDS))
        row = {"part": part, "what": "directory", "records": records}
        _fill(Path(name) / "shared", space, records)
        for number in range(records, records + 100):
            record = _stored(number)
            ms = _ms(lambda record=record: shared.publish(space, [record]))  # type: ignore[misc]
            yield {**row, "case": "publish", "ms": ms}
        for number in range(5):
            local = _local(Path(name) / f"node{number}")
            yield {**row, "case": "names", "ms": _ms(lambda: shared.names(space))}
            yield {**row, "case": "pull_all", "ms": _ms(lambda: _pull(url, local))}  # noqa: B023
            yield {**row, "case": "pull_nothing", "ms": _ms(lambda: _pull(url, local))}  # noqa: B023
            wanted = _stored(number * 997).choice
            get = _ms(lambda: shared.get(space, wanted.key, wanted.declared))  # noqa: B023
            yield {**row, "case": "get", "ms": get}
            local.close()
        for number in range(3):
            waited, complete = _first_miss(url, Path(name) / f"miss{number}")
            yield {**row, "case": "first_miss", "ms": waited}
            yield {**row, "case": "pulled_behind", "ms": complete}


def _first_miss(url: str, folder: Path) -> tuple[float, float]:
    """Return how long a process that has nothing yet waits, and when it has all, both in ms."""
    from safetune.store.shared.layer import SharedLayer
    from safetune.store.shared.opening import open_shared

    local = _local(folder)
    layer = SharedLayer(open_shared(url), local.connection)
    begin = time.perf_counter()
    layer.refresh(_space())
    waited = time.perf_counter() - begin
    while layer._partial:
        time.sleep(0.01)
    complete = time.perf_counter() - begin
    local.close()
    return waited * 1e3, complete * 1e3


def _fill(directory: Path, space: str, records: int) -> None:
    """Write the files that publishing would have written, without waiting for the disk."""
    from safetune.store.shared import protocol as shared_record
    from safetune.store.shared.files import file_name

    for record in map(_stored, range(records)):
        bucket = directory / str(shared_record.FORMAT) / space / record.choice.key[:2]
        bucket.mkdir(parents=True, exist_ok=True)
        (bucket / file_name(record)).write_text(shared_record.encode(record))


def _ms(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def _local(folder: Path) -> Any:
    from safetune.store.lookup import GuardedStore

    return GuardedStore.open(folder)


def _refresh(url: str, local: Any) -> None:
    from safetune.store.shared.layer import SharedLayer
    from safetune.store.shared.opening import open_shared

    SharedLayer(open_shared(url), local.connection).refresh(_space())


def _pull(url: str, local: Any) -> None:
    """Take over all there is, however long that takes."""
    from safetune.store.shared import local_copy
    from safetune.store.shared.opening import open_shared

    shared = open_shared(url)
    missing = shared.names(_space()) - local_copy.copied(local.connection, _space(), "")
    local_copy.adopt(local.connection, shared.pull(_space(), missing))


def _key(number: int) -> Any:
    from safetune.keys.tuning_key import Device, KernelIdentity, Toolchain, TuningKey

    return TuningKey(
        kernel=KernelIdentity("add_one", "0" * 32),
        values=(("n", number),),
        dtypes=(("x", "float32"),),
        options=(),
        device=Device("benchmark", "90", 132, 232448),
        toolchain=Toolchain("3.9.0", "benchmark", "cuda:90:32"),
    )


def _space() -> str:
    from safetune.store.shared.protocol import space_of

    return space_of(_key(0))


def _stored(number: int) -> Any:
    from safetune.keys import encoding
    from safetune.store.records import ChoiceRecord, KeyRecord, StoredChoice

    config = {"BLOCK": 64, "num_warps": 4, "num_stages": 2}
    key, digest = _key(number), encoding.digest(config)
    choice = ChoiceRecord(key.digest, 1, digest, config, "1" * 32, 1.0, 8, 1.0)
    return StoredChoice(KeyRecord.of(key), choice)


def _server_module() -> Any:
    path = recording.ROOT / "docs/examples/postgres_server.py"
    spec = importlib.util.spec_from_file_location("postgres_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Part = Callable[[str, argparse.Namespace], Iterator[Row]]
PARTS: dict[str, Part] = {"herd": herd, "directory": directory}


def main() -> None:
    """Run the parts that are still missing."""
    options = recording.part_arguments(__doc__.split("\n", maxsplit=1)[0]).parse_args()
    recording.require_device()
    result = recording.begin("store_shared")
    folder = recording.output_folder(options)
    if not options.fresh:
        recording.resume(result, [folder, recording.RESULTS])
    for part in recording.parts_to_run(PARTS, result.rows, options, PART_S):
        print(part, flush=True)
        result.rows += PARTS[part](part, options)
        result.save(folder, figures)
    print(recording.figures_table(result, result.save(folder, figures)))


if __name__ == "__main__":
    main()
