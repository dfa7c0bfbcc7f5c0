"""What the store costs: the first launch of a fresh process, lookups, writes, and many writers.

`first launch`: a process that has imported torch and Triton imports safetune, decorates a kernel
whose choice is stored, launches it and waits for the device; another does so under
SAFETUNE_MODE=frozen, and another launches the same kernel with the same config through triton.jit.
All have a warm compile cache. They alternate, and change who goes first; the figures are the
difference of the medians to triton.jit's, and how many times as long a frozen process takes as one
that may tune.

`local`: one database with few and with 100,000 choices: opening it and finding a choice, finding
one when it is open, finding one in memory, and writing one. `writers`: 64 processes at once that
write 20 rows each.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fresh_process
import recording
from recording import Figures, Row

KINDS = ("safetune", "frozen", "jit")
PROCESS_TIMEOUT_S = 240.0
PART_S = 30.0
WRITERS, ROWS_EACH = 64, 20
COUNTS = (100, 100_000)


def figures(rows: Sequence[Row]) -> Figures:
    """Return what is added to the first launch, and the medians of the local store."""
    found: Figures = {}
    first = recording.medians([row for row in rows if row["what"] == "first_launch"], "ms", "kind")
    if first:
        found["first_launch_added_ms"] = first["safetune",] - first["jit",]
        found |= {f"first_launch_ms_{kind}": value for (kind,), value in sorted(first.items())}
        if ("frozen",) in first:
            found["first_launch_frozen_ratio"] = first["frozen",] / first["safetune",]
    local = recording.medians([r for r in rows if r["what"] == "local"], "us", "case", "choices")
    found |= {f"{case}_us_{choices}": value for (case, choices), value in sorted(local.items())}
    writers = [row for row in rows if row["what"] == "writers"]
    if writers:
        found["writer_rows_per_s"] = statistics.median(row["rows_per_s"] for row in writers)
        found["writer_rows_lost"] = float(sum(row["lost"] for row in writers))
    return found


def first_launches(part: str, options: argparse.Namespace) -> Iterator[Row]:
    """Launch in fresh processes, in turns."""
    with tempfile.TemporaryDirectory(prefix="store-") as name:
        caches = fresh_process.caches(Path(name) / "triton", Path(name) / "store")
        # Compiling our own modules again in each process is nothing that a user sees.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

        def launch(kind: str, block: int) -> dict[str, Any]:
            mode = {"SAFETUNE_MODE": "frozen"} if kind == "frozen" else {}
            variables = caches | mode
            return fresh_process.run(
                first_launch, kind, block, variables=variables, limit_s=PROCESS_TIMEOUT_S
            )

        block = launch("safetune", 0)["block"]  # tunes
        for kind in () if recording.interpreted() else KINDS:
            launch(kind, block)  # fills the compile cache and the page cache
        for number in range(options.launches):
            for order, kind in enumerate(recording.in_turn(KINDS, number)):
                report = launch(kind, block)
                assert report["block"] == block
                row = {"part": part, "what": "first_launch", "kind": kind, "order": order}
                yield {**row, "number": number, **report}


def first_launch(kind: str, block: int) -> dict[str, Any]:
    """In a fresh process: launch a kernel once, and say how long that took, imports included."""
    import device_time
    import store_kernel
    import torch

    n = 1 << (10 if recording.interpreted() else 20)
    x = torch.ones(n, device=recording.torch_device())
    y = torch.empty_like(x)
    device_time.synchronize()
    kernel, grid = store_kernel.add_one, lambda meta: (-(-n // meta["BLOCK"]),)
    begin = time.perf_counter()
    if kind == "jit":
        kernel[grid](x, y, n, BLOCK=block, num_warps=4)
    else:
        from safetune import safetune

        kernel = safetune(configs=store_kernel.configs(), key=["n"])(kernel)
        kernel[grid](x, y, n)
    device_time.synchronize()
    seconds = time.perf_counter() - begin
    if not torch.equal(y, x + 1):
        raise SystemExit(f"{kind} gave a wrong result")
    chosen = block if kind == "jit" else kernel.best_config.kwargs["BLOCK"]
    return {"ms": seconds * 1e3, "block": chosen}


def local(part: str, options: argparse.Namespace) -> Iterator[Row]:
    """Time the local store with few and with many choices."""
    for count in (min(count, options.most) for count in COUNTS):
        with tempfile.TemporaryDirectory(prefix="store-") as name:
            _fill(Path(name), count)
            for number in range(options.repetitions):
                for case, seconds in _times(Path(name), count, number).items():
                    row = {"part": part, "what": "local", "case": case, "choices": count}
                    yield {**row, "number": number, "us": seconds * 1e6}


def _times(folder: Path, count: int, number: int) -> dict[str, float]:
    from safetune.store.local.store import Store
    from safetune.store.lookup import Lookup

    wanted, near = f"key-{number * 7919 % count}", f"key-{number % count}"
    begin = time.perf_counter()
    store = Store.open(folder)
    opened = time.perf_counter() - begin
    cold = _once(lambda: store.choice(wanted, "declared"))
    lookup = Lookup(store)
    lookup.remember(_choice(0))
    _key()
    times = {
        "open": opened,
        "open_and_find": opened + cold,
        "find": _once(lambda: store.choice(near, "declared")),
        "find_in_memory": _once(lambda: lookup.find(_key(), "declared")),
        "put": _once(lambda: store.put_choice(_choice(count + number))),
    }
    store.close()
    return times


def _once(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    assert work() is not None
    return time.perf_counter() - begin


@functools.cache
def _key() -> Any:
    """What a launch looks for, under the name that the first row has here."""
    from safetune.keys.tuning_key import Device, KernelIdentity, Toolchain, TuningKey

    kernel, device = KernelIdentity("add", "kernel"), Device("H100", "90", 132, 232448)
    wanted = TuningKey(kernel, (), (), (), device, Toolchain("3.9.0", "ptxas", "cuda:90:32"))
    vars(wanted)["digest"] = "key-0"
    return wanted


def _choice(number: int) -> Any:
    from safetune.store.records import ChoiceRecord

    config = {"BLOCK": 64, "num_warps": 4, "num_stages": 2}
    return ChoiceRecord(f"key-{number}", 1, "c" * 32, config, "declared", 1.0, 8, 1.0)


def _fill(folder: Path, count: int) -> None:
    import sqlite3

    from safetune.store.local import rows
    from safetune.store.local.db_files import DATABASE_NAME
    from safetune.store.local.store import Store

    Store.open(folder).close()
    connection = sqlite3.connect(folder / DATABASE_NAME)
    with connection:
        made = (rows.CHOICE.seal(_choice(number)) for number in range(count))
        first = rows.CHOICE.seal(_choice(0))
        statement = (
            f"INSERT INTO choice ({', '.join(first)}) VALUES ({', '.join('?' * len(first))})"
        )
        connection.executemany(statement, (tuple(row.values()) for row in made))
    connection.close()


def writers(part: str, options: argparse.Namespace) -> Iterator[Row]:
    """Fork processes that write at the same moment, and count what is there afterwards."""
    import sqlite_utils  # noqa: F401 - before the forks

    from safetune.store.local.store import Store

    processes = min(WRITERS, options.most_processes)
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="store-") as name:
            folder = Path(name)
            Store.open(folder).close()
            receive, send = os.pipe()
            children = [_writer(folder, process, receive, send) for process in range(processes)]
            begin = time.perf_counter()
            os.close(send)
            failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in children)
            seconds = time.perf_counter() - begin
            os.close(receive)
            store = Store.open(folder)
            wanted = range(processes * ROWS_EACH)
            lost = sum(store.choice(f"key-{index}") is None for index in wanted)
            store.close()
            row = {"part": part, "what": "writers", "number": number, "failed": failed}
            yield {**row, "lost": lost, "rows_per_s": len(wanted) / seconds}


def _writer(folder: Path, process: int, receive: int, send: int) -> int:
    """Fork one, which begins when the last copy of `send` is closed."""
    from safetune.store.local.store import Store

    if pid := os.fork():
        return pid
    status = 1
    try:
        os.close(send)
        os.read(receive, 1)
        store = Store.open(folder)
        for index in range(ROWS_EACH):
            store.put_choice(_choice(process * ROWS_EACH + index))
        status = 0
    finally:
        os._exit(status)


Part = Callable[[str, argparse.Namespace], Iterator[Row]]
PARTS: dict[str, Part] = {"first launch": first_launches, "local": local, "writers": writers}


def main() -> None:
    """Run the parts that are still missing, print and record."""
    parser = recording.part_arguments(__doc__ or "")
    parser.add_argument("--launches", type=int, default=15, help="fresh processes of each kind")
    parser.add_argument("--repetitions", type=int, default=50, help="of each lookup and write")
    parser.add_argument("--rounds", type=int, default=3, help="of all writers at once")
    parser.add_argument("--most-processes", type=int, default=1000, help="that do it at once")
    parser.add_argument("--most", type=int, default=COUNTS[-1], help="choices in a database")
    options = parser.parse_args()
    recording.run_parts(
        recording.begin("store"),
        PARTS,
        lambda part: PARTS[part](part, options),
        figures,
        options,
        PART_S,
    )


if __name__ == "__main__":
    main()
