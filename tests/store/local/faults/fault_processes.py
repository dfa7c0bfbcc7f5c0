"""Storms: many processes on one store."""

from __future__ import annotations

import functools
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import sqlite_utils.migrations  # noqa: F401 - imported before the forks
from tally import Tally, choice, fault, filled, run, trial

from safetune.store.local import db_files
from safetune.store.local.store import Store


def _together(tally: Tally, what: str, count: int, work: Callable[[int], object]) -> None:
    """Fork a number of processes, let them work at the same moment, and see that each ends well."""
    receive, send = os.pipe()
    children = []
    for number in range(count):
        if not (pid := os.fork()):
            code = 1
            try:
                os.close(send)
                os.read(receive, 1)  # until the last writer is gone
                work(number)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    os.close(send)
    os.close(receive)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    tally.expect(ends == [0] * count, f"{what}: {sum(map(bool, ends))} of {count} failed")


@fault("first-opens", "32 processes create the store at once", "each can use it", 1, 20)
def first_opens(place: Path, times: int) -> Tally:
    """The obvious way (WAL, then Migrations.apply) fails in most of them."""
    tally = Tally()
    for number in range(times):
        tally.tried += 32
        directory = place / str(number)
        _together(tally, "opening", 32, functools.partial(_go_on, directory))
        tally.lost += 32 - len(run(directory, range(32)).found)
    return tally


@fault(
    "damaged-at-once", "32 processes open a damaged store at once", "one process renames it", 2, 20
)
def damaged_at_once(place: Path, times: int) -> Tally:
    tally = Tally()
    for number in range(times):
        tally.tried += 32
        path = filled(place / str(number))
        path.write_bytes(os.urandom(9000))
        _together(tally, "opening", 32, functools.partial(_go_on, path.parent))
        tally.expect(db_files.aside(path).exists(), "it was not moved aside")
        tally.lost += 32 - len(run(path.parent, range(32)).found)
    return tally


def _go_on(directory: Path, number: int) -> None:
    import warnings

    warnings.simplefilter("ignore")
    Store.open(directory).put_choice(choice(number))


@fault("forks-and-threads", "forks while threads write", "every row of each side", 10, 200)
def forks_and_threads(place: Path, times: int) -> Tally:
    tally = Tally(tried=times)
    store, stop, written = Store.open(place / "store"), threading.Event(), set()

    def write(first: int) -> None:
        number = first
        while not stop.is_set():
            store.put_trial(trial(number))
            written.add(number)
            number += 1

    threads = [threading.Thread(target=write, args=(n * 100_000,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for number in range(times):
        _together(tally, "a fork", 1, lambda _, number=number: store.put_choice(choice(number)))
    stop.set()
    for thread in threads:
        thread.join()
    tally.lost += sum(store.choice(f"key-{n}") != choice(n) for n in range(times))
    tally.lost += sum(store.trials(f"key-{n}") != [trial(n)] for n in written)
    store.close()
    return tally
