"""Storms: many processes on one store, and leaders that die."""

from __future__ import annotations

import functools
import json
import os
import random
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import sqlite_utils.migrations  # noqa: F401 - imported before the forks
from tally import ROOT, Tally, choice, fault, filled, run, trial

from safetune.store.local import db_files
from safetune.store.local.db_files import DATABASE_NAME
from safetune.store.local.locks import try_lock
from safetune.store.local.store import Store

sys.path[:0] = [str(Path(__file__).parents[1]), str(ROOT)]  # of `test_flight` and `tests`


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


@fault("writers", "64 processes write 20 rows each at once", "1,280 of 1,280 rows", 320, 12_800)
def writers(place: Path, times: int) -> Tally:
    tally = Tally()
    each = min(20, times // 64)
    for number in range(max(1, times // 1280)):
        directory = place / str(number)
        _together(tally, "writing", 64, functools.partial(_write, directory, each))
        store = Store.open(directory)
        wanted = [process * 100 + index for process in range(64) for index in range(each)]
        tally.tried += len(wanted)
        tally.lost += sum(store.trials(f"key-{n}") != [trial(n)] for n in wanted)
        store.close()
    return tally


def _write(directory: Path, count: int, process: int) -> None:
    store = Store.open(directory)
    for index in range(count):
        store.generation(f"key-{index}")
        store.put_trial(trial(process * 100 + index))


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


@fault(
    "one-lock",
    "32 processes lock one key, owners are killed",
    "one process has it at a time",
    2,
    50,
)
def one_lock(place: Path, times: int) -> Tally:
    """The owner makes a file that must not be there; every third is killed with the file there."""
    tally, draw = Tally(), random.Random(2)
    for number in range(times):
        tally.tried += 32
        directory = place / str(number)
        filled(directory, 1)
        doomed = frozenset(n for n in range(32) if draw.random() < 0.3)
        before = len(tally.wrong)
        _together(tally, "the lock", 32, functools.partial(_want, directory, doomed))
        ends = tally.wrong[before:]
        del tally.wrong[before:]
        killed = f"the lock: {len(doomed)} of 32 failed"
        tally.wrong += [end for end in ends if end != killed]
    return tally


def _want(directory: Path, doomed: frozenset[int], process: int) -> None:
    work = directory / "at-work"
    while (lock := try_lock(directory / DATABASE_NAME, "key")) is None:
        os.sched_yield()
    try:
        owner, number = map(int, work.read_text().split())
        if number not in doomed or not _ends(owner):
            raise AssertionError(f"{owner} and {os.getpid()} have it")
    except FileNotFoundError:
        pass
    work.write_text(f"{os.getpid()} {process}")
    if process in doomed:
        os.kill(os.getpid(), signal.SIGKILL)
    work.unlink()
    lock.release()


def _ends(pid: int) -> bool:
    """Whether a process has ended, or does so now: its locks are free before it is a zombie."""
    try:
        ended, _, _ = select.select([os.pidfd_open(pid)], [], [], 10)
    except ProcessLookupError:
        return True
    return bool(ended)


@fault(
    "herd",
    "processes miss one key; the owner is killed",
    "one process tunes, another takes over",
    0,
    4,
)
def herd(place: Path, times: int) -> Tally:
    """32 processes each time, and every other time the owner is killed in the third config.

    The tests do the same with fewer, in tests/store/local/test_flight.py.
    """
    import test_flight

    tally = Tally()
    for number in range(times):
        tally.tried += 32
        directory = place / str(number)
        directory.mkdir(parents=True)
        os.mkfifo(directory / "gate")
        kill = number % 2 == 1
        if kill:
            (directory / "hold").touch()
        herd = test_flight.Herd()
        try:
            herd.play(directory, 32)
            if kill:
                with test_flight.held(directory) as owner:
                    os.kill(owner, signal.SIGKILL)
            launches = herd.launches()
        finally:
            herd.stop()
        measured = sorted(launch["measured"] for launch in launches if launch["measured"])
        # What is left of 4 configs, and finalists again.
        right = len(measured) == 1 and (2 if kill else 4) <= measured[0] <= 4
        tally.expect(right, f"measured {measured}")
        tally.expect(len(launches) == 32 - kill, f"{len(launches)} launched")
        tally.expect(len({launch["block"] for launch in launches}) == 1, "choices differ")
        trials = test_flight.query(directory, "SELECT count(*) FROM trial")
        tally.lost += 4 - trials[0][0]
        tally.expect(
            json.dumps([launch["warnings"] for launch in launches]).count("W") == 0, "told"
        )
    return tally
